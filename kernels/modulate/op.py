"""LayerNorm without weights, then (1 + scale) and shift; alone, or after a gated residual whose sum it also returns.

float32 inside, every result rounded once. The modulated value comes from the residual before rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import launch
from kernels.checks import FLOATS, check_device, check_dtype, check_inner_stride, check_shape
from kernels.modulate import reference


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift: x [B, S, D] to the same, contiguous.

    shift, scale: [D] shared by the batch, or [B, D]; bf16, fp16 or fp32, as x. Any strides but the last. Raises
    ValueError for what does not fit.
    """
    _check(x, x=x)
    _check_vectors(x, shift=shift, scale=scale)
    if launch.lack(x.device):
        return reference.modulate(x, shift, scale, eps)
    from kernels.modulate import kernel

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel.run(x, out, shift, scale, eps)
    return out


def gated_modulate(
    x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """r = x + y * gate and LayerNorm(r) * (1 + scale) + shift in one pass; both contiguous, in x's dtype.

    x, y [B, S, D] of one dtype; gate, shift, scale as in `modulate`.
    """
    _check(x, x=x, y=y)
    _check_vectors(x, gate=gate, shift=shift, scale=scale)
    if launch.lack(x.device):
        return reference.gated_modulate(x, y, gate, shift, scale, eps)
    from kernels.modulate import kernel

    residual, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    kernel.run(x, out, shift, scale, eps, gated=(y, gate, residual))
    return residual, out


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
