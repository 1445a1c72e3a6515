"""How long a request will take here, from what this machine was measured to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.request import Request
from engine.shapes import latent_shape, video_tokens

TEXT_TOKENS = 64
# Text, first frame and file are small beside the rest; this much a video was seen on two cores.
OTHER_SECONDS = 2.0


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
    """flops: floating-point operations a second in the transformer; voxels: latent positions decoded a second."""

    flops: float
    voxels: float
    basis: str


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
        denoise=request_flops(config, request) / rates.flops,
        decode=request_voxels(request) / rates.voxels,
        other=OTHER_SECONDS,
        basis=rates.basis,
    )
