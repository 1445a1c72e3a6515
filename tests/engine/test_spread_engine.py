"""The whole engine over several devices: a video, what stats.json says of them, and comparisons with one device."""

from __future__ import annotations

import json

import pytest
import torch

from engine.__main__ import main
from engine.engine import Engine
from engine.errors import ExhaustedError
from engine.events import ComparisonFinished, VideoFinished
from engine.latents import load_latents, save_latents
from engine.noise import draw_noise
from engine.settings import DecodeSettings
from engine.sides import RandomLatents

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def engine(toy_preset):
    made = Engine(toy_preset, "cpu:2")
    yield made
    made.close()


def test_a_video_is_that_of_one_device(engine, toy_preset, tmp_path):
    request = toy_preset.request()
    *_, spread = engine.generate(request, tmp_path / "spread")
    one = Engine(toy_preset, "cpu")
    *_, alone = one.generate(request, tmp_path / "alone")
    assert isinstance(spread, VideoFinished) and isinstance(alone, VideoFinished)
    ours, truth = (load_latents(tmp_path / name / "latents.safetensors").tensor for name in ("spread", "alone"))
    assert (ours - truth).abs().max() < 1e-4 * truth.abs().max().clamp(min=1)
    assert spread.stats["decode"]["devices"] == 2 and alone.stats["decode"]["devices"] == 1
    lanes = json.loads((tmp_path / "spread" / "stats.json").read_text())["devices"]
    assert [lane["name"] for lane in lanes] == ["rank 0 (cpu)", "rank 1 (cpu)"]
    assert all(lane["bytes_sent"] > 0 and lane["peak_bytes"] > 0 for lane in lanes)
    assert {span[0] for span in lanes[1]["spans"]} >= {"denoise", "decode"}
    assert alone.stats["devices"] == []


def test_one_device_against_the_group_gives_the_same_bytes(engine, tmp_path):
    values = [option.value for option in engine.decoders()]
    assert {"plain:fp32", "plain:fp32:one", "reference:fp32"} <= set(values)
    noise = RandomLatents(seed=3, frames=9, height=64, width=96)
    *_, finished = engine.compare(noise, DecodeSettings("plain"), DecodeSettings("plain", devices="one"), tmp_path)
    assert isinstance(finished, ComparisonFinished)
    result = finished.result
    assert result["verdict"]["passed"] and "Every byte is the same" in result["verdict"]["text"]
    assert (result["sides"]["a"]["devices"], result["sides"]["b"]["devices"]) == (2, 1)


def test_prompts_tokens_pictures_and_facts_come_from_the_workers(engine, toy_preset):
    engine.load()
    assert engine.count_tokens("a red circle") > 0
    assert "2 processes on the CPU" in engine.about()["Device"]
    assert not torch.cuda.is_initialized()


def test_the_command_line_verifies_a_decode(engine, toy_preset, toy_checkpoint, tmp_path, capsys, monkeypatch):
    noise = draw_noise(5, (1, 48, 2, 6, 4))
    save_latents(tmp_path / "latents.safetensors", noise, {})
    monkeypatch.setattr("engine.__main__.Engine", lambda preset, devices: engine)
    monkeypatch.setattr("engine.__main__.preset_from_environment", lambda *_: toy_preset)
    arguments = ["decode", "--latents", str(tmp_path / "latents.safetensors"), "--out", str(tmp_path / "out.mp4")]
    assert main([*arguments, "--devices", "cpu:2", "--verify"]) == 0
    assert "Every byte is the same" in capsys.readouterr().err


def test_a_group_that_ran_out_of_memory_while_it_was_measured_makes_the_video(toy_preset, tmp_path, monkeypatch):
    def too_large(executor, _):
        executor.group.close()  # as after every fault of a rank
        raise ExhaustedError("Rank 1 (cpu), stage denoise: it does not fit.")

    monkeypatch.setattr("engine.experience.measure", too_large)
    engine = Engine(toy_preset, "cpu:2")
    *_, finished = engine.generate(toy_preset.request(frames=1, steps=1), tmp_path)
    engine.close()
    assert isinstance(finished, VideoFinished) and engine.readiness().state == "idle"
