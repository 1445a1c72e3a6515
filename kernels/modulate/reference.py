"""What `op.py` promises, in float32 PyTorch operations: the truth of tests and what runs where no kernel does."""

import torch
import torch.nn.functional as F
from torch import Tensor


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift, rounded once to x's dtype."""
    return _modulated(x.float(), shift, scale, eps).to(x.dtype)


def gated_modulate(
    x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """r = x + y * gate, and LayerNorm(r) * (1 + scale) + shift of the r before it is rounded."""
    residual = torch.addcmul(x.float(), y.float(), _per_token(gate))
    return residual.to(x.dtype), _modulated(residual, shift, scale, eps).to(x.dtype)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.addcmul(_per_token(shift), F.layer_norm(x, x.shape[-1:], eps=eps), 1 + _per_token(scale))


def _per_token(m: Tensor) -> Tensor:
    """float32; a vector per sample [B, D] meets tokens [B, S, D], a shared [D] broadcasts as it is."""
    return m.float() if m.dim() == 1 else m.float()[:, None]
