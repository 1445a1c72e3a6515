"""`python -m kernels.qk_norm_rope.bench`: share of the copy bandwidth; `--sweep` tries other launch sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.qk_norm_rope.op import Norms, qk_norm_rope
from kernels.timing import Pass, nbytes

TEXT = 512
SIZES = ((1, 8), (1, 16), (1, 32), (2, 16), (2, 32), (4, 8))  # tokens, heads
WARPS = (2, 4, 8)


def inputs(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """The joint products [1, N + L, 3, H, E], their two parts, and the rest of the arguments."""
    head = min(128, width)
    qkv = torch.empty(1, tokens + TEXT, 3, width // head, head, dtype=dtype, device=device).normal_()
    norms = Norms(*torch.empty(4, head, device=device).normal_().to(dtype))
    angles = torch.empty(tokens, head // 2, device=device).normal_()
    return qkv, qkv[:, :tokens], qkv[:, tokens:], norms, (angles.cos(), angles.sin())


def passes(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Pass]:
    """In place, as the blocks use it, and into another tensor, values included."""
    qkv, video, text, norms, rope = inputs(tokens, width, dtype, device)
    out = torch.empty_like(qkv)
    small = nbytes(*norms, *rope)
    return [
        Pass("qk_norm_rope", lambda: qk_norm_rope(video, text, norms, rope, out=qkv), 4 * qkv.nbytes // 3 + small),
        Pass("qk_norm_rope_copied", lambda: qk_norm_rope(video, text, norms, rope, out=out), 2 * qkv.nbytes + small),
    ]


def sweep(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    """Every launch size, that of `launch_size` among them."""
    from kernels.qk_norm_rope import kernel

    qkv, video, text, norms, rope = inputs(tokens, width, dtype, device)
    for block, heads in SIZES:
        for warps in WARPS:
            size = kernel.Size(block, heads, warps)

            def call(size=size):
                kernel.run(video, text, norms, rope, 1e-6, qkv, True, False, size)

            yield Pass(f"tokens={block} heads={heads} warps={warps}", call, 4 * qkv.nbytes // 3 + nbytes(*rope))


if __name__ == "__main__":
    from kernels.kernel_bench import main

    main("qk_norm_rope", passes, sweep)
