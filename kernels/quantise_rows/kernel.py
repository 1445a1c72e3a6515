"""The Triton kernel: some whole rows to a program, read once. Imported only where it runs, because it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.quantise_rows.reference import LARGEST, LEAST

WIDEST = 65536


@triton.jit
def quantise_rows_kernel(
    x,
    values,
    scales,
    count,
    x_row,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """values = x / scale, scale = largest magnitude of the row / LARGEST."""
    program = tl.program_id(0).to(tl.int64)  # a long clip has more than 2^31 values
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < count) & (column < WIDTH)
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=1, keep_dims=True)
    # Exact divisions: an approximate one would round some values to another neighbour than the reference does.
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), LEAST)
    # Zero but for rows with NaN or infinity, which a maximum passes over.
    scale += tl.sum(value - value, axis=1, keep_dims=True)
    value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    tl.store(values + row * WIDTH + column, value.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < count)


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
        LARGEST=LARGEST,
        LEAST=LEAST,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=min(16, max(1, rows * block // 1024)),
    )
