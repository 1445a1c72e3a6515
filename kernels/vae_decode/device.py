"""What the decoder's Triton kernels share: which elements a program has, activation, and the one rounding of a sum."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

# Numbers that follow from a video's size, its length and how the work is cut. Triton makes a kernel of its own for
# those that are one, and for those that 16 divides: each is compiled, for most of a second, while somebody waits.
COUNTS = ("t", "columns", "across", "positions", "first", "last", "replaced")

ELEMENTS = 1024  # of one program and frame: eight 16-bit numbers a thread, one load of 16 bytes


@triton.jit
def block_of(positions, C: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    """The positions of this program [P], its channels [BLOCK], which are a part of all C where BLOCK is less, and which
    of [P, BLOCK] exist."""
    parts: tl.constexpr = (C + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    position = program // parts * P + tl.arange(0, P)
    channel = tl.arange(0, BLOCK)
    if parts > 1:
        channel = program % parts * BLOCK + channel
    return position, channel, (position < positions)[:, None] & (channel < C)[None, :]


@triton.jit
def vector(numbers, channel, C: tl.constexpr, WANTED: tl.constexpr):
    """fp32 [1, BLOCK], zeros where it is not wanted."""
    if WANTED:
        return tl.load(numbers + channel, mask=channel < C, other=0.0)[None, :]
    return tl.zeros([channel.shape[0]], tl.float32)[None, :]


@triton.jit
def activate(x, gain, bias, mask, NORM: tl.constexpr):
    """silu(norm(x + bias)) of [P, BLOCK], rounded to the dtype of x; zero where masked out."""
    v = x.to(tl.float32) + bias
    if NORM:
        length = tl.sqrt(tl.sum(tl.where(mask, v * v, 0.0), axis=1))
        v = v * (1.0 / tl.maximum(length, 1e-12))[:, None] * gain
        v = v / (1.0 + tl.exp(-v))
    return tl.where(mask, v, 0.0).to(x.dtype)


@triton.jit
def while_left(mask, left):
    """The mask, nothing of it where no frame is left. Compares blocks: the interpreter makes a number of a mask that is
    combined with a scalar."""
    return mask & (left > tl.zeros(mask.shape, tl.int32))


@triton.jit
def settle(out, residual, y, bias, mask, RESIDUAL: tl.constexpr):
    """out = y + bias + residual, rounded once."""
    y += bias
    if RESIDUAL:
        y += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, y.to(out.dtype.element_ty), mask=mask)


@functools.cache
def sizes_of(channels: int, elements: int = ELEMENTS, most: int = 1 << 30) -> dict[str, int]:
    """Block of channels, at most so many, and positions of a program of so many elements."""
    block = min(most, triton.next_power_of_2(channels))
    return {"BLOCK": block, "P": max(1, elements // block)}


def norms_of(gain: Tensor | None, bias: Tensor | None) -> dict[str, bool]:
    return {"NORM": gain is not None, "BIAS": bias is not None}


def sums_of(bias: Tensor | None, residual: Tensor | None) -> dict[str, bool]:
    return {"BIAS": bias is not None, "RESIDUAL": residual is not None}
