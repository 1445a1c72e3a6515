"""The guardrail over a stand-in for the release's package: neither a hit nor a failed check leaves anything to see."""

import dataclasses
import sys
from types import ModuleType

import httpx
import numpy as np
import pytest

import app
from engine import guardrail
from engine.engine import Engine
from engine.errors import CheckpointError, EngineError, RequestError
from engine.guardrail import GuardedEngine, Guardrail, guarded
from engine.jobs import Jobs
from engine.preset import load_preset
from engine.video import probe
from tests.double import Double, Pace, serve

PRESET = load_preset("tiny")


class Checker:
    """What the release's checker is taken to do: prompts with "evil" are refused, and videos if `videos` says so."""

    videos = staticmethod(lambda frames: frames)
    seen: list

    def __init__(self):
        Checker.seen = []

    def check_text_safety(self, prompt):
        return "evil" not in prompt

    def check_video_safety(self, frames):
        Checker.seen.append(frames)
        return Checker.videos(frames)


@pytest.fixture
def package(monkeypatch):
    module = ModuleType("pan2_guardrail")
    module.PAN2SafetyChecker = Checker
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("pan2_guardrail", None)
    monkeypatch.setitem(sys.modules, "pan2_guardrail", module)
    monkeypatch.setattr(Checker, "videos", staticmethod(lambda frames: frames))
    return module


def request(**values):
    return PRESET.request(**{"prompt": "a red circle", "frames": 33, "height": 64, "width": 96, "steps": 2} | values)


@pytest.fixture
def served(package, tmp_path):
    with serve(GuardedEngine(Double(PRESET, Pace(chunk=0.05)), Guardrail()), tmp_path) as served:
        yield served


def test_what_passes_is_a_whole_video_and_16_frames_of_it_were_seen(served):
    state = served.jobs.wait(served.jobs.submit(request()))
    assert state.status == "finished" and probe(state.video).frames == 33
    assert state.video.parent == state.folder and state.latents.is_file()
    assert (state.folder / "thumbnail.jpg").is_file()
    (frames,) = Checker.seen
    assert frames.shape == (16, 64, 96, 3) and frames.dtype == np.uint8
    assert not list(served.jobs.outputs.glob(".unchecked-*"))


def test_a_refused_prompt_is_a_sentence_before_any_work(served):
    state = served.jobs.wait(served.jobs.submit(request(prompt="an evil circle")))
    assert (state.status, state.error) == ("failed", guardrail.PROMPT_REFUSED)
    assert state.stages == [] and not Checker.seen


@pytest.mark.parametrize("answer", [None, False, 0, "unsafe", {}])
def test_a_refused_video_leaves_nothing_to_see(served, monkeypatch, answer):
    monkeypatch.setattr(Checker, "videos", staticmethod(lambda frames: answer))
    state = served.jobs.wait(served.jobs.submit(request(frames=5)))
    assert (state.status, state.error, state.video) == ("failed", guardrail.VIDEO_REFUSED, None)
    left = {path.name for path in served.jobs.outputs.rglob("*") if path.is_file()}
    assert not left & {"video.mp4", "live.mp4", "latents.safetensors", "thumbnail.jpg", "last.png", "preview.webp"}
    assert not list(served.jobs.outputs.glob(".unchecked-*"))
    for path in (f"/video/{state.id}.mp4", f"/live/{state.id}.mp4", f"/thumbnail/{state.id}.jpg"):
        assert httpx.get(served.url + path).status_code == 404


def test_nothing_can_be_seen_before_it_has_passed(served):
    job = served.jobs.submit(request(frames=97))
    for state in served.jobs.follow(job, 0.01):
        if state.over:
            break
        assert not [path.name for path in state.folder.glob("*") if path.suffix in (".mp4", ".jpg", ".webp")]
        hidden = served.jobs.outputs / f".unchecked-{job}" / "live.mp4"
        if hidden.is_file():
            answers = [httpx.get(f"{served.url}/live/{job}.mp4"), httpx.get(f"{served.url}/gradio_api/file={hidden}")]
            assert answers[0].status_code in (202, 404) and answers[1].status_code in (403, 404)
            assert b"ftyp" not in answers[0].content + answers[1].content
            break
    else:
        raise AssertionError("it was never at work")
    served.jobs.cancel(job)
    # What a stop leaves is checked as well.
    assert served.jobs.wait(job).status == "stopped" and Checker.seen


