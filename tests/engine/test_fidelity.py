"""The bench of faster ways: its figures on a toy checkpoint, and the formula of its PSNR."""

import json

import pytest
import torch

from engine import fidelity, step_cache
from engine.step_cache import Policy


def test_decibels_are_those_of_the_range():
    full = torch.tensor([-3.0, 1.0, 5.0])
    # Off by 0.8 everywhere, over a range of 8: 20 dB.
    assert fidelity.decibels(full + 0.8, full) == pytest.approx(20)


def test_all_ways_are_measured_on_prompts_and_on_a_first_frame(toy_preset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fidelity, "preset_from_environment", lambda *_: toy_preset)
    monkeypatch.setitem(step_cache.POLICIES, "balanced", Policy(100.0, first=3))
    monkeypatch.setitem(step_cache.POLICIES, "draft", Policy(0.0))
    fidelity.main(["--device", "cpu", "--videos", "2", "--steps", "6", "--frames", "5", "--ways", "draft", "balanced"])
    *rows, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["bench"], found["preset"], found["steps"], found["frames"]) == ("fidelity", "toy", 6, 5)
    assert found["draft"]["skipped"] == [0, 0] and found["draft"]["psnr"] == [float("inf")] * 2
    assert found["balanced"]["skipped"] == [2 / 6] * 2 and max(found["balanced"]["psnr"]) < 100
    assert rows[1].startswith("draft") and "33% of passes skipped" in rows[2]


def test_fp8_is_measured_by_velocities_too(monkeypatch, toy_preset):
    bench = fidelity.Bench(toy_preset, torch.device("cpu"), 2, steps=3, frames=5)
    truth = [bench.run(video) for video in bench.videos]
    assert sorted(truth[0].kept) == [0, 1, 2]
    moved = []
    monkeypatch.setattr(fidelity.fp8, "convert", lambda model: moved.append(model.proj_out.weight.mul_(1.01)))
    found = fidelity.measure(bench, ["fp8"], say=moved.append)["fp8"]
    assert len(moved) == 2 and "velocities off by" in moved[1]
    assert len(found["psnr"]) == 2 and 0.001 < max(found["velocity_error"]) < 0.02
