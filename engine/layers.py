"""Building blocks of the PAN2 transformer. Statistics, rotations and modulations are float32 inside and rounded once.

Letters: B batch, N video tokens, L text tokens, D width, H heads, E head size. x is the video stream, c the text.
Module names are those of the released checkpoint.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import attend
from engine.packed import pack
from engine.rope import rotate_pairs

BLOCK_EPS = 1e-6
REFINER_EPS = 1e-5
TIME_FEATURES = 256

Rope = tuple[Tensor, Tensor]


class Modulation(NamedTuple):
    """float32, each [D] when the batch shares it, else [B, D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


def split_modulation(m: Tensor) -> tuple[Modulation, Modulation]:
    """Cut [..., 6 D] into what attention and what the MLP uses."""
    parts = m.float().chunk(6, dim=-1)
    return Modulation(*parts[:3]), Modulation(*parts[3:])


def per_token(m: Tensor) -> Tensor:
    """Let a vector per sample [B, D] meet tokens [B, S, D]; a shared [D] broadcasts as it is."""
    return m if m.dim() == 1 else m[:, None]


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = BLOCK_EPS) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift for x [B, S, D]; float32 inside, returned in x's dtype."""
    x32, width = x.float(), x.shape[-1:]
    if scale.dim() == 1:  # one fused pass, a quarter of the time of two
        return F.layer_norm(x32, width, 1 + scale.float(), shift.float(), eps).to(x.dtype)
    normed = F.layer_norm(x32, width, eps=eps)
    return torch.addcmul(per_token(shift.float()), normed, 1 + per_token(scale.float())).to(x.dtype)


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y * gate for x, y [B, S, D]; float32 inside, returned in x's dtype."""
    return torch.addcmul(x.float(), y.float(), per_token(gate.float())).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32 in and out of the statistics."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def qk_norm_rope(x: Tensor, weight: Tensor, rope: Rope | None, eps: float = BLOCK_EPS) -> Tensor:
    """RMSNorm per head, then the rotation if there is one; float32 inside, rounded once to x's dtype.

    x [B, S, H, E], weight [E], rope cosines and sines float32 [S, E / 2] (None for text).
    """
    y = rms_norm(x.float(), weight, eps)
    return (y if rope is None else rotate_pairs(y, *rope)).to(x.dtype)


