"""The whole path on a toy checkpoint: prompt in, checked mp4 out, in the order that the events promise."""

import dataclasses
import hashlib
import json
import threading

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from engine import checkpoint, placement
from engine import record as engine_record
from engine.about import place_name
from engine.engine import Engine
from engine.errors import BusyError, Cancelled, CheckpointError, RequestError, ResourceError
from engine.events import FramesReady, StageEnded, StageStarted, StepDone, VideoFinished, Warned
from engine.latents import load_latents
from engine.preset import Trained
from engine.settings import DecodeSettings, DenoiseSettings
from engine.step_cache import POLICIES, Policy
from engine.video import probe, read_settings


@pytest.fixture
def engine(toy_preset):
    made = Engine(toy_preset, "cpu")
    yield made
    made.close()


def run(events):
    """All events, and the hash of all frames."""
    seen, digest = [], hashlib.sha256()
    for event in events:
        if isinstance(event, FramesReady):
            digest.update(np.ascontiguousarray(event.frames).tobytes())
        seen.append(event)
    return seen, digest.hexdigest()


def generate(engine, folder, cancel=None, **values):
    return run(engine.generate(engine.preset.request(**values), folder, cancel))


def test_the_path_from_prompt_to_file(engine, tmp_path):
    events, _ = generate(engine, tmp_path / "job")
    assert [event.stage for event in events if isinstance(event, StageStarted)] == [
        "load",
        "text",
        "denoise",
        "decode",
        "file",
    ]
    assert [(event.step, event.steps) for event in events if isinstance(event, StepDone)] == [(1, 2), (2, 2)]
    frames = [event for event in events if isinstance(event, FramesReady)]
    assert [(event.start, len(event.frames), event.total) for event in frames] == [(0, 1, 9), (1, 8, 9)]
    finished = events[-1]
    assert isinstance(finished, VideoFinished) and not finished.partial
    info = probe(finished.path)
    assert (info.frames, info.height, info.width, info.fps) == (9, 64, 96, 24)
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        "request.json",
        "latents.safetensors",
        "live.mp4",
        "video.mp4",
        "thumbnail.jpg",
        "last.png",
        "stats.json",
    }
    last = np.asarray(Image.open(tmp_path / "job" / "last.png"))
    assert np.array_equal(last, frames[-1].frames[-1])


def test_the_figures_add_up(engine, tmp_path):
    events, _ = generate(engine, tmp_path, seed=7)
    stats = events[-1].stats
    assert json.loads((tmp_path / "stats.json").read_text()) == json.loads(json.dumps(stats))
    assert [stage["name"] for stage in stats["stages"]] == ["load", "text", "denoise", "decode", "file"]
    assert sum(stage["seconds"] for stage in stats["stages"]) <= stats["seconds"]
    decode = stats["stages"][3]
    assert decode["started"] <= stats["seconds_to_first_frame"] <= decode["started"] + decode["seconds"]
    assert len(stats["step_seconds"]) == 2 and sum(stats["step_seconds"]) <= stats["stages"][2]["seconds"] + 1e-3
    assert max(stats["memory"]["host"]) <= stats["peak_bytes"]["host"]
    assert stats["peak_bytes"]["host"] > 0 and stats["file_bytes"] == (tmp_path / "video.mp4").stat().st_size
    assert stats["request"]["seed"] == 7 and stats["decode"]["path"] == "plain" and stats["decode"]["reason"]
    assert stats["decode_frames_per_second"] == pytest.approx(9 / decode["seconds"])
    saved = load_latents(tmp_path / "latents.safetensors")
    assert saved.metadata["sha256"] == stats["latents_sha256"]
    assert saved.metadata["vae_sha256"] == stats["vae_sha256"]


def test_the_video_says_how_it_was_made(engine, tmp_path):
    generate(engine, tmp_path, prompt='a "quoted" = ä; prompt', seed=9)
    settings = read_settings(tmp_path / "video.mp4")
    assert settings["request"]["prompt"] == 'a "quoted" = ä; prompt'
    assert settings["request"]["seed"] == 9
    assert str(tmp_path) not in json.dumps(settings)


