"""The fast paths behind the engine: where it shows up, what it refuses, and how it goes on after a failure."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from engine import decode_paths
from engine.decode import DecodeRun, decode, float_frames
from engine.decode_paths import explain
from engine.decode_plan import Plan
from engine.errors import NotFiniteError, RequestError, ResourceError
from engine.executor import LocalExecutor
from engine.settings import DecodeSettings
from kernels.vae_decode import built, reference
from kernels.vae_decode.plan import PLANS
from kernels.vae_decode.portable import PortableDecoder
from tests.engine.wan_vae import normal_latents, small_vae, theirs
from tests.kernels.test_built import on_cpu

PORTABLE = DecodeSettings(path="portable", precision="fp32")


@pytest.fixture
def here(monkeypatch):
    """A machine that has the portable path: this one, with plain PyTorch in the place of the passes."""
    monkeypatch.setattr(decode_paths, "_portable_lack", lambda device: None)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H200 and a compiler, as far as questions about paths go; a dict to change that."""
    facts = {"capability": (9, 0), "lack": None, "name": "NVIDIA H200"}
    monkeypatch.setattr(decode_paths, "triton_lack", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: facts["name"])
    monkeypatch.setattr(built.store, "obtainable", lambda recipe, target: facts["lack"])
    return facts


@pytest.fixture(scope="module")
def vae():
    return small_vae()


def to_bytes(frames):
    return torch.round(255 * (frames / 2 + 0.5).clamp(0, 1)).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def levels(got, wanted):
    return np.abs(got.astype(int) - wanted.astype(int)).max()


@pytest.mark.parametrize(
    "passes, starts", [((1, 4), [0, 1, 17]), ((9,), [0]), ((2, 3, 4), [0, 17]), ((1,), [0, 1, 17])]
)
def test_chunks_are_the_frames_of_diffusers_and_end_where_tiles_do(here, vae, passes, starts):
    chunks = [(c.start, c.frames.copy(), c.stats) for c in decode(vae, normal_latents(9), PORTABLE, passes=passes)]
    assert [start for start, _, _ in chunks] == starts
    assert levels(np.concatenate([frames for _, frames, _ in chunks]), to_bytes(theirs(vae, normal_latents(9)))) <= 1
    assert {(s.path, s.precision, s.notes) for _, _, s in chunks} == {("portable", "fp32", ())}


def test_float_frames_equal_diffusers(here, vae):
    got = torch.cat(list(float_frames(vae, normal_latents(6), PORTABLE)))
    assert (got - theirs(vae, normal_latents(6))).abs().max() < 1e-5


@pytest.mark.parametrize("settings", [PORTABLE, DecodeSettings("plain", "fp32")], ids=lambda s: s.path)
def test_nothing_of_a_request_waits_for_the_garbage_collector(here, vae, settings):
    """Histories of gigabytes, which would lie in the next request's way."""
    gc.disable()
    try:
        run = DecodeRun(vae, Plan(normal_latents(2), explain(settings, "cpu"), (1, 4)))
        for span in run.plan.passes:
            run.floats(span)
        left = weakref.ref(run)
        del run
        assert left() is None
    finally:
        gc.enable()


def test_prepared_weights_are_kept_for_the_next_video_and_given_back(here):
    vae = small_vae()
    for settings, same in ((PORTABLE, True), (DecodeSettings("portable", "fp16"), False)):
        next(decode(vae, normal_latents(1, 2, 2), PORTABLE))
        before = decode_paths._prepared[vae][1]
        next(decode(vae, normal_latents(1, 2, 2), settings))
        assert (decode_paths._prepared[vae][1] is before) == same
    next(decode(vae, normal_latents(1, 2, 2), DecodeSettings("plain")))
    assert vae not in decode_paths._prepared


def test_too_little_memory_is_refused_before_anything_runs(here, vae):
    settings = DecodeSettings("portable", "fp32", memory_gib=0.01)
    with pytest.raises(ResourceError, match=r"in bf16 needs at least 0\.\d GiB, memory_gib allows 0\.0 GiB"):
        decode(vae, normal_latents(1), settings)


@pytest.fixture
def wide(here, monkeypatch):
    """A machine that takes fp32 by itself, which has a CPU's weights of another size than bf16, as fp16 has a GPU's."""
    monkeypatch.setattr(decode_paths, "_auto_precision", lambda path, device, why: ("fp32", why))


def test_where_only_bf16_fits_it_is_taken_unless_another_was_asked_for(wide, vae):
    latents = normal_latents(5, 2, 2)
    peaks = (PortableDecoder(vae, dtype).peak(PLANS[-1], 2, 2) / 2**30 for dtype in (torch.bfloat16, torch.float32))
    memory = sum(peaks) / 2
    chunks = list(decode(vae, latents, DecodeSettings("portable", memory_gib=memory)))
    assert {chunk.stats.precision for chunk in chunks} == {"bf16"}
    assert [len(chunk.stats.notes) for chunk in chunks] == [1, 0]
    assert "in fp32 needs at least" in chunks[0].stats.notes[0] and "goes on in bf16" in chunks[0].stats.notes[0]
    expected = list(decode(vae, latents, DecodeSettings("portable", "bf16")))
    assert all(np.array_equal(ours.frames, truth.frames) for ours, truth in zip(chunks, expected, strict=True))
    assert len(list(float_frames(vae, latents, DecodeSettings("portable", memory_gib=memory)))) == 2
    with pytest.raises(ResourceError, match=r"in fp32 needs at least .* choose decode precision bf16 \(--decode-prec"):
        decode(vae, latents, DecodeSettings("portable", "fp32", memory_gib=memory))


