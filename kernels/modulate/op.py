"""LayerNorm without weights, then (1 + scale) and shift; alone, or after a gated residual whose sum it also returns.

float32 inside, every result rounded once. The modulated value comes from the residual before rounding; where a product
in fp8 takes it, it is quantised row by row in the same pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import launch
from kernels.checks import FLOATS, check_device, check_dtype, check_inner_stride, check_shape
from kernels.modulate import reference
from kernels.quantise_rows.op import empty
from kernels.quantise_rows.reference import Quantised


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, quantise: bool = False) -> Tensor | Quantised:
    """LayerNorm(x) * (1 + scale) + shift: x [B, S, D] to the same, contiguous; quantise: in fp8.

    shift, scale: [D] shared by the batch, or [B, D]; bf16, fp16 or fp32, as x. Any strides but the last. Raises
    ValueError for what does not fit.
    """
    _check(x, x=x)
    _check_vectors(x, shift=shift, scale=scale)
    if launch.lack(x.device):
        return reference.modulate(x, shift, scale, eps, quantise)
    from kernels.modulate import kernel

    found, out, scales = _out(x, quantise)
    kernel.run(x, out, shift, scale, eps, scales=scales)
    return found


def gated_modulate(
    x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, quantise: bool = False
) -> tuple[Tensor, Tensor | Quantised]:
    """r = x + y * gate and LayerNorm(r) * (1 + scale) + shift in one pass; both contiguous, in x's dtype.

    x, y [B, S, D] of one dtype; gate, shift, scale and quantise, which is of the second result, as in `modulate`.
    """
    _check(x, x=x, y=y)
    _check_vectors(x, gate=gate, shift=shift, scale=scale)
    if launch.lack(x.device):
        return reference.gated_modulate(x, y, gate, shift, scale, eps, quantise)
    from kernels.modulate import kernel

    residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    found, out, scales = _out(x, quantise)
    kernel.run(x, out, shift, scale, eps, gated=(y, gate, residual), scales=scales)
    return residual, found


def _out(x: Tensor, quantise: bool) -> tuple[Tensor | Quantised, Tensor, Tensor | None]:
    """Memory for a result: as it is returned, then the two tensors of it."""
    if quantise:
        found = empty(x)
        return found, *found
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, out, None


def _check(like: Tensor, **tensors: Tensor) -> None:
    check_shape("x", like, [-1, -1, -1])
    for name, tensor in tensors.items():
        check_shape(name, tensor, like.shape)
        check_dtype(name, tensor, *(FLOATS if name == "x" else (like.dtype,)))
    check_device(like.device, **tensors)
    check_inner_stride(**tensors)


def _check_vectors(x: Tensor, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        check_shape(name, vector, [x.shape[2]], [x.shape[0], x.shape[2]])
        check_dtype(name, vector, *FLOATS)
    check_device(x.device, **vectors)
    check_inner_stride(**vectors)
