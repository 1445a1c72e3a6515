"""Frames and pixels on one side, latents on the other: the one place that knows how they belong together.

The factors are those of the Wan 2.2 VAE (16 in space, 4 in time, first frame alone) and of the transformer's 2 x 2
patches; the loader refuses a checkpoint whose configuration says otherwise.
"""

from __future__ import annotations

LATENT_CHANNELS = 48
SPATIAL_FACTOR = 16
TEMPORAL_FACTOR = 4
PATCH = 2
SIZE_MULTIPLE = SPATIAL_FACTOR * PATCH


def latent_frames(frames: int) -> int:
    """Latent frames of a video of 4n + 1 frames."""
    return (frames - 1) // TEMPORAL_FACTOR + 1


def video_frames(latents: int) -> int:
    """Frames that a number of latent frames decodes to."""
    return (latents - 1) * TEMPORAL_FACTOR + 1


def latent_shape(frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """[channels, latent frames, latent height, latent width] of a video."""
    return LATENT_CHANNELS, latent_frames(frames), height // SPATIAL_FACTOR, width // SPATIAL_FACTOR


def video_tokens(frames: int, height: int, width: int) -> int:
    """How many tokens the transformer sees for a video."""
    return latent_frames(frames) * (height // SIZE_MULTIPLE) * (width // SIZE_MULTIPLE)


def nearest_frames(frames: float) -> int:
    """The legal frame count (4n + 1, at least 1) nearest to a number; the longer one at a tie."""
    return max(0, int((frames - 1) / TEMPORAL_FACTOR + 0.5)) * TEMPORAL_FACTOR + 1


def nearest_size(pixels: float) -> int:
    """The legal height or width (a multiple of 32, at least 32) nearest to a number; the larger one at a tie."""
    return max(1, int(pixels / SIZE_MULTIPLE + 0.5)) * SIZE_MULTIPLE


def frames_of_seconds(seconds: float, fps: int) -> int:
    """The legal frame count nearest to a duration (2 s at 24 a second are 49 frames)."""
    return nearest_frames(seconds * fps + 1)
