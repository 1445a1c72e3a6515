"""A comparison on a toy checkpoint: the files and figures of both sides, what stays when one fails, what is refused."""

import json
import math
import threading

import numpy as np
import pytest
import torch

from engine.compare import Decoder
from engine.decode_cost import DecodeCosts
from engine.engine import Engine
from engine.errors import BusyError, Cancelled, EngineError, RequestError, ResourceError
from engine.events import ComparisonFinished, FramesMeasured, FramesReady, SideEnded, SideStarted, StageStarted
from engine.janitor import RAW_KEPT
from engine.jobs import Jobs
from engine.latents import load_latents, save_latents
from engine.noise import draw_noise
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents, options, parse_side
from engine.video import probe

PLAIN, REFERENCE = DecodeSettings("plain", "fp32"), DecodeSettings("reference")
NOISE = RandomLatents(seed=7, frames=5, height=64, width=96)


@pytest.fixture(scope="module")
def engine(toy_preset):
    made = Engine(toy_preset, "cpu")
    made.load()
    yield made
    made.close()


@pytest.fixture
def broken(engine, monkeypatch):
    """Makes one path fail: broken(path, error, where="decode")."""

    def broken(path, error, where="decode"):
        real = getattr(engine.executor, where)

        def fails(latents, settings, cancel):
            if settings.path != path:
                yield from real(latents, settings, cancel)
                return
            yield next(iter(real(latents, settings, cancel)))
            raise error

        monkeypatch.setattr(engine.executor, where, fails)

    return broken


def result(events):
    *_, last = events
    assert isinstance(last, ComparisonFinished)
    return last.result


def test_both_sides_are_decoded_measured_and_kept(engine, tmp_path):
    events = list(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path))
    stages = [event.stage for event in events if isinstance(event, StageStarted)]
    assert stages == ["load", *["measure", "decode", "file"] * 2, "compare"]
    assert [(event.side, event.path) for event in events if isinstance(event, SideStarted)] == [
        ("a", "plain"),
        ("b", "reference"),
    ]
    assert [event.done for event in events if isinstance(event, FramesMeasured)] == [1, 5, 1, 5]
    found = result(events)
    assert json.loads((tmp_path / "compare.json").read_text()) == found
    assert found["verdict"]["passed"] and found["figures"]["psnr"] > 100 and found["figures"]["frames"] == 5
    a, b = found["sides"]["a"], found["sides"]["b"]
    assert found["ratio"] == pytest.approx(b["seconds"] / a["seconds"])
    assert a["frames_per_second"] == pytest.approx(5 / a["seconds"]) and a["peak_bytes"]["host"] > 0
    assert (a["path"], b["path"]) == ("plain", "reference") and a["reason"] and a["error"] is None
    for side in "ab":
        info = probe(tmp_path / side / "video.mp4")
        assert (info.frames, info.height, info.width, info.fps) == (5, 64, 96, 24)
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert kept == ["a/frames.npy", "a/video.mp4", "b/frames.npy", "b/video.mp4", "compare.json"]


def test_the_raw_frames_are_the_delivered_ones_and_noise_comes_from_the_seed(engine, tmp_path):
    latents = draw_noise(7, (1, 48, 2, 4, 6))
    never = threading.Event()
    chunks = [np.array(chunk.frames) for chunk in engine.executor.decode(latents, PLAIN, never)]
    found = result(engine.compare(NOISE, PLAIN, PLAIN, tmp_path))
    assert np.array_equal(np.load(tmp_path / "a" / "frames.npy"), np.concatenate(chunks))
    assert found["source"] == {"latents": "random", "seed": 7}


def test_identical_sides_are_infinitely_close(engine, tmp_path):
    found = result(engine.compare(NOISE, PLAIN, PLAIN, tmp_path))
    figures = found["figures"]
    assert figures["psnr"] == figures["psnr_8bit_worst"] == "Infinity" and figures["same_bytes"] == 1.0
    assert float(figures["psnr"]) == math.inf
    assert found["verdict"]["text"].startswith("Every byte is the same")


def test_an_excerpt_of_a_file_is_the_start_of_it(engine, tmp_path):
    save_latents(tmp_path / "l.safetensors", draw_noise(3, (1, 48, 4, 4, 6)), {"seed": "3"})
    whole = result(engine.compare(tmp_path / "l.safetensors", PLAIN, PLAIN, tmp_path / "whole"))
    part = result(engine.compare(tmp_path / "l.safetensors", PLAIN, PLAIN, tmp_path / "part", frames=9))
    assert (whole["frames"], part["frames"], part["source"]["seed"]) == (13, 9, "3")
    frames = [np.load(tmp_path / name / "a" / "frames.npy") for name in ("whole", "part")]
    assert np.array_equal(frames[0][:9], frames[1])


