"""The passes before and behind the products of a Winograd layer, as Triton kernels; the maths is `winograd.py`'s.

A thread holds a whole tile of a few channels: six frames (of six columns) on the way in, four (of four) on the way out.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.vae_decode import winograd
from kernels.vae_decode.device import COUNTS, block_of, settle, sizes_of, sums_of, vector, while_left
from kernels.vae_decode.geometry import check_beside, check_outputs, check_tiles

NEAR, FAR = tl.constexpr(winograd.NEAR), tl.constexpr(winograd.FAR)
NEAR_2, FAR_2 = tl.constexpr(winograd.NEAR**2), tl.constexpr(winograd.FAR**2)
NEAR_3, FAR_3 = tl.constexpr(winograd.NEAR**3), tl.constexpr(winograd.FAR**3)
LESS, FAR_LESS = tl.constexpr(1 / winograd.SHIFT), tl.constexpr(winograd.FAR / winograd.SHIFT)
BOTH = tl.constexpr(winograd.NEAR**2 + winograd.FAR**2)
CHANNELS = 128  # of a program, at most
ELEMENTS = 256  # positions times channels of a program: two numbers a thread, a tile of them in registers


@triton.jit
def _inputs(d0, d1, d2, d3, d4, d5):
    """Six inputs of F(4, 3) from six numbers."""
    near, near_odd = d4 - d2 * FAR_2, (d3 - d1 * FAR_2) * NEAR
    far, far_odd = (d4 - d2 * NEAR_2) * LESS, (d3 - d1 * NEAR_2) * FAR_LESS
    return d0 - d2 * BOTH + d4, near + near_odd, near - near_odd, far + far_odd, far - far_odd, d1 - d3 * BOTH + d5


@triton.jit
def _outputs(m0, m1, m2, m3, m4, m5):
    """Four outputs of F(4, 3) from six products."""
    near, near_odd, far, far_odd = m1 + m2, m1 - m2, m3 + m4, m3 - m4
    last = near_odd * NEAR_3 + far_odd * FAR_3 + m5
    return m0 + near + far, near_odd * NEAR + far_odd * FAR, near * NEAR_2 + far * FAR_2, last


@triton.jit
def _wide(source, mask):
    """A block, fp32."""
    return tl.load(source, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _six(source, step, mask):
    """Six blocks, fp32."""
    v0 = _wide(source, mask)
    source += step
    v1 = _wide(source, mask)
    source += step
    v2 = _wide(source, mask)
    source += step
    v3 = _wide(source, mask)
    source += step
    v4 = _wide(source, mask)
    source += step
    v5 = _wide(source, mask)
    return v0, v1, v2, v3, v4, v5


@triton.jit
def _six_frames(source, step, left, mask):
    """The inputs along time of six frames, of which `left` exist: three at least."""
    d0 = _wide(source, mask)
    source += step
    d1 = _wide(source, mask)
    source += step
    d2 = _wide(source, mask)
    source += step
    d3 = _wide(source, while_left(mask, left - 3))
    source += step
    d4 = _wide(source, while_left(mask, left - 4))
    source += step
    d5 = _wide(source, while_left(mask, left - 5))
    return _inputs(d0, d1, d2, d3, d4, d5)


@triton.jit
def _store_six(target, step, v0, v1, v2, v3, v4, v5, mask):
    """Six phases; the pointer to the next one."""
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
    return target + step


@triton.jit(do_not_specialize=COUNTS)
def _tiles(
    out, frames, t, positions, frame, out_phase, out_tile,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    k, own = tl.program_id(1).to(tl.int64), position[:, None] * C + channel[None, :]
    v0, v1, v2, v3, v4, v5 = _six_frames(frames + 4 * k * frame + own, frame, t - 4 * k, mask)
    _store_six(out + k * out_tile + own, out_phase, v0, v1, v2, v3, v4, v5, mask)


@triton.jit(do_not_specialize=COUNTS)
def _wide_tiles(
    out, frames, t, across, columns, positions, frame, out_phase, out_tile,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    k = tl.program_id(1).to(tl.int64)
    row, column, left = position // across, position % across * 4, t - 4 * k
    source = frames + 4 * k * frame + ((row * columns + column) * C)[:, None] + channel[None, :]
    a0, a1, a2, a3, a4, a5 = _six_frames(source - C, frame, left, mask & (column > 0)[:, None])
    b0, b1, b2, b3, b4, b5 = _six_frames(source, frame, left, mask)
    c0, c1, c2, c3, c4, c5 = _six_frames(source + C, frame, left, mask & (column + 1 < columns)[:, None])
    d0, d1, d2, d3, d4, d5 = _six_frames(source + 2 * C, frame, left, mask & (column + 2 < columns)[:, None])
    e0, e1, e2, e3, e4, e5 = _six_frames(source + 3 * C, frame, left, mask & (column + 3 < columns)[:, None])
    f0, f1, f2, f3, f4, f5 = _six_frames(source + 4 * C, frame, left, mask & (column + 4 < columns)[:, None])
    target = out + k * out_tile + position[:, None] * C + channel[None, :]
    v0, v1, v2, v3, v4, v5 = _inputs(a0, b0, c0, d0, e0, f0)
    target = _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)
    v0, v1, v2, v3, v4, v5 = _inputs(a1, b1, c1, d1, e1, f1)
    target = _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)
    v0, v1, v2, v3, v4, v5 = _inputs(a2, b2, c2, d2, e2, f2)
    target = _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)
    v0, v1, v2, v3, v4, v5 = _inputs(a3, b3, c3, d3, e3, f3)
    target = _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)
    v0, v1, v2, v3, v4, v5 = _inputs(a4, b4, c4, d4, e4, f4)
    target = _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)
    v0, v1, v2, v3, v4, v5 = _inputs(a5, b5, c5, d5, e5, f5)
    _store_six(target, out_phase, v0, v1, v2, v3, v4, v5, mask)


@triton.jit
def _settle_four(
    out, residual, out_frame, residual_frame, m0, m1, m2, m3, m4, m5, bias, mask, left, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Four frames of a tile, of which `left` exist, from its six products along time."""
    y0, y1, y2, y3 = _outputs(m0, m1, m2, m3, m4, m5)
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


