"""The passes before and behind the products of a Winograd layer, as Triton kernels; the maths is `winograd.py`'s.

The pass before is the norm, SiLU and keeping of history as well, the pass behind bias and residual.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.vae_decode.device import activate, block_of, norms_of, settle, sizes_of, sums_of, vector, while_left
from kernels.vae_decode.geometry import check_outputs, check_tiles


@triton.jit
def _frame_of_tile(source, frame, t, x_frame, gain, bias, mask, NORM: tl.constexpr):
    """The activation of one frame of a tile, zero beyond the last frame, with the pointer to the next one."""
    there = while_left(mask, t - frame)
    v = activate(tl.load(source, mask=there, other=0.0), gain, bias, there, NORM)
    return v, source + x_frame


@triton.jit
def _time_inputs(d0, d1, d2, d3, d4, d5):
    """Six inputs of F(4, 3) from six frames, fp32."""
    outer, odd, even = d4 - 4.0 * d2, d3 - 4.0 * d1, d3 - d1
    twice = d4 - d2
    first, last = 4.0 * d0 - 5.0 * d2 + d4, 4.0 * d1 - 5.0 * d3 + d5
    return first, outer + odd, outer - odd, twice + 2.0 * even, twice - 2.0 * even, last


@triton.jit
def _tiles(
    out, x, gain, bias, history, t, n, columns, positions,
    x_frame, x_row, x_column, out_phase, out_tile, history_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    own = position[:, None] * C + channel[None, :]
    source = x + (position // columns * x_row + position % columns * x_column)[:, None] + channel[None, :]
    gains, biases = vector(gain, channel, C, NORM), vector(bias, channel, C, BIAS)
    memory, target = history + own, out + own
    d0 = tl.load(memory, mask=mask, other=0.0)
    d1 = tl.load(memory + history_frame, mask=mask, other=0.0)
    for tile in range(0, n):
        frame = 4 * tile
        d2, source = _frame_of_tile(source, frame, t, x_frame, gains, biases, mask, NORM)
        d3, source = _frame_of_tile(source, frame + 1, t, x_frame, gains, biases, mask, NORM)
        d4, source = _frame_of_tile(source, frame + 2, t, x_frame, gains, biases, mask, NORM)
        d5, source = _frame_of_tile(source, frame + 3, t, x_frame, gains, biases, mask, NORM)
        v0, v1, v2, v3, v4, v5 = _time_inputs(
            d0.to(tl.float32), d1.to(tl.float32), d2.to(tl.float32),
            d3.to(tl.float32), d4.to(tl.float32), d5.to(tl.float32),
        )  # fmt: skip
        _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)
        target += out_tile
        left = t - frame
        d0 = tl.where(left > 3, d4, tl.where(left == 3, d3, tl.where(left == 2, d2, d1)))
        d1 = tl.where(left > 3, d5, tl.where(left == 3, d4, tl.where(left == 2, d3, d2)))
    tl.store(memory, d0, mask=mask)
    tl.store(memory + history_frame, d1, mask=mask)


@triton.jit
def _store_six(target, step, v0, v1, v2, v3, v4, v5, mask):
    kind = target.dtype.element_ty
    tl.store(target, v0.to(kind), mask=mask)
    target += step
    tl.store(target, v1.to(kind), mask=mask)
    target += step
    tl.store(target, v2.to(kind), mask=mask)
    target += step
    tl.store(target, v3.to(kind), mask=mask)
    target += step
    tl.store(target, v4.to(kind), mask=mask)
    target += step
    tl.store(target, v5.to(kind), mask=mask)


@triton.jit
def _column(
    x, history, gain, bias, mask, tile, t, x_frame, history_frame, NORM: tl.constexpr
):  # fmt: skip
    """Six inputs of F(4, 3) of one column; x points to the first frame of the tile."""
    if tile == 0:
        d0 = tl.load(history, mask=mask, other=0.0)
        d1 = tl.load(history + history_frame, mask=mask, other=0.0)
    else:
        d1 = activate(tl.load(x - x_frame, mask=mask, other=0.0), gain, bias, mask, NORM)
        d0 = activate(tl.load(x - x_frame - x_frame, mask=mask, other=0.0), gain, bias, mask, NORM)
    frame = 4 * tile
    d2, x = _frame_of_tile(x, frame, t, x_frame, gain, bias, mask, NORM)
    d3, x = _frame_of_tile(x, frame + 1, t, x_frame, gain, bias, mask, NORM)
    d4, x = _frame_of_tile(x, frame + 2, t, x_frame, gain, bias, mask, NORM)
    d5, x = _frame_of_tile(x, frame + 3, t, x_frame, gain, bias, mask, NORM)
    v0, v1, v2, v3, v4, v5 = _time_inputs(
        d0.to(tl.float32), d1.to(tl.float32), d2.to(tl.float32),
        d3.to(tl.float32), d4.to(tl.float32), d5.to(tl.float32),
    )  # fmt: skip
    return v0, v1, v2, v3, v4, v5


@triton.jit
def _store_four(target, step, a, b, c, d, mask):
    """Four inputs of F(2, 3) of four columns; the pointer to the next phase."""
    kind = target.dtype.element_ty
    tl.store(target, (a - c).to(kind), mask=mask)
    target += step
    tl.store(target, (b + c).to(kind), mask=mask)
    target += step
    tl.store(target, (c - b).to(kind), mask=mask)
    target += step
    tl.store(target, (b - d).to(kind), mask=mask)
    return target + step


@triton.jit
def _wide_tiles(
    out, x, gain, bias, history, t, pairs, columns, positions,
    x_frame, x_row, x_column, out_phase, out_tile, history_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    tile = tl.program_id(1).to(tl.int64)
    row, column = position // pairs, position % pairs * 2 - 1
    gains, biases = vector(gain, channel, C, NORM), vector(bias, channel, C, BIAS)
    source = x + tile * 4 * x_frame + (row * x_row + column * x_column)[:, None] + channel[None, :]
    memory = history + ((row * columns + column) * C)[:, None] + channel[None, :]
    left = mask & (column >= 0)[:, None]
    a0, a1, a2, a3, a4, a5 = _column(source, memory, gains, biases, left, tile, t, x_frame, history_frame, NORM)
    source += x_column
    memory += C
    b0, b1, b2, b3, b4, b5 = _column(source, memory, gains, biases, mask, tile, t, x_frame, history_frame, NORM)
    source += x_column
    memory += C
    there = mask & (column + 2 < columns)[:, None]
    c0, c1, c2, c3, c4, c5 = _column(source, memory, gains, biases, there, tile, t, x_frame, history_frame, NORM)
    source += x_column
    memory += C
    there = mask & (column + 3 < columns)[:, None]
    d0, d1, d2, d3, d4, d5 = _column(source, memory, gains, biases, there, tile, t, x_frame, history_frame, NORM)
    target = out + tile * out_tile + position[:, None] * C + channel[None, :]
    target = _store_four(target, out_phase, a0, b0, c0, d0, mask)
    target = _store_four(target, out_phase, a1, b1, c1, d1, mask)
    target = _store_four(target, out_phase, a2, b2, c2, d2, mask)
    target = _store_four(target, out_phase, a3, b3, c3, d3, mask)
    target = _store_four(target, out_phase, a4, b4, c4, d4, mask)
    target = _store_four(target, out_phase, a5, b5, c5, d5, mask)


@triton.jit
def _remember(
    history, x, gain, bias, t, columns, positions, x_frame, x_row, x_column, history_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    gains, biases = vector(gain, channel, C, NORM), vector(bias, channel, C, BIAS)
    memory = history + position[:, None] * C + channel[None, :]
    last = x + (position // columns * x_row + position % columns * x_column)[:, None] + channel[None, :]
    last += tl.cast(t - 1, tl.int64) * x_frame
    if t == 1:
        older = tl.load(memory + history_frame, mask=mask, other=0.0)
    else:
        older = activate(tl.load(last - x_frame, mask=mask, other=0.0), gains, biases, mask, NORM)
    tl.store(memory, older, mask=mask)
    newer = activate(tl.load(last, mask=mask, other=0.0), gains, biases, mask, NORM)
    tl.store(memory + history_frame, newer, mask=mask)


@triton.jit
def _load_phases(source, step, mask):
    """Six phases of products, fp32."""
    m0 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m2 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m3 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m4 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m5 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return m0, m1, m2, m3, m4, m5


@triton.jit
def _time_outputs(m0, m1, m2, m3, m4, m5):
    """Four outputs of F(4, 3) from six products."""
    near, near_odd, far, far_odd = m1 + m2, m1 - m2, m3 + m4, m3 - m4
    return m0 + near + far, near_odd + 2.0 * far_odd, near + 4.0 * far, near_odd + 8.0 * far_odd + m5


@triton.jit
def _settle_four(
    out, residual, out_frame, residual_frame, y0, y1, y2, y3, bias, mask, left, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Four frames of a tile, of which `left` exist."""
    settle(out, residual, y0, bias, mask, RESIDUAL)
    out += out_frame
    residual += residual_frame
    settle(out, residual, y1, bias, while_left(mask, left - 1), RESIDUAL)
    out += out_frame
    residual += residual_frame
    settle(out, residual, y2, bias, while_left(mask, left - 2), RESIDUAL)
    out += out_frame
    residual += residual_frame
    settle(out, residual, y3, bias, while_left(mask, left - 3), RESIDUAL)


