"""What `op.py` promises, in float32 PyTorch operations: the truth of tests and what runs where no kernel does."""

from typing import NamedTuple

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]


class Norms(NamedTuple):
    """Weights [E] of the RMSNorms: of the video's queries and keys, and of the text's."""

    q: Tensor
    k: Tensor
    added_q: Tensor
    added_k: Tensor


def qk_norm_rope(video: Tensor, text: Tensor, norms: Norms, rope: Rope, eps: float) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, N + L, H, E]: video normed and turned, then text normed, each rounded once."""
    joint = (
        torch.cat((turned(rms_norm(video[:, :, i], norm, eps), *rope), rms_norm(text[:, :, i], added, eps)), dim=1)
        for i, (norm, added) in enumerate(((norms.q, norms.added_q), (norms.k, norms.added_k)))
    )
    q, k = (part.to(video.dtype) for part in joint)
    return q, k


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the head, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Adjacent pairs (a, b) to (a cos - b sin, b cos + a sin); x [B, N, H, E], tables [N, E / 2]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
