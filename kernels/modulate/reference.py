"""What `op.py` promises, in float32 PyTorch operations: the truth of tests and what runs where no kernel does."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantise_rows.reference import Quantised, quantise_rows


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float, quantise: bool = False) -> Tensor | Quantised:
    """LayerNorm(x) * (1 + scale) + shift, rounded once to x's dtype, or quantised."""
    value = _modulated(x.float(), shift, scale, eps)
    return quantise_rows(value) if quantise else value.to(x.dtype)


def gated_modulate(
    x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, quantise: bool = False
) -> tuple[Tensor, Tensor | Quantised]:
    """r = x + y * gate, and LayerNorm(r) * (1 + scale) + shift of the r before it is rounded."""
    residual = torch.addcmul(x.float(), y.float(), _per_token(gate))
    value = _modulated(residual, shift, scale, eps)
    return residual.to(x.dtype), quantise_rows(value) if quantise else value.to(x.dtype)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.addcmul(_per_token(shift), F.layer_norm(x, x.shape[-1:], eps=eps), 1 + _per_token(scale))


def _per_token(m: Tensor) -> Tensor:
    """float32; a vector per sample [B, D] meets tokens [B, S, D], a shared [D] broadcasts as it is."""
    return m.float() if m.dim() == 1 else m.float()[:, None]
