"""`python -m engine compare`: figures on the toy checkpoint, what is refused, and the word "compare" as a prompt."""

import json

import pytest

from engine.__main__ import main
from engine.latents import save_latents
from engine.noise import draw_noise
from engine.video import probe
from tests.engine.test_main import TOML


@pytest.fixture
def preset(toy_checkpoint, tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(TOML.format(checkpoint=toy_checkpoint))
    return str(path)


def test_random_latents_as_json(preset, tmp_path, capsys):
    assert main(["compare", "--preset", preset, "--seed", "7", "--frames", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == {"latents": "random", "seed": 7} and found["frames"] == 5
    assert [side["path"] for side in found["sides"].values()] == ["plain", "reference"]
    assert found["verdict"]["passed"] and found["figures"]["per_frame"][4]["psnr"] > 100
    assert [path.name for path in tmp_path.iterdir()] == ["toy.toml"]


def test_a_file_of_latents_as_a_table_with_everything_kept(preset, tmp_path, capsys):
    save_latents(tmp_path / "l.safetensors", draw_noise(1, (1, 48, 3, 4, 6)), {})
    sides = ["--a", "plain:fp32", "--b", "plain", "--keep", str(tmp_path / "kept")]
    latents = ["--latents", str(tmp_path / "l.safetensors"), "--frames", "1"]
    assert main(["compare", "--preset", preset, *latents, *sides]) == 0
    text = capsys.readouterr().out
    assert "1 frames of 96 x 64" in text and "infinite (identical)" in text and "Every byte is the same" in text
    assert probe(tmp_path / "kept" / "b" / "video.mp4").frames == 1


def test_list_names_what_this_machine_has(preset, capsys):
    assert main(["compare", "--preset", preset, "--a", "list"]) == 0
    listed = capsys.readouterr().out
    assert "reference:fp32" in listed and listed.splitlines()[0].startswith("auto ")


BAD = [
    (["--b", "fast"], "fast"),
    (["--b", "reference:tf32", "--devices", "cpu"], "tf32"),
    (["--frames", "6"], "frames = 6"),
    (["--latents", "/nowhere.safetensors"], "/nowhere.safetensors"),
    (["--latents", "/nowhere.safetensors", "--height", "64"], "--height"),
    (["--latents", "/nowhere.safetensors", "--height", "0"], "--height"),
    (["--latents", "/nowhere.safetensors", "--width", "0"], "--height"),
    (["--height", "0"], "height = 0"),
    (["--a", "list", "--b", "zzz"], "zzz"),
    (["--a", "zzz", "--b", "list"], "zzz"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(preset, capsys, arguments, words):
    assert main(["compare", "--preset", preset, *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_word_can_still_be_a_prompt(preset, tmp_path, capsys):
    out = ["--out", str(tmp_path / "o.mp4"), "--frames", "1", "--steps", "1", "--guidance", "1", "--json"]
    for words in (["--", "compare"], ["compare, then contrast"]):
        options = ["--preset", preset, *out]
        assert main([*options, *words]) == 0
        assert json.loads(capsys.readouterr().out)["request"]["prompt"] == words[-1]
