"""How long a request will take here, from what this machine was measured to do."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.request import Request
from engine.shapes import latent_shape, video_tokens

TEXT_TOKENS = 64
# Text, first frame and file are small beside the rest; this much a video was seen on two cores.
OTHER_SECONDS = 2.0
SOME_STEPS = 8


@dataclass(frozen=True)
class Estimate:
    """Seconds by stage; basis: a sentence on what was measured."""

    denoise: float
    decode: float
    other: float
    basis: str

    @property
    def total(self) -> float:
        """Seconds from click to file."""
        return self.denoise + self.decode + self.other


@dataclass(frozen=True)
class Rates:
    """flops: floating-point operations a second in the transformer; voxels: latent positions decoded a second;
    speedups: by quality, how much faster than "full" a video was made here; a quality not in it was not measured."""

    flops: float
    voxels: float
    basis: str
    speedups: Mapping[str, float] = field(default_factory=dict)


def pass_flops(config: Any, frames: int, height: int, width: int) -> float:
    """Operations of one transformer pass over a video: products of the video stream and joint attention.

    config: `engine.mmdit.MMDiTConfig`. The text stream is too short to count.
    """
    width_model = config.num_attention_heads * config.attention_head_dim
    tokens = video_tokens(frames, height, width)
    linear = 2 * tokens * width_model**2 * (4 + 2 * config.mlp_ratio)
    attention = 4 * tokens * (tokens + TEXT_TOKENS) * width_model
    return config.num_layers * (linear + attention)


def request_flops(config: Any, request: Request) -> float:
    """Operations of a whole denoising run, both guidance branches."""
    branches = 2 if request.guidance > 1 else 1
    return request.steps * branches * pass_flops(config, request.frames, request.height, request.width)


def request_voxels(request: Request) -> int:
    """Latent positions to decode."""
    _, frames, height, width = latent_shape(request.frames, request.height, request.width)
    return frames * height * width


def estimate(config: Any, request: Request, rates: Rates) -> Estimate:
    """Seconds that a request will take at these rates."""
    return Estimate(
        denoise=request_flops(config, request) / rates.flops / rates.speedups.get(request.denoise.quality, 1.0),
        decode=request_voxels(request) / rates.voxels,
        other=OTHER_SECONDS,
        basis=rates.basis,
    )


def pace(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds that a step takes by the latest ones: the newest, or the mean of some where steps are skipped, since
    those alternate with whole ones. The first steps also warm caches up."""
    return statistics.fmean(seconds for seconds, _ in steps[-SOME_STEPS if any(s for _, s in steps) else -1 :])


def learn_denoise(
    rates: Rates, config: Any, request: Request, seconds: float, steps: Sequence[tuple[float, int]]
) -> Rates:
    """What a denoising run of so many seconds teaches. steps: of each, its seconds and the passes that it skipped."""
    basis, flops = "the last video made here", request_flops(config, request)
    if request.denoise.quality == "full":
        return dataclasses.replace(rates, flops=flops / seconds, basis=basis)
    # The first step warms caches up, and a step that skips on one branch only is neither one nor the other.
    whole = [each for each, skipped in steps if not skipped]
    full = len(steps) * statistics.median(whole[1:] or whole)
    speedups = {**rates.speedups, request.denoise.quality: full / seconds}
    return dataclasses.replace(rates, flops=flops / full, basis=basis, speedups=speedups)
