"""Rows of activations or weights to fp8: e4m3 values and one float32 scale a row, chosen so that the largest is 448."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import launch
from kernels.checks import FLOATS, check_dtype, check_inner_stride, check_shape
from kernels.quantise_rows import reference
from kernels.quantise_rows.reference import Quantised


def quantise_rows(x: Tensor) -> Quantised:
    """x [rows, width] in bf16, fp16 or fp32, any row stride, to e4m3 [rows, width] and float32 scales [rows, 1].

    x is about values * scales. A value that is not finite stays visible: it, or its scale, is not finite. Raises
    ValueError for what does not fit.
    """
    return _quantised(x, False)


def gelu_quantise_rows(x: Tensor) -> Quantised:
    """The same of GELU(x), tanh form, in one pass over x; the largest magnitude counts as 0.17 at least."""
    return _quantised(x, True)


def _quantised(x: Tensor, gelu: bool) -> Quantised:
    check_shape("x", x, [-1, -1])
    check_dtype("x", x, *FLOATS)
    check_inner_stride(x=x)
    if launch.lack(x.device):
        return reference.gelu_quantise_rows(x) if gelu else reference.quantise_rows(x)
    from kernels.quantise_rows import kernel

    found = empty(x)
    (kernel.run_gelu if gelu else kernel.run)(x, *found)
    return found


def empty(x: Tensor) -> Quantised:
    """Without values yet, for rows like those of x [..., width]."""
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return Quantised(torch.empty(x.shape, dtype=reference.E4M3, device=x.device), scales)
