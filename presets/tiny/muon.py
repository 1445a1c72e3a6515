"""Muon (Jordan et al., 2024) for the matrices of the blocks: momentum, made orthogonal by five Newton-Schulz steps.

Matrices of one shape are stacked, so that a step is a few batched products. Updates are scaled to AdamW's usual size
(0.2 a weight, Liu et al., 2025), so that one learning rate serves both optimisers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] to matrices whose singular values are near 1; bf16 on a GPU, which suffices for it."""
    a, b, c = COEFFICIENTS
    # Many CPUs emulate bf16, a hundred times slower than float32.
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """step() reads .grad of the given matrices; `rate` is set by the caller before each step."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.momenta = {shape: [torch.zeros_like(p) for p in group] for shape, group in self.groups.items()}
        self.momentum, self.decay, self.rate = momentum, decay, 0.0

    @torch.no_grad()
    def step(self) -> None:
        for shape, group in self.groups.items():
            gradients = [p.grad for p in group]
            torch._foreach_lerp_(self.momenta[shape], gradients, 1 - self.momentum)
            ahead = torch._foreach_lerp(gradients, self.momenta[shape], self.momentum)
            updates = orthogonalise(torch.stack(ahead)).float().unbind(0)
            torch._foreach_mul_(group, 1 - self.rate * self.decay)
            torch._foreach_add_(group, updates, alpha=-self.rate * 0.2 * max(shape) ** 0.5)
