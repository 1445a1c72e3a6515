"""The blocks of the transformer in as few passes over memory as they need. `set_fused_kernels` switches it on.

The formulas are those of `engine.layers`, arranged otherwise: one product makes queries, keys and values of a stream,
in the joint layout, where they are normed and turned in place; each gated residual is added by the pass that
normalises for what comes next, also across the border of two blocks; GELU is part of its product where PyTorch has
that. In fp8 those passes also quantise what a product takes. Every product is in one of the functions at the end.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import fp8
from engine.attention import TOLERANCE, Shape, attend, waves
from engine.layers import BLOCK_EPS, FeedForward, JointAttention, Modulation, Rope, TransformerBlock
from engine.packed import joint, packable
from kernels import launch
from kernels.choose import Choice, Path, choose
from kernels.modulate import reference as modulate_reference
from kernels.modulate.op import gated_modulate, modulate
from kernels.qk_norm_rope import reference as qk_norm_rope_reference
from kernels.qk_norm_rope.op import Norms, qk_norm_rope
from kernels.quantise_rows.op import gelu_quantise_rows
from kernels.quantise_rows.reference import Quantised

log = logging.getLogger(__name__)


def choose_fused(wanted: str, device: torch.device, shape: Shape | None = None) -> Choice:
    """What `DenoiseSettings.fused_kernels` means on a device. Raises RequestError for "on" where it can't be.

    shape: of the model; with it the kernels are tried before they are chosen, which also compiles them.
    """
    lack = launch.lack(device)
    if not lack and shape and wanted != "off":
        lack = fault(device, shape)
    fused = Path("on", "fused Triton kernels", lack=lack)
    return choose("fused_kernels", (fused, Path("off", "PyTorch operations")), wanted)


@functools.cache
def fault(device: torch.device, shape: Shape) -> str | None:
    """Why the kernels can't be used: each is started once at the model's widths and compared with its reference."""
    try:
        distances = _trial(device, shape)
    except Exception as error:  # no C compiler for Triton's launcher, a driver too old, a kernel that needs too much
        log.warning("the fused kernels failed their trial on %s", device, exc_info=True)
        return f"the kernels failed their trial: {type(error).__name__}: {error}".splitlines()[0]
    wrong = [
        f"{name} by {distance:.1e}" for name, distance in distances.items() if not distance <= TOLERANCE[shape.dtype]
    ]
    return f"the kernels gave wrong values: {', '.join(wrong)}" if wrong else None


def _trial(device: torch.device, shape: Shape) -> dict[str, float]:
    """Relative L2 of each kernel against its reference."""
    qkv = waves(device, shape, 13)
    x, y, other = (part.flatten(2) for part in qkv.unbind(2))
    vectors = other[0, :3].float()
    norms = Norms(*qkv[0, 9:, 2, 0])
    angles = torch.outer(torch.arange(9.0, device=device), vectors[0, : shape.head_size // 2])
    rope = angles.cos(), angles.sin()
    arguments = qkv[:, :9], qkv[:, 9:], norms, rope
    results = {
        "modulate": (modulate(x, *vectors[:2]), modulate_reference.modulate(x, *vectors[:2], BLOCK_EPS)),
        "gated_modulate": (
            torch.cat(gated_modulate(x, y, *vectors)),
            torch.cat(modulate_reference.gated_modulate(x, y, *vectors, BLOCK_EPS)),
        ),
        "qk_norm_rope": (
            qk_norm_rope(*arguments)[:, :, :2],
            torch.stack(qk_norm_rope_reference.qk_norm_rope(*arguments, BLOCK_EPS), dim=2),
        ),
    }
    return {
        name: float((found.float() - truth.float()).norm() / truth.float().norm())
        for name, (found, truth) in results.items()
    }


Rows = Tensor | Quantised  # [B, S, D], as a product takes it


class Streams(NamedTuple):
    """Between two blocks: the residual of each stream, and what its next block's attention takes."""

    x: Tensor  # video [B, N, D]
    x_in: Rows
    c: Tensor  # text [B, L, D]
    c_in: Rows


