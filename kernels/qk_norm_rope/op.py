"""Queries, keys and values of both streams in the joint layout [video; text], q and k normed, the video's turned.

float32 statistics and rotation, rounded once. Where the products already lie in the joint tensor nothing is copied:
q and k are normed in place and the values stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import launch
from kernels.checks import FLOATS, check_device, check_dtype, check_inner_stride, check_shape
from kernels.qk_norm_rope import reference
from kernels.qk_norm_rope.reference import Norms, Rope


def qk_norm_rope(
    video: Tensor,
    text: Tensor,
    norms: Norms,
    rope: Rope,
    eps: float = 1e-6,
    out: Tensor | None = None,
    text_queries: bool = True,
) -> Tensor:
    """Returns `out` [B, N + L, 3, H, E]: queries, keys, values; video first, then text.

    video [B, N, 3, H, E] and text [B, L, 3, H, E]: the products, bf16, fp16 or fp32; rope: cosines and sines, float32
    [N, E / 2]. out: None for a new tensor; video and text may be its two parts, which is the fast way. text_queries:
    False leaves the text's queries unread and unwritten. Any strides but the last. Raises ValueError for what does
    not fit.
    """
    _check(video, text, norms, rope)
    if out is None:
        shape = (len(video), video.shape[1] + text.shape[1], *video.shape[2:])
        out = torch.empty(shape, dtype=video.dtype, device=video.device)
    _check_out(video, text, out)
    copy_values = not _in_place(video, text, out)
    if launch.lack(video.device):
        return _by_reference(video, text, norms, rope, eps, out, text_queries, copy_values)
    from kernels.qk_norm_rope import kernel

    return kernel.run(video, text, norms, rope, eps, out, text_queries, copy_values)


def _in_place(video: Tensor, text: Tensor, out: Tensor) -> bool:
    """Whether the products are the parts of `out`, so that the values are where they belong."""
    n = video.shape[1]
    pairs = (video, out[:, :n]), (text, out[:, n:])
    return all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() for a, b in pairs)


def _by_reference(
    video: Tensor,
    text: Tensor,
    norms: Norms,
    rope: Rope,
    eps: float,
    out: Tensor,
    text_queries: bool,
    copy_values: bool,
) -> Tensor:
    q, k = reference.qk_norm_rope(video, text, norms, rope, eps)
    if copy_values:
        out[:, :, 2] = torch.cat((video[:, :, 2], text[:, :, 2]), dim=1)
    queries = out.shape[1] if text_queries else video.shape[1]
    out[:, :queries, 0] = q[:, :queries]
    out[:, :, 1] = k
    return out


def _check(video: Tensor, text: Tensor, norms: Norms, rope: Rope) -> None:
    check_shape("video", video, [-1, -1, 3, -1, -1])
    batch, tokens, _, heads, size = video.shape
    if size % 2:
        raise ValueError(f"the head size is {size}, it must be even: RoPE turns pairs")
    check_shape("text", text, [batch, -1, 3, heads, size])
    check_dtype("video", video, *FLOATS)
    check_dtype("text", text, video.dtype)
    for name, weight in norms._asdict().items():
        check_shape(f"norms.{name}", weight, [size])
        check_dtype(f"norms.{name}", weight, *FLOATS)
    for name, table in zip(("cosines", "sines"), rope, strict=True):
        check_shape(name, table, [tokens, size // 2])
        check_dtype(name, table, torch.float32)
    tensors = {"text": text, "cosines": rope[0], "sines": rope[1], **norms._asdict()}
    check_device(video.device, **tensors)
    check_inner_stride(video=video, **tensors)


def _check_out(video: Tensor, text: Tensor, out: Tensor) -> None:
    check_shape("out", out, [len(video), video.shape[1] + text.shape[1], *video.shape[2:]])
    check_dtype("out", out, video.dtype)
    check_device(video.device, out=out)
    check_inner_stride(out=out)