@triton.jit
def _outputs(
    out, products, bias, residual, t, positions, phase, tile, out_frame, residual_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    own = position[:, None] * C + channel[None, :]
    k = tl.program_id(1).to(tl.int64)
    biases = vector(bias, channel, C, BIAS)
    m0, m1, m2, m3, m4, m5 = _load_phases(products + k * tile + own, phase, mask)
    y0, y1, y2, y3 = _time_outputs(m0, m1, m2, m3, m4, m5)
    left = t - 4 * k
    target, beside = out + 4 * k * out_frame + own, residual + 4 * k * residual_frame + own
    _settle_four(target, beside, out_frame, residual_frame, y0, y1, y2, y3, biases, mask, left, RESIDUAL)


@triton.jit
def _two_columns(source, step, mask):
    """Two outputs of F(2, 3) from four phases of products, fp32; the pointer to the next phase."""
    m0 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m2 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    source += step
    m3 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return m0 + m1 + m2, m1 - m2 - m3, source + step


@triton.jit
def _wide_outputs(
    out, products, bias, residual, t, pairs, columns, positions, phase, tile, out_frame, residual_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    k = tl.program_id(1).to(tl.int64)
    column = position % pairs * 2
    biases = vector(bias, channel, C, BIAS)
    source = products + k * tile + position[:, None] * C + channel[None, :]
    even0, odd0, source = _two_columns(source, phase, mask)
    even1, odd1, source = _two_columns(source, phase, mask)
    even2, odd2, source = _two_columns(source, phase, mask)
    even3, odd3, source = _two_columns(source, phase, mask)
    even4, odd4, source = _two_columns(source, phase, mask)
    even5, odd5, source = _two_columns(source, phase, mask)
    own = ((position // pairs * columns + column) * C)[:, None] + channel[None, :]
    target, beside = out + 4 * k * out_frame + own, residual + 4 * k * residual_frame + own
    left = t - 4 * k
    y0, y1, y2, y3 = _time_outputs(even0, even1, even2, even3, even4, even5)
    _settle_four(target, beside, out_frame, residual_frame, y0, y1, y2, y3, biases, mask, left, RESIDUAL)
    y0, y1, y2, y3 = _time_outputs(odd0, odd1, odd2, odd3, odd4, odd5)
    there = mask & (column + 1 < columns)[:, None]
    _settle_four(target + C, beside + C, out_frame, residual_frame, y0, y1, y2, y3, biases, there, left, RESIDUAL)


def write_tiles(out: Tensor, x: Tensor, gain: Tensor | None, bias: Tensor | None, history: Tensor) -> None:
    """As `reference.write_tiles`."""
    check_tiles(out, x, gain, bias, history)
    t, h, w, c = x.shape
    sizes, flags = sizes_of(c), norms_of(gain, bias)
    vectors = (x if gain is None else gain, x if bias is None else bias)
    before, behind = x.stride()[:3], history.stride(0)
    strides = (*before, *out.stride()[:2], behind)
    grid = (triton.cdiv(h * w, sizes["P"]),)
    if len(out) == 6:
        numbers = (t, out.shape[1], w, h * w)
        launch(_tiles, grid, x.device, out, x, *vectors, history, *numbers, *strides, C=c, **sizes, **flags)
        return
    pairs = out.shape[3]
    wide, numbers = (triton.cdiv(h * pairs, sizes["P"]), out.shape[1]), (t, pairs, w, h * pairs)
    warps = {"num_warps": 8}  # six frames of four columns are in registers at once: with 4 warps, all 255 of a thread
    launch(_wide_tiles, wide, x.device, out, x, *vectors, history, *numbers, *strides, C=c, **sizes, **flags, **warps)
    launch(_remember, grid, x.device, history, x, *vectors, t, w, h * w, *before, behind, C=c, **sizes, **flags)


def write_outputs(out: Tensor, products: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """As `reference.write_outputs`."""
    check_outputs(out, products, bias, residual)
    t, h, w, o = out.shape
    sizes, flags = sizes_of(o), sums_of(bias, residual)
    beside, vector = out if residual is None else residual, out if bias is None else bias
    strides = (*products.stride()[:2], out.stride(0), beside.stride(0))
    pairs = products.shape[3]
    kernel, numbers = (_outputs, (t, h * w)) if len(products) == 6 else (_wide_outputs, (t, pairs, w, h * pairs))
    grid = (triton.cdiv(h * pairs, sizes["P"]), products.shape[1])
    launch(kernel, grid, out.device, out, products, vector, beside, *numbers, *strides, C=o, **sizes, **flags)