def test_a_check_that_fails_is_no_pass(served, monkeypatch):
    monkeypatch.setattr(Checker, "videos", staticmethod(lambda frames: 1 / 0))
    state = served.jobs.wait(served.jobs.submit(request(frames=5)))
    assert state.status == "failed" and "The safety check itself failed" in state.error and state.video is None


def test_latents_that_are_decoded_again_and_comparisons_are_checked_too(package, toy_preset, tmp_path, monkeypatch):
    engine = guarded(Engine(toy_preset, "cpu"), "on", False)
    small = toy_preset.request(prompt="a", height=64, width=64, frames=5, steps=1)
    *_, last = engine.generate(small, tmp_path / "a")
    latents, settings = tmp_path / "a" / "latents.safetensors", toy_preset.decode
    *_, result = engine.compare(latents, settings, dataclasses.replace(settings, path="reference"), tmp_path / "b")
    assert result.result["figures"] and (tmp_path / "b" / "a" / "video.mp4").is_file()
    monkeypatch.setattr(Checker, "videos", staticmethod(lambda frames: None))
    for work in (
        lambda folder: engine.decode(latents, settings, folder),
        lambda folder: engine.compare(latents, settings, settings, folder),
    ):
        with pytest.raises(EngineError, match="refused by the safety check"):
            list(work(tmp_path / "c"))
        assert not (tmp_path / "c").exists()
    assert last.path.is_file()


def test_it_is_on_where_strangers_come_if_it_is_here(package, monkeypatch):
    engine = Double(PRESET)
    assert guarded(engine, "auto", False) is guarded(engine, "off", True) is engine
    assert isinstance(guarded(engine, "auto", True), GuardedEngine)
    monkeypatch.delitem(sys.modules, "pan2_guardrail")
    assert guarded(engine, "auto", True) is engine
    with pytest.raises(CheckpointError, match="set ENGINE_GUARDRAIL=off"):
        guarded(engine, "on", True)


def test_a_server_that_is_refused_leaves_the_other_ones_unchecked_work_alone(served, monkeypatch, capsys):
    job = served.jobs.submit(request(frames=97))
    hidden = served.jobs.outputs / f".unchecked-{job}"
    while not hidden.is_dir():
        assert not served.jobs.snapshot(job).over
    monkeypatch.setattr(sys, "argv", ["app.py", "--outputs", str(served.jobs.outputs), "--port", "1"])
    with pytest.raises(SystemExit, match="Another server uses the outputs folder"):
        app.main()
    state = served.jobs.wait(job)
    assert (state.status, state.error) == ("finished", None) and probe(state.video).frames == 97


def test_what_a_crash_left_unchecked_goes_at_the_next_start(tmp_path):
    (tmp_path / ".unchecked-1").mkdir()
    Jobs(Double(PRESET), tmp_path).close()
    assert not (tmp_path / ".unchecked-1").exists()


def test_after_a_failure_no_more_is_said_to_be_kept_than_is(package, tmp_path):
    engine = Double(PRESET, Pace(fail_at="decode", fail_after=0))
    jobs = Jobs(GuardedEngine(engine, Guardrail()), tmp_path)
    nothing = jobs.wait(jobs.submit(request()))
    assert nothing.status == "failed" and not nothing.latents.exists()
    assert nothing.rest() == "Its settings are kept, and nothing else. Start it again."
    engine.pace = Pace(fail_at="decode", fail_after=1)
    checked = jobs.wait(jobs.submit(request()))
    jobs.close()
    assert checked.status == "failed" and checked.video.is_file() and checked.latents.is_file()


def test_a_package_that_speaks_otherwise_is_refused_at_the_start(package):
    package.PAN2SafetyChecker = type("Other", (), {})
    with pytest.raises(CheckpointError, match="check_text_safety"):
        Guardrail()


def test_the_page_says_what_is_checked(package, tmp_path):
    for engine, words in (
        (Double(PRESET), "nothing is checked"),
        (GuardedEngine(Double(PRESET), Guardrail()), "16 frames"),
    ):
        page = app.Page.__new__(app.Page)
        page.engine, page.listed = engine, True
        assert words in page.tell_system()


def test_a_refused_prompt_is_a_request_error(package):
    with pytest.raises(RequestError):
        Guardrail().check_prompt("evil")
