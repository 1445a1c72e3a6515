"""The decoder's passes in Triton's interpreter against plain PyTorch: every dtype, strided input, bands, odd sizes."""

from __future__ import annotations

import pytest
import torch

from kernels.vae_decode import reference

pytest.importorskip("triton")
from kernels.vae_decode import passes

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
PHASES = pytest.mark.parametrize("phases", [6, 36])
STEP = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the last bit, relative


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(name, out, *arguments, changes=()):
    """Run the pass and its reference on copies; every element of `out` and of the arguments `changes` must agree."""
    results = []
    for module in (passes, reference):
        target = out.clone(memory_format=torch.preserve_format).fill_(torch.nan if out.is_floating_point() else 99)
        copies = [a.clone() if i in changes else a for i, a in enumerate(arguments)]
        getattr(module, name)(target, *copies)
        results.append([target, *(copies[i] for i in changes)])
    for got, wanted in zip(*results, strict=True):
        assert torch.isfinite(got.float()).all()
        step = STEP.get(out.dtype, 0) * wanted.float().abs().max()
        assert (got.float() - wanted.float()).abs().max() <= 2 * step
    return results[0][0]


def strided(t, h, w, c, dtype):
    """A [t, h, w, c] band of every second frame and column of something larger, channels from the middle."""
    return drawn(2 * t, h + 3, 2 * w, c + 5, dtype=dtype)[::2, 2 : 2 + h, ::2, 3 : 3 + c]


@DTYPES
@pytest.mark.parametrize("t, h, w, c", [(1, 3, 5, 12), (4, 2, 3, 8), (3, 4, 3, 40)])
@pytest.mark.parametrize("norm, bias", [(True, True), (True, False), (False, False)])
def test_frames_are_written_behind_their_history(dtype, t, h, w, c, norm, bias):
    x, history = strided(t, h, w, c, dtype), drawn(2, h + 2, w, c, seed=1, dtype=dtype)[:, 1:-1]
    gain, shift = (drawn(c, seed=2) if norm else None), (drawn(c, seed=3) if bias else None)
    out = torch.empty(t + 2, h + 2, w, c, dtype=dtype)[:, 1:-1]
    agree("write_frames", out, x, gain, shift, history, changes=(3,))


@DTYPES
@pytest.mark.parametrize("above, below, kept", [(1, 1, 0), (0, 1, 0), (1, 0, 2), (0, 0, 4), (2, 1, 1)])
def test_rows_beside_the_input_are_zero_and_kept_rows_of_history_stay(dtype, above, below, kept):
    x, history = strided(3, 4, 5, 24, dtype), drawn(2, above + 4 + below, 5, 24, seed=1, dtype=dtype)
    gain, shift = drawn(24, seed=2), drawn(24, seed=3)
    out = torch.empty(5, above + 4 + below, 5, 24, dtype=dtype)
    got = agree("write_frames", out, x, gain, shift, history, above, kept, changes=(3,))
    assert not got[2:, :above].any() and not got[2:, above + 4 :].any()
    assert torch.equal(got[:2], history)
    passes.write_frames(out, x, gain, shift, changed := history.clone(), above, kept)
    assert torch.equal(changed[:, len(changed[0]) - kept :], history[:, len(history[0]) - kept :])


