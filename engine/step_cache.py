"""Skip the blocks of steps at which they would say what they said before.

The first block runs at every step, and what it adds to the video stream is the witness: while that differs little from
what it added when all blocks last ran, the velocity is extrapolated from the last two that were computed (a straight
line in sigma) and the other blocks are skipped. The idea of watching the first block is that of first-block caching
(ParaAttention); extrapolating the velocity instead of repeating a residual is ours: engine/benchmarks.md compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.settings import Quality


@dataclass(frozen=True)
class Policy:
    """threshold: of the relative L1 change of what the first block adds; first, last: so many steps are computed."""

    threshold: float
    first: int = 3
    last: int = 1


POLICIES: dict[Quality, Policy] = {"balanced": Policy(0.1), "draft": Policy(0.2)}
"""Chosen by measurement on the small model (engine/benchmarks.md)."""


class StepCache:
    """What one guidance branch remembers over one run of `steps` steps; never used for a second run.

    At step k the model asks `recalls` after its first block, then takes `velocity`, or computes it and calls `keep`.
    """

    def __init__(self, policy: Policy, sigmas: list[float]) -> None:
        self.policy, self.sigmas = policy, sigmas
        self.recalled = 0
        # Adds up what the devices that share the tokens found; by default there is one.
        self.total: Callable[[Tensor], Tensor] = lambda sums: sums
        self._witness: Tensor | None = None
        self._known: list[tuple[float, Tensor]] = []

    def recalls(self, k: int, before: Tensor, after: Tensor) -> bool:
        """Whether step k need not be computed. before, after [B, N, D]: the video stream around the first block."""
        added = after - before
        steps = len(self.sigmas) - 1
        free = self.policy.first <= k < steps - self.policy.last and len(self._known) == 2
        if free and self._change(added) < self.policy.threshold:
            self.recalled += 1
            return True
        self._witness = added
        return False

    def keep(self, k: int, velocity: Tensor) -> None:
        """Remember what was computed at step k."""
        self._known = [*self._known[-1:], (self.sigmas[k], velocity.float())]

    def velocity(self, k: int) -> Tensor:
        """Of step k, float32: the straight line in sigma through the last two that were computed."""
        (earlier, a), (later, b) = self._known
        return torch.lerp(a, b, (self.sigmas[k] - earlier) / (later - earlier))

    def _change(self, added: Tensor) -> float:
        """Relative L1 distance from the witness; NaN counts as changed, since no comparison with it is true."""
        sums = torch.stack([x.abs().sum(dtype=torch.float32) for x in (added - self._witness, self._witness)])
        difference, size = self.total(sums)
        return float(difference / size)


def make_cache(quality: Quality, sigmas: list[float]) -> StepCache | None:
    """A fresh cache for one branch of one run over `sigmas` (steps + 1 levels); None for "full": nothing is skipped."""
    return StepCache(POLICIES[quality], sigmas) if quality in POLICIES else None
