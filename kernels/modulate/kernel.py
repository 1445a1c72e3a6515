"""The Triton kernel: some whole rows to a program, read once, statistics in two passes over registers.

Imported only where it runs, because it needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.quantise_rows.kernel import scale_of
from kernels.quantise_rows.reference import LEAST, UNIT

WIDEST = 32768


class Size(NamedTuple):
    """rows: of a program; warps: that share them."""

    rows: int
    warps: int


def launch_size(width: int) -> Size:
    """32 values of each input to a thread, of one row where it has as many: enough bytes on their way, and registers
    for several programs at once. Two rows to a program share their vectors and were a tenth slower all the same."""
    if width > WIDEST:
        raise ValueError(f"rows have {width} values, at most {WIDEST} fit into the registers of one program")
    block = triton.next_power_of_2(width)
    rows = max(1, 4096 // block)
    return Size(rows, min(16, max(1, rows * block // 1024)))


# The count of tokens changes with every size; a kernel of its own for some counts would be compiled during a request.
@triton.jit(do_not_specialize=["tokens"])
def modulate_kernel(
    x,
    y,
    gate,
    shift,
    scale,
    residual,
    out,
    scales,
    tokens,
    x_batch,
    x_token,
    y_batch,
    y_token,
    gate_batch,
    shift_batch,
    scale_batch,
    residual_batch,
    residual_token,
    out_batch,
    out_token,
    eps,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """out = LayerNorm(r) * (1 + scale) + shift; r is x, or x + y * gate, which is then written too.

    QUANTISE: out has the values of `quantise_rows`, `scales` [samples * tokens] its scales.
    """
    program = tl.program_id(0).to(tl.int64)  # a whole clip has more than 2^31 values
    blocks = tl.cdiv(tokens, ROWS)
    sample = program // blocks
    token = (program % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    mask = (token < tokens) & inside

    r = tl.load(x + sample * x_batch + token * x_token + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        added = tl.load(y + sample * y_batch + token * y_token + column, mask=mask, other=0.0).to(tl.float32)
        r += added * tl.load(gate + sample * gate_batch + column, mask=inside, other=0.0).to(tl.float32)
        place = residual + sample * residual_batch + token * residual_token + column
        tl.store(place, r.to(residual.dtype.element_ty), mask=mask)

    # Deviations from the mean, not the mean of squares: a small variance on a large mean would drown in rounding.
    mean = tl.sum(r, axis=1, keep_dims=True) / WIDTH
    deviation = tl.where(inside, r - mean, 0.0)
    variance = tl.sum(deviation * deviation, axis=1, keep_dims=True) / WIDTH
    factor = 1 + tl.load(scale + sample * scale_batch + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + sample * shift_batch + column, mask=inside, other=0.0).to(tl.float32)
    value = deviation * tl.rsqrt(variance + eps) * factor + offset
    if QUANTISE:
        largest = tl.max(tl.abs(tl.where(inside, value, 0.0)), axis=1, keep_dims=True)
        row_scale, inverse = scale_of(largest, UNIT, LEAST)
        tl.store(scales + sample * tokens + token, row_scale, mask=token < tokens)
        value *= inverse
    # Eight values to a thread, as in the loads: with the 16 of fp8 that fill a store, all rows would be laid out again.
    place = out + sample * out_batch + token * out_token + tl.multiple_of(column, [1, 8])
    tl.store(place, value.to(out.dtype.element_ty), mask=mask)


def run(
    x: Tensor,
    out: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    gated: tuple[Tensor, Tensor, Tensor] | None = None,
    size: Size | None = None,
    scales: Tensor | None = None,
) -> None:
    """Fill `out`, the residual of `gated` = (y, gate, residual), and the contiguous `scales` of a quantised `out`.

    Shapes and strides as `op.py` checks them.
    """
    batch, tokens, width = x.shape
    y, gate, residual = gated or (x, scale, out)  # unread
    rows, warps = size or launch_size(width)
    launch(
        modulate_kernel,
        (batch * triton.cdiv(tokens, rows),),
        x.device,
        *(x, y, gate, shift, scale, residual, out, out if scales is None else scales, tokens),
        *(x.stride(0), x.stride(1), y.stride(0), y.stride(1)),
        *(per_sample(gate), per_sample(shift), per_sample(scale)),
        *(residual.stride(0), residual.stride(1), out.stride(0), out.stride(1)),
        eps,
        UNIT=UNIT,
        LEAST=LEAST,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=rows,
        GATED=gated is not None,
        QUANTISE=scales is not None,
        num_warps=warps,
    )


def per_sample(m: Tensor) -> int:
    """From one sample's vector to the next; 0 where the batch shares it."""
    return 0 if m.dim() == 1 else m.stride(0)