def test_weights_that_do_not_fit_are_made_in_bf16(wide, vae, monkeypatch):
    made = decode_paths.fast_decoder

    def full(vae, choice):
        if choice.precision == "fp32":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made(vae, choice)

    monkeypatch.setattr("engine.decode.fast_decoder", full)
    (chunk,) = decode(vae, normal_latents(1, 2, 2), DecodeSettings("portable"))
    assert chunk.stats.notes == ("CUDA out of memory; decoding goes on in bf16.",)


def test_memory_picks_the_plan(here, vae, caplog):
    caplog.set_level("INFO", "engine.decode_paths")
    full = [PortableDecoder(vae, torch.float32).peak(plan, 44, 78) / 2**30 for plan in PLANS]
    for memory, plan in ((None, PLANS[0]), (full[0], PLANS[0]), (full[1], PLANS[1]), (full[-1], PLANS[-1])):
        decode(vae, normal_latents(1, 44, 78), DecodeSettings("portable", "fp32", memory_gib=memory))
        assert str(plan) in caplog.records[-1].message


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e9, True, "8", [8]], ids=repr)
def test_memory_that_is_none_is_refused(value):
    with pytest.raises(RequestError, match=r"decode memory_gib = .* above 0"):
        DecodeSettings(memory_gib=value)


def failing(monkeypatch, when, error):
    """Make the decoder raise in the second pass, while `when(decoder, state)`."""
    frames = PortableDecoder.frames

    def broken(self, latents, state):
        if state.latents == 1 and when(self, state):
            raise error
        return frames(self, latents, state)

    monkeypatch.setattr(PortableDecoder, "frames", broken)


def test_out_of_memory_goes_on_in_smaller_pieces_and_says_so(here, vae, monkeypatch):
    wanted = [chunk.frames.copy() for chunk in decode(vae, normal_latents(9), PORTABLE)]
    failing(monkeypatch, lambda decoder, state: state.plan in PLANS[:2], torch.OutOfMemoryError("CUDA out of memory"))
    got, kept = [], []
    for chunk in decode(vae, normal_latents(9), PORTABLE):
        got.append((chunk.start, chunk.frames.copy(), chunk.stats.notes))
        kept.append((chunk.frames, chunk.frames.copy()))
        assert all(np.array_equal(view, copy) for view, copy in kept[-2:])
    assert [start for start, _, _ in got] == [0, 1, 17]
    assert all(levels(frames, right) <= 1 for (_, frames, _), right in zip(got, wanted, strict=True))
    assert [len(notes) for _, _, notes in got] == [0, 2, 0]
    assert all("out of memory" in note and size in note for note, size in zip(got[1][2], ("1024", "512"), strict=True))


def test_out_of_memory_in_the_smallest_pieces_is_an_error(here, vae, monkeypatch):
    failing(monkeypatch, lambda decoder, state: True, torch.OutOfMemoryError("CUDA out of memory"))
    run = decode(vae, normal_latents(5), PORTABLE)
    next(run)
    with pytest.raises(torch.OutOfMemoryError):
        next(run)


def test_fp16_that_overflows_goes_on_in_bf16_and_says_so(here):
    vae = small_vae()
    vae.decoder.mid_block.resnets[0].conv2.weight.mul_(1e5)
    chunks = list(decode(vae, normal_latents(5), DecodeSettings("portable", "fp16")))
    assert [chunk.start for chunk in chunks] == [0, 1]
    assert {chunk.stats.precision for chunk in chunks} == {"bf16"}
    assert [len(chunk.stats.notes) for chunk in chunks] == [1, 0]
    assert "fp16 overflowed at frame 0" in chunks[0].stats.notes[0]
    with pytest.raises(NotFiniteError):
        list(float_frames(vae, normal_latents(5), DecodeSettings("portable", "fp16")))


def test_what_is_wider_and_still_not_finite_is_an_error(here):
    vae = small_vae()
    vae.decoder.mid_block.resnets[0].conv2.weight.fill_(float("nan"))
    for precision in ("fp16", "bf16", "fp32"):
        with pytest.raises(NotFiniteError, match="not finite"):
            next(decode(vae, normal_latents(1, 2, 2), DecodeSettings("portable", precision)))


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_cpu_has_no_portable_path(monkeypatch, interpret):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(RequestError, match=r"'portable' can't run here: .*NVIDIA GPU.* auto, plain, reference"):
        explain(DecodeSettings("portable"), "cpu")
    assert explain(DecodeSettings(), "cpu").path == "plain"