class Shifts(NamedTuple):
    """A block's modulations, of one stream."""

    attn: Modulation
    mlp: Modulation


class Then(NamedTuple):
    """How a stream is normalised for the layer that comes next. quantise: that layer multiplies in fp8."""

    shift: Tensor
    scale: Tensor
    quantise: bool = False


def attention_of(block: TransformerBlock, m: Shifts) -> Then:
    return Then(m.attn.shift, m.attn.scale, in_fp8(block.attn.to_q))


def in_fp8(layer: nn.Module) -> bool:
    return isinstance(layer, fp8.Fp8Linear)


def run_blocks(
    blocks: Sequence[TransformerBlock],
    x: Tensor,
    c: Tensor,
    modulations: Sequence[Tensor],
    out: tuple[Tensor, Tensor],
    rope: Rope,
    enough: Callable[[Tensor, Tensor], bool] | None = None,
) -> Tensor | None:
    """Tokens [B, N, D] and text [B, L, D] through all blocks and the LayerNorm behind them, to [B, N, D].

    modulations: of the video, a block each, float32 [6 D] or [B, 6 D]; out: shift and scale of that LayerNorm.
    enough: asked with the video stream before and after the first of several blocks; if it says so, the result is None.
    """
    video = [shifts(m) for m in modulations]
    text = [shifts(block.scale_shift_table_context) for block in blocks]
    streams = start(x, c, attention_of(blocks[0], video[0]), attention_of(blocks[0], text[0]))
    last = len(blocks) - 1
    for i in range(last):
        after = tuple(attention_of(blocks[i + 1], m[i + 1]) for m in (video, text))
        before = streams.x if i == 0 else None  # else it would be held until the next block has its peak
        with blocks[i].visit():
            streams = run_block(blocks[i], streams, video[i], text[i], after, rope)
        if i == 0 and enough is not None and enough(before, streams.x):
            return None
    with blocks[last].visit():
        return run_last(blocks[last], streams, video[last], Then(*out), rope)


def shifts(m: Tensor) -> Shifts:
    """[..., 6 D] in six, as they lie."""
    parts = m.detach().chunk(6, dim=-1)
    return Shifts(Modulation(*parts[:3]), Modulation(*parts[3:]))


def start(x: Tensor, c: Tensor, video: Then, text: Then) -> Streams:
    return Streams(x, normalised(x, video), c, normalised(c, text))


def normalised(x: Tensor, then: Then) -> Rows:
    return modulate(x, then.shift, then.scale, BLOCK_EPS, then.quantise)


def run_block(
    block: TransformerBlock, s: Streams, video: Shifts, text: Shifts, after: tuple[Then, Then], rope: Rope
) -> Streams:
    """after: what the video and the text are normalised for at the end."""
    y, z = joint_attention(block.attn, s.x_in, s.c_in, rope)
    x, x_in = finish(s.x, y, block.ff, video, after[0])
    c, c_in = finish(s.c, z, block.ff_context, text, after[1])
    return Streams(x, x_in, c, c_in)


def run_last(block: TransformerBlock, s: Streams, video: Shifts, after: Then, rope: Rope) -> Rows:
    """The last block: its text only gives keys and values."""
    y, _ = joint_attention(block.attn, s.x_in, s.c_in, rope, text_out=False)
    return finish(s.x, y, block.ff, video, after)[1]


def finish(x: Tensor, y: Tensor, ff: FeedForward, m: Shifts, after: Then) -> tuple[Tensor, Rows]:
    """A stream behind its attention's output y: the new residual, and what the next layer takes of it."""
    inside = Then(m.mlp.shift, m.mlp.scale, in_fp8(ff.net[0].proj))
    x, x_in = add_and_normalise(x, y, m.attn.gate, inside)
    return add_and_normalise(x, feed_forward(ff, x_in), m.mlp.gate, after)


