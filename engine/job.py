"""What is known of a job: a video, a second decode of one, or a comparison; who waits, runs or is over, stage by stage.

Each kind knows how to run itself, what events mean to it, and what of it is written down: `to_json` is what `job.json`
holds, and nothing that another file of the job's folder says. A snapshot is a copy that nobody changes any more.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

from engine.events import (
    STAGES,
    ComparisonFinished,
    Event,
    FramesMeasured,
    FramesReady,
    PreviewReady,
    SideEnded,
    SideStarted,
    Stage,
    StageEnded,
    StageStarted,
    StepDone,
    VideoFinished,
    Warned,
)
from engine.job_id import known_id
from engine.kept import COMPARISON, JOB, RESULT, STATS, checked
from engine.preview import PREVIEW_NAME
from engine.record import IMAGE_NAME, LATENTS_NAME, STATS_NAME, read_json
from engine.request import Request
from engine.settings import DecodeSettings
from engine.sides import RESULT_NAME, SIDES, CompareRequest, RandomLatents
from engine.video import FINAL_NAME, LIVE_NAME

Status = Literal["queued", "running", "finished", "stopped", "failed", "interrupted"]
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed", "interrupted")
# Fields of every job that job.json holds as they are.
KEPT = ("id", "status", "parent", "group", "warnings", "error", "partial", "created", "started", "ended")


class Generates(Protocol):
    """What jobs need of an engine."""

    def generate(self, request: Request, folder: Path, cancel: threading.Event) -> Iterator[Event]: ...

    def decode(
        self, latents: Path, settings: DecodeSettings, folder: Path, cancel: threading.Event
    ) -> Iterator[Event]: ...

    def compare(
        self,
        latents: Path | RandomLatents,
        a: DecodeSettings,
        b: DecodeSettings,
        folder: Path,
        cancel: threading.Event,
        frames: int | None,
    ) -> Iterator[Event]: ...


@dataclass(frozen=True)
class DecodeRequest:
    """Saved latents to decode (again). latents: a safetensors file; video: what they are latents of, with the settings
    to decode by; source: the job here that made them, None for a file from elsewhere."""

    latents: Path
    video: Request
    source: str | None = None


@dataclass
class StageState:
    """A stage as the page shows it. done of total: steps or frames; eta: seconds, None where unknown; cut: seconds
    until the job ended within this stage."""

    name: Stage
    total: int | None = None
    done: int = 0
    seconds: float | None = None
    seconds_each: float | None = None
    eta: float | None = None
    cut: float | None = None
    started: float = field(default_factory=time.monotonic, compare=False)

    @property
    def elapsed(self) -> float:
        """Seconds so far, or in all once it has ended."""
        if self.seconds is not None:
            return self.seconds
        return time.monotonic() - self.started if self.cut is None else self.cut

    def to_json(self) -> dict[str, Any]:
        """What is kept of it."""
        return {
            name: getattr(self, name) for name in ("name", "total", "done", "seconds", "seconds_each", "eta", "cut")
        }


@dataclass(kw_only=True)
class Job:
    """What is known of any job.

    status: "stopped" means that the user stopped it, "interrupted" that the server ended before it did; stopping: has
    been asked to; position: jobs that run before it; partial: the result is a part of what was asked for; parent: the
    job that it goes on from; group: of jobs that were asked for together.
    """

    kind: ClassVar[str]

    id: str
    folder: Path
    status: Status = "queued"
    parent: str | None = None
    group: str | None = None
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
        # The clock of the machine may be set back meanwhile.
        return 0.0 if self.started is None else max(0.0, (self.ended or time.time()) - self.started)

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

    def end(self, status: Status, error: str | None) -> None:
        """Nothing changes any more."""
        self.status, self.error, self.ended = status, error, time.time()
        for stage in self.stages:
            if stage.seconds is None:
                stage.cut = stage.elapsed

    def rest(self) -> str:
        """What there is of a job that was cut short, as a sentence."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """What job.json holds."""
        kept = {name: getattr(self, name) for name in KEPT}
        return {"kind": self.kind, **kept, "stages": [stage.to_json() for stage in self.stages]}

    @classmethod
    def from_json(cls, folder: Path, values: Mapping[str, Any]) -> Any:
        """The job of a folder. Raises KeyError, TypeError, ValueError or RequestError for what nobody here wrote."""
        checked(JOB, values)
        if values["id"] != folder.name or values["status"] not in get_args(Status):
            raise ValueError(f"{values['id']} is {values['status']}")
        kept = {name: values[name] for name in KEPT}
        for name in ("created", "started", "ended"):
            kept[name] = _seconds(kept[name])
        stages = [StageState(**stage) for stage in values["stages"]]
        return cls(folder=folder, stages=stages, **kept, **cls._more(folder, values))

    @classmethod
    def _more(cls, folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of this kind."""
        raise NotImplementedError

    def _find(self, name: Stage) -> StageState:
        return next(stage for stage in reversed(self.stages) if stage.name == name)

    def _count(self, name: Stage, done: int) -> None:
        state = self._find(name)
        state.done = done
        state.eta = state.elapsed / done * ((state.total or done) - done)


