"""The bench of several devices: a dry run of the command for two GPUs, and the prediction on one device."""

from __future__ import annotations

import json

import pytest

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


@pytest.mark.parametrize("arguments, words", [(["--devices", "cpu", "--random"], "several"), (["--devices", "x"], "x")])
def test_bad_input_is_one_line(capsys, arguments, words):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