@DTYPES
@PHASES
@pytest.mark.parametrize("t, h, w, c", [(4, 2, 3, 8), (8, 3, 4, 12), (1, 2, 2, 8), (6, 1, 5, 136), (3, 2, 1, 8)])
def test_tiles_hold_the_inputs_of_the_products(dtype, phases, t, h, w, c):
    frames = drawn(t + 2, h + 2, w, c, dtype=dtype)[:, 1:-1]
    columns = w if phases == 6 else -(-w // 4)
    out = torch.empty(phases, -(-t // 4), h + 2, columns, c, dtype=dtype)[:, :, 1:-1]
    agree("write_tiles", out, frames)


@DTYPES
@PHASES
@pytest.mark.parametrize("t, h, w, o", [(4, 2, 3, 8), (7, 3, 5, 12), (1, 2, 2, 136)])
@pytest.mark.parametrize("bias, residual", [(True, True), (False, False), (True, False)])
def test_outputs_of_products(dtype, phases, t, h, w, o, bias, residual):
    columns = w if phases == 6 else -(-w // 4)
    products = drawn(phases, -(-t // 4), h, columns, o, dtype=dtype)
    beside = drawn(t, h + 2, w, o, seed=1, dtype=dtype)[:, 1:-1] if residual else None
    out = torch.empty(t, h + 3, w, o, dtype=dtype)[:, 2:-1]
    agree("write_outputs", out, products, drawn(o, seed=2) if bias else None, beside)


@DTYPES
def test_sums_may_be_written_over_the_residual(dtype):
    y, stream = drawn(3, 2, 5, 24, dtype=dtype), drawn(3, 4, 5, 24, seed=1, dtype=dtype)[:, 1:-1]
    wanted = agree("add", torch.empty_like(y), y, drawn(24, seed=2), stream)
    passes.add(stream, y, drawn(24, seed=2), stream)
    assert torch.equal(stream, wanted)


STREAM = torch.zeros(8, 6, 3, 8)
OVERLAPS = [  # of [4, 2, 3, 8]: out, residual, whether they are refused
    (STREAM[:4, :2], STREAM[:4, :2], False),
    (STREAM[:4, :2], STREAM[:4, 2:4], False),
    (STREAM[:4, 2:4], STREAM[3:7, :2], False),
    (STREAM[:4, :2], STREAM[4:, :2], False),
    (STREAM[::2, :2], STREAM[1::2, :2], False),
    (STREAM[:4, :2], STREAM[:4, 1:3], True),
    (STREAM[:4, 1:3], STREAM[:4, :2], True),
    (STREAM[:4, :2], STREAM[1:5, :2], True),
    (STREAM[3:7, :2], STREAM[:4, :2], True),
    (STREAM[:4, :2], STREAM[::2, :2], True),
]


@pytest.mark.parametrize("module", [passes, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("out, residual, refused", OVERLAPS)
def test_a_residual_is_out_itself_or_apart_from_it(module, out, residual, refused):
    calls = (
        lambda: module.add(out, drawn(4, 2, 3, 8), None, residual),
        lambda: module.write_outputs(out, drawn(6, 1, 2, 3, 8), None, residual),
    )
    for call in calls:
        if refused:
            with pytest.raises(ValueError, match="residual shares a part of its memory with out; give out itself"):
                call()
        else:
            call()


@DTYPES
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_upsampling_finds_pixels_and_shortcut(dtype, stride):
    z, source = drawn(2, 4, 6, 4 * 12, dtype=dtype), drawn(2, 3, 5, 12 * stride, seed=1, dtype=dtype)
    out = torch.empty(4, 6, 10, 12, dtype=dtype)[1::2]
    agree("enlarge", out, z, drawn(12, seed=2), source)


@DTYPES
@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
@pytest.mark.parametrize("width", [1, 5, 70])
def test_the_stencil_sums_nine_planes(dtype, kind, width):
    values = drawn(2, 6, width, 112, dtype=dtype) / 3
    out = torch.empty((2, 8, 2 * width, 3) if kind == torch.uint8 else (2, 4, width, 12), dtype=kind)
    got, wanted, finite = torch.zeros_like(out), torch.zeros_like(out), torch.ones(1, dtype=torch.int32)
    passes.stencil(got, values, drawn(12, seed=1), finite)
    reference.stencil(wanted, values, drawn(12, seed=1), finite)
    assert finite.item() == 1
    tolerance = 1 if kind == torch.uint8 else 1e-5  # a value within 1e-6 of a half may round the other way
    assert (wanted.double() - got.double()).abs().max() <= tolerance
    if kind == torch.uint8 and width > 1:
        assert (wanted != got).float().mean() < 0.01 and got.max() > 200 and got.min() < 50


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_stencil_tells_of_values_that_are_not_finite(value):
    for module in (passes, reference):
        for kind, shape in ((torch.uint8, (1, 4, 6, 3)), (torch.float32, (1, 2, 3, 12))):
            values, finite = drawn(1, 4, 3, 112), torch.ones(1, dtype=torch.int32)
            values[0, 2, 1, 12 * 4] = value
            module.stencil(torch.empty(shape, dtype=kind), values, drawn(12), finite)
            assert finite.item() == 0


def test_the_norm_neither_overflows_nor_divides_by_nothing():
    for module in (passes, reference):
        for size in (0.0, 6e4):
            x = torch.full((1, 1, 1, 64), size, dtype=torch.float16)
            out, history = torch.empty(3, 1, 1, 64, dtype=torch.float16), torch.zeros(2, 1, 1, 64, dtype=torch.float16)
            module.write_frames(out, x, torch.full((64,), 8.0), None, history)
            assert torch.allclose(out[2].float(), torch.tensor(0.7311 if size else 0.0), atol=1e-3)


GOOD = {
    "stencil": (torch.empty(2, 8, 6, 3, dtype=torch.uint8), drawn(2, 6, 3, 112), drawn(12), torch.ones(1).int()),
    "enlarge": (drawn(1, 4, 6, 8), drawn(1, 3, 4, 32), drawn(8), drawn(1, 2, 3, 8)),
    "write_frames": (drawn(4, 2, 3, 8), drawn(2, 2, 3, 8), None, None, drawn(2, 2, 3, 8), 0, 0),
    "write_tiles": (drawn(6, 1, 2, 3, 8), drawn(6, 2, 3, 8)),
    "write_outputs": (drawn(4, 2, 3, 8), drawn(6, 1, 2, 3, 8), None, None),
    "add": (drawn(4, 2, 3, 8), drawn(4, 2, 3, 8), None, None),
}


@pytest.mark.parametrize("module", [passes, reference], ids=["triton", "reference"])
@pytest.mark.parametrize(
    "name, place, wrong, words",
    [
        ("stencil", 1, drawn(2, 6, 3, 96), "108 channels, not 96"),
        ("stencil", 1, drawn(3, 6, 3, 112), "out has shape"),
        ("stencil", 1, drawn(2, 5, 3, 112), "out has shape"),
        ("stencil", 1, drawn(2, 2, 3, 112), "no rows between their halo"),
        ("stencil", 2, drawn(3), "bias must be packed"),
        ("enlarge", 3, drawn(1, 2, 3, 24), "1, 2 or 4 times 8 channels, not 24"),
        ("enlarge", 1, drawn(1, 2, 3, 32), "z has shape"),
        ("write_frames", 4, drawn(1, 2, 3, 8), "history has shape"),
        ("write_frames", 5, 1, "above = 1: x has 2 rows, out 2"),
        ("write_frames", 6, 3, "kept = 3: history has 2 rows"),
        ("write_frames", 1, drawn(2, 2, 3, 16)[..., ::2], "stride 2 in its last dimension"),
        ("write_frames", 0, drawn(4, 3, 2, 8).transpose(1, 2), "each frame of out must be one block"),
        ("write_tiles", 0, drawn(6, 2, 2, 3, 8), "out has shape"),
        ("write_tiles", 0, drawn(1, 1, 2, 3, 8).expand(6, -1, -1, -1, -1), "the phases of out lie on one another"),
        ("write_tiles", 1, drawn(6, 2, 8), r"frames must be \[frames, rows, columns, channels\], not \[6, 2, 8\]"),
        ("write_frames", 2, drawn(4), "the gain must be packed"),
        ("write_outputs", 0, drawn(1, 2, 3, 8).expand(4, -1, -1, -1), "lie on one another"),
        ("write_tiles", 1, drawn(2, 2, 3, 8), "none behind their history"),
        ("write_tiles", 1, drawn(6, 3, 2, 8).transpose(1, 2), "each frame of frames must be one block"),
        ("write_outputs", 1, drawn(6, 2, 2, 3, 8), "products has shape"),
        ("write_outputs", 3, drawn(4, 2, 3, 8).half(), "residual is torch.float16"),
        ("add", 1, drawn(4, 2, 2, 8), "y has shape"),
        ("add", 1, drawn(4, 2, 3, 8).to("meta"), "y is on meta"),
        ("add", 1, drawn(4, 2, 3, 8).int(), "y is torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(module, name, place, wrong, words):
    arguments = list(GOOD[name])
    getattr(module, name)(*arguments)
    arguments[place] = wrong
    with pytest.raises(ValueError, match=words):
        getattr(module, name)(*arguments)
