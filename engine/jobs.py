"""Jobs: who waits, who runs, what became of it. One worker thread owns the engine; pages only look at snapshots.

All kinds of job of `engine.job` share the queue, which knows nothing of any. A job goes on when the page that started
it is closed; its id finds it again.
"""

from __future__ import annotations

import copy
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import again, broken, disk, store
from engine.admission import Admission, QueueLimits
from engine.condition import open_image
from engine.errors import Cancelled, EngineError, RequestError, ResourceError, shown
from engine.events import Event
from engine.janitor import Keep, calendar, clear, is_fresh, needs, room, sweep, too_many
from engine.job import CompareState, DecodeRequest, Generates, Job, JobState, Status, new_job
from engine.job_id import known_id, new_id
from engine.memory import in_words
from engine.record import keep_image
from engine.request import Request
from engine.settings import DecodeSettings
from engine.sides import CompareRequest

log = logging.getLogger(__name__)

Asked = Request | DecodeRequest | CompareRequest


@dataclass(frozen=True)
class Ticket:
    """What the queue keeps of a job that is not over. room: bytes of disk that it was promised; context: of the call
    that asked for it, in which it runs, so that a GPU that is lent is lent to that visitor."""

    room: int
    cancel: threading.Event = field(default_factory=threading.Event)
    context: Context = field(default_factory=copy_context)


