"""The Triton kernel: a few tokens with all their heads to a program, queries and keys loaded together.

Imported only where it runs, because it needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.qk_norm_rope.reference import Norms, Rope


class Size(NamedTuple):
    """tokens, heads: of a program; warps: that share them."""

    tokens: int
    heads: int
    warps: int


def launch_size(heads: int, head_size: int) -> Size:
    """4096 values of q and as many of k to a program of four warps: sixteen bytes, eight times for each thread."""
    block = triton.next_power_of_2(head_size)
    taken = min(triton.next_power_of_2(heads), max(1, 4096 // block))
    tokens = max(1, min(16, 4096 // (taken * block)))
    return Size(tokens, taken, max(1, min(4, tokens * taken * block // 1024)))


@triton.jit
def normed(x, weight, eps, SIZE: tl.constexpr):
    """RMSNorm over the last axis; what lies beyond the head is zero and stays so."""
    mean = tl.sum(x * x, axis=2, keep_dims=True) / SIZE
    return x * tl.rsqrt(mean + eps) * weight


@triton.jit
def turned(x, cos, sin, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Adjacent pairs turned: a thread holds whole pairs, so nothing moves between threads."""
    a, b = tl.split(tl.reshape(x, (TOKENS, HEADS, BLOCK // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (TOKENS, HEADS, BLOCK))


@triton.jit
def stream(
    qkv,
    out,
    weight_q,
    weight_k,
    cosines,
    sines,
    token,
    tokens,
    head,
    heads,
    qkv_token,
    qkv_part,
    qkv_head,
    out_token,
    out_part,
    out_head,
    cos_token,
    sin_token,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    QUERIES: tl.constexpr,
    COPY_VALUES: tl.constexpr,
):
    """One stream's share of a program; `qkv` and `out` point to the stream's first token of this sample."""
    token, head = token[:, None, None], head[None, :, None]
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    mask = (token < tokens) & (head < heads) & inside[None, None, :]
    source = qkv + token * qkv_token + head * qkv_head + column[None, None, :]
    target = out + token * out_token + head * out_head + column[None, None, :]

    # Every load before the first sum, so that all of them are on their way at once.
    if QUERIES:
        q = tl.load(source, mask=mask, other=0.0)
    k = tl.load(source + qkv_part, mask=mask, other=0.0)
    if COPY_VALUES:
        v = tl.load(source + 2 * qkv_part, mask=mask, other=0.0)
        tl.store(target + 2 * out_part, v, mask=mask)
    if ROTATE:
        pair = tl.arange(0, BLOCK // 2)[None, None, :]
        there = (token < tokens) & (pair < SIZE // 2)
        cos = tl.load(cosines + token * cos_token + pair, mask=there, other=0.0)
        sin = tl.load(sines + token * sin_token + pair, mask=there, other=0.0)
    if QUERIES:
        weight = tl.load(weight_q + column, mask=inside, other=0.0).to(tl.float32)[None, None, :]
        q = normed(q.to(tl.float32), weight, eps, SIZE)
        if ROTATE:
            q = turned(q, cos, sin, TOKENS, HEADS, BLOCK)
        tl.store(target, q.to(out.dtype.element_ty), mask=mask)
    weight = tl.load(weight_k + column, mask=inside, other=0.0).to(tl.float32)[None, None, :]
    k = normed(k.to(tl.float32), weight, eps, SIZE)
    if ROTATE:
        k = turned(k, cos, sin, TOKENS, HEADS, BLOCK)
    tl.store(target + out_part, k.to(out.dtype.element_ty), mask=mask)


# The counts of tokens change with every request; a kernel of its own for some would be compiled during one.
@triton.jit(do_not_specialize=["video_tokens", "text_tokens"])
def qk_norm_rope_kernel(
    video,
    text,
    video_out,
    text_out,
    norm_q,
    norm_k,
    norm_added_q,
    norm_added_k,
    cosines,
    sines,
    video_tokens,
    text_tokens,
    heads,
    video_batch,
    video_token,
    video_part,
    video_head,
    text_batch,
    text_token,
    text_part,
    text_head,
    out_batch,
    out_token,
    out_part,
    out_head,
    cos_token,
    sin_token,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TEXT_QUERIES: tl.constexpr,
    COPY_VALUES: tl.constexpr,
):
    """Programs of a sample: the video's tokens first, then the text's."""
    program = tl.program_id(0).to(tl.int64)  # a whole clip has more than 2^31 values
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    video_blocks = tl.cdiv(video_tokens, TOKENS)
    blocks = video_blocks + tl.cdiv(text_tokens, TOKENS)
    sample, block = program // blocks, program % blocks
    if block < video_blocks:
        token = block * TOKENS + tl.arange(0, TOKENS)
        first, target = video + sample * video_batch, video_out + sample * out_batch
        stream(
            first, target, norm_q, norm_k, cosines, sines, token, video_tokens, head, heads,
            video_token, video_part, video_head, out_token, out_part, out_head, cos_token, sin_token, eps,
            SIZE, BLOCK, TOKENS, HEADS, True, True, COPY_VALUES,
        )  # fmt: skip
    else:
        token = (block - video_blocks) * TOKENS + tl.arange(0, TOKENS)
        first, target = text + sample * text_batch, text_out + sample * out_batch
        stream(
            first, target, norm_added_q, norm_added_k, cosines, sines, token, text_tokens, head, heads,
            text_token, text_part, text_head, out_token, out_part, out_head, cos_token, sin_token, eps,
            SIZE, BLOCK, TOKENS, HEADS, False, TEXT_QUERIES, COPY_VALUES,
        )  # fmt: skip


def run(
    video: Tensor,
    text: Tensor,
    norms: Norms,
    rope: Rope,
    eps: float,
    out: Tensor,
    text_queries: bool,
    copy_values: bool,
    size: Size | None = None,
) -> Tensor:
    """Fill `out` and return it. Shapes and strides as `op.py` checks them."""
    batch, tokens, _, heads, head_size = video.shape
    size = size or launch_size(heads, head_size)
    blocks = triton.cdiv(tokens, size.tokens) + triton.cdiv(text.shape[1], size.tokens)
    launch(
        qk_norm_rope_kernel,
        (batch * blocks, triton.cdiv(heads, size.heads)),
        video.device,
        *(video, text, out, out[:, tokens:], *norms, *rope, tokens, text.shape[1], heads),
        *(*video.stride()[:4], *text.stride()[:4], *out.stride()[:4], rope[0].stride(0), rope[1].stride(0)),
        eps,
        SIZE=head_size,
        BLOCK=triton.next_power_of_2(head_size),
        TOKENS=size.tokens,
        HEADS=size.heads,
        TEXT_QUERIES=text_queries,
        COPY_VALUES=copy_values,
        num_warps=size.warps,
    )
    return out
