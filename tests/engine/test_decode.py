"""Chunks of frames: what they hold, how long they are valid, how a run ends, which path runs and why."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

import engine.decode as module
from engine.decode import decode, explain, float_frames
from engine.errors import Cancelled, EngineError, RequestError
from engine.settings import DecodeSettings
from tests.engine.wan_vae import normal_latents, small_vae, theirs

PLAIN, REFERENCE = DecodeSettings(path="plain"), DecodeSettings(path="reference")


@pytest.fixture(scope="module")
def vae():
    return small_vae()


@pytest.fixture(scope="module")
def latents():
    return normal_latents(9)


@pytest.fixture(scope="module")
def expected(vae, latents):
    return theirs(vae, latents)


def to_bytes(frames):
    """The delivered pixels of float frames, by the formula."""
    return torch.round(255 * (frames / 2 + 0.5).clamp(0, 1)).to(torch.uint8).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("settings", [PLAIN, REFERENCE], ids=["plain", "reference"])
def test_chunks_hold_the_frames_of_diffusers(vae, latents, expected, settings):
    chunks = [(chunk.start, chunk.frames.copy()) for chunk in decode(vae, latents, settings)]
    assert [(start, len(frames)) for start, frames in chunks] == [(0, 1), (1, 16), (17, 16)]
    got, wanted = np.concatenate([frames for _, frames in chunks]), to_bytes(expected)
    assert got.dtype == np.uint8 and got.shape == (33, 48, 80, 3)
    difference = np.abs(got.astype(int) - wanted)
    assert difference.max() <= 1  # a value within 1e-5 of a half may round the other way
    assert (difference > 0).mean() < 0.002


@pytest.mark.parametrize("settings", [PLAIN, REFERENCE], ids=["plain", "reference"])
@pytest.mark.parametrize("passes", [(1, 4), (9,), (2, 3, 4), (1,)], ids=str)
def test_float_frames_equal_diffusers(vae, latents, expected, settings, passes):
    frames = list(float_frames(vae, latents, settings, passes=passes))
    assert len(frames[0]) == 4 * passes[0] - 3
    got = torch.cat(frames)
    assert got.dtype == torch.float32 and got.shape == (33, 3, 48, 80)
    assert (got - expected).abs().max() < 1e-5


def test_one_frame_alone(vae):
    latents = normal_latents(1)
    (chunk,) = decode(vae, latents)
    assert chunk.start == 0 and chunk.frames.shape == (1, 48, 80, 3)
    assert np.abs(chunk.frames.astype(int) - to_bytes(theirs(vae, latents))).max() <= 1


def test_stats_say_what_ran(vae):
    chunk = next(decode(vae, normal_latents(1), DecodeSettings(precision="fp32")))
    assert (chunk.stats.latents, chunk.stats.path, chunk.stats.precision) == (1, "plain", "fp32")


@pytest.fixture(params=[0, 1], ids=["as on a CPU", "one pass ahead, as on CUDA"])
def ahead(request, monkeypatch):
    monkeypatch.setattr(module.HostCopy, "AHEAD", {"cpu": request.param})
    return request.param


def test_a_chunk_stays_valid_until_the_second_one_after_it_is_asked_for(vae, ahead):
    latents, kept = normal_latents(6), []
    for chunk in decode(vae, latents, passes=(1,)):
        kept.append((chunk.frames, chunk.frames.copy()))
        for view, copy in kept[-2:]:
            assert np.array_equal(view, copy)
    (whole,) = decode(vae, latents, passes=(6,))
    assert np.array_equal(np.concatenate([copy for _, copy in kept]), whole.frames)
    memory = {frames.__array_interface__["data"][0] for frames, _ in kept}
    assert len(memory) == module.RING


def test_float_chunks_belong_to_the_caller_and_are_not_kept(vae, monkeypatch):
    pieces, seen, kept = module.DecodeRun.pieces, [], []

    def watched(run, span):
        kept.append([reference() is not None for reference in seen])
        return pieces(run, span)

    monkeypatch.setattr(module.DecodeRun, "pieces", watched)
    for frames in float_frames(vae, normal_latents(3), passes=(1,)):
        seen.append(weakref.ref(frames))
        del frames
    assert kept == [[], [False], [False, False]]


def test_a_pass_runs_when_its_chunk_is_asked_for(vae, monkeypatch, ahead):
    passes = []
    pieces = module.DecodeRun.pieces
    monkeypatch.setattr(module.DecodeRun, "pieces", lambda run, span: passes.append(span) or pieces(run, span))
    run = decode(vae, normal_latents(5), passes=(1,))
    assert passes == []
    next(run)
    next(run)
    assert len(passes) == 2 + ahead


def test_pixels_round_as_agreed():
    values = torch.linspace(-1.3, 1.3, 12 * 40).view(1, 4, 10, 12)
    got = module._to_bytes(values)
    wanted = to_bytes(module._planes(values.clone()))
    assert np.array_equal(got.numpy(), wanted)
    assert got.min() == 0 and got.max() == 255


@pytest.mark.parametrize("make", [lambda event: event, lambda event: event.is_set], ids=["event", "callable"])
def test_cancel_keeps_what_was_decoded(vae, latents, expected, make, ahead):
    event, chunks = threading.Event(), []
    with pytest.raises(Cancelled, match="after 17 of 33 frames"):
        for chunk in decode(vae, latents, PLAIN, make(event)):
            chunks.append(chunk.frames.copy())
            if len(chunks) == 2 - ahead:
                event.set()
    assert np.abs(np.concatenate(chunks).astype(int) - to_bytes(expected[:17])).max() <= 1


def test_cancel_of_float_frames(vae, latents):
    event = threading.Event()
    event.set()
    with pytest.raises(Cancelled, match="after 0 of 33"):
        next(float_frames(vae, latents, PLAIN, event))


@pytest.mark.parametrize("settings", [PLAIN, REFERENCE], ids=["plain", "reference"])
def test_an_abandoned_or_broken_run_leaves_nothing_behind(vae, settings, monkeypatch):
    latents = normal_latents(3)
    fresh = [chunk.frames.copy() for chunk in decode(vae, latents, settings)]
    run = decode(vae, latents, settings, passes=(1,))
    next(run)
    next(run)
    run.close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_to_bytes", lambda piece: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(decode(vae, latents, settings))
    again = [chunk.frames.copy() for chunk in decode(vae, latents, settings)]
    assert all(np.array_equal(a, b) for a, b in zip(fresh, again, strict=True))


@pytest.mark.parametrize("settings", [PLAIN, REFERENCE], ids=["plain", "reference"])
def test_interleaved_runs_do_not_disturb_each_other(vae, settings):
    latents, other = normal_latents(3), normal_latents(3, seed=8)
    alone = [torch.cat(list(float_frames(vae, x, settings))) for x in (latents, other)]
    pairs = zip(*(float_frames(vae, x, settings, passes=(1,)) for x in (latents, other)), strict=True)
    for got, wanted in zip(zip(*pairs, strict=True), alone, strict=True):
        assert torch.equal(torch.cat(got), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_blamed_on_the_stage_before(vae, value):
    latents = normal_latents(2)
    latents[0, 3, 1, 2, 2] = value
    with pytest.raises(EngineError, match=r"Stage denoise.*NaN or infinity"):
        decode(vae, latents)


@pytest.mark.parametrize("runner", [decode, float_frames])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_name_stage_chunk_and_precision(vae, runner, value, monkeypatch):
    pieces = module.DecodeRun.pieces

    def broken(run, span):
        for piece in pieces(run, span):
            if span.start == 1:
                piece[-1, 0, 0, 0] = value
            yield piece

    monkeypatch.setattr(module.DecodeRun, "pieces", broken)
    run = runner(vae, normal_latents(5))
    next(run)
    with pytest.raises(EngineError, match=r"Stage decode, chunk 1 \(frames 1 to 16, path plain, fp32\)"):
        next(run)


@pytest.mark.parametrize("shape", [(2, 48, 1, 3, 5), (1, 16, 1, 3, 5), (48, 1, 3, 5), (1, 48, 0, 3, 5)], ids=str)
def test_other_shapes_are_refused(vae, shape):
    with pytest.raises(RequestError, match=r"takes latents \[1, 48, .* one after another"):
        decode(vae, torch.zeros(shape))


@pytest.mark.parametrize("passes", [(), (0,), (1, -1)], ids=str)
def test_passes_without_frames_are_refused(vae, passes):
    with pytest.raises(RequestError, match=r"passes = .* one latent frame or more"):
        decode(vae, normal_latents(1), passes=passes)


def test_the_reference_needs_fp32_weights(latents):
    with pytest.raises(RequestError, match=r"weights in fp32.*bfloat16"):
        decode(small_vae().to(torch.bfloat16), latents, REFERENCE)


@pytest.mark.parametrize("precision, decibels", [("bf16", 50), ("fp16", 68)])
def test_sixteen_bits_stay_near_the_truth(vae, precision, decibels):
    latents = normal_latents(2, 2, 2)
    got = torch.cat(list(float_frames(vae, latents, DecodeSettings(precision=precision))))
    psnr = 10 * torch.log10(4 / (got - theirs(vae, latents)).square().mean())
    assert psnr > decibels


def test_fp32_is_strict_and_global_switches_are_put_back(vae, monkeypatch):
    pieces, inside = module.DecodeRun.pieces, []

    def watched(run, span):
        inside.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
        return pieces(run, span)

    monkeypatch.setattr(module.DecodeRun, "pieces", watched)
    before = (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    torch.set_float32_matmul_precision("high")
    try:
        for _ in decode(vae, normal_latents(2), REFERENCE):
            assert torch.get_float32_matmul_precision() == "high" and torch.is_grad_enabled()
    finally:
        torch.set_float32_matmul_precision(before[1])
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.is_grad_enabled()) == before
    assert set(inside) == {(False, "highest")}


def test_explain_gives_path_precision_and_reason(monkeypatch):
    assert explain(DecodeSettings(), "cpu")[:2] == ("plain", "fp32")
    assert explain(DecodeSettings(precision="bf16"), "cpu")[:2] == ("plain", "bf16")
    assert explain(REFERENCE, "cuda")[:2] == ("reference", "fp32")
    for capability, precision in (((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        choice = explain(DecodeSettings(), "cuda:0")
        assert (choice.path, choice.precision) == ("plain", precision) and precision in choice.reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert explain(DecodeSettings(path="reference", precision="tf32"), "cuda:0")[:2] == ("reference", "tf32")


def test_what_is_not_here_is_refused():
    settings = DecodeSettings()
    object.__setattr__(settings, "path", "faster")
    with pytest.raises(RequestError, match=r"'faster' is not known; choose one of auto, .*plain, reference"):
        explain(settings, "cpu")
    with pytest.raises(RequestError, match=r"'built' can't run here: .* Choose one of auto, plain, reference"):
        explain(DecodeSettings("built"), "cpu")
    with pytest.raises(RequestError, match="reference decodes in fp32 only"):
        explain(DecodeSettings(path="reference", precision="bf16"), "cpu")
    with pytest.raises(RequestError, match="cpu has no tf32"):
        explain(DecodeSettings(path="reference", precision="tf32"), "cpu")
    with pytest.raises(RequestError, match="Only the reference decodes in tf32"):
        explain(DecodeSettings(precision="tf32"), "cpu")


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, 48, 1, 2, 2, dtype=torch.int32), torch.zeros(1, 48, 1, 2, 2, device="meta")]
)
def test_latents_of_another_kind_are_refused(wrong):
    with pytest.raises(
        RequestError, match=r"latents in fp32, bf16 or fp16 with numbers in them, not torch\.\w+ on \w+"
    ):
        decode(small_vae(), wrong)