class Jobs:
    """Submits jobs to one worker thread, in the order in which they came.

    engine: makes the videos; outputs: every job gets a folder of its own below it, and those that are there already
    are found again; keep: how much of them stays; limits: of the queue; visitor: the address for which this thread
    submits, None for the owner of the machine. Raises ResourceError if the folder can't be written to or is another
    server's.
    """

    def __init__(
        self,
        engine: Generates,
        outputs: Path,
        keep: Keep | None = None,
        limits: QueueLimits | None = None,
        visitor: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.engine, self.outputs, self.keep = engine, outputs, keep or Keep()
        self.on_end: list[Callable[[Job], None]] = []
        self._visitor, self._admission, self._door = visitor, Admission(limits), threading.Lock()
        self._lock = store.lock(outputs)
        self._states: dict[str, Job] = {job.id: job for job in store.load_all(outputs)}
        self._tickets: dict[str, Ticket] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._today = calendar(self._states.values())
        clear(outputs, self._states)
        self._tidy()
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._worker.start()

    def submit(self, request: Asked, parent: str | None = None, group: str | None = None) -> str:
        """Queue a checked request; returns the job's id at once. The folder is there then, with the first frame in it.

        parent, group: see `Job`. Raises BrokenError once a restart is needed, BusyError for too much, ResourceError for
        a folder or a disk that can't take it, RequestError for a picture, latents or a parent that are none.
        """
        return self.submit_all([request], parent, group)[0]

    def submit_all(self, requests: Sequence[Asked], parent: str | None = None, group: str | None = None) -> list[str]:
        """Queue all of these requests or, if one of them is refused, none; their ids in order. Else as `submit`."""
        common = {"parent": known_id(parent), "group": group}
        names = [new_id() for _ in requests]
        jobs = [new_job(r, id=n, folder=self.outputs / n, **common) for r, n in zip(requests, names, strict=True)]
        # One caller at a time, so that nobody is admitted while another's job is not yet counted.
        with self._door:
            visitor = self._admit(len(jobs))
            tickets = self._require_room(jobs)
            self._furnish_all(jobs, requests)
            with self._changed:
                for job, ticket in zip(jobs, tickets, strict=True):
                    self._admission.take(visitor, job.id)
                    self._states[job.id], self._tickets[job.id] = job, ticket
        for name in names:
            self._waiting.put(name)
        return names

    def _admit(self, more: int) -> str | None:
        """The visitor, if so many more jobs may be queued for it."""
        broken.refuse()
        visitor = self._visitor()
        with self._changed:
            active = {name for name, state in self._states.items() if not state.over}
            self._admission.check(visitor, active, self.waiting, more)
        return visitor

    def _require_room(self, jobs: Sequence[Job]) -> list[Ticket]:
        tickets = [Ticket(room(job)) for job in jobs]
        with self._changed:
            promised = sum(other.room for other in self._tickets.values())
        these, it = ("This job", "it") if len(jobs) == 1 else (f"These {len(jobs)} jobs", "them")
        what = f"{these} and those before {it}" if promised else these
        disk.require(self.outputs, sum(ticket.room for ticket in tickets) + promised, what)
        return tickets

    def _furnish_all(self, jobs: Sequence[Job], requests: Sequence[Asked]) -> None:
        """All folders or none."""
        try:
            for job, request in zip(jobs, requests, strict=True):
                self._furnish(job, request)
        except Exception:
            for job in jobs:
                shutil.rmtree(job.folder, ignore_errors=True)
            raise

    def decode_again(self, job: str, settings: DecodeSettings) -> str:
        """Queue another decode of a video's latents; returns the new job's id at once. Errors as of `submit`."""
        source = self.snapshot(job)
        return self.submit(again.of_job(source, settings), parent=source and source.parent)

    @staticmethod
    def _furnish(job: Job, request: Asked) -> None:
        """Make the job's folder, with what may be gone by the time that it runs: uploads are kept for a day."""
        try:
            job.folder.mkdir(parents=True)
            if isinstance(job, JobState) and job.request.image is not None:
                job.request = keep_image(job.folder, job.request, open_image(job.request.image))
            if isinstance(request, DecodeRequest) and request.source is None:
                shutil.copyfile(request.latents, job.latents)
            store.save(job)
        except OSError as error:
            raise ResourceError(
                f"The output folder {job.folder} can't be written to ({error}). Make it writable and see that its disk "
                "is not full, or choose another one (ENGINE_OUTPUTS)."
            ) from error

    @property
    def waiting(self) -> int:
        """How many jobs stand in the queue."""
        return self._number("queued")

    @property
    def running(self) -> int:
        """How many jobs are at work: 1 or 0."""
        return self._number("running")

    def _number(self, status: Status) -> int:
        with self._changed:
            return sum(state.status == status for state in self._states.values())

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
            # What is over never changes; of that a new outside is enough.
            found = copy.copy(state) if state.over else copy.deepcopy(state)
            found.position = self._position(state)
            return found

    def cancel(self, job: str) -> None:
        """Stop a job within one step or chunk; what is decoded by then stays."""
        with self._changed:
            state = self._state(job)
            if state.over:
                return
            state.stopping = True
            self._tickets[job].cancel.set()
            waited = state.status == "queued"
            if waited:
                state.end("stopped", "Stopped before it began.")
                self._save(state)
            self._changed.notify_all()
        if waited:
            self._tell(state)

    def delete(self, job: str) -> None:
        """Remove a job that is over, with its folder and nothing else. Raises RequestError while it is at work or its
        latents are needed by another that is, ResourceError if the folder can't be deleted."""
        with self._changed:
            state = self._state(job)
            if not state.over:
                raise RequestError(f"The job {job} is still at work. Stop it first.")
            if job in needs(self._states.values()):
                raise RequestError(f"The latents of {job} are about to be decoded by another job. Stop that one first.")
            del self._states[job]
        try:
            store.remove(state)
        except ResourceError:
            if state.folder.is_dir():
                with self._changed:
                    self._states[job] = state
            raise

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
            return self._changed.wait_for(lambda: self._state(job).over, seconds)

    def wait(self, job: str) -> Any:
        """Block until a job is over."""
        *_, last = self.follow(job)
        return last

    def recent(self) -> list[JobState]:
        """Snapshots of all videos' jobs, the newest first."""
        return self._all(JobState)

    def going_on_from(self, job: str) -> list[JobState]:
        """Snapshots of the videos that go on from a job, in the order in which they were asked for."""
        found = [state for state in self.recent() if state.parent == job]
        return sorted(found, key=lambda state: state.created)

    def of_group(self, group: str) -> list[JobState]:
        """Snapshots of the videos that were asked for together, in the order in which they were."""
        found = [state for state in self.recent() if state.group == group]
        return sorted(found, key=lambda state: state.created)

    def comparisons(self) -> list[CompareState]:
        """Snapshots of all comparisons, the newest first."""
        return self._all(CompareState)

    def everything(self) -> list[Job]:
        """Snapshots of all jobs, the newest first."""
        return self._all(Job)

    def _all(self, kind: type[Job]) -> list[Any]:
        with self._changed:
            states = [state for state in self._states.values() if isinstance(state, kind)]
        newest = sorted(states, key=lambda state: (state.created, state.id), reverse=True)
        return [found for state in newest if (found := self._snapshot(state.id))]

    @property
    def closing(self) -> bool:
        """Whether nothing is begun any more."""
        return self._closing

    def stop(self) -> None:
        """Stop what runs and begin nothing more, without waiting for it."""
        with self._changed:
            self._closing = True
            for ticket in self._tickets.values():
                ticket.cancel.set()

    def close(self) -> None:
        """Stop what runs, leave what waits to be found as interrupted, end the worker."""
        self.stop()
        self._waiting.put(None)
        self._worker.join()
        if self._lock:
            self._lock.close()

    def _state(self, job: str) -> Job:
        if not isinstance(job, str) or job not in self._states:
            raise RequestError(f"There is no job {shown(job)} here. It may have been deleted.")
        return self._states[job]

    def _position(self, state: Job) -> int:
        if state.status != "queued":
            return 0
        before = (other for other in self._states.values() if other.id != state.id and not other.over)
        return sum(other.status == "running" or other.created < state.created for other in before)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None and not self._closing:
            state = self._begin(job)
            if state is not None:
                ticket = self._tickets[job]
                ticket.context.run(self._run, state, ticket.cancel)
            with self._changed:
                del self._tickets[job]
            try:
                self._tidy()
            except Exception:
                # The worker must survive it: without tidying there is only less room.
                log.exception("the outputs folder could not be tidied")

    def _tidy(self) -> None:
        """Keep the outputs folder within its limits, and free of what nobody needs."""
        with self._changed:
            states = list(self._states.values())
        sizes = {state.id: store.folder_bytes(state.folder) for state in states}
        safe = needs(states) | {state.id for state in states if is_fresh(state)}
        for job, reason in too_many(states, sizes, self.keep, safe, self._today()).items():
            log.info("removing the job %s (%s): %s", job, in_words(sizes[job]), reason)
            self._forget(job)
        sweep([state for state in states if state.id in self._states])

    def _forget(self, job: str) -> None:
        try:
            self.delete(job)
        except EngineError as error:
            log.warning("%s", error)

    def _begin(self, job: str) -> Job | None:
        """The job if it is still wanted: it may have been stopped, and deleted since. It runs from here on."""
        with self._changed:
            state = self._states.get(job)
            if state is None or state.over:
                return None
            state.status, state.started = "running", time.time()
            self._save(state)
            self._changed.notify_all()
            return state

    def _run(self, state: Job, cancel: threading.Event) -> None:
        status, error = self._drive(state, cancel)

        def end() -> None:
            ended = "stopped" if status == "finished" and state.partial else status
            if self._closing and ended == "stopped":
                state.end("interrupted", f"The server ended while this was made. {state.rest()}")
            else:
                state.end(ended, error)
            self._save(state)

        self._update(state, end)
        self._tell(state)

    def _tell(self, state: Job) -> None:
        """Let listeners know that a job has ended."""
        for listener in self.on_end:
            try:
                listener(copy.copy(state))
            except Exception:
                # The worker must survive it, the log keeps the trace.
                log.exception("the end of job %s could not be told", state.id)

    def _save(self, state: Job) -> None:
        """Write down what a job is. One that can't be written goes on: its video is worth more than its record."""
        try:
            store.save(state)
        except ResourceError as error:
            log.error("job %s: %s", state.id, error)
            state.warnings.append(f"This job may be missing after the next start of the server. {error}")

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