def add_and_normalise(x: Tensor, y: Tensor, gate: Tensor, then: Then) -> tuple[Tensor, Rows]:
    return gated_modulate(x, y, gate, then.shift, then.scale, BLOCK_EPS, then.quantise)


# ---- the products


def joint_attention(
    attn: JointAttention, x: Rows, c: Rows, rope: Rope, text_out: bool = True
) -> tuple[Tensor, Tensor | None]:
    """As `JointAttention.forward`."""
    n = x.shape[1]
    qkv = joint_qkv(attn, x, c, text_out)
    norms = Norms(*(norm.weight for norm in (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)))
    qk_norm_rope(qkv[:, :n], qkv[:, n:], norms, rope, BLOCK_EPS, out=qkv, text_queries=text_out)
    q, k, v = qkv.unbind(2)
    y = attend(q if text_out else q[:, :n], k, v, attn.backend)
    return attn.to_out[0](y[:, :n]), attn.to_add_out(y[:, n:]) if text_out else None


def joint_qkv(attn: JointAttention, x: Rows, c: Rows, text_queries: bool) -> Tensor:
    """[B, N + L, 3, H, E]: one product for the video, one for the text, each written where attention reads it."""
    batch, n, dim = x.shape
    qkv = attn.to_q.bias.new_empty(batch, n + c.shape[1], 3 * dim)
    video, text = attn.streams()
    first = 0 if text_queries else 1
    project(video, x, qkv[:, :n])
    project(text[first:], c, qkv[:, n:, first * dim :])
    return qkv.view(batch, -1, 3, attn.heads, dim // attn.heads)


def project(layers: Sequence[nn.Module], x: Rows, out: Tensor) -> None:
    """All layers of x [B, S, D] side by side into `out` [B, S, outputs of all], in one product if they can share it."""
    if not packable(layers):
        for layer, part in zip(layers, out.chunk(len(layers), dim=-1), strict=True):
            part.copy_(layer(x))
        return
    if in_fp8(layers[0]):
        return fp8.project(layers, x, out)
    weight, bias = joint(layers)
    for tokens, rows in zip(x, out, strict=True):
        torch.addmm(bias, tokens, weight.T, out=rows)


def feed_forward(ff: FeedForward, x: Rows) -> Tensor:
    up, down = ff.net[0].proj, ff.net[2]
    if not in_fp8(down):
        return down(gelu_linear(up, x))
    inner = up(x)
    rows = gelu_quantise_rows(inner.flatten(0, -2))
    return down(Quantised(*(part.view(*inner.shape[:-1], -1) for part in rows)))


def gelu_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """GELU, tanh approximation, of a linear layer."""
    if type(layer) is not nn.Linear or not gelu_in_product(x.device, x.dtype):
        return F.gelu(layer(x), approximate="tanh")
    y = torch._addmm_activation(layer.bias, x.flatten(0, 1), layer.weight.T, use_gelu=True)
    return y.view(*x.shape[:-1], -1)


@functools.cache
def gelu_in_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product may apply GELU itself here: only where that is the tanh approximation, which is tried out.

    On CUDA it is cuBLASLt's epilogue, of the tanh form; on a CPU PyTorch takes the exact form.
    """
    if device.type != "cuda":
        return False
    one, zero = torch.eye(64, device=device, dtype=dtype), torch.zeros(64, device=device, dtype=dtype)
    return is_tanh_gelu(lambda x: torch._addmm_activation(zero, x, one, use_gelu=True), device, dtype)


def is_tanh_gelu(function: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Tell the two forms apart where they differ most, by 5e-4 at -2.2, and where bf16 still shows it."""
    x = torch.linspace(-4, -1.8, 64, device=device).to(dtype).expand(64, 64).contiguous()
    found, plain = function(x).double(), F.gelu(x, approximate="tanh").double()
    tanh, erf = (F.gelu(x.double(), approximate=form) for form in ("tanh", "none"))
    near = (found - tanh).norm() <= 2 * (plain - tanh).norm() + 1e-3 * tanh.norm()
    return bool(near and (found - tanh).norm() < (found - erf).norm())