@triton.jit(do_not_specialize=COUNTS)
def _frames_of(
    out, products, bias, residual, t, positions, phase, tile, out_frame, residual_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    own, k = position[:, None] * C + channel[None, :], tl.program_id(1).to(tl.int64)
    biases = vector(bias, channel, C, BIAS)
    m0, m1, m2, m3, m4, m5 = _six(products + k * tile + own, phase, mask)
    target, beside = out + 4 * k * out_frame + own, residual + 4 * k * residual_frame + own
    left = t - 4 * k
    _settle_four(
        target, beside, out_frame, residual_frame, m0, m1, m2, m3, m4, m5, biases, mask, left, RESIDUAL
    )  # fmt: skip


@triton.jit
def _four_columns(source, step, mask):
    """Four outputs along width from six phases of products, fp32; the pointer to the next phase."""
    m0, m1, m2, m3, m4, m5 = _six(source, step, mask)
    y0, y1, y2, y3 = _outputs(m0, m1, m2, m3, m4, m5)
    return y0, y1, y2, y3, source + 6 * step


@triton.jit(do_not_specialize=COUNTS)
def _wide_frames_of(
    out, products, bias, residual, t, across, columns, positions, phase, tile, out_frame, residual_frame,
    C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    position, channel, mask = block_of(positions, C, BLOCK, P)
    k = tl.program_id(1).to(tl.int64)
    row, column, left = position // across, position % across * 4, t - 4 * k
    biases = vector(bias, channel, C, BIAS)
    source = products + k * tile + position[:, None] * C + channel[None, :]
    a0, b0, c0, d0, source = _four_columns(source, phase, mask)
    a1, b1, c1, d1, source = _four_columns(source, phase, mask)
    a2, b2, c2, d2, source = _four_columns(source, phase, mask)
    a3, b3, c3, d3, source = _four_columns(source, phase, mask)
    a4, b4, c4, d4, source = _four_columns(source, phase, mask)
    a5, b5, c5, d5, source = _four_columns(source, phase, mask)
    own = ((row * columns + column) * C)[:, None] + channel[None, :]
    target, beside = out + 4 * k * out_frame + own, residual + 4 * k * residual_frame + own
    _settle_four(
        target, beside, out_frame, residual_frame, a0, a1, a2, a3, a4, a5, biases, mask, left, RESIDUAL
    )  # fmt: skip
    there = mask & (column + 1 < columns)[:, None]
    _settle_four(
        target + C, beside + C, out_frame, residual_frame, b0, b1, b2, b3, b4, b5, biases, there, left, RESIDUAL
    )  # fmt: skip
    there = mask & (column + 2 < columns)[:, None]
    _settle_four(
        target + 2 * C, beside + 2 * C, out_frame, residual_frame, c0, c1, c2, c3, c4, c5, biases, there, left, RESIDUAL
    )  # fmt: skip
    there = mask & (column + 3 < columns)[:, None]
    _settle_four(
        target + 3 * C, beside + 3 * C, out_frame, residual_frame, d0, d1, d2, d3, d4, d5, biases, there, left, RESIDUAL
    )  # fmt: skip


@functools.cache
def _sizes(channels: int) -> dict[str, int]:
    """Channels and positions of a program."""
    return {"C": channels, **sizes_of(channels, ELEMENTS, CHANNELS)}


def _grid(sizes: dict[str, int], positions: int, tiles: int) -> tuple[int, int]:
    return -(-positions // sizes["P"]) * -(-sizes["C"] // sizes["BLOCK"]), tiles


def write_tiles(out: Tensor, frames: Tensor) -> None:
    """As `reference.write_tiles`."""
    check_tiles(out, frames)
    t, h, w, c = frames.shape
    phases, n, _, across, _ = out.shape
    sizes, strides = _sizes(c), (frames.stride(0), *out.stride()[:2])
    grid = _grid(sizes, h * across, n)
    kernel, numbers = (_tiles, (t, h * w)) if phases == 6 else (_wide_tiles, (t, across, w, h * across))
    launch(kernel, grid, frames.device, out, frames, *numbers, *strides, **sizes)


def write_outputs(out: Tensor, products: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """As `reference.write_outputs`."""
    check_outputs(out, products, bias, residual)
    check_beside(out, residual)
    t, h, w, o = out.shape
    phases, n, _, across, _ = products.shape
    sizes, flags = _sizes(o), sums_of(bias, residual)
    beside, biases = out if residual is None else residual, out if bias is None else bias
    strides = (*products.stride()[:2], out.stride(0), beside.stride(0))
    grid = _grid(sizes, h * across, n)
    kernel, numbers = (_frames_of, (t, h * w)) if phases == 6 else (_wide_frames_of, (t, across, w, h * across))
    launch(kernel, grid, out.device, out, products, biases, beside, *numbers, *strides, **sizes, **flags)
