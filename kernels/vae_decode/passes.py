"""The decoder's passes over memory as Triton kernels: what `reference.py` says, function by function, for any GPU.

Each program takes a few positions (rows and columns) with all their channels and walks through the frames, so that an
activation is computed once, history is read and replaced in the same place, and nothing is padded or concatenated.
Offsets that can pass 2^31 elements are int64; phases and frames are stepped through pointer by pointer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.vae_decode.device import COUNTS, activate, block_of, norms_of, settle, sizes_of, sums_of, vector
from kernels.vae_decode.geometry import check_beside, check_enlarge, check_frames, check_stencil, check_sum
from kernels.vae_decode.tile_passes import write_outputs, write_tiles

__all__ = ["add", "enlarge", "stencil", "write_frames", "write_outputs", "write_tiles"]


@triton.jit(do_not_specialize=COUNTS)
def _frames(
    out, x, gain, bias, history, t, columns, positions, first, last, replaced,
    x_frame, x_row, x_column, out_frame, history_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    own = position[:, None] * C + channel[None, :]
    inside = mask & ((position >= first) & (position < last))[:, None]
    within = position - first
    source = x + (within // columns * x_row + within % columns * x_column)[:, None] + channel[None, :]
    gains, biases = vector(gain, channel, C, NORM), vector(bias, channel, C, BIAS)
    memory, target = history + own, out + own
    older = tl.load(memory, mask=mask, other=0.0)
    newer = tl.load(memory + history_frame, mask=mask, other=0.0)
    tl.store(target, older, mask=mask)
    target += out_frame
    tl.store(target, newer, mask=mask)
    for _ in range(0, t):
        target += out_frame
        older = newer
        newer = activate(tl.load(source, mask=inside, other=0.0), gains, biases, inside, NORM)
        tl.store(target, newer, mask=mask)
        source += x_frame
    mask &= (position < replaced)[:, None]
    tl.store(memory, older, mask=mask)
    tl.store(memory + history_frame, newer, mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _add(
    out, y, bias, residual, positions, out_frame, y_frame, residual_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    own = position[:, None] * C + channel[None, :]
    frame = tl.program_id(1).to(tl.int64)
    v = tl.load(y + frame * y_frame + own, mask=mask, other=0.0).to(tl.float32)
    biases = vector(bias, channel, C, BIAS)
    settle(out + frame * out_frame + own, residual + frame * residual_frame + own, v, biases, mask, RESIDUAL)


@triton.jit(do_not_specialize=COUNTS)
def _enlarge(
    out, z, bias, source, columns, positions, out_frame, z_frame, source_frame,
    C: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    frame = tl.program_id(1).to(tl.int64)
    i, j = position // columns, position % columns
    biases = vector(bias, channel, C, True)
    near = source + frame * source_frame + (position * C * STRIDE)[:, None] + (channel * STRIDE)[None, :]
    for k in tl.static_range(4):
        p, q = k // 2, k % 2
        place = ((i + p) * (columns + 1) + j + q) * 4 * C + k * C
        v = tl.load(z + frame * z_frame + place[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        pixel = (2 * i + p) * 2 * columns + 2 * j + q
        target = out + frame * out_frame + (pixel * C)[:, None] + channel[None, :]
        settle(target, near + k * STRIDE // 4, v, biases, mask, True)


@triton.jit(do_not_specialize=COUNTS)
def _stencil(
    out, values, bias, finite, columns, out_frame, values_frame,
    S: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, frame = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k = tl.arange(0, 16)
    mask = (column < columns)[:, None] & (k < 12)[None, :]
    v = tl.zeros([BLOCK, 16], tl.float32)
    for tap in tl.static_range(9):
        a, b = tap // 3, tap % 3
        at = column + b - 1
        there = mask & ((at >= 0) & (at < columns))[:, None]
        place = values + frame * values_frame + (((row + a) * columns + at) * S)[:, None] + k[None, :] + 12 * tap
        v += tl.load(place, mask=there, other=0.0).to(tl.float32)
    v += tl.load(bias + k, mask=k < 12, other=0.0)[None, :]
    wrong = tl.sum(tl.sum(tl.where(mask & (tl.abs(v) < float("inf")), 0, tl.where(mask, 1, 0)), axis=1), axis=0)
    tl.store(finite, 0, mask=wrong > 0)
    if PIXELS:
        level = tl.minimum(tl.maximum(v * 0.5 + 0.5, 0.0), 1.0) * 255.0
        level = (level + 8388608.0) - 8388608.0  # 2^23: what is left is whole, halves rounded to even
        pixel = ((2 * row + k % 2) * 2 * columns + k % 4 // 2)[None, :] + (2 * column)[:, None]
        tl.store(out + frame * out_frame + pixel * 3 + (k // 4)[None, :], level.to(tl.uint8), mask=mask)
    else:
        own = ((row * columns + column) * 12)[:, None] + k[None, :]
        tl.store(out + frame * out_frame + own, v, mask=mask)


def write_frames(
    out: Tensor, x: Tensor, gain: Tensor | None, bias: Tensor | None, history: Tensor, above: int = 0, kept: int = 0
) -> None:
    """As `reference.write_frames`."""
    check_frames(out, x, gain, bias, history, above, kept)
    t, h, w, c = x.shape
    rows, sizes = out.shape[1], sizes_of(c)
    grid = (-(-rows * w // sizes["P"]),)
    numbers = (t, w, rows * w, above * w, (above + h) * w, (rows - kept) * w)
    strides = (*x.stride()[:3], out.stride(0), history.stride(0))
    vectors = (x if gain is None else gain, x if bias is None else bias)
    launch(_frames, grid, x.device, out, x, *vectors, history, *numbers, *strides, C=c, **sizes, **norms_of(gain, bias))


def add(out: Tensor, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """As `reference.add`."""
    check_sum(out, y, bias, residual)
    check_beside(out, residual)
    t, h, w, o = out.shape
    sizes = sizes_of(o)
    beside = out if residual is None else residual
    strides = (out.stride(0), y.stride(0), beside.stride(0))
    grid = (-(-h * w // sizes["P"]), t)
    vector = out if bias is None else bias
    launch(_add, grid, out.device, out, y, vector, beside, h * w, *strides, C=o, **sizes, **sums_of(bias, residual))


def enlarge(out: Tensor, z: Tensor, bias: Tensor, source: Tensor) -> None:
    """As `reference.enlarge`."""
    check_enlarge(out, z, bias, source)
    t, h, w, c = source.shape
    o = out.shape[-1]
    sizes = sizes_of(o)
    grid = (-(-h * w // sizes["P"]), t)
    strides = (out.stride(0), z.stride(0), source.stride(0))
    launch(_enlarge, grid, out.device, out, z, bias, source, w, h * w, *strides, C=o, STRIDE=c // o, **sizes)


def stencil(out: Tensor, values: Tensor, bias: Tensor, finite: Tensor) -> None:
    """As `reference.stencil`."""
    check_stencil(out, values, bias, finite)
    t, rows, w, s = values.shape
    grid = (-(-w // 64), rows - 2, t)
    strides = (out.stride(0), values.stride(0))
    pixels = out.dtype == torch.uint8
    launch(_stencil, grid, out.device, out, values, bias, finite, w, *strides, S=s, BLOCK=64, PIXELS=pixels)
