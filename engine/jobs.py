"""Jobs: who waits, who runs, what became of it. One worker thread owns the engine; pages only look at snapshots.

A video and a comparison are two kinds of job in the same queue: each knows how to run itself and what events mean to
it, the queue knows nothing of either. A job goes on when the page that started it is closed; its id finds it again.
"""

from __future__ import annotations

import copy
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.errors import Cancelled, EngineError, RequestError
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
from engine.sides import CompareRequest, RandomLatents, drop_raw

log = logging.getLogger(__name__)

Status = Literal["queued", "running", "finished", "stopped", "failed"]
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
# Raw frames are large (3 bytes a pixel and side): only the newest comparisons keep them.
RAW_KEPT = 4


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
    partial: the result is a part of what was asked for.
    """

    id: str
    folder: Path
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


class Jobs:
    """Submits jobs to one worker thread, in the order in which they came.

    engine: makes the videos; outputs: every job gets a folder of its own below it.
    """

    def __init__(self, engine: Generates, outputs: Path) -> None:
        self.engine = engine
        self.outputs = outputs
        self._states: dict[str, Job] = {}
        self._cancels: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._worker.start()

    def submit(self, request: Request | CompareRequest) -> str:
        """Queue a checked request; returns the job's id at once."""
        job = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4)
        kind = CompareState if isinstance(request, CompareRequest) else JobState
        with self._changed:
            self._states[job] = kind(id=job, request=request, folder=self.outputs / job)
            self._cancels[job] = threading.Event()
            over = [state for state in self._states.values() if isinstance(state, CompareState) and state.over]
        for state in sorted(over, key=lambda state: state.created)[: 1 - RAW_KEPT]:
            drop_raw(state.folder)
        self._waiting.put(job)
        return job

    def snapshot(self, job: str) -> JobState | None:
        """A video's job as it is now, or None if the id is unknown or that of a comparison."""
        return self._snapshot(job, JobState)

    def comparison(self, job: str) -> CompareState | None:
        """A comparison as it is now, or None if the id is unknown or that of a video."""
        return self._snapshot(job, CompareState)

    def _snapshot(self, job: str, kind: type[Job] = Job) -> Any:
        with self._changed:
            state = self._states.get(job) if isinstance(job, str) else None
            if not isinstance(state, kind):
                return None
            found = copy.deepcopy(state)
            found.position = self._position(state)
            return found

    def cancel(self, job: str) -> None:
        """Stop a job within one step or chunk; what is decoded by then stays."""
        with self._changed:
            state = self._state(job)
            state.stopping = True
            self._cancels[job].set()
            if state.status == "queued":
                state.status, state.error, state.ended = "stopped", "Stopped before it began.", time.time()
            self._changed.notify_all()

    def follow(self, job: str, seconds: float = 0.5) -> Iterator[Any]:
        """Snapshots until the job is over, the last one included: one when it changed, at most one every `seconds`."""
        shown = None
        while True:
            with self._changed:
                self._state(job)
            state = self._snapshot(job)
            if state != shown:
                yield state
            if state.over:
                return
            shown = state
            self._over(job, seconds)

    def _over(self, job: str, seconds: float) -> bool:
        """Wait until a job is over, but no longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._states[job].over, seconds)

    def wait(self, job: str) -> Any:
        """Block until a job is over."""
        *_, last = self.follow(job)
        return last

    def recent(self) -> list[JobState]:
        """Snapshots of all videos' jobs, the newest first."""
        return self._all(JobState)

    def comparisons(self) -> list[CompareState]:
        """Snapshots of all comparisons, the newest first."""
        return self._all(CompareState)

    def _all(self, kind: type[Job]) -> list[Any]:
        with self._changed:
            names = sorted((name for name, state in self._states.items() if isinstance(state, kind)), reverse=True)
        return [self._snapshot(name) for name in names]

    def close(self) -> None:
        """Stop what runs, forget what waits, end the worker."""
        with self._changed:
            for cancel in self._cancels.values():
                cancel.set()
        self._waiting.put(None)
        self._worker.join()

    def _state(self, job: str) -> Job:
        if job not in self._states:
            raise RequestError(f"There is no job {job!r} here. It may be older than the last start of the server.")
        return self._states[job]

    def _position(self, state: Job) -> int:
        if state.status != "queued":
            return 0
        before = (other for other in self._states.values() if other.id != state.id and not other.over)
        return sum(other.status == "running" or other.created < state.created for other in before)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            if self._begin(self._states[job]):
                self._run(self._states[job], self._cancels[job])

    def _begin(self, state: Job) -> bool:
        """Whether a job is still wanted; it runs from here on."""
        with self._changed:
            if state.over:
                return False
            state.status, state.started = "running", time.time()
            self._changed.notify_all()
            return True

    def _run(self, state: Job, cancel: threading.Event) -> None:
        status, error = self._drive(state, cancel)

        def end() -> None:
            state.ended, state.error = time.time(), error
            state.status = "stopped" if status == "finished" and state.partial else status

        self._update(state, end)

    def _drive(self, state: Job, cancel: threading.Event) -> tuple[Status, str | None]:
        try:
            self._consume(state, state.run(self.engine, cancel))
        except Cancelled as stopped:
            return "stopped", str(stopped)
        except EngineError as error:
            log.warning("job %s: %s", state.id, error)
            return "failed", str(error)
        except Exception as error:
            # A fault of ours: the worker must survive it, the log keeps the trace, the page says what it can.
            log.exception("job %s failed", state.id)
            return "failed", f"Internal error, please report it: {type(error).__name__}: {error}"
        return "finished", None

    def _consume(self, state: Job, events: Iterable[Event]) -> None:
        for event in events:
            self._update(state, lambda event=event: state.apply(event))

    def _update(self, state: Job, change: Callable[[], Any]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
