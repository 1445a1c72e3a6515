"""What one request remembers between passes, and whose rows are beside its own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.bands import Rows
from kernels.vae_decode.plan import Plan
from kernels.vae_decode.winograd import SIZE


def beside(rows: Rows, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The neighbours' rows next to x [t, h, w, c]: above and below, each [t, 1, w, c], None beyond the picture."""
    if not rows.halo:
        return None, None
    edges = x if x.shape[1] == 1 else torch.stack((x[:, 0], x[:, -1]), 1)
    target = x.new_empty(x.shape[0], edges.shape[1] + 2, *x.shape[2:])
    rows.fill(target, lambda a, b: target[:, 1 + a : 1 + b].copy_(edges[:, a:b]))
    return (None if rows.above is None else target[:, :1]), (None if rows.below is None else target[:, -1:])


class State:
    """For each causal convolution its last two input frames; which layers have had their first frame; how many latent
    frames have come. Drop it and nothing is left of the request."""

    def __init__(self, plan: Plan, rows: Rows | None = None) -> None:
        self.plan, self.rows = plan, rows or Rows()
        self.latents = 0
        self._histories: dict[str, Tensor] = {}
        self._started: set[str] = set()

    def first(self, name: str) -> bool:
        """True the first time a name is asked for."""
        if name in self._started:
            return False
        self._started.add(name)
        return True

    def history(self, name: str, like: Tensor, halo: int = 1) -> Tensor:
        """[2, h + 2 halo, w, c] for inputs like [t, h, w, c], halo rows included, zeros at the start; replaced in
        place."""
        _, h, w, c = like.shape
        if name not in self._histories:
            self._histories[name] = like.new_zeros(2, h + 2 * halo, w, c)
        return self._histories[name]

    def admit(self, latents: int) -> None:
        """Count the latent frames of a pass. ValueError where it would cut a tile of a level in two."""
        if self.latents > 1 and (self.latents - 1) % SIZE:
            raise ValueError(
                f"a pass began after {self.latents} latent frames, inside a tile; only the last pass may end elsewhere "
                "than after 1, 5, 9, ... latent frames"
            )
        self.latents += latents

    @property
    def bytes(self) -> int:
        """What the histories hold."""
        return sum(history.nbytes for history in self._histories.values())
