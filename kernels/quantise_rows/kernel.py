"""The Triton kernels: whole rows to a program. Imported only where they run, because they need Triton."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.quantise_rows.reference import DIP, LEAST, UNIT

WIDEST = 65536


@triton.jit
def gelu(x):
    """tanh form: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), without the cancellation of 1 + tanh; the square of a
    reciprocal root takes fewer instructions than a division."""
    root = tl.rsqrt(1 + tl.exp2(x * (-2.302208198 - 0.1029432396 * x * x)))
    return x * root * root


@triton.jit
def scale_of(largest, UNIT: tl.constexpr, LEAST: tl.constexpr):
    """Of rows whose largest magnitudes these are, and its reciprocal: an exact division, as the reference's."""
    scale = tl.maximum(largest * UNIT, LEAST)
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


# The count of rows changes with every size; a kernel of its own for some counts would be compiled during a request.
@triton.jit(do_not_specialize=["count"])
def quantise_rows_kernel(
    x,
    values,
    scales,
    count,
    x_row,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """values = x / scale, scale = largest magnitude of the row * UNIT.

    Products with the reciprocal of a scale pass 448 by a last place at most, which rounds to it.
    """
    program = tl.program_id(0).to(tl.int64)  # a long clip has more than 2^31 values
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < count) & (column < WIDTH)
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True), UNIT, LEAST)
    tl.store(values + row * WIDTH + column, (value * inverse).to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < count)


@triton.jit
def gelu_quantise_rows_kernel(
    x,
    values,
    scales,
    x_row,
    DIP: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The same of GELU(x), a row to a program: its largest value decides the scale, then it is read again, out of the
    first cache, a chunk at a time, so that few registers hold it and several programs share a multiprocessor."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    x += row * x_row
    values += row * WIDTH
    largest = tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, WIDTH, CHUNK):
        value = tl.load(x + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, value)
    largest = tl.max(largest, axis=0, keep_dims=True)
    scale, inverse = scale_of(tl.maximum(gelu(largest), DIP), UNIT, LEAST)
    for start in range(0, WIDTH, CHUNK):
        mask = start + column < WIDTH
        value = gelu(tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)) * inverse
        tl.store(values + start + column, value.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row + tl.arange(0, 1), scale)


class Size(NamedTuple):
    """Of a program that applies GELU. chunk: values at a time; warps: that share them."""

    chunk: int
    warps: int


def gelu_size(width: int) -> Size:
    """16 values to a thread at a time."""
    chunk = min(8192, triton.next_power_of_2(width))
    return Size(chunk, max(1, chunk // 512))


def run(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Fill `values` and `scales`. Shapes and strides as `op.py` checks them."""
    count, width = x.shape
    if width > WIDEST:
        raise ValueError(f"rows have {width} values, at most {WIDEST} fit into the registers of one program")
    block = triton.next_power_of_2(width)
    rows = max(1, 8192 // block)
    launch(
        quantise_rows_kernel,
        (triton.cdiv(count, rows),),
        x.device,
        *(x, values, scales, count, x.stride(0)),
        UNIT=UNIT,
        LEAST=LEAST,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=min(16, max(1, rows * block // 1024)),
    )


def run_gelu(x: Tensor, values: Tensor, scales: Tensor, size: Size | None = None) -> None:
    """The same of GELU(x)."""
    count, width = x.shape
    chunk, warps = size or gelu_size(width)
    launch(
        gelu_quantise_rows_kernel,
        (count,),
        x.device,
        *(x, values, scales, x.stride(0)),
        DIP=DIP,
        UNIT=UNIT,
        LEAST=LEAST,
        WIDTH=width,
        CHUNK=chunk,
        num_warps=warps,
    )
