"""How long a request will take here and how much memory, from what this machine was measured to do."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.decode_cost import DecodeCost
from engine.request import Request
from engine.shapes import latent_shape, video_tokens

TEXT_TOKENS = 64
# Text, first frame and file are small beside the rest; this much a video was seen on two cores.
OTHER_SECONDS = 2.0
SOME_STEPS = 8
# Of what a pass holds at its peak, in vectors of the model's width a token, beside those of the MLP; and in copies of
# the latents in fp32. Seen on a CPU at 49 frames of 448 x 256 to 1248 x 704.
VECTORS, LATENT_COPIES = 13, 8
# Three buffers of 16 frames that the decoder hands out in turn.
RING_FRAMES = 48


@dataclass(frozen=True)
class Estimate:
    """Seconds by stage; basis: a sentence on what was measured; bytes: the most that will be held at once, with all
    that is loaded (of the device, or of this process on a CPU), None where that is not known."""

    denoise: float
    decode: float
    other: float
    basis: str
    bytes: int | None = None

    @property
    def total(self) -> float:
        """Seconds from click to file."""
        return self.denoise + self.decode + self.other


@dataclass(frozen=True)
class Rates:
    """flops: floating-point operations a second in the transformer; pass_seconds: what a pass takes beside those,
    whatever its size; positions: decoded a second, see `decode_work`; loaded: bytes that are held before any work,
    None where that is not known; unforeseen: the most bytes that were held here beyond what was reckoned; speedups: by
    quality, how much faster than "full" a video was made here; a quality not in it was not measured."""

    flops: float
    positions: float
    basis: str
    pass_seconds: float = 0.0
    loaded: int | None = None
    speedups: Mapping[str, float] = field(default_factory=dict)
    unforeseen: int = 0


# Before anything was measured. The first video says how much slower a machine is than one operation a second.
UNKNOWN = Rates(flops=1.0, positions=0.0, basis="nothing")


def pass_flops(config: Any, frames: int, height: int, width: int) -> float:
    """Operations of one transformer pass over a video: products of the video stream and joint attention.

    config: `engine.mmdit.MMDiTConfig`. The text stream is too short to count.
    """
    width_model = config.num_attention_heads * config.attention_head_dim
    tokens = video_tokens(frames, height, width)
    linear = 2 * tokens * width_model**2 * (4 + 2 * config.mlp_ratio)
    attention = 4 * tokens * (tokens + TEXT_TOKENS) * width_model
    return config.num_layers * (linear + attention)


def passes(request: Request) -> int:
    """Passes of the transformer, both guidance branches."""
    return request.steps * (2 if request.guidance > 1 else 1)


def request_flops(config: Any, request: Request) -> float:
    """Operations of a whole denoising run, both guidance branches."""
    return passes(request) * pass_flops(config, request.frames, request.height, request.width)


def denoise_seconds(config: Any, request: Request, rates: Rates) -> float:
    """Of a whole run in full quality."""
    return passes(request) * rates.pass_seconds + request_flops(config, request) / rates.flops


def denoise_bytes(config: Any, request: Request, itemsize: int) -> int:
    """What denoising holds on top of the weights. itemsize: of the transformer's dtype."""
    width = config.num_attention_heads * config.attention_head_dim
    tokens = video_tokens(request.frames, request.height, request.width)
    latents = math.prod(latent_shape(request.frames, request.height, request.width)) * 4
    return int(tokens * width * itemsize * (VECTORS + 2 * config.mlp_ratio)) + LATENT_COPIES * latents


def decode_bytes(decode: DecodeCost, height: int, width: int) -> int:
    """What decoding holds on top of the weights. height, width: of the frames."""
    return decode.bytes + RING_FRAMES * height * width * 3


def estimate(config: Any, request: Request, rates: Rates, decode: DecodeCost, itemsize: int) -> Estimate:
    """What a request will take at these rates. decode: of its latents with its decoder; itemsize: of the transformer's
    dtype."""
    most = max(denoise_bytes(config, request, itemsize), decode_bytes(decode, request.height, request.width))
    return Estimate(
        denoise=denoise_seconds(config, request, rates) / rates.speedups.get(request.denoise.quality, 1.0),
        decode=decode.seconds or 0.0,
        other=OTHER_SECONDS,
        basis=rates.basis,
        bytes=None if rates.loaded is None else rates.loaded + most + rates.unforeseen,
    )


def pace(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds that a step takes by the latest ones: the newest, or the mean of some where steps are skipped, since
    those alternate with whole ones. The first steps also warm caches up."""
    return statistics.fmean(seconds for seconds, _ in steps[-SOME_STEPS if any(s for _, s in steps) else -1 :])


def learn_denoise(
    rates: Rates, config: Any, request: Request, seconds: float, steps: Sequence[tuple[float, int]]
) -> Rates:
    """What a denoising run of so many seconds teaches. steps: of each, its seconds and the passes that it skipped."""
    if request.denoise.quality == "full":
        return _scaled(rates, seconds / denoise_seconds(config, request, rates))
    # The first step warms caches up, and a step that skips on one branch only is neither one nor the other.
    whole = [each for each, skipped in steps if not skipped]
    full = len(steps) * statistics.median(whole[1:] or whole)
    speedups = {**rates.speedups, request.denoise.quality: full / seconds}
    scaled = _scaled(rates, full / denoise_seconds(config, request, rates))
    return dataclasses.replace(scaled, speedups=speedups)


def _scaled(rates: Rates, slower: float) -> Rates:
    """The rates of a machine that turned out so much slower than they say."""
    flops, fixed = rates.flops / slower, rates.pass_seconds * slower
    return dataclasses.replace(rates, flops=flops, pass_seconds=fixed, basis="the last video made here")
