"""Seconds and bytes: stages are timed, the memory of a stage is seen also when it is given back before the end."""

import time

import numpy as np
import psutil
import torch

from engine.telemetry import Telemetry, memory_now

CPU = torch.device("cpu")


def test_memory_now_agrees_with_the_system():
    memory = memory_now()
    assert abs(memory.host - psutil.Process().memory_info().rss) < 50 * 2**20
    assert memory.host < memory.host_total and memory.host_available < memory.host_total
    assert memory.devices == () or torch.cuda.is_available()


def test_stages_and_first_frame_are_timed():
    with Telemetry(CPU) as telemetry:
        with telemetry.stage("denoise"):
            time.sleep(0.05)
        telemetry.frame_arrived()
        with telemetry.stage("decode"):
            time.sleep(0.02)
        telemetry.frame_arrived()
    summary = telemetry.summary()
    denoise, decode = summary["stages"]
    assert denoise["name"] == "denoise" and 0.05 <= denoise["seconds"] < 0.5
    assert decode["started"] >= denoise["seconds"]
    assert denoise["seconds"] <= summary["seconds_to_first_frame"] <= decode["started"]


def test_a_peak_in_the_middle_of_a_stage_is_seen():
    with Telemetry(CPU) as telemetry, telemetry.stage("decode") as stage:
        before = memory_now().host
        block = np.ones(300 * 2**20, np.uint8)
        time.sleep(0.6)
        del block
    assert stage.peaks["host"] - before > 200 * 2**20
    assert telemetry.summary()["peak_bytes"]["host"] == stage.peaks["host"]


def test_a_stage_that_fails_is_still_timed_and_the_sampler_ends():
    try:
        with Telemetry(CPU) as telemetry, telemetry.stage("decode") as stage:
            raise ValueError
    except ValueError:
        pass
    assert stage.seconds is not None and not telemetry._sampler.is_alive()


def test_a_gpu_that_is_not_open_yet_has_no_statistics(monkeypatch):
    """As the H200 answered: invalid device argument."""

    def refuse(device):
        raise RuntimeError("Invalid device argument")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with Telemetry(torch.device("cuda:0")) as telemetry, telemetry.stage("build"):
        pass
    assert telemetry.stages[0].seconds is not None


def test_gpus_that_the_process_does_not_use_are_not_opened(monkeypatch):
    """To ask for the free memory of a GPU opens it, which takes half a GiB there."""
    opened = []

    def free(index):
        opened.append(index)
        return 3, 8

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda index: 2 if index == 1 else 0)
    (only,) = memory_now().devices
    assert opened == [1] and (only.name, only.reserved, only.used, only.total) == ("cuda:1", 2, 5, 8)
