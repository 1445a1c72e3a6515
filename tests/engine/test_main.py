"""The command line: what it writes, its exit codes, and one clear line on bad input."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from engine.__main__ import main
from engine.video import probe

TOML = """
title = "Toy"
about = "Random weights."
checkpoint = "{checkpoint}"
fps = 24

[defaults]
height = 64
width = 96
frames = 9
steps = 2
shift = 9.0
guidance = 2.5

[limits]
steps = 100
frames = 97
pixels = 16384
volume = 1589248
"""


@pytest.fixture
def preset(toy_checkpoint, tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(TOML.format(checkpoint=toy_checkpoint))
    return str(path)


def test_a_video_and_its_figures(preset, tmp_path, capsys):
    out = tmp_path / "out.mp4"
    code = main(["a red circle", "--preset", preset, "--seconds", "0.2", "--seed", "7", "--out", str(out), "--json"])
    assert code == 0
    printed = capsys.readouterr()
    stats = json.loads(printed.out)
    assert re.search(r"\rtext    : \d+\.\d s\n", printed.err), "a stage without a count shows its seconds alone"
    assert stats["request"]["seed"] == 7 and stats["video"] == str(out) and not stats["partial"]
    assert (probe(out).frames, probe(out).height, probe(out).width) == (5, 64, 96)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.mp4", "toy.toml"]


def test_a_machine_that_could_not_be_measured_makes_the_video(preset, tmp_path, capsys, monkeypatch):
    def too_large(*_):
        raise MemoryError

    monkeypatch.setattr("engine.experience.measure", too_large)
    arguments = ["x", "--preset", preset, "--frames", "1", "--steps", "1", "--seed", "7"]
    assert main([*arguments, "--out", str(tmp_path / "o.mp4")]) == 0
    assert re.search(r"seed 7\n", capsys.readouterr().err)


def test_keep_keeps_the_latents(preset, tmp_path):
    keep = tmp_path / "files"
    arguments = ["x", "--preset", preset, "--frames", "1", "--out", str(tmp_path / "o.mp4"), "--keep", str(keep)]
    assert main([*arguments, "--decode-path", "reference", "--guidance", "1", "--steps", "1"]) == 0
    assert (keep / "latents.safetensors").exists() and (keep / "stats.json").exists()


def test_a_kept_video_is_not_written_over(preset, tmp_path, capsys):
    (tmp_path / "latents.safetensors").write_bytes(b"work of hours")
    assert main(["x", "--preset", preset, "--out", str(tmp_path / "o.mp4"), "--keep", str(tmp_path)]) == 2
    assert "holds latents.safetensors of another video already" in capsys.readouterr().err


BAD = [
    (["--height", "100"], "height = 100"),
    (["--frames", "6"], "nearest"),
    (["--seconds", "-1"], "seconds = -1"),
    (["--seconds", "nan"], "seconds"),
    (["--seconds", "inf"], "seconds = inf"),
    (["--steps", "0"], "steps = 0"),
    (["--guidance", "nan"], "guidance"),
    (["--image", "/nowhere.png"], "/nowhere.png"),
    (["--out", "/nowhere/out.mp4"], "/nowhere/out.mp4"),
    (["--out", "out.avi"], ".mp4"),
    (["--preset", "huge"], "huge"),
    (["--devices", "cuda:99"], "cuda:99"),
    (["--devices", "cpu:9"], "cpu:9"),
    (["--devices", "0,0"], "once"),
    (["--decode-path", "fast"], "fast"),
    (["--precision", "int1"], "int1"),
    (["--quality", "best"], "full, balanced, draft"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(preset, tmp_path, capsys, arguments, words):
    assert main(["x", "--preset", preset, "--out", str(tmp_path / "out.mp4"), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["toy.toml"]


def test_a_missing_checkpoint_is_exit_code_1(preset, tmp_path, capsys):
    arguments = ["x", "--preset", preset, "--checkpoint", str(tmp_path / "none"), "--out", str(tmp_path / "o.mp4")]
    assert main(arguments) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_ctrl_c_stops_and_leaves_nothing_half_done(preset, tmp_path):
    command = [sys.executable, "-m", "engine", "x", "--preset", preset, "--steps", "100", "--frames", "97"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out.mp4")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LANG": "C"},
    )
    for line in process.stderr:
        if "about" in line:
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["toy.toml"]


def test_impossible_work_is_refused_before_the_model_is_loaded(preset, tmp_path, capsys, monkeypatch):
    def never(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr("engine.engine.Engine.load", never)
    out = ["--out", str(tmp_path / "o.mp4")]
    (tmp_path / "text.png").write_text("no picture")
    file = tmp_path / "file"
    file.write_text("")
    for arguments, words in (
        (["x", "--decode-path", "reference", "--decode-precision", "bf16"], "reference"),
        (["x", "--decode-precision", "tf32"], "tf32"),
        (["x", "--image", str(tmp_path / "text.png")], "text.png"),
        (["x", "--keep", str(file)], "--keep"),
        ([" "], "empty"),
    ):
        assert main([*arguments, "--preset", preset, *out]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_an_older_file_is_replaced_whole_or_not_at_all(preset, tmp_path, capsys, monkeypatch):
    out = tmp_path / "o.mp4"
    out.write_bytes(b"old")

    def full(source, target):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.__main__.shutil.copyfile", full)
    assert main(["x", "--preset", preset, "--frames", "1", "--steps", "1", "--out", str(out)]) == 1
    assert "No space left" in capsys.readouterr().err and out.read_bytes() == b"old"
    assert not (tmp_path / "o.mp4.part").exists() and list(tmp_path.glob("pan2-*/video.mp4"))


def test_latents_are_decoded_again(preset, tmp_path):
    keep, out = tmp_path / "keep", tmp_path / "keep" / "video.mp4"
    assert main(["x", "--preset", preset, "--frames", "5", "--steps", "1", "--keep", str(keep), "--out", str(out)]) == 0
    again = tmp_path / "again.mp4"
    latents = ["--latents", str(keep / "latents.safetensors")]
    assert main(["decode", *latents, "--preset", preset, "--decode-path", "reference", "--out", str(again)]) == 0
    assert probe(again).frames == probe(out).frames == 5
    assert main(["decode", "--latents", str(tmp_path / "none"), "--preset", preset, "--out", str(again)]) == 2