FAILURES = [
    (torch.OutOfMemoryError("CUDA out of memory"), "does not fit"),
    (EngineError("values that are not finite"), "not finite"),
    (ZeroDivisionError("oh"), "Internal error, please report it: ZeroDivisionError"),
]


@pytest.mark.parametrize("where", ["float_frames", "decode"])
@pytest.mark.parametrize(("error", "words"), FAILURES)
def test_what_fails_on_one_side_leaves_the_other_sides_result(engine, broken, tmp_path, error, words, where):
    broken("reference", error, where)
    events = list(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path))
    found = result(events)
    assert words in found["sides"]["b"]["error"] and found["sides"]["b"]["video"] is None
    assert found["sides"]["a"]["error"] is None and probe(tmp_path / "a" / "video.mp4").frames == 5
    assert found["figures"] is None and found["verdict"] is None
    assert [event.figures["error"] is None for event in events if isinstance(event, SideEnded)] == [True, False]
    assert not list(tmp_path.glob("*.npy")) and not (tmp_path / "b" / "frames.npy").exists()


def test_the_second_side_runs_though_the_first_failed(engine, broken, tmp_path):
    broken("plain", torch.OutOfMemoryError("CUDA out of memory"), "float_frames")
    found = result(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path))
    assert "Side A does not fit" in found["sides"]["a"]["error"]
    assert found["sides"]["b"]["seconds"] > 0 and (tmp_path / "b" / "video.mp4").exists()


def test_if_both_fail_it_is_an_error_and_nothing_large_stays(engine, broken, tmp_path):
    broken("plain", EngineError("first fault"), "float_frames")
    broken("reference", EngineError("second fault"))
    with pytest.raises(EngineError, match=r"first fault.*second fault"):
        list(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path))
    assert not list(tmp_path.rglob("*.npy"))
    again = engine.compare(NOISE, PLAIN, PLAIN, tmp_path / "again")
    assert next(again).stage == "load"
    again.close()


def test_a_stop_in_the_first_side_ends_it_and_in_the_second_keeps_the_first(engine, tmp_path):
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        for event in engine.compare(NOISE, PLAIN, REFERENCE, tmp_path / "a", cancel):
            if isinstance(event, FramesReady):
                cancel.set()
    assert not list((tmp_path / "a").rglob("*.npy"))
    cancel = threading.Event()
    for event in engine.compare(NOISE, PLAIN, REFERENCE, tmp_path / "b", cancel):
        if isinstance(event, SideEnded) and event.side == "a":
            cancel.set()
    assert "stopped" in event.result["sides"]["b"]["error"] and event.result["sides"]["a"]["video"] == "a/video.mp4"


REFUSED = [
    ({"a": DecodeSettings("reference", "bf16")}, "reference decodes in fp32 only"),
    ({"b": DecodeSettings("reference", "tf32")}, "cpu has no tf32"),
    ({"b": DecodeSettings("plain", "tf32")}, "Only the reference"),
    ({"frames": 6}, "take 5"),
    ({"frames": 9}, "at most the 5"),
    ({"latents": RandomLatents(7, 5, 100, 96)}, "height = 100"),
    ({"latents": RandomLatents(7, 45, 64, 96)}, "frames = 45"),
    ({"latents": RandomLatents(-7, 5, 64, 96)}, "seed = -7"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_what_this_machine_or_preset_does_not_do_is_refused_before_any_work(engine, tmp_path, changed, words):
    asked = {"latents": NOISE, "a": PLAIN, "b": REFERENCE, "folder": tmp_path / "job"} | changed
    with pytest.raises(RequestError, match=words):
        next(engine.compare(**asked))
    assert not (tmp_path / "job").exists()


def test_wrong_files_are_refused(engine, tmp_path):
    bad = tmp_path / "bad.safetensors"
    for latents, words in ((torch.zeros(1, 16, 2, 4, 6), "shape"), (torch.full((1, 48, 2, 4, 6), math.nan), "finite")):
        save_latents(bad, latents, {})
        with pytest.raises(RequestError, match=words):
            next(engine.compare(bad, PLAIN, REFERENCE, tmp_path / "job"))
    bad.write_bytes(b"no safetensors")
    with pytest.raises(RequestError, match="safetensors"):
        next(engine.compare(bad, PLAIN, REFERENCE, tmp_path / "job"))
    save_latents(bad, torch.zeros(1, 48, 2, 40, 40), {})
    with pytest.raises(RequestError, match="640"):
        next(engine.compare(bad, PLAIN, REFERENCE, tmp_path / "job"))


def test_a_full_disk_is_said_before_any_work(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ResourceError, match="1000 bytes are free"):
        next(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path))


def test_a_busy_engine_refuses(engine, tmp_path):
    running = engine.compare(NOISE, PLAIN, REFERENCE, tmp_path / "a")
    next(running)
    with pytest.raises(BusyError):
        next(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path / "b"))
    running.close()
    assert not list(tmp_path.rglob("*.npy"))


