"""Disk space that work needs, known and asked for before it begins. All sizes in bytes; frames in pixels."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.errors import ResourceError
from engine.memory import in_words
from engine.shapes import latent_shape

# H.264 at our quality needs about a tenth of the raw bytes on noisy content, and it is written twice: live and final.
VIDEO_SHARE = 0.2
LATENT_BYTES = 4
# 8-bit frames of both sides, float frames of one.
RAW_SHARE = 2 + 4
SPARE = 200 * 2**20


def raw(frames: int, height: int, width: int) -> int:
    """Frames as they are delivered: three bytes a pixel."""
    return frames * height * width * 3


def video(frames: int, height: int, width: int) -> int:
    """A video and its live file, at most."""
    return int(raw(frames, height, width) * VIDEO_SHARE)


def latents(frames: int, height: int, width: int) -> int:
    """The latents' file of so many frames."""
    channels, length, rows, columns = latent_shape(frames, height, width)
    return channels * length * rows * columns * LATENT_BYTES


def comparison(frames: int, height: int, width: int) -> int:
    """Both sides of a comparison, raw and as videos."""
    return RAW_SHARE * raw(frames, height, width) + 2 * video(frames, height, width)


def require(folder: Path, needed: int, what: str) -> None:
    """Raises ResourceError if the disk of a folder that exists has not `needed` bytes free and some to spare. what: the
    work that needs them, as the subject of a sentence."""
    try:
        needed, free = needed + SPARE, shutil.disk_usage(folder).free
    except OSError as error:
        raise ResourceError(f"The output folder {folder} is gone ({error}). Make it again.") from error
    if free < needed:
        raise ResourceError(
            f"{what} may need {in_words(needed)} on the disk of {folder}, and {in_words(free)} are free there. Delete "
            "old videos, ask for a smaller or shorter one, or choose another output folder."
        )