def test_one_seed_gives_the_same_bytes_and_another_does_not(engine, tmp_path):
    hashes = [generate(engine, tmp_path / str(i), seed=seed)[1] for i, seed in enumerate((5, 5, 6))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_prompt_and_first_frame_reach_the_video(engine, tmp_path):
    Image.new("RGB", (200, 100), (220, 30, 40)).save(tmp_path / "red.png")
    plain = generate(engine, tmp_path / "a", prompt="a red circle")[1]
    other = generate(engine, tmp_path / "b", prompt="a blue square")[1]
    events, framed = generate(engine, tmp_path / "c", prompt="a red circle", image=tmp_path / "red.png")
    assert len({plain, other, framed}) == 3
    assert "image" in [event.stage for event in events if isinstance(event, StageStarted)]
    kept = json.loads((tmp_path / "c" / "request.json").read_text())["image"]
    assert Image.open(kept).size == (200, 100)


def test_guidance_of_one_runs_one_branch(engine, tmp_path, monkeypatch):
    engine.load()
    texts = []
    encode = engine.executor.encode_prompt
    monkeypatch.setattr(engine.executor, "encode_prompt", lambda prompt: texts.append(prompt) or encode(prompt))
    generate(engine, tmp_path, guidance=1.0, negative_prompt="blue")
    assert texts == ["a red circle"]


def test_decoding_again_from_the_file_gives_the_same_frames(engine, tmp_path):
    first = generate(engine, tmp_path / "a")[1]
    latents = tmp_path / "a" / "latents.safetensors"
    events, again = run(engine.decode(latents, DecodeSettings(), tmp_path / "b"))
    assert first == again and events[-1].path == tmp_path / "b" / "video.mp4"
    reference = run(engine.decode(latents, DecodeSettings(path="reference"), tmp_path / "c"))[0][-1]
    assert reference.stats["decode"]["path"] == "reference"


def test_a_stop_while_denoising_ends_within_a_step(engine, tmp_path):
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        for event in engine.generate(engine.preset.request(steps=8), tmp_path, cancel):
            assert not isinstance(event, StepDone) or event.step == 1
            if isinstance(event, StepDone):
                cancel.set()
    assert not (tmp_path / "video.mp4").exists()
    assert isinstance(generate(engine, tmp_path / "next")[0][-1], VideoFinished)


def test_a_stop_while_decoding_keeps_what_is_there(engine, tmp_path):
    cancel = threading.Event()
    events = []
    for event in engine.generate(engine.preset.request(frames=41), tmp_path, cancel):
        events.append(event)
        if isinstance(event, FramesReady) and event.start > 0:
            cancel.set()
    finished = events[-1]
    assert finished.partial and finished.stats["frames"] == 17
    assert probe(finished.path).frames == 17


def test_a_busy_engine_refuses_in_words(engine, tmp_path):
    running = engine.generate(engine.preset.request(), tmp_path / "a")
    next(running)
    with pytest.raises(BusyError, match="another video"):
        next(engine.generate(engine.preset.request(), tmp_path / "b"))
    running.close()
    assert isinstance(generate(engine, tmp_path / "c")[0][-1], VideoFinished)


def test_bad_requests_are_refused_before_any_work(engine, tmp_path):
    request = dataclasses.replace(engine.preset.request(), frames=10**6)
    with pytest.raises(RequestError, match="1000000"):
        next(engine.generate(request, tmp_path / "job"))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG not really")
    with pytest.raises(RequestError):
        next(engine.generate(engine.preset.request(image=tmp_path / "broken.png"), tmp_path / "job"))
    assert not (tmp_path / "job").exists() and engine.readiness().state == "idle"


def test_a_full_disk_is_an_error_before_the_work(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.disk.shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**6})())
    with pytest.raises(ResourceError, match="free"):
        next(engine.generate(engine.preset.request(), tmp_path))
    assert engine.readiness().state == "idle"


def test_a_request_beyond_the_training_is_warned_of(toy_preset, tmp_path):
    engine = Engine(dataclasses.replace(toy_preset, trained=Trained(pixels=64 * 96, frames=5)), "cpu")
    events, _ = generate(engine, tmp_path)
    assert isinstance(events[0], Warned) and "at most 5 frames" in events[0].text
    assert isinstance(events[-1], VideoFinished)


def test_a_long_prompt_is_cut_with_a_warning(engine, tmp_path):
    events, _ = generate(engine, tmp_path, prompt="red " * 1600)
    assert any(isinstance(event, Warned) and "1536" in event.text for event in events)


def test_a_missing_checkpoint_fails_in_words_and_can_be_mended(toy_preset, toy_checkpoint, tmp_path):
    engine = Engine(dataclasses.replace(toy_preset, checkpoint=str(tmp_path / "later")), "cpu")
    with pytest.raises(CheckpointError, match="later"):
        generate(engine, tmp_path / "a")
    assert engine.readiness().state == "failed" and "later" in engine.readiness().text
    (tmp_path / "later").symlink_to(toy_checkpoint)
    assert isinstance(generate(engine, tmp_path / "b")[0][-1], VideoFinished)
    assert engine.readiness().state == "ready"


