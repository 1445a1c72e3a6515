"""What one request remembers between passes."""

from __future__ import annotations

from torch import Tensor

from engine.bands import Rows
from kernels.vae_decode.plan import Plan
from kernels.vae_decode.winograd import SIZE


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
