"""What the engine tells while it works. Page, command line, API and tests consume these and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

Stage = Literal["load", "text", "image", "denoise", "decode", "file", "measure", "compare"]
# Of a video; a comparison measures, decodes and writes each side, then compares.
STAGES: tuple[Stage, ...] = ("load", "text", "image", "denoise", "decode", "file")


@dataclass(frozen=True)
class StageStarted:
    """total: how many steps or frames the stage has; None where it can't be counted."""

    stage: Stage
    total: int | None = None


@dataclass(frozen=True)
class StageEnded:
    """seconds: wall clock; peak_bytes: the most memory that each device held during the stage."""

    stage: Stage
    seconds: float
    peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone:
    """Denoising step `step` of `steps` (from 1); seconds: of this step; eta: seconds until the last step."""

    step: int
    steps: int
    seconds: float
    eta: float


@dataclass(frozen=True)
class PreviewReady:
    """After step `step` of `steps` there is a small animated picture of where the video goes. path: a WebP file."""

    step: int
    steps: int
    path: Path


@dataclass(frozen=True)
class FramesReady:
    """frames: uint8 [t, height, width, 3], valid until the second chunk after this one; start: index of the first."""

    start: int
    frames: np.ndarray
    total: int


@dataclass(frozen=True)
class Warned:
    """Something that the user should know and that does not stop the work."""

    text: str


@dataclass(frozen=True)
class VideoFinished:
    """path: the checked mp4; partial: the user stopped the work and this is what was there; stats: as in stats.json."""

    path: Path
    partial: bool
    stats: dict[str, Any]


@dataclass(frozen=True)
class SideStarted:
    """A comparison begins with side "a" or "b": what decodes it and why."""

    side: str
    path: str
    precision: str
    reason: str


@dataclass(frozen=True)
class FramesMeasured:
    """So many frames of a side exist before rounding."""

    done: int
    total: int


@dataclass(frozen=True)
class SideEnded:
    """figures: of this side as in compare.json; "error" says in words why it has no result."""

    side: str
    figures: dict[str, Any]


@dataclass(frozen=True)
class ComparisonFinished:
    """result: as in compare.json."""

    result: dict[str, Any]


Event = (
    StageStarted
    | StageEnded
    | StepDone
    | PreviewReady
    | FramesReady
    | Warned
    | VideoFinished
    | SideStarted
    | FramesMeasured
    | SideEnded
    | ComparisonFinished
)