def test_any_gpu_of_2020_or_later_takes_it(gpu, monkeypatch):
    gpu |= {"capability": (8, 6), "name": "NVIDIA A10"}
    assert explain(DecodeSettings(), "cuda:0")[:2] == ("portable", "fp16")
    assert explain(DecodeSettings("portable", "bf16"), "cuda:0")[:2] == ("portable", "bf16")
    gpu["capability"] = (7, 5)
    assert explain(DecodeSettings(), "cuda:0").path == "plain"
    with pytest.raises(RequestError, match="2020 or later"):
        explain(DecodeSettings("portable"), "cuda:0")


# ---- path built ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """A machine that has path built: this one, with PyTorch in the place of kernels and passes."""
    kernels = on_cpu()
    monkeypatch.setattr(decode_paths, "_built_lack", lambda device, precision: None)
    monkeypatch.setattr(built.Built, "on", lambda device: kernels)
    monkeypatch.setattr(built.Built, "passes", lambda self: reference)
    return kernels


@pytest.mark.parametrize("precision, most", [("fp16", 1), ("bf16", 6)])
def test_path_built_gives_the_frames_of_diffusers(compiled, vae, precision, most):
    latents = normal_latents(6)
    chunks = list(decode(vae, latents, DecodeSettings("built", precision)))
    assert levels(np.concatenate([chunk.frames for chunk in chunks]), to_bytes(theirs(vae, latents))) <= most
    assert {(c.stats.path, c.stats.precision) for c in chunks} == {("built", precision)} and compiled.library.calls


def test_widths_that_no_kernel_takes_are_left_to_portable_and_refused_by_name(gpu):
    odd, words = small_vae(4), "its convolutions take channels in groups of 8, this VAE has layers of 4"
    assert explain(DecodeSettings(), "cuda:0").path == "built"
    choice = explain(DecodeSettings(), "cuda:0", odd)
    assert choice.path == "portable" and f"not built: {words}" in choice.reason
    assert explain(DecodeSettings(), "cuda:0", small_vae()).path == "built"
    with pytest.raises(RequestError, match=f"'built' can't run here: {words}. Choose one of auto, portable"):
        explain(DecodeSettings("built"), "cuda:0", odd)


def test_an_engine_asks_with_its_vae_once_that_is_loaded(compiled, here):
    odd, executor = small_vae(4), LocalExecutor("nowhere", torch.device("cpu"))
    assert executor.explain_decode(DecodeSettings(precision="fp16")).path == "built"
    executor.vae = odd
    assert executor.explain_decode(DecodeSettings(precision="fp16")).path == "portable"
    (chunk,) = decode(odd, normal_latents(1, 2, 2), DecodeSettings(precision="fp16"))
    assert (chunk.stats.path, chunk.stats.precision) == ("portable", "fp16")


def test_auto_takes_it_where_it_was_measured(gpu):
    assert explain(DecodeSettings(), "cuda:0")[:2] == ("built", "fp16")
    assert explain(DecodeSettings(precision="fp32"), "cuda:0")[:2] == ("portable", "fp32")
    gpu["name"] = "NVIDIA H20"
    choice = explain(DecodeSettings(), "cuda:0")
    assert choice.path == "portable" and "not built: it was not measured on NVIDIA H20 (python -m" in choice.reason
    assert explain(DecodeSettings("built"), "cuda:0")[:2] == ("built", "fp16")


@pytest.mark.parametrize(
    "changes, precision, words",
    [
        ({"capability": (8, 9)}, "auto", "this GPU is sm_89"),
        ({"lack": "There is no nvcc on the PATH. Install it."}, "fp16", "There is no nvcc"),
        ({}, "fp32", "16-bit numbers, not fp32"),
    ],
    ids=["GPU", "compiler", "precision"],
)
def test_what_path_built_lacks_is_said_and_portable_takes_its_place(gpu, monkeypatch, changes, precision, words):
    gpu.update(changes)
    with pytest.raises(RequestError, match=f"'built' can't run here: .*{words}.*portable"):
        explain(DecodeSettings("built", precision), "cuda:0")
    choice = explain(DecodeSettings(precision=precision), "cuda:0")
    assert choice.path == "portable" and words in choice.reason


def test_kernels_are_compiled_before_the_first_video(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(built.Built, "on", lambda device, say: asked.append(say("Compiling")))
    said = []
    decode_paths.compile_kernels("cuda:0", said.append)
    assert said == ["Compiling"] and len(asked) == 1
    gpu["lack"] = "There is no nvcc."
    decode_paths.compile_kernels("cuda:0", said.append)
    assert len(asked) == 1


def test_a_failed_build_is_said_and_does_not_end_loading(gpu, monkeypatch, caplog):
    def fail(device, say):
        raise ResourceError("The build failed; its log is /tmp/log.")

    monkeypatch.setattr(built.Built, "on", fail)
    decode_paths.compile_kernels("cuda:0", print)
    assert "without compiled kernels: The build failed; its log is /tmp/log." in caplog.text
