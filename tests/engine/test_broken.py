"""A GPU that met a fault which CUDA does not forgive: what was made is kept, what follows is refused in words."""

import subprocess
import sys

import gradio as gr
import httpx
import pytest
import torch

from engine import broken, telemetry
from engine.__main__ import main
from engine.engine import Engine
from engine.errors import BrokenError, GroupError
from engine.events import VideoFinished
from engine.jobs import Jobs
from engine.settings import DecodeSettings
from engine.sides import RandomLatents
from engine.video import probe
from engine.web import api
from tests.double import serve

SAID = "CUDA error: device-side assert triggered"
WORDS = r"device-side assert triggered\). Restart the program; until then no work is taken. What was made is kept"
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """The CPU as a GPU that has met a fault as soon as `die` was called: `die(error)` raises it."""
    monkeypatch.setattr(broken, "_fault", None)

    def die(error):
        monkeypatch.setattr(broken, "_refusal", lambda device: SAID)
        raise error

    return die


@pytest.fixture
def engine(toy_preset):
    made = Engine(toy_preset, "cpu")
    made.load()
    yield made
    made.close()


def breaks_while_decoding(engine, monkeypatch, gpu, chunks):
    decode = engine.executor.decode

    def breaks(*arguments):
        parts = decode(*arguments)
        yield from (next(parts) for _ in range(chunks))
        gpu(RuntimeError(f"{SAID}\nCompile with TORCH_USE_CUDA_DSA"))

    monkeypatch.setattr(engine.executor, "decode", breaks)


def test_what_was_decoded_is_kept_and_the_next_request_is_refused(engine, tmp_path, monkeypatch, gpu):
    breaks_while_decoding(engine, monkeypatch, gpu, chunks=1)
    seen, request = [], engine.preset.request()
    with pytest.raises(BrokenError, match=WORDS):
        for event in engine.generate(request, tmp_path / "a"):
            seen.append(event)
    assert isinstance(seen[-1], VideoFinished) and seen[-1].partial and probe(seen[-1].path).frames == 1
    assert (tmp_path / "a" / "latents.safetensors").exists()
    assert engine.readiness().state == "failed" and "Restart the program" in engine.readiness().text
    monkeypatch.setattr(engine.executor, "encode_prompt", lambda _: pytest.fail("worked"))
    noise = RandomLatents(seed=3, frames=9, height=64, width=96)
    for ask in (
        lambda: engine.check(request),
        engine.load,
        lambda: next(engine.generate(request, tmp_path / "b")),
        lambda: next(engine.decode(tmp_path / "a" / "latents.safetensors", DecodeSettings(), tmp_path / "b")),
        lambda: next(engine.compare(noise, DecodeSettings(), DecodeSettings(), tmp_path / "b")),
    ):
        with pytest.raises(BrokenError, match=WORDS):
            ask()
    assert not (tmp_path / "b").exists()


def test_an_obscure_error_of_such_a_gpu_is_told_by_its_cause(engine, tmp_path, monkeypatch, gpu):
    obscure = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
    monkeypatch.setattr(engine.executor, "encode_prompt", lambda _: gpu(obscure))
    with pytest.raises(BrokenError, match=WORDS):
        list(engine.generate(engine.preset.request(), tmp_path))


def test_queue_api_and_page_refuse_with_the_sentence(engine, tmp_path, monkeypatch, gpu):
    breaks_while_decoding(engine, monkeypatch, gpu, chunks=0)
    jobs = Jobs(engine, tmp_path)
    try:
        first, waits = (jobs.submit(engine.preset.request(seed=seed)) for seed in (1, 2))
        for job in (first, waits):
            state = jobs.wait(job)
            assert state.status == "failed" and "Restart the program" in state.error
        assert jobs.snapshot(first).latents.exists()
        with pytest.raises(BrokenError, match=WORDS):
            jobs.submit(engine.preset.request())
        with pytest.raises(gr.Error, match=WORDS):
            next(api.run(engine.preset, jobs, {"prompt": "x", "image": None, "seconds": None, "decoder": None}))
        assert len(jobs.recent()) == 2
    finally:
        jobs.close()
    with serve(engine, tmp_path) as served:
        ready = httpx.get(f"{served.url}/readyz")
        assert ready.status_code == 503 and "Restart the program" in ready.json()["text"]


def test_the_command_line_says_it_in_one_line(toy_preset, tmp_path, monkeypatch, gpu, capsys):
    engine = Engine(toy_preset, "cpu")
    breaks_while_decoding(engine, monkeypatch, gpu, chunks=0)
    monkeypatch.setattr("engine.__main__.Engine", lambda preset, devices: engine)
    monkeypatch.setattr("engine.__main__.preset_from_environment", lambda *_: toy_preset)
    monkeypatch.setattr(engine.experience, "measure", lambda *_: None)
    assert main(["a red circle", "--out", str(tmp_path / "out.mp4")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("BrokenError: ") and "Restart the program" in said[-1]
    assert "decode them again with" in said[-2]


def test_a_side_that_was_whole_stays(engine, tmp_path, monkeypatch, gpu):
    floats = engine.executor.float_frames

    def breaks(latents, settings, cancel):
        if settings.path == "reference":
            gpu(RuntimeError(SAID))
        yield from floats(latents, settings, cancel)

    monkeypatch.setattr(engine.executor, "float_frames", breaks)
    noise = RandomLatents(seed=3, frames=9, height=64, width=96)
    *_, finished = engine.compare(noise, DecodeSettings("plain"), DecodeSettings("reference"), tmp_path)
    sides = finished.result["sides"]
    assert sides["a"]["error"] is None and "Restart the program" in sides["b"]["error"]


def test_other_faults_are_none(engine, tmp_path, monkeypatch, gpu):
    def fail(_):
        raise GroupError(f"Rank 1 (cuda:1) failed in stage text: RuntimeError: {SAID}")

    monkeypatch.setattr(engine.executor, "encode_prompt", fail)
    with pytest.raises(GroupError):
        list(engine.generate(engine.preset.request(), tmp_path))
    engine.check(engine.preset.request())


@pytest.mark.parametrize(("refusals", "dead"), [([], False), ([SAID], False), ([SAID, SAID], True)])
def test_a_gpu_is_broken_that_refuses_again_and_is_left_alone_then(monkeypatch, refusals, dead):
    answers = iter(refusals)

    def synchronize(device):
        if said := next(answers, None):
            raise RuntimeError(said)

    monkeypatch.setattr(broken, "_fault", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    broken.look(GPU)
    assert (broken.fault() is not None) == dead
    if dead:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("asked"))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: pytest.fail("asked"))
        assert telemetry.memory_now().devices == ()
        with telemetry.Telemetry(GPU) as watch, watch.stage("file") as stage:
            pass
        assert stage.seconds is not None


@pytest.mark.parametrize("fault, status", [(None, 3), (SAID, 4)])
def test_a_process_with_a_broken_gpu_ends_without_giving_its_memory_back(fault, status):
    program = (
        "import atexit, sys; from engine import broken; atexit.register(print, 'Python ended');"
        f"broken._fault = {fault!r}; print('said'); broken.leave({status})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == status and ended.stdout.split("\n")[0] == "said", ended.stderr
    assert ("Python ended" in ended.stdout) == (fault is None)
