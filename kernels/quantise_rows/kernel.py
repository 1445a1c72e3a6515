"""The Triton kernel: some whole rows to a program, read once. Imported only where it runs, because it needs Triton."""

from __future__ import annotations

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


@triton.jit
def quantise_rows_kernel(
    x,
    values,
    scales,
    count,
    x_row,
    GELU: tl.constexpr,
    DIP: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """values = x / scale, scale = largest magnitude of the row * UNIT; of GELU(x) in place of x if GELU.

    Products with the reciprocal of a scale pass 448 by a last place at most, which rounds to it.
    """
    program = tl.program_id(0).to(tl.int64)  # a long clip has more than 2^31 values
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < count) & (column < WIDTH)
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        largest = tl.maximum(gelu(tl.max(value, axis=1, keep_dims=True)), DIP)
        value = gelu(value)
    else:
        largest = tl.max(tl.abs(value), axis=1, keep_dims=True)
    scale, inverse = scale_of(largest, UNIT, LEAST)
    value *= inverse
    tl.store(values + row * WIDTH + column, value.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < count)


def launch_size(width: int) -> tuple[int, int]:
    """Rows of a program and the warps that share them: 32 values to a thread, 64 of the widest rows, in 512 threads."""
    block = triton.next_power_of_2(width)
    rows = max(1, 8192 // block)
    return rows, min(16, max(1, rows * block // 1024))


def run(x: Tensor, values: Tensor, scales: Tensor, gelu: bool = False, warps: int | None = None) -> None:
    """Fill `values` and `scales`. Shapes and strides as `op.py` checks them. warps: of a program, if not the usual."""
    count, width = x.shape
    if width > WIDEST:
        raise ValueError(f"rows have {width} values, at most {WIDEST} fit into the registers of one program")
    rows, usual = launch_size(width)
    launch(
        quantise_rows_kernel,
        (triton.cdiv(count, rows),),
        x.device,
        *(x, values, scales, count, x.stride(0)),
        GELU=gelu,
        DIP=DIP,
        UNIT=UNIT,
        LEAST=LEAST,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=rows,
        num_warps=warps or usual,
    )
