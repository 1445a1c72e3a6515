"""One decode before it runs: checked latents, the path that was chosen, and the passes that the work is cut into."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import Cancelled, EngineError, NotFiniteError, RequestError
from engine.shapes import LATENT_CHANNELS, SPATIAL_FACTOR, video_frames

log = logging.getLogger(__name__)

TILE = {"built": 4, "portable": 4}  # latent frames whose convolutions are computed together, by path
PASSES = (1, 4)  # latent frames of the first pass and of every later one: the first frame is on the screen early


class Choice(NamedTuple):
    """path and precision that run, a sentence that says why, and how many devices share the rows."""

    path: str
    precision: str
    reason: str
    devices: int = 1


@dataclass(frozen=True)
class ChunkStats:
    """latents: latent frames of the pass; notes: what people should know before they see it, such as that another
    precision took over."""

    latents: int
    path: str
    precision: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FrameChunk:
    """frames: uint8 [t, H, W, 3] in memory of the decoder, valid until the second chunk after this one is asked for;
    start: index of the first."""

    start: int
    frames: np.ndarray
    stats: ChunkStats


class Plan:
    """One request, checked: its latents, the path that was chosen for it and its passes. Needs no weights.

    Raises RequestError or EngineError as `decode` does.
    """

    def __init__(
        self,
        latents: Tensor,
        choice: Choice,
        passes: Sequence[int] = PASSES,
        channels: int = LATENT_CHANNELS,
        memory_gib: float | None = None,
        asked: bool = True,
    ) -> None:
        """memory_gib: as in `DecodeSettings`; passes: paths built and portable lengthen them to whole tiles; asked:
        whether the precision was asked for by name."""
        self.choice, self.memory_gib, self.asked = choice, memory_gib, asked
        self.notes: tuple[str, ...] = ()
        self.latents = _checked(latents, channels)
        self.total = video_frames(self.latents.shape[2])
        self.height, self.width = (SPATIAL_FACTOR * n for n in self.latents.shape[3:])
        self.passes = _spans(self.latents.shape[2], passes, TILE.get(choice.path, 1))

    @property
    def longest(self) -> int:
        """Frames of the longest chunk."""
        return max(self.chunk(span)[1] for span in self.passes)

    def chunk(self, span: slice) -> tuple[int, int]:
        """First frame and number of frames that the latent frames of a pass decode to."""
        start = video_frames(span.start) if span.start else 0
        return start, video_frames(span.stop) - start

    def deliver(self, span: slice, frames: np.ndarray) -> FrameChunk:
        """The chunk of a pass, from its frames on the host."""
        stats = ChunkStats(span.stop - span.start, self.choice.path, self.choice.precision, self.notes)
        self.notes = ()
        return FrameChunk(self.chunk(span)[0], frames, stats)

    def noted(self, note: str, choice: Choice | None = None) -> Plan:
        """The same plan with a note for the next chunk, and another choice if one is given."""
        log.warning("%s", note)
        other = copy.copy(self)
        other.notes, other.choice = (*self.notes, note), choice or self.choice
        return other

    def not_finite(self, span: slice) -> NotFiniteError:
        """The error for a pass whose output holds NaN or infinity."""
        start, count = self.chunk(span)
        return NotFiniteError(
            f"Stage decode, chunk {self.passes.index(span)} (frames {start} to {start + count - 1}, path "
            f"{self.choice.path}, {self.choice.precision}): values that are not finite. The latents were finite, so "
            "the VAE's weights are damaged or this precision overflows; decode again with precision fp32 to tell "
            "which.",
            start,
        )

    def cancelled(self, span: slice) -> Cancelled:
        """The error that ends a run before this pass."""
        return Cancelled(f"Decoding was stopped after {self.chunk(span)[0]} of {self.total} frames.")


class Arrivals:
    """Passes on several devices, which overlap, as they end. ring: uint8 [n, longest, H, W, 3], for passes in turn;
    done: chunks that were delivered before and are not again."""

    def __init__(self, plan: Plan, ring: np.ndarray, done: int) -> None:
        self.plan, self.ring, self.done = plan, ring, done

    def of(self, answers: list[list[tuple[int, bool]]]) -> Iterator[FrameChunk]:
        """The chunks that every device has now finished. answers: of each, passes and whether their values were
        finite. NotFiniteError where some were not."""
        for ended in zip(*answers, strict=True):
            index = ended[0][0]
            span = self.plan.passes[index]
            if not all(finite for _, finite in ended):
                raise self.plan.not_finite(span)
            if index >= self.done:
                frames = self.ring[index % len(self.ring)][: self.plan.chunk(span)[1]]
                yield self.plan.deliver(span, frames)


def _checked(latents: Tensor, channels: int) -> Tensor:
    """The latents, or what is wrong with them."""
    shape = list(latents.shape)
    if len(shape) != 5 or shape[0] != 1 or shape[1] != channels or 0 in shape:
        raise RequestError(
            f"The decoder takes latents [1, {channels}, frames, height/16, width/16] of one video, not {shape}; "
            "decode the videos of a batch one after another."
        )
    if not latents.is_floating_point() or latents.is_meta:
        kind = f"{latents.dtype} on {latents.device}"
        raise RequestError(f"The decoder takes latents in fp32, bf16 or fp16 with numbers in them, not {kind}.")
    if not bool(torch.isfinite(latents).all()):
        raise EngineError("Stage denoise: the latents hold NaN or infinity, so decoding was not begun.")
    return latents


def _spans(latent_frames: int, passes: Sequence[int], tile: int) -> list[slice]:
    """Cut the latent frames into passes; the last length repeats. Passes end after 1, 1 + tile, 1 + 2 tile, ..."""
    if not passes or min(passes) < 1:
        raise RequestError(f"passes = {list(passes)}: each needs one latent frame or more; {list(PASSES)} is usual.")
    spans, start = [], 0
    while start < latent_frames:
        stop = start + passes[min(len(spans), len(passes) - 1)]
        stop = min(latent_frames, 1 + -(-(stop - 1) // tile) * tile)
        spans.append(slice(start, stop))
        start = stop
    return spans