def test_the_menu_lists_what_explain_accepts(engine):
    found = {option.value: option for option in options(engine.executor)}
    assert list(found) == ["plain:fp32", "plain:bf16", "plain:fp16", "reference:fp32"]
    assert all(option.reason and parse_side(value) == option.settings for value, option in found.items())
    with pytest.raises(RequestError, match="magic"):
        parse_side("magic:fp32")


def test_costs_are_guessed_first_and_known_after_a_run(engine, toy_preset, tmp_path):
    fresh = Engine(toy_preset, "cpu")
    assert fresh.estimate_comparison(PLAIN, REFERENCE, (3, 4, 6)).total is None
    list(engine.compare(NOISE, PLAIN, REFERENCE, tmp_path))
    one, two = (engine.estimate_comparison(PLAIN, REFERENCE, (frames, 4, 6)) for frames in (2, 4))
    assert one.a.measured and one.b.measured and one.total > 0
    # 2 latent frames make 5 frames, 4 make 13.
    assert two.b.seconds == pytest.approx(13 / 5 * one.b.seconds) and two.b.bytes == one.b.bytes > one.a.bytes > 0
    assert not engine.estimate_comparison(PLAIN, DecodeSettings("plain", "bf16"), (3, 4, 6)).b.measured


@pytest.mark.parametrize(
    ("decoder", "device", "base", "latents", "seen"),
    [
        (("plain", "fp32"), "cpu", 16, (3, 16, 28), 143 * 2**20),
        (("reference", "fp32"), "cpu", 16, (3, 16, 28), 347 * 2**20),
        (("reference", "fp32"), "cuda", 256, (31, 44, 78), 21 * 2**30),
    ],
)
def test_predicted_memory_is_near_what_was_measured(decoder, device, base, latents, seen):
    cost = DecodeCosts(device).predict(Decoder(*decoder), latents, {"decoder_base_dim": base, "base_dim": 8})
    assert cost.bytes == pytest.approx(seen, rel=0.15) and cost.seconds is None


def test_a_comparison_is_a_job_like_any_other_but_no_video(engine, toy_preset, tmp_path):
    jobs = Jobs(engine, tmp_path)
    request = CompareRequest(NOISE, PLAIN, REFERENCE, source="noise")
    video = jobs.submit(toy_preset.request(prompt="a test", frames=1, steps=1))
    first = jobs.submit(request)
    assert jobs.comparison(first).position == 1 and jobs.snapshot(first) is None and jobs.comparison(video) is None
    state = jobs.wait(first)
    assert state.status == "finished" and set(state.sides) == {"a", "b"} and state.result["figures"]
    assert all(stage.seconds is not None for stage in state.stages)
    more = [jobs.submit(request) for _ in range(RAW_KEPT)]
    jobs.wait(more[-1])
    assert [job.id for job in jobs.recent()] == [video]
    assert [job.id for job in jobs.comparisons()] == [*reversed([first, *more])]
    jobs.submit(request)
    jobs.close()
    assert len(list(tmp_path.rglob("frames.npy"))) <= 2 * RAW_KEPT
    assert not (tmp_path / first / "a" / "frames.npy").exists() and (tmp_path / first / "a" / "video.mp4").exists()


def test_a_failed_comparison_says_why(engine, broken, tmp_path):
    broken("plain", EngineError("first fault"))
    jobs = Jobs(engine, tmp_path)
    state = jobs.wait(jobs.submit(CompareRequest(NOISE, PLAIN, PLAIN)))
    jobs.close()
    assert state.status == "failed" and "Neither side" in state.error and state.result is None


def test_the_latents_of_a_video_can_be_compared(engine, toy_preset, tmp_path):
    request = toy_preset.request(prompt="a test", frames=5, steps=1, guidance=1.0)
    list(engine.generate(request, tmp_path / "video"))
    latents = tmp_path / "video" / "latents.safetensors"
    found = result(engine.compare(latents, PLAIN, REFERENCE, tmp_path / "compare"))
    assert found["source"]["sha256"] == load_latents(latents).metadata["sha256"] and found["verdict"]["passed"]
