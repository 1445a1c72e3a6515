"""How the work is cut so that it fits: frames a slice, bytes a band, and the peak that follows, before anything runs.

A plan changes when and where things are computed, never what: see `winograd` for time and `layers` for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ResourceError
from kernels.vae_decode.winograd import PHASES, tiles

MIB, GIB = 2**20, 2**30
LATENTS = 4  # latent frames of a pass


class Level(NamedTuple):
    """One level of a decoder. inputs, outputs: channels; factor: frames that its upsampler makes of one (0: none)."""

    inputs: int
    outputs: int
    factor: int


@dataclass(frozen=True)
class Plan:
    """slices: frames that each level takes at once, multiples of four; work: bytes of a band's buffers."""

    slices: tuple[int, ...]
    work: int

    def band(self, row_bytes: int, products: float, h: int) -> int:
        """Rows of a band, all bands of nearly the same height. row_bytes: of one row of input; products: what comes out
        of it, relative to that."""
        most = max(2, int(self.work / (row_bytes * (1 + products))))
        return -(-h // -(-h // min(h, most)))

    def frames_of(self, frame_bytes: int, t: int) -> int:
        """How many of t frames may be in work at once, at least one."""
        return max(1, min(t, self.work // frame_bytes))

    def __str__(self) -> str:
        frames = ", ".join(map(str, self.slices))
        return f"slices of {frames} frames, bands of {self.work // MIB} MiB"


# From the usual one down. On an H200 slices of eight frames at the second level are no faster, and bands of 256 MiB
# start more kernels than the host can keep up with (benchmarks.md).
SLICES = (4, 4, 4, 4)
PLANS = tuple(Plan(SLICES, work * MIB) for work in (1024, 512, 256, 64))


def peak(plan: Plan, levels: Sequence[Level], held: int, h: int, w: int, size: int) -> int:
    """Bytes at the worst moment of a decode of any length. held: weights, histories and workspace; h, w: of the latents
    (or of a device's rows of them); size: bytes of a number.

    At every level its input waits while slices of it go up; on top, the level at work has its stream, the half-done
    block beside it and a band, or its stream, the enlarged frames and the phases of some.
    """
    frames, waiting, worst = LATENTS, 0, 0
    for level, most in zip(levels, plan.slices, strict=True):
        waiting += frames * h * w * level.inputs * size
        some = min(frames, most)
        stream = (some + 2) * h * w * level.outputs * size
        blocks = stream + some * h * w * level.outputs * size + _band(plan, level, some, h, w, size)
        enlarged = some * max(1, level.factor) * 4 * h * w * level.outputs * size if level.factor else 0
        one = 4 * (h + 1) * (w + 1) * level.outputs * size
        phases = stream + enlarged + max(one, plan.work) + some * h * w * level.outputs * size
        worst = max(worst, waiting + max(blocks, phases if level.factor else 0))
        if level.factor:
            frames, h, w = some * level.factor, 2 * h, 2 * w
    return held + worst


def _band(plan: Plan, level: Level, frames: int, h: int, w: int, size: int) -> int:
    """Buffers of a band at its widest: activations, the inputs and the products of their tiles; halo rows, two rows
    kept."""
    tiled = PHASES["time_width"] * tiles(frames) * tiles(w) / w
    row = int((frames + 2 + 2 * tiled) * w * max(level.inputs, level.outputs) * size)
    return min(plan.work, h * row) + 3 * row


def least(peaks: Sequence[int]) -> str:
    """The smallest that is possible, in words."""
    return f"{min(peaks) / GIB:.1f} GiB"


def choose(peaks: Sequence[int], limit: int | None, free: int | None, precision: str) -> int:
    """Index of the first plan that fits. limit: bytes that the user allows; free: bytes that the device has; precision:
    of the decoder whose peaks these are, for messages.

    Raises ResourceError where even the smallest needs more.
    """
    allowed = min(value for value in (limit, free, 1 << 60) if value is not None)
    for index, needed in enumerate(peaks):
        if needed <= allowed:
            return index
    whose = f"memory_gib allows {limit / GIB:.1f} GiB" if allowed == limit else f"{allowed / GIB:.1f} GiB are free"
    raise ResourceError(
        f"Decoding at this size in {precision} needs at least {least(peaks)}, {whose}. Allow more, free memory, or "
        "decode a smaller video."
    )
