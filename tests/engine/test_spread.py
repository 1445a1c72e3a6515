"""Workers on gloo: the bytes of one device on any number of them, faults that end in words, and no process left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from engine.errors import Cancelled, EngineError, GroupError, ResourceError
from engine.executor import LocalExecutor
from engine.settings import DecodeSettings, DenoiseSettings
from engine.spread import GroupExecutor
from tests.engine.wan_vae import normal_latents

pytestmark = pytest.mark.timeout(240)
NEVER = threading.Event()
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def quiet(*_):
    pass


def group_of(checkpoint, ranks, **how):
    return GroupExecutor(str(checkpoint), [CPU] * ranks, **how)


def frames_of(executor, latents, settings=None, ranks=None):
    """All frames, and the lengths of the chunks; checks that a chunk stays readable as long as was promised."""
    kept, copies = [], []
    for chunk in executor.decode(latents, settings or DecodeSettings(), NEVER):
        kept.append(chunk.frames)
        copies.append(chunk.frames.copy())
        assert all(np.array_equal(a, b) for a, b in list(zip(kept, copies, strict=True))[-2:])
    return np.concatenate(copies), [len(frames) for frames in copies]


def workers():
    return [child for child in psutil.Process().children(recursive=True) if _is_worker(child)]


def _is_worker(process):
    try:
        return "worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def local(toy_checkpoint):
    executor = LocalExecutor(str(toy_checkpoint), CPU)
    executor.load(DenoiseSettings(), quiet)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def group(toy_checkpoint):
    """Eight ranks, of which tests use as many as they like."""
    executor = group_of(toy_checkpoint, 8)
    executor.load(DenoiseSettings(), quiet)
    yield executor
    processes = [member.process for member in executor.group.members]
    executor.close()
    assert all(process.poll() is not None for process in processes) and not workers()


@pytest.fixture
def on(group, monkeypatch):
    """The group, as if it had so many ranks."""

    def use(ranks):
        known = group._known()[:ranks]
        monkeypatch.setattr(group, "_known", lambda: known)
        return group

    return use


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_frames_are_those_of_one_device_byte_for_byte(local, on, ranks):
    latents = normal_latents(6, 9, 4)
    expected, lengths = frames_of(local, latents)
    got, cut = frames_of(on(ranks), latents)
    assert expected.std() > 10 and np.array_equal(got, expected) and cut == lengths == [1, 16, 4]


@pytest.mark.parametrize("ranks", [2, 5])
def test_float_frames_are_those_of_one_device(local, on, ranks):
    latents = normal_latents(3, 5, 6)
    expected = torch.cat(list(local.float_frames(latents, DecodeSettings(), NEVER)))
    assert torch.equal(torch.cat(list(on(ranks).float_frames(latents, DecodeSettings(), NEVER))), expected)


def test_fewer_rows_than_ranks_use_fewer_ranks(local, group):
    latents = normal_latents(2, 3, 4)
    group.begin_request()
    assert np.array_equal(frames_of(group, latents)[0], frames_of(local, latents)[0])
    assert [lane["busy_seconds"] > 0 for lane in group.stats()] == [True] * 3 + [False] * 5


def test_one_device_alone_and_the_reference(local, group):
    latents = normal_latents(2, 4, 4)
    for settings in (DecodeSettings(devices="one"), DecodeSettings("reference")):
        assert np.array_equal(frames_of(group, latents, settings)[0], frames_of(local, latents, settings)[0])
        assert group.explain_decode(settings).devices == 1


def test_what_every_device_did_is_counted(on):
    group = on(2)
    group.begin_request()
    frames_of(group, normal_latents(3, 4, 4))
    for lane in group.stats()[:2]:
        assert lane["bytes_sent"] > 0 and lane["peak_bytes"] > 2**20
        assert 0 < lane["waiting_seconds"] < lane["busy_seconds"]
        assert all(0 <= began <= ended for _, began, ended in lane["spans"])
    assert group.stats()[0]["bytes_sent"] == group.stats()[1]["bytes_sent"]


def test_a_stop_ends_after_the_chunk_that_is_out(group):
    cancel, latents = threading.Event(), normal_latents(20, 8, 2)
    came = 0
    with pytest.raises(Cancelled, match=r"after 17 of 77"):
        for chunk in group.decode(latents, DecodeSettings(), cancel):
            came += len(chunk.frames)
            if came > 1:
                cancel.set()
    assert came == 17 and group.group.alive
    assert frames_of(group, latents[:, :, :2])[1] == [1, 4]


def test_a_consumer_that_leaves_early_disturbs_nobody(local, group):
    latents = normal_latents(6, 8, 3)
    next(iter(group.decode(latents, DecodeSettings(), NEVER)))
    assert np.array_equal(frames_of(group, latents)[0], frames_of(local, latents)[0])


def test_values_that_are_not_finite_on_one_rank_are_said_and_the_group_stays(group, local):
    latents = normal_latents(2, 8, 3)
    with pytest.raises(EngineError, match="latents hold NaN"):
        list(group.decode(latents * torch.nan, DecodeSettings(), NEVER))
    broken = latents.clone()
    broken[:, :, 1, 7] = 3e38
    with pytest.raises(EngineError, match=r"chunk 1 .*not finite"):
        list(group.decode(broken, DecodeSettings(), NEVER))
    assert np.array_equal(frames_of(group, latents)[0], frames_of(local, latents)[0])


def test_the_parent_holds_no_weights(group):
    assert not [name for name, value in vars(group).items() if isinstance(value, torch.nn.Module)]
    assert group.device.type == "cpu" and not torch.cuda.is_initialized()


def test_memory_is_that_of_all_processes(group):
    memory = group.memory()
    assert len(memory.devices) == 8 and memory.host > sum(entry.used for entry in memory.devices)


FAULTS = {
    "die": (GroupError, r"Rank 1 \(cpu\) ended in stage decode: killed by SIGKILL"),
    "stop": (GroupError, r"Rank 1 \(cpu\) hung in stage decode: its process is stopped"),
    "raise": (GroupError, r"Rank 1 \(cpu\) failed in stage decode: KeyError"),
    "oom": (ResourceError, r"Rank 1 \(cpu\), stage decode: .* does not fit on cpu"),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_faults_in_the_middle_of_a_pass_end_in_words_and_the_next_request_works(
    toy_checkpoint, local, tmp_path, monkeypatch, ranks
):
    latents = normal_latents(3, 5, 3)
    expected, _ = frames_of(local, latents)
    for kind, (error, words) in FAULTS.items():
        monkeypatch.setenv("FAULT", f"1 {kind} {tmp_path / kind}")
        executor = group_of(toy_checkpoint, ranks, program="tests.engine.faulty_worker")
        try:
            executor.load_vae_only()
            before, clock = [member.process for member in executor.group.members], time.monotonic()
            with pytest.raises(error, match=words):
                frames_of(executor, latents)
            assert time.monotonic() - clock < 30 and not executor.holds(DenoiseSettings())
            assert all(process.poll() is not None for process in before)
        finally:
            executor.close()
    assert not workers()