@dataclass(kw_only=True)
class JobState(Job):
    """A video. A stopped or failed one has the part that was there as `video`, or None; stats: as in stats.json, of
    one that was cut short before there was a video what `Telemetry.summary` tells;
    previewed: the step that the newest preview shows, 0 without one."""

    kind: ClassVar[str] = "video"
    stages_to_come: ClassVar[tuple[Stage, ...]] = STAGES

    request: Request
    video: Path | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    first_frame_seconds: float | None = None
    previewed: int = 0

    @property
    def live(self) -> Path:
        """The fragmented mp4 that grows while frames are decoded."""
        return self.folder / LIVE_NAME

    @property
    def preview(self) -> Path:
        """A small animated picture of where its steps lead."""
        return self.folder / PREVIEW_NAME

    @property
    def latents(self) -> Path:
        """The file of its latents; it is there once they are made, until somebody deletes it."""
        return self.folder / LATENTS_NAME

    def run(self, engine: Generates, cancel: threading.Event) -> Iterator[Event]:
        """Make the video."""
        return engine.generate(self.request, self.folder, cancel)

    def apply(self, event: Event) -> None:
        """Take in what the engine told."""
        match event:
            case StepDone(step, _, seconds, eta):
                state = self._find("denoise")
                state.done, state.seconds_each, state.eta = step, seconds, eta
            case PreviewReady(step):
                self.previewed = step
            case FramesReady(start, frames):
                self._count("decode", start + len(frames))
                if self.first_frame_seconds is None:
                    self.first_frame_seconds = self.elapsed
            case VideoFinished(path, partial, stats):
                self.video, self.stats, self.partial = path, stats, partial
            case _:
                super().apply(event)

    def end(self, status: Status, error: str | None) -> None:
        """Nothing changes any more."""
        super().end(status, error)
        self.stats = self.stats or read_json(self.folder / STATS_NAME) or {}

    def rest(self) -> str:
        """What there is of it."""
        has_latents = self.latents.is_file()
        if self.video:
            return "What was decoded by then is kept" + (
                ", and decoding again brings the rest." if has_latents else "."
            )
        if has_latents:
            return "Its latents are kept: decode them again to get the video."
        return "Its settings are kept, and nothing else. Start it again."

    def to_json(self) -> dict[str, Any]:
        """What job.json holds. Files of the job are named without their folder, which may be moved."""
        request = self.request.to_json() | {"image": self.request.image and self.request.image.name}
        return super().to_json() | {"first_frame_seconds": self.first_frame_seconds, "request": request}

    @classmethod
    def _more(cls, folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        # Never a path that the file names: what belongs to a job lies in its folder under a known name.
        image = folder / IMAGE_NAME
        request = Request.from_json(values["request"])
        return {
            "request": dataclasses.replace(request, image=image if request.image and image.is_file() else None),
            "video": folder / FINAL_NAME if (folder / FINAL_NAME).is_file() else None,
            "stats": checked(STATS, read_json(folder / STATS_NAME) or {}),
            "first_frame_seconds": _seconds(values["first_frame_seconds"]),
        }


@dataclass(kw_only=True)
class DecodeState(JobState):
    """A video from latents that are there already. source: the job that made them; None: they lie in this folder."""

    kind: ClassVar[str] = "decode"
    stages_to_come: ClassVar[tuple[Stage, ...]] = ("load", "decode", "file")

    source: str | None = None

    @property
    def latents(self) -> Path:
        """The file of its latents."""
        return self.folder.parent / (self.source or self.id) / LATENTS_NAME

    def run(self, engine: Generates, cancel: threading.Event) -> Iterator[Event]:
        """Decode them."""
        return engine.decode(self.latents, self.request.decode, self.folder, cancel)

    def to_json(self) -> dict[str, Any]:
        """What job.json holds."""
        return super().to_json() | {"source": self.source}

    @classmethod
    def _more(cls, folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        return super()._more(folder, values) | {"source": known_id(values["source"])}


@dataclass(kw_only=True)
class CompareState(Job):
    """A comparison. side: at work, "a" or "b"; sides: figures of those that ended; result: as in compare.json."""

    kind: ClassVar[str] = "compare"

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

    def rest(self) -> str:
        """What there is of it."""
        return "Run it again."

    def to_json(self) -> dict[str, Any]:
        """What job.json holds."""
        return super().to_json() | {"side": self.side, "request": self.request.to_json()}

    @classmethod
    def _more(cls, folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        result = read_json(folder / RESULT_NAME)
        if result is not None:
            checked(RESULT, result)
        for name in SIDES if result else ():
            video = Path(name, FINAL_NAME)
            result["sides"][name]["video"] = str(video) if (folder / video).is_file() else None
        request = CompareRequest.from_json(checked(COMPARISON, values["request"]))
        return {"side": values["side"], "request": request, "sides": (result or {}).get("sides", {}), "result": result}


KINDS: dict[str, type[Job]] = {kind.kind: kind for kind in (JobState, DecodeState, CompareState)}


def new_job(request: Request | DecodeRequest | CompareRequest, **common: Any) -> Job:
    """The job that a request asks for. common: fields that every job has."""
    match request:
        case CompareRequest():
            return CompareState(request=request, **common)
        case DecodeRequest():
            return DecodeState(request=request.video, source=request.source, **common)
        case _:
            return JobState(request=request, **common)


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
