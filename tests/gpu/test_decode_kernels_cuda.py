"""The decoder's kernels on a CUDA device: against the reference at real sizes, memory, addresses, the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import decode_paths
from engine.decode import decode, explain, float_frames
from engine.settings import DecodeSettings
from kernels.vae_decode import reference, table
from kernels.vae_decode.convolve import Cudnn
from kernels.vae_decode.plan import PLANS, Plan
from kernels.vae_decode.portable import PortableDecoder
from tests.engine.wan_vae import normal_latents, small_vae, theirs

pytestmark = pytest.mark.gpu
SHAPES = [(4, 44, 78, 1024), (8, 88, 156, 1024), (4, 176, 312, 512), (4, 352, 624, 256), (3, 5, 7, 24), (1, 3, 1, 8)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
STEP = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def agree(name, out, *arguments, changes=()):
    """The kernel and its reference on the same input: every element written, and as near as one rounding allows."""
    from kernels.vae_decode import passes

    results = []
    for module in (passes, reference):
        target = torch.full_like(out, torch.nan) if out.is_floating_point() else torch.full_like(out, 99)
        copies = [a.clone() if i in changes else a for i, a in enumerate(arguments)]
        getattr(module, name)(target, *copies)
        results.append([target, *(copies[i] for i in changes)])
    for got, wanted in zip(*results, strict=True):
        assert torch.isfinite(got.float()).all()
        scale = wanted.float().abs().max()
        assert (got.float() - wanted.float()).abs().max() <= 2 * STEP[arguments[0].dtype] * scale


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frames(dtype, shape):
    t, h, w, c = shape
    """With a row of zeros above, and two rows of history that stay."""
    x, history = drawn(t, h + 2, w, c + 8, dtype=dtype)[:, 1:-1, :, 8:], drawn(2, h + 1, w, c, dtype=dtype)
    out = torch.empty(t + 2, h + 1, w, c, dtype=dtype, device="cuda")
    agree("write_frames", out, x, drawn(c), drawn(c), history, 1, 2, changes=(3,))


@DTYPES
@pytest.mark.parametrize("phases", [6, 36])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_in_and_out(dtype, phases, shape):
    t, h, w, c = shape
    n, columns = -(-t // 4), w if phases == 6 else -(-w // 4)
    out = torch.empty(phases, n, h, columns, c, dtype=dtype, device="cuda")
    agree("write_tiles", out, drawn(t + 2, h, w, c, dtype=dtype))
    products, residual = drawn(phases, n, h, columns, c, dtype=dtype), drawn(t, h, w, c, dtype=dtype)
    agree("write_outputs", torch.empty_like(residual), products, drawn(c), residual)


@DTYPES
@pytest.mark.parametrize("stride", [1, 2])
def test_enlarged_frames_and_sums(dtype, stride):
    source, z = drawn(2, 88, 156, 512 * stride, dtype=dtype), drawn(2, 89, 157, 2048, dtype=dtype)
    agree("enlarge", torch.empty(4, 176, 312, 512, dtype=dtype, device="cuda")[::2], z, drawn(512), source)
    y, residual = drawn(4, 176, 312, 512, dtype=dtype), drawn(4, 176, 312, 512, dtype=dtype)
    agree("add", torch.empty_like(y), y, drawn(512), residual)


@DTYPES
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_the_stencil(dtype, kind):
    from kernels.vae_decode import passes

    values = drawn(4, 354, 624, 112, dtype=dtype) / 3
    shape = (4, 704, 1248, 3) if kind == torch.uint8 else (4, 352, 624, 12)
    got, wanted = torch.full(shape, 99, dtype=kind, device="cuda"), torch.empty(shape, dtype=kind, device="cuda")
    finite, bias = torch.ones(1, dtype=torch.int32, device="cuda"), drawn(12)
    passes.stencil(got, values, bias, finite)
    reference.stencil(wanted, values, bias, finite)
    assert finite.item() == 1
    difference = (got.float() - wanted.float()).abs()
    assert difference.max() <= (1 if kind == torch.uint8 else 1e-4) and (difference > 1e-4).float().mean() < 1e-3
    values[3, 100, 600, 5] = torch.nan
    passes.stencil(got, values, bias, finite)
    assert finite.item() == 0


def test_tiles_beyond_two_to_the_31():
    """The last rows of the last tile and phase, beyond 2^31 elements, are those that two rows alone give."""
    from kernels.vae_decode import passes

    x = drawn(30, 352, 624, 256, dtype=torch.float16)
    rows = x[:, 350:].contiguous()
    out = torch.empty(6, 7, 352, 624, 256, dtype=torch.float16, device="cuda")
    alone = torch.empty(6, 7, 2, 624, 256, dtype=torch.float16, device="cuda")
    assert out.numel() > 2**31
    passes.write_tiles(out, x)
    passes.write_tiles(alone, rows)
    assert torch.equal(out[:, :, 350:], alone)
    del x, rows
    y, few = (torch.empty(28, h, 624, 256, dtype=torch.float16, device="cuda") for h in (352, 2))
    passes.write_outputs(y, out, None, None)
    passes.write_outputs(few, alone, None, None)
    assert torch.equal(y[:, 350:], few)


def test_cudnn_writes_in_place_what_the_reference_computes():
    buffer, weight = drawn(6, 46, 78, 256, dtype=torch.float16), drawn(128, 3, 3, 3, 256, dtype=torch.float16) / 80
    got, wanted = (torch.full((4, 44, 78, 128), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2))
    Cudnn().direct(buffer, weight, None, None, got, (0, 0))
    reference.Reference().direct(buffer, weight, None, None, wanted, (0, 0))
    assert (got.float() - wanted.float()).abs().max() < 4e-3 * wanted.abs().max()
    inputs, weights = drawn(6, 2, 46, 78, 256, dtype=torch.float16), drawn(6, 128, 3, 3, 256, dtype=torch.float16) / 48
    got, wanted = (torch.full((6, 2, 44, 78, 128), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2))
    Cudnn().phases(inputs, weights, got, (0, 0))
    reference.Reference().phases(inputs, weights, wanted, (0, 0))
    assert (got.float() - wanted.float()).abs().max() < 4e-3 * wanted.abs().max()


@pytest.fixture(scope="module")
def vae():
    return small_vae(16).cuda()


@pytest.fixture(scope="module")
def expected():
    return theirs(small_vae(16), normal_latents(9))


def psnr(a, b):
    return float(10 * torch.log10(4 / (a.double() - b.double()).square().mean()))


@pytest.mark.parametrize("way", ["direct", "time", "time_width"])
@pytest.mark.parametrize("precision, decibels", [("fp32", 90), ("fp16", 60), ("bf16", 43)])
@pytest.mark.parametrize("passes", [(1, 4), (9,)], ids=str)
def test_float_frames_equal_the_cpu(vae, expected, monkeypatch, way, precision, decibels, passes):
    monkeypatch.setattr(table, "ways", lambda *_, **__: lambda i, o, level: way)
    decode_paths.forget(vae)
    settings = DecodeSettings("portable", precision)
    got = torch.cat([part.cpu() for part in float_frames(vae, normal_latents(9), settings, passes=passes)])
    decode_paths.forget(vae)
    assert psnr(got, expected) > decibels


def test_frames_of_every_plan_are_within_one_level(vae):
    """cuDNN may sum in another order for another shape; more than that would be ours."""
    decoder, frames = PortableDecoder(vae, torch.float16, lambda i, o, level: "time"), []
    z = normal_latents(9, 6, 6)[0].cuda().half()
    for plan in (*PLANS, Plan((4, 4, 4, 4), 1)):
        state = decoder.start(plan)
        with torch.no_grad():
            parts = [piece for part in z.split([1, 4, 4], dim=1) for piece, _ in decoder.frames(part, state)]
        frames.append(torch.cat(parts).int())
    assert all((other - frames[0]).abs().max() <= 1 for other in frames[1:])
    assert all((other != frames[0]).float().mean() < 0.02 for other in frames[1:])


def test_chunks_are_right_and_valid_while_the_next_pass_runs(vae):
    settings = DecodeSettings("portable", "fp32")
    floats = torch.cat([part.cpu() for part in float_frames(vae, normal_latents(9, 8, 8), settings)])
    wanted = torch.round(255 * (floats / 2 + 0.5).clamp(0, 1)).permute(0, 2, 3, 1).numpy()
    kept = []
    for chunk in decode(vae, normal_latents(9, 8, 8), settings):
        kept.append((chunk.start, chunk.frames, chunk.frames.copy()))
        for _, view, copy in kept[-2:]:
            assert np.array_equal(view, copy)
    assert [start for start, _, _ in kept] == [0, 1, 17]
    assert np.abs(np.concatenate([copy for _, _, copy in kept]).astype(int) - wanted).max() <= 1


def test_the_prediction_holds_and_does_not_grow(vae):
    decoder = PortableDecoder(vae, torch.float16, lambda i, o, level: "time")
    for latents in (9, 33):
        z = normal_latents(latents, 22, 39)[0].cuda().half()
        for plan in PLANS:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            state = decoder.start(plan)
            with torch.no_grad():
                for part in z.split([1] + [4] * (latents // 4), dim=1):
                    for _ in decoder.frames(part, state):
                        pass
            torch.cuda.synchronize()
            added = torch.cuda.max_memory_allocated() - before
            assert added <= decoder.peak(plan, 22, 39) - decoder.weight_bytes
            del state


def test_fp16_that_overflows_goes_on_in_bf16():
    vae = small_vae(16)
    vae.decoder.mid_block.resnets[0].conv2.weight.mul_(1e5)
    chunks = list(decode(vae.cuda(), normal_latents(5), DecodeSettings("portable", "fp16")))
    assert {chunk.stats.precision for chunk in chunks} == {"bf16"} and len(chunks[0].stats.notes) == 1


def test_the_path_is_offered_here(vae):
    assert explain(DecodeSettings("portable"), vae.device)[:2] == ("portable", "fp16")