def test_estimates_come_from_measured_rates(engine, tmp_path):
    request = engine.preset.request()
    assert engine.estimate(request) is None
    engine.load()
    short, long = engine.estimate(request), engine.estimate(dataclasses.replace(request, steps=8))
    assert long.denoise == pytest.approx(4 * short.denoise) and long.decode == short.decode > 0
    events, _ = generate(engine, tmp_path)
    denoise = next(event.seconds for event in events if isinstance(event, StageEnded) and event.stage == "denoise")
    assert engine.estimate(request).denoise == pytest.approx(denoise)


def test_a_decoder_that_does_not_take_the_vae_is_refused_before_denoising(engine, tmp_path, monkeypatch):
    explain = engine.executor.explain_decode

    def by_width(settings):
        if engine.executor.vae is not None and settings.path == "plain":
            raise RequestError("decode path = 'plain' can't run here: its widths")
        return explain(settings)

    monkeypatch.setattr(engine.executor, "explain_decode", by_width)
    request = dataclasses.replace(engine.preset.request(), decode=DecodeSettings(path="plain"))
    engine.check(request)
    seen = []
    with pytest.raises(RequestError, match="its widths"):
        seen.extend(engine.generate(request, tmp_path / "video"))
    assert {event.stage for event in seen} <= {"load"}


def test_a_measuring_run_that_does_not_fit_costs_the_estimate_alone(engine, tmp_path, monkeypatch, caplog):
    runs = []

    def too_large(*_):
        runs.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.experience.measure", too_large)
    engine.load()
    engine.load()
    ready, request = engine.readiness(), engine.preset.request()
    assert ready.state == "ready" and "known after the first one. A short run at the preset's size" in ready.text
    assert "does not fit on cpu" in caplog.text and len(runs) == 1
    assert engine.estimate(request) is None
    assert isinstance(generate(engine, tmp_path)[0][-1], VideoFinished)
    assert engine.estimate(request).denoise > 0
    assert engine.readiness().state == "ready" and "known after" not in engine.readiness().text


def test_about_names_model_and_device(engine):
    engine.load()
    about = engine.about()
    assert about["Model"].startswith("Toy") and "CPU" in about["Device"]
    assert "parameters" in about["Transformer"] and "parameters" in about["VAE"]


@pytest.mark.parametrize(("number", "words"), [(1, "CPU, 1 thread ("), (2, "CPU, 2 threads (")])
def test_one_thread_is_not_many(engine, monkeypatch, number, words):
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    assert engine.executor.device_name().startswith(words)


def test_a_device_that_is_absent_is_refused(toy_preset):
    for name, words in (
        ("cuda:99", "GPU|devices"),
        ("tpu", "not known"),
        ("mps", "not known"),
        ("cpu,0", "takes the CPU as one GPU"),
        ("cpu:0", "1 to 8"),
    ):
        with pytest.raises(RequestError, match=words):
            Engine(toy_preset, name)


def test_a_fault_while_decoding_keeps_what_is_there_and_the_latents(engine, tmp_path, monkeypatch):
    engine.load()
    decode = engine.executor.decode

    def breaks_after_one_chunk(*arguments):
        yield next(decode(*arguments))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.executor, "decode", breaks_after_one_chunk)
    seen = []
    with pytest.raises(ResourceError, match="smaller size"):
        for event in engine.generate(engine.preset.request(), tmp_path):
            seen.append(event)
    assert seen[-1].partial and probe(seen[-1].path).frames == 1
    monkeypatch.undo()
    again, _ = run(engine.decode(tmp_path / "latents.safetensors", DecodeSettings(), tmp_path / "again"))
    assert probe(again[-1].path).frames == 9


def test_if_the_live_video_breaks_off_the_job_says_so_and_goes_on(engine, tmp_path):
    warned = []
    for event in engine.generate(engine.preset.request(frames=41), tmp_path):
        if isinstance(event, FramesReady) and event.start == 0:
            children = psutil.Process().children()
            live = next(child for child in children if child.cmdline()[-1].endswith("live.mp4"))
            live.kill()
            while live.status() != psutil.STATUS_ZOMBIE:
                pass
        if isinstance(event, Warned):
            warned.append(event.text)
    assert isinstance(event, VideoFinished) and not event.partial
    assert probe(event.path).frames == 41
    assert len([text for text in warned if "plays once it is whole" in text]) == 1


def test_figures_that_can_not_be_written_do_not_cost_the_video(engine, tmp_path, monkeypatch):
    write = engine_record.write_json

    def full(path, values):
        if path.name == "stats.json":
            raise ResourceError("the disk is full")
        write(path, values)

    monkeypatch.setattr(engine_record, "write_json", full)
    events, _ = generate(engine, tmp_path)
    assert isinstance(events[-1], VideoFinished) and probe(events[-1].path).frames == 9
    assert any(isinstance(event, Warned) and "the disk is full" in event.text for event in events)


