"""The bench of several devices: a dry run of the command for two GPUs, and the prediction on one device."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from engine import random_group, spread_predict
from engine.spread_bench import main

pytestmark = pytest.mark.timeout(300)
SIZE = ["--small", "--repeats", "1"]


def test_the_run_for_two_devices(tmp_path, capsys):
    assert main(["--devices", "cpu:2", "--random", *SIZE, "--out", str(tmp_path / "out.json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((tmp_path / "out.json").read_text())
    assert figures["decode"]["2"]["same_bytes"] and figures["decode"]["2"]["bytes_sent"][1] > 0
    assert set(figures["denoise_step"]) == {"guided", "one branch"}
    for name in figures["denoise_step"]:
        assert len(figures["denoise_step"][name]["2"]["peak_bytes"]) == 2
    killed = figures["killed_rank"]
    assert killed["error"].startswith("Rank 1 (cpu) ended in stage decode") and killed["seconds_to_error"] < 30
    assert killed["next_request_same_bytes"] and "not how it scales" in figures["note"]


def test_one_device_predicts_and_says_what_it_assumes(toy_checkpoint, capsys):
    assert main(["--devices", "cpu", "--checkpoint", str(toy_checkpoint), "--preset", "tiny", *SIZE]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["decode_predicted"]) == {"1", "2", "4"}  # a band of 6 rows for each of 8 ranks there is not
    for count, found in figures["decode_predicted"].items():
        assert (found["bytes"] > 0) == (count != "1") and found["seconds"] >= found["work"] > 0
    assert "a prediction, not a measurement" in figures["assumptions"] and "200 GB/s" in figures["assumptions"]


def test_one_device_predicts_with_random_weights_and_few_blocks(capsys, monkeypatch):
    monkeypatch.setattr(random_group, "BLOCKS", 2)
    arguments = ["--devices", "cpu", "--random", "--path", "plain", "--precision", "bf16"]
    assert main([*arguments, *SIZE]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["decoder"]["path"] == "plain" and figures["decoder"]["precision"] == "bf16"
    assert set(figures["decode_predicted"]) == {"1", "2", "4"} and figures["decode_predicted"]["4"]["bytes"] > 0
    steps = figures["denoise_step_predicted"]
    assert set(steps["guided"]) == {"1", "2", "4"} and set(steps["one branch"]) == {"1", "2"}  # two heads
    # Halves exchange velocities of 48 x 5 x 6 x 8 numbers of 4 bytes and nothing else.
    assert (steps["guided"]["2"]["bytes"], steps["guided"]["2"]["exchanges"]) == (4 * 48 * 5 * 6 * 8, 1)
    # 60 video and 12 text tokens of 32 channels: q, k, v and y of half of them and half of their heads in 44 blocks
    # (the last one without the text's queries), and half of the velocity, 192 numbers a token.
    sent = 4 * (30 * 16 * 4 * 44 + 6 * 16 * (4 * 43 + 2) + 30 * 192)
    assert (steps["one branch"]["2"]["bytes"], steps["one branch"]["2"]["exchanges"]) == (sent, 4 * 44 + 1)


@pytest.mark.parametrize("total, count, kinds", [(44, 8, 4), (44, 4, 3), (44, 2, 2), (44, 1, 1), (6, 4, 4)])
def test_bands_that_do_the_same_work_are_timed_once(monkeypatch, total, count, kinds):
    timed = []
    monkeypatch.setattr(spread_predict, "_rank", lambda *a: timed.append(a[2]) or {"seconds": float(a[2])})
    plan = SimpleNamespace(latents=torch.empty(1, 48, 1, total, 1))
    assert spread_predict._slowest(None, plan, count, None)["seconds"] == max(timed) and len(timed) == kinds


@pytest.mark.parametrize(
    "arguments, words",
    [(["--devices", "cpu", "--random", "--small", "--path", "built"], "built"), (["--devices", "x"], "x")],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