def linear_float32(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer` in float32 on x's device, whatever its own dtype and device are, also under autocast."""
    weight, bias = (p.to(x.device, torch.float32) for p in (layer.weight, layer.bias))
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight, bias)


def time_features(timestep: Tensor) -> Tensor:
    """Sinusoids of t in 0..1000: [B] to float32 [B, 256], 128 cosines then 128 sines, frequencies 10000^(-k/128).

    Angles are float64: in float32 they are off by 5e-5 near t = 1000, the largest error of the whole model.
    """
    half = TIME_FEATURES // 2
    k = torch.arange(half, dtype=torch.float64, device=timestep.device)
    angles = timestep.double()[:, None] * 10000 ** (-k / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


class TimeEmbedder(nn.Module):
    """Timestep [B] to float32 [B, D]: every modulation hangs on this one vector, so it is kept whole."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear_1 = nn.Linear(TIME_FEATURES, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, timestep: Tensor) -> Tensor:
        return linear_float32(self.linear_2, F.silu(linear_float32(self.linear_1, time_features(timestep))))


class AdaNorm(nn.Module):
    """A time embedding [B, D] to `parts` modulations, float32 [B, parts * D]. The LayerNorm itself has no weights."""

    def __init__(self, dim: int, parts: int):
        super().__init__()
        self.linear = nn.Linear(dim, parts * dim)

    def forward(self, temb: Tensor) -> Tensor:
        return linear_float32(self.linear, F.silu(temb.float()))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class GELUProjection(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(dim, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class GatedProjection(nn.Module):
    """value * SiLU(gate); the first half of the projection is the value."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(dim, 2 * inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.silu(gate)


class FeedForward(nn.Module):
    """D -> inner -> D. Index 1 of `net` is the release's dropout, which holds no weights."""

    def __init__(self, dim: int, inner: int, gated: bool = False):
        super().__init__()
        first = GatedProjection(dim, inner) if gated else GELUProjection(dim, inner)
        self.net = nn.ModuleList([first, nn.Identity(), nn.Linear(inner, dim, bias=not gated)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


class SelfAttention(nn.Module):
    """The refiner's attention: text with text, no positions, no biases."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim, bias=False)])
        self.norm_q, self.norm_k = (RMSNorm(dim // heads, REFINER_EPS) for _ in range(2))

    def forward(self, c: Tensor) -> Tensor:
        q, k, v = (layer(c).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        return self.to_out[0](attend(self.norm_q(q), self.norm_k(k), v))


class RefinerBlock(nn.Module):
    """Text [B, L, D] to text: c += attention(norm(c)); c += mlp(norm(c))."""

    def __init__(self, dim: int, heads: int, inner: int):
        super().__init__()
        self.norm1 = RMSNorm(dim, REFINER_EPS)
        self.attn = SelfAttention(dim, heads)
        self.norm2 = RMSNorm(dim, REFINER_EPS)
        self.ff = FeedForward(dim, inner, gated=True)

    def forward(self, c: Tensor) -> Tensor:
        c = c + self.attn(self.norm1(c))
        return c + self.ff(self.norm2(c))


class JointAttention(nn.Module):
    """Video and text attend to both; each stream has its own projections, only video has positions."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.to_add_out = nn.Linear(dim, dim)
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            RMSNorm(dim // heads, BLOCK_EPS) for _ in range(4)
        )
        self.backend: str | None = None  # of `engine.attention.attend`
        self.pack()

    def streams(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """Queries, keys and values of the video, and of the text: each three share one tensor."""
        return (self.to_q, self.to_k, self.to_v), (self.add_q_proj, self.add_k_proj, self.add_v_proj)

    def pack(self) -> None:
        """Bring together what `streams` names."""
        for layers in self.streams():
            pack(layers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "JointAttention":
        """Moving or casting gives every parameter memory of its own."""
        super()._apply(fn, recurse)
        self.pack()
        return self

    def forward(self, x: Tensor, c: Tensor, rope: Rope, text_out: bool) -> tuple[Tensor, Tensor | None]:
        """x [B, N, D], c [B, L, D] to the same; without `text_out` the text only gives its keys and values."""
        q = self.project(self.to_q, self.norm_q, x, rope)
        k = torch.cat(
            (self.project(self.to_k, self.norm_k, x, rope), self.project(self.add_k_proj, self.norm_added_k, c)), dim=1
        )
        v = torch.cat((self.to_v(x), self.add_v_proj(c)), dim=1).unflatten(-1, (self.heads, -1))
        if not text_out:
            return self.to_out[0](attend(q, k, v, self.backend)), None
        q = torch.cat((q, self.project(self.add_q_proj, self.norm_added_q, c)), dim=1)
        x, c = attend(q, k, v, self.backend).split((x.shape[1], c.shape[1]), dim=1)
        return self.to_out[0](x), self.to_add_out(c)

    def project(self, layer: nn.Linear, norm: RMSNorm, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Queries or keys [B, S, H, E] of a stream, normed and turned."""
        return qk_norm_rope(layer(x).unflatten(-1, (self.heads, -1)), norm.weight, rope, norm.eps)


class TransformerBlock(nn.Module):
    """Two streams, joint attention, an MLP each. The six video modulations come from outside: they depend on time
    alone, so a denoising loop computes them once for its schedule. Those of the text are constants."""

    def __init__(self, dim: int, heads: int, inner: int, context_inner: int):
        super().__init__()
        self.norm1 = AdaNorm(dim, 6)
        self.scale_shift_table_context = nn.Parameter(torch.zeros(6 * dim))
        self.attn = JointAttention(dim, heads)
        self.ff = FeedForward(dim, inner)
        self.ff_context = FeedForward(dim, context_inner)
        # The context in which its weights are on the device; `engine.offload` puts another in its place.
        self.visit: Callable[[], AbstractContextManager] = nullcontext

    def forward(
        self, x: Tensor, c: Tensor, modulation: Tensor, rope: Rope, text_out: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, N, D], c [B, L, D], modulation float32 [6 D] or [B, 6 D]; the last block needs no `text_out`."""
        attn, mlp = split_modulation(modulation)
        attn_c, mlp_c = split_modulation(self.scale_shift_table_context)
        y, z = self.attn(modulate(x, attn.shift, attn.scale), modulate(c, attn_c.shift, attn_c.scale), rope, text_out)
        x = add_gated(x, y, attn.gate)
        x = add_gated(x, self.ff(modulate(x, mlp.shift, mlp.scale)), mlp.gate)
        if not text_out:
            return x, None
        c = add_gated(c, z, attn_c.gate)
        return x, add_gated(c, self.ff_context(modulate(c, mlp_c.shift, mlp_c.scale)), mlp_c.gate)
