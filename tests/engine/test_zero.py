"""ZeroGPU over a stand-in for `spaces` that forks and pickles as the real one does."""

import contextvars
import dataclasses
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest
import torch
from gradio.context import LocalContext

from engine import executor, guardrail, packed
from engine.engine import Engine
from engine.errors import MediaError, RequestError
from engine.estimate import Estimate
from engine.guardrail import GuardedEngine
from engine.jobs import Jobs
from engine.settings import DecodeSettings, DenoiseSettings
from engine.sides import CompareRequest, RandomLatents
from engine.telemetry import memory_now
from engine.video import probe
from engine.web import details, render, zero
from engine.web.generate_tab import GenerateTab
from engine.web.zero import ZeroEngine
from tests.double import Double

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "tests" / "stubs"


@pytest.fixture
def spaces():
    spec = importlib.util.spec_from_file_location("stub_of_spaces", STUBS / "spaces" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(toy_preset, spaces):
    made = ZeroEngine(Engine(toy_preset, "cpu", measured=False), spaces.GPU)
    made.load()
    yield made
    made.close()


@pytest.fixture
def jobs(engine, tmp_path):
    registry = Jobs(engine, tmp_path / "outputs")
    yield registry
    registry.close()


def as_visitor(request, work):
    """Call `work` as an event of this visitor's page would."""

    def call():
        LocalContext.request.set(request)
        return work()

    return contextvars.copy_context().run(call)


def test_a_video_is_made_in_another_process_on_its_visitors_quota(jobs, engine, spaces, toy_preset):
    visitor = SimpleNamespace(headers={"x-ip-token": "theirs"})
    request = toy_preset.request(frames=9)
    assert engine.estimate(request) is None
    state = jobs.wait(as_visitor(visitor, lambda: jobs.submit(request)))
    assert (state.status, state.error, state.warnings) == ("finished", None, [])
    assert probe(state.video).frames == 9 and state.live.is_file() and state.latents.is_file()
    assert [(stage.name, stage.done) for stage in state.stages if stage.total] == [("denoise", 2), ("decode", 9)]
    assert spaces.asked == [(visitor, zero.FIRST_SECONDS)]
    assert not (state.folder / zero.STOP_FILE).exists()
    # What the other process learned is known here, and the next one asks for as long as it will take.
    assert engine.estimate(request).basis == "the last video made here"
    assert jobs.wait(jobs.submit(request)).status == "finished"
    assert spaces.asked[1] == (None, zero.LEAST_SECONDS)


def test_the_server_itself_computes_nothing(toy_preset, spaces, tmp_path, monkeypatch):
    inner, here = Engine(toy_preset, "cpu", measured=False), os.getpid()
    monkeypatch.setattr("engine.engine.usable", lambda device: os.getpid() != here)
    monkeypatch.setattr(executor, "usable", lambda device: os.getpid() != here)
    for name in ("encode_prompt", "denoise", "decode", "preview_map", "encode_image"):
        work = getattr(inner.executor, name)
        refuse = lambda *rest, work=work: pytest.fail("in the server") if os.getpid() == here else work(*rest)  # noqa: E731
        monkeypatch.setattr(inner.executor, name, refuse)
    probed = []
    choose = executor.choose_attention
    monkeypatch.setattr(executor, "choose_attention", lambda *a: (probed.append(a[2]), choose(*a))[1])
    engine = ZeroEngine(inner, spaces.GPU)
    engine.load()
    engine.about(), engine.paths(), engine.check(toy_preset.request())
    assert set(probed) == {None}
    *_, last = engine.generate(toy_preset.request(frames=5), tmp_path / "job")
    assert probe(last.path).frames == 5
    assert set(probed) == {None}


def test_blocks_can_not_stream_before_a_gpu_is_there(toy_preset, monkeypatch):
    engine = Engine(toy_preset, "cpu", measured=False)
    monkeypatch.setattr(executor, "usable", lambda device: False)
    with pytest.raises(zero.ResourceError, match=r"stream from host memory .* smaller size"):
        engine.load(DenoiseSettings(offload="blocks"))


def test_weights_that_a_late_gpu_got_one_by_one_share_memory_again(toy_preset, monkeypatch):
    engine = Engine(toy_preset, "cpu", measured=False)
    monkeypatch.setattr(executor, "usable", lambda device: False)
    engine.load()
    layers = engine.executor.transformer.transformer_blocks[0].attn.streams()[0]
    before = packed.joint(layers)[0].clone()
    for layer in layers:
        layer.weight.data = layer.weight.data.clone()
    monkeypatch.setattr(executor, "usable", lambda device: True)
    engine.load()
    assert packed.joint(layers)[0].data_ptr() == layers[0].weight.data_ptr()
    assert torch.equal(packed.joint(layers)[0], before)


def test_decoding_again_and_comparing_are_lent_a_gpu_too(jobs, spaces, toy_preset):
    first = jobs.wait(jobs.submit(toy_preset.request(frames=5)))
    again = jobs.wait(jobs.decode_again(first.id, DecodeSettings(path="reference")))
    assert (again.status, probe(again.video).frames) == ("finished", 5)
    sides = DecodeSettings(path="plain"), DecodeSettings(path="reference")
    state = jobs.wait(jobs.submit(CompareRequest(RandomLatents(seed=1, height=64, width=64, frames=5), *sides)))
    assert state.status == "finished" and state.result["sides"]["a"]["video"]
    assert len(spaces.asked) == 3


def test_errors_of_the_engine_arrive_as_themselves(engine, toy_preset, tmp_path, monkeypatch):
    def fail(*_):
        yield from ()
        raise MediaError("ffmpeg is missing. Install it.")

    monkeypatch.setattr(engine._engine.executor, "decode", fail)
    with pytest.raises(MediaError, match=r"^ffmpeg is missing\. Install it\.$"):
        list(engine.generate(toy_preset.request(), tmp_path / "job"))


def test_a_fault_of_ours_keeps_its_words(jobs, engine, toy_preset, monkeypatch):
    def fail(*_):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(engine._engine.executor, "denoise", fail)
    state = jobs.wait(jobs.submit(toy_preset.request()))
    assert state.status == "failed" and "please report it: RuntimeError: KeyError: 'a fault of ours'" in state.error


@pytest.mark.parametrize("title", ["ZeroGPU quota exceeded", "ZeroGPU queue timeout"])
def test_a_gpu_that_is_not_lent_is_said_in_words(jobs, spaces, toy_preset, title):
    spaces.refuse.append(gr.Error("Try again in 0:10:00.", title=title))
    state = jobs.wait(jobs.submit(toy_preset.request()))
    assert (state.status, state.error) == ("failed", f"{title}: Try again in 0:10:00.")
    spaces.refuse.clear()
    assert jobs.wait(jobs.submit(toy_preset.request(frames=1))).status == "finished"


def test_a_call_that_is_ended_from_outside_is_said_in_words(engine, toy_preset, tmp_path, monkeypatch):
    monkeypatch.setattr(engine._engine.executor, "denoise", lambda *_: os._exit(9))
    with pytest.raises(zero.ResourceError, match="GPU task aborted"):
        list(engine.generate(toy_preset.request(), tmp_path / "job"))


def test_a_stop_reaches_the_other_process(jobs, engine, toy_preset, monkeypatch):
    work = engine._engine.executor.denoise

    def slow(request, texts, condition, noise, cancel):
        yield next(steps := work(request, texts, condition, noise, cancel))
        while not cancel.is_set():
            threading.Event().wait(0.01)
        yield from steps

    monkeypatch.setattr(engine._engine.executor, "denoise", slow)
    job = jobs.submit(toy_preset.request(steps=4))
    for state in jobs.follow(job, 0.05):
        if state.stage and state.stage.done == 1:
            jobs.cancel(job)
    assert state.status == "stopped" and state.video is None and state.stage.done == 1
    assert not (state.folder / zero.STOP_FILE).exists()
    monkeypatch.undo()
    assert jobs.wait(jobs.submit(toy_preset.request(frames=1))).status == "finished"


def test_whoever_turns_away_in_the_middle_leaves_nothing_behind(engine, toy_preset, tmp_path):
    events = engine.generate(toy_preset.request(), tmp_path / "job")
    next(events)
    events.close()
    assert "stop" not in [thread.name for thread in threading.enumerate()]
    assert not (tmp_path / "job" / zero.STOP_FILE).exists()


def test_what_takes_longer_than_a_gpu_is_lent_is_refused_before(engine, spaces, toy_preset, tmp_path, monkeypatch):
    monkeypatch.setattr(engine._engine, "estimate", lambda request: Estimate(600.0, 1.0, 2.0, "a test"))
    with pytest.raises(RequestError, match=r"about 603 s, .* 600 s at most"):
        list(engine.generate(toy_preset.request(), tmp_path / "job"))
    assert spaces.asked == []
    monkeypatch.setattr(engine._engine, "estimate", lambda request: Estimate(38.0, 1.0, 1.0, "a test"))
    list(engine.generate(toy_preset.request(frames=1), tmp_path / "job"))
    assert spaces.asked == [(None, 60)]


def test_the_guardrail_sees_the_frames_where_they_are(toy_preset, spaces, tmp_path):
    class Rail:
        def check_prompt(self, prompt): ...

        def check_frames(self, frames):
            (tmp_path / "seen").write_text(str((os.getpid(), frames.shape)))

    engine = ZeroEngine(GuardedEngine(Engine(toy_preset, "cpu", measured=False), Rail()), spaces.GPU)
    engine.load()
    list(engine.generate(toy_preset.request(frames=5), tmp_path / "job"))
    pid, shape = eval((tmp_path / "seen").read_text())
    assert pid != os.getpid() and shape == (5, 64, 96, 3)
    assert guardrail.in_words(engine) == guardrail.CHECKED and engine.estimate(toy_preset.request()).denoise > 0


# ---- the page


def test_the_page_says_what_is_reduced(engine):
    assert zero.LENT in render.model("Toy", "", engine.readiness())
    system = details.system(engine.about(), engine.paths(), engine.readiness(), memory_now())
    assert "a reduced mode" in system and "not promised" in system


def test_a_page_that_is_loaded_again_promises_nothing(toy_preset, spaces, tmp_path):
    for engine, promised in ((Double(toy_preset), True), (ZeroEngine(Double(toy_preset), spaces.GPU), False)):
        jobs = Jobs(SimpleNamespace(generate=lambda *_: iter(())), tmp_path / str(promised))
        state = jobs.snapshot(jobs.submit(toy_preset.request()))
        jobs.close()
        waiting = dataclasses.replace(state, status="queued")
        with gr.Blocks() as demo:
            tab = GenerateTab(engine, SimpleNamespace(snapshot=lambda job, state=waiting: state, outputs=tmp_path))
            with gr.Tabs():
                tab.build(demo)
        shown = (tab.player, tab.strip, tab.messages, tab.details, tab.model)
        values = {field: field.value for field in tab.fields.values()} | dict.fromkeys(shown) | {tab.job: state.id}
        said = tab.reopen(values)
        assert ("the address finds it again" in said[tab.player]) == promised
        assert ("keep this page open" in said[tab.messages]) != promised
        waiting.status = "finished"
        assert "keep this page open" not in tab.look(values)[tab.messages]


# ---- how it starts

START = """
import sys
import app
from engine.web import zero
from engine.web import compare_tab, generate_tab, world_tab

assert sys.modules["spaces"].FIRST, "torch was imported before spaces"
# What does not go through Gradio's queue does not say whose quota to take.
assert all(tab.ASKS["queue"] for tab in (generate_tab, compare_tab, world_tab))

class Toy:
    loads = 0
    def load(self): self.loads += 1

engine = zero.lend(Toy())
assert isinstance(engine, zero.ZeroEngine) and engine.loads == 1
assert sys.modules["spaces.zero"].started == [True]
"""


def run(code, where):
    environment = {**os.environ, "SPACES_ZERO_GPU": where, "PYTHONPATH": f"{STUBS}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_on_zerogpu_spaces_is_imported_first_and_told_when_the_model_is_there():
    done = run(START, "true")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where, imported", [("1", True), ("True", True), ("", False), ("false", False), ("0", False)])
def test_spaces_is_imported_only_where_it_is_needed(where, imported):
    done = run("import sys; from engine.web import lent; print(lent.HERE, 'spaces' in sys.modules)", where)
    assert done.stdout.strip() == f"{imported} {imported}", done.stderr


def test_elsewhere_an_engine_stays_what_it_is():
    assert zero.lend(engine := object()) is engine and zero.while_running(engine) == ""


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="another test has begun to use CUDA")
def test_a_gpu_can_be_used_once_cuda_has_begun():
    assert executor.usable(torch.device("cpu")) and not executor.usable(torch.device("cuda:0"))
