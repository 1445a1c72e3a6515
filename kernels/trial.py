"""The smallest Triton kernel, to try whether any starts. Imported only where it runs, because it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import launch

COUNT = 32


@triton.jit
def double_kernel(x, COUNT: tl.constexpr):
    place = x + tl.arange(0, COUNT)
    tl.store(place, 2 * tl.load(place))


def run(device: torch.device) -> bool:
    """Start it; whether it gave what it should."""
    x = torch.ones(COUNT, device=device)
    launch(double_kernel, (1,), device, x, COUNT=COUNT)
    return bool((x == 2).all())
