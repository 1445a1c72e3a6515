"""Rows of activations or weights to fp8: e4m3 values and one float32 scale a row, chosen so that the largest is 448."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import launch
from kernels.checks import FLOATS, check_dtype, check_inner_stride, check_shape
from kernels.quantise_rows import reference


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, width] in bf16, fp16 or fp32, any row stride, to e4m3 [rows, width] and float32 scales [rows, 1].

    x is about values * scales. A value that is not finite makes its row not finite. Raises ValueError for what does not
    fit.
    """
    check_shape("x", x, [-1, -1])
    check_dtype("x", x, *FLOATS)
    check_inner_stride(x=x)
    if launch.lack(x.device):
        return reference.quantise_rows(x)
    from kernels.quantise_rows import kernel

    values = torch.empty(x.shape, dtype=reference.E4M3, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    kernel.run(x, values, scales)
    return values, scales