def test_the_step_cache_is_in_the_figures_and_full_has_none(engine, tmp_path, monkeypatch):
    events, _ = generate(engine, tmp_path / "full")
    assert "step_cache" not in events[-1].stats
    monkeypatch.setitem(POLICIES, "draft", Policy(100.0, first=2, last=1))
    events, _ = generate(engine, tmp_path / "draft", steps=5, denoise=DenoiseSettings(quality="draft"))
    assert events[-1].stats["step_cache"] == {
        "quality": "draft",
        "threshold": 100.0,
        "passes": 10,
        "skipped": 4,
        "share": 0.4,
        "psnr": None,
    }
    assert engine.estimate(engine.preset.request(denoise=DenoiseSettings(quality="draft"))).denoise > 0


def test_streamed_blocks_make_the_same_video_and_the_plan_is_shown(engine, tmp_path):
    _, expected = generate(engine, tmp_path / "resident")
    assert "fp32: a CPU is faster" in engine.about()["Denoising"]
    _, streamed = generate(engine, tmp_path / "streamed", denoise=DenoiseSettings(offload="blocks"))
    assert streamed == expected
    assert "in host memory, 2 at a time" in engine.about()["Weights"]
    _, again = generate(engine, tmp_path / "again")
    assert again == expected
    assert "in host memory" not in engine.about()["Weights"]


def test_fp8_is_refused_on_a_cpu_before_any_work(engine, tmp_path):
    with pytest.raises(RequestError, match=r"precision = 'fp8': fp8 products need an NVIDIA GPU.* Choose auto, bf16"):
        generate(engine, tmp_path / "job", denoise=DenoiseSettings(precision="fp8"))
    assert not (tmp_path / "job").exists()


def test_a_visiting_text_encoder_gives_the_same_embedding(engine):
    engine.load()
    executor = engine.executor
    expected = executor.encode_prompt("a red circle").embedding
    executor.placement = dataclasses.replace(executor.placement, text="visiting")
    executor._texts.clear()
    assert torch.equal(executor.encode_prompt("a red circle").embedding, expected)
    assert not executor.holds(engine.preset.denoise)
    engine.load()
    assert executor.placement.text == "resident"


def test_a_prompt_is_read_once_until_others_have_come(engine, monkeypatch):
    engine.load()
    engine.executor._texts.clear()
    encode, read = engine.executor.text.encode, []
    monkeypatch.setattr(engine.executor.text, "encode", lambda prompt: read.append(prompt) or encode(prompt))
    for prompt in ("", "a", "", "b", "", *"cdefgh", "", "a"):
        engine.executor.encode_prompt(prompt)
    assert read == ["", *"abcdefgh", "a"]


def test_too_little_memory_is_said_before_anything_is_loaded(toy_preset, tmp_path, monkeypatch):
    engine = Engine(toy_preset, "cpu")
    monkeypatch.setattr(placement, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(checkpoint, "fill", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ResourceError, match=r"9 frames of 96 x 64 do not fit .* of cpu memory are needed, 1.0 MiB"):
        generate(engine, tmp_path)
    assert engine.readiness().state == "failed"


def test_fp8_that_nobody_asked_for_is_logged_with_its_reason(engine, monkeypatch, caplog):
    plan = engine.executor.plan
    forced = {"precision": "fp8", "reason": "bf16 does not fit here"}
    monkeypatch.setattr(engine.executor, "plan", lambda settings: dataclasses.replace(plan(settings), **forced))
    with caplog.at_level("WARNING"):
        engine.load()
    assert "The transformer runs in fp8: bf16 does not fit here." in caplog.text
    assert engine.executor.precision == "fp8" == engine.about()["Denoising"].split(":")[0]


def test_the_record_names_a_checkpoint_without_its_path_on_this_machine(toy_checkpoint):
    assert place_name(str(toy_checkpoint)) == toy_checkpoint.name
    assert place_name("nvidia/PAN-2") == "nvidia/PAN-2"


@pytest.mark.parametrize("when", ["text", "denoise"])
def test_a_job_that_fails_or_is_stopped_keeps_its_figures(engine, tmp_path, monkeypatch, when):
    engine.load()
    cancel = threading.Event()

    def fail(*arguments):
        raise ResourceError("out of memory")

    if when == "text":
        monkeypatch.setattr(engine.executor, "encode_prompt", fail)
    else:
        cancel.set()
    with pytest.raises((ResourceError, Cancelled)):
        list(engine.generate(engine.preset.request(), tmp_path, cancel))
    kept = json.loads((tmp_path / engine_record.STATS_NAME).read_text())
    assert kept["stages"][-1]["name"] == when and kept["peak_bytes"]["host"] > 0
    assert len(kept["memory"]["host"]) == len(kept["memory"]["seconds"]) > 0
