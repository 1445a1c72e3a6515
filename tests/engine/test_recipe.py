"""How a video is made again: the command line asks for exactly the same, the card names what its bytes depend on."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from engine import recipe
from engine.__main__ import make_request, parser
from engine.preset import load_preset
from engine.settings import DecodeSettings, DenoiseSettings

TINY = load_preset("tiny")
STATS = {
    "preset": "tiny",
    "device": "CPU, 2 threads",
    "precision": "fp32",
    "decode": {"path": "plain", "precision": "fp32", "reason": "the fastest path that is here"},
    "paths": {"fused_kernels": {"operation": "fused_kernels", "path": "off", "reason": "no GPU"}},
    "versions": {"python": "3.11", "torch": "2.13"},
    "vae_sha256": "a" * 64,
    "latents_sha256": "b" * 64,
}


def read(command, preset=TINY):
    """The request that a shell and our own command line make of a command."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "engine"]
    return make_request(parser().parse_args(words[3:]), preset)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "a red circle"},
        {"prompt": "-x 'quoted' \"twice\" $HOME `ls` \\ \n second line"},
        {"prompt": "compare"},
        {"prompt": '{"events": [1]}', "negative_prompt": "--seed 5"},
        {"prompt": "a", "height": 320, "width": 320, "frames": 25, "steps": 3, "shift": 7.25, "guidance": 0.1 + 0.2},
        {"prompt": "a", "seed": 2**63 - 1, "decode": DecodeSettings("reference", "fp32")},
        {"prompt": "a", "denoise": DenoiseSettings("bf16", "draft", attention="math", fused_kernels="off")},
    ],
)
def test_the_command_asks_for_the_same(values):
    request = TINY.request(**values)
    expected = dataclasses.replace(request, denoise=dataclasses.replace(request.denoise, preview="off"))
    assert read(recipe.command(request)) == expected


def test_settings_of_another_presets_default_are_spelled_out():
    request = TINY.request(prompt="a")
    other = dataclasses.replace(TINY, denoise=DenoiseSettings(precision="bf16", quality="draft"))
    assert read(recipe.command(request), other).denoise == dataclasses.replace(request.denoise, preview="off")


def test_a_first_frame_is_named_without_the_path_of_this_machine(tmp_path, monkeypatch):
    (tmp_path / "my picture.png").write_bytes(b"")
    request = TINY.request(prompt="a", image=tmp_path / "my picture.png")
    monkeypatch.chdir(tmp_path)
    assert read(recipe.command(request)).image == Path("my picture.png")
    assert str(tmp_path) not in recipe.card(request, STATS)


def test_the_card_names_all_that_the_bytes_depend_on():
    request = TINY.request(prompt="a red circle", seed=7)
    lines = dict(line.split(": ", 1) for line in recipe.card(request, STATS).splitlines())
    assert lines["Prompt"] == "a red circle" and lines["Seed"].startswith("7 ")
    assert lines["Size"] == "448 x 256 (width x height), 49 frames"
    assert lines["Denoising"] == "12 steps, shift 20, guidance 2.5"
    assert (lines["Device"], lines["Precision"]) == ("CPU, 2 threads", "fp32")
    assert lines["Fused kernels"] == "off (no GPU)"
    assert lines["Decode"] == "plain, fp32 (the fastest path that is here)"
    assert (lines["VAE"], lines["Latents"]) == (f"sha256 {'a' * 64}", f"sha256 {'b' * 64}")
    assert "torch 2.13" in lines["Versions"]
    assert "Negative prompt" not in lines and "First frame" not in lines


def test_a_job_that_ended_early_has_a_card_of_what_is_known():
    text = recipe.card(TINY.request(prompt="a"), {})
    assert "Prompt: a" in text and "sha256" not in text and recipe.paths({}) == []


@pytest.mark.parametrize(
    ("settings", "options"), [(DenoiseSettings, recipe.OF_DENOISE), (DecodeSettings, recipe.OF_DECODE)]
)
def test_no_setting_is_forgotten(settings, options):
    names = {field.name for field in dataclasses.fields(settings)}
    assert names - set(recipe.WITHOUT_EFFECT) == set(options)
