"""What is known of a job: a video or a comparison, who waits, runs or is over, stage by stage.

Each kind knows how to run itself and what events mean to it. A snapshot is a copy that nobody changes any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.events import (
    ComparisonFinished,
    Event,
    FramesMeasured,
    FramesReady,
    SideEnded,
    SideStarted,
    Stage,
    StageEnded,
    StageStarted,
    StepDone,
    VideoFinished,
    Warned,
)
from engine.request import Request
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents

Status = Literal["queued", "running", "finished", "stopped", "failed"]
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")


class Generates(Protocol):
    """What jobs need of an engine."""

    def generate(self, request: Request, folder: Path, cancel: threading.Event) -> Iterator[Event]: ...

    def compare(
        self,
        latents: Path | RandomLatents,
        a: DecodeSettings,
        b: DecodeSettings,
        folder: Path,
        cancel: threading.Event,
        frames: int | None,
    ) -> Iterator[Event]: ...


@dataclass
class StageState:
    """A stage as the page shows it. done of total: steps or frames; eta: seconds, None where unknown."""

    name: Stage
    total: int | None = None
    done: int = 0
    seconds: float | None = None
    seconds_each: float | None = None
    eta: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds so far, or in all once it has ended."""
        return self.seconds if self.seconds is not None else time.monotonic() - self.started


@dataclass(kw_only=True)
class Job:
    """What is known of any job. A snapshot is a copy that nobody changes any more.

    status: "stopped" means that the user stopped it; stopping: has been asked to; position: jobs that run before it;
    partial: the result is a part of what was asked for; parent: the job that it goes on from; group: of jobs that were
    asked for together.
    """

    id: str
    folder: Path
    parent: str | None = None
    group: str | None = None
    status: Status = "queued"
    stopping: bool = False
    position: int = 0
    stages: list[StageState] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    partial: bool = False
    created: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    @property
    def elapsed(self) -> float:
        """Seconds since the work began; 0 while it waits."""
        return 0.0 if self.started is None else (self.ended or time.time()) - self.started

    @property
    def stage(self) -> StageState | None:
        """The stage at work, or the last one."""
        return self.stages[-1] if self.stages else None

    def run(self, engine: Generates, cancel: threading.Event) -> Iterator[Event]:
        """Do the work."""
        raise NotImplementedError

    def apply(self, event: Event) -> None:
        """Take in what the engine told."""
        match event:
            case StageStarted(stage, total):
                self.stages.append(StageState(stage, total))
            case StageEnded(stage, seconds):
                self._find(stage).seconds = seconds
            case Warned(text):
                self.warnings.append(text)

    def _find(self, name: Stage) -> StageState:
        return next(stage for stage in reversed(self.stages) if stage.name == name)

    def _count(self, name: Stage, done: int) -> None:
        state = self._find(name)
        state.done = done
        state.eta = state.elapsed / done * ((state.total or done) - done)


@dataclass(kw_only=True)
class JobState(Job):
    """A video. A stopped or failed one has the part that was there as `video`, or None; stats: as in stats.json."""

    request: Request
    video: Path | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    first_frame_seconds: float | None = None

    @property
    def live(self) -> Path:
        """The fragmented mp4 that grows while frames are decoded."""
        return self.folder / "live.mp4"

    def run(self, engine: Generates, cancel: threading.Event) -> Iterator[Event]:
        """Make the video."""
        return engine.generate(self.request, self.folder, cancel)

    def apply(self, event: Event) -> None:
        """Take in what the engine told."""
        match event:
            case StepDone(step, _, seconds, eta):
                state = self._find("denoise")
                state.done, state.seconds_each, state.eta = step, seconds, eta
            case FramesReady(start, frames):
                self._count("decode", start + len(frames))
                if self.first_frame_seconds is None:
                    self.first_frame_seconds = self.elapsed
            case VideoFinished(path, partial, stats):
                self.video, self.stats, self.partial = path, stats, partial
            case _:
                super().apply(event)


@dataclass(kw_only=True)
class CompareState(Job):
    """A comparison. side: at work, "a" or "b"; sides: figures of those that ended; result: as in compare.json."""

    request: CompareRequest
    side: str = ""
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    result: dict[str, Any] | None = None

    def run(self, engine: Generates, cancel: threading.Event) -> Iterator[Event]:
        """Decode twice and measure."""
        request = self.request
        return engine.compare(request.latents, request.a, request.b, self.folder, cancel, request.frames)

    def apply(self, event: Event) -> None:
        """Take in what the engine told."""
        match event:
            case SideStarted(side):
                self.side = side
            case FramesMeasured(done):
                self._count("measure", done)
            case FramesReady(start, frames):
                self._count("decode", start + len(frames))
            case SideEnded(side, figures):
                self.sides[side] = figures
                # A side that failed left its stage open.
                for stage in self.stages:
                    stage.seconds = stage.elapsed
            case ComparisonFinished(result):
                self.result = result
            case _:
                super().apply(event)
