"""ZeroGPU: a GPU that is lent for one call at a time, in a process that is forked from the server for it.

The weights are loaded in the server, where nothing may compute. `ZeroEngine` sends each job into such a call and passes
on what comes back, which is pickled: events without their pixels, errors as values, at the end what was learned. The
files of the job are written by the process that has the GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import numpy as np

from engine.errors import EngineError, RequestError, ResourceError
from engine.events import Event, FramesReady
from engine.experience import Experience
from engine.readiness import Readiness
from engine.request import Request
from engine.settings import DecodeSettings
from engine.web import lent

log = logging.getLogger(__name__)

# Seconds to ask for: what was reckoned and half of it more, within bounds; as long as nothing is known, FIRST.
MARGIN, LEAST_SECONDS, FIRST_SECONDS, MOST_SECONDS = 1.5, 20, 120, 600
STOP_FILE, POLL_SECONDS = ".stop", 0.2
LENT = "ZeroGPU lends it for as long as a video is made, a reduced mode: see System."
REDUCED = (
    "a reduced mode: a GPU is lent for one job at a time, on the quota of the visitor who asked for it. A page that is "
    "loaded again is not promised a job that still runs; the time of a job is known only after the first one, its "
    "figures of memory only when it is over; blocks can't be streamed from the host"
)
RUNNING = (
    "On ZeroGPU the work belongs to the call that asked for it, so keep this page open. Loaded again, it shows the "
    "video for as long as the work goes on, without a promise that it does."
)


def lend(engine: Any) -> Any:
    """The engine as it is, or on ZeroGPU loaded and ready to be lent a GPU. Errors of `Engine.load`."""
    if not lent.HERE:
        return engine
    spaces = importlib.import_module("spaces")
    engine = ZeroEngine(engine, spaces.GPU)
    # In this thread: torch is patched for the one that imported `spaces` alone.
    engine.load()
    # Gradio's launch would call it, and this server mounts the page instead.
    importlib.import_module("spaces.zero").startup()
    return engine


def tell_port(demo: gr.Blocks, port: int) -> None:
    """Let `spaces` know which connections a forked process has to close. Gradio's launch would set the same."""
    demo.server = SimpleNamespace(config=SimpleNamespace(port=port))


def while_running(engine: Any) -> str:
    """What a page must say while its job is at work; empty where a page that is loaded again finds it for certain."""
    return RUNNING if isinstance(engine, ZeroEngine) else ""


class ZeroEngine:
    """An engine, guarded or not, whose work is done where there is a GPU. Everything else is the engine's own.

    gpu: `spaces.GPU`.
    """

    def __init__(self, engine: Any, gpu: Callable[..., Any]) -> None:
        self._engine = engine
        self._lent = gpu(duration=self._seconds)(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def readiness(self) -> Readiness:
        """As the engine's, with a word on the GPU."""
        found = self._engine.readiness()
        return dataclasses.replace(found, text=f"{found.text} {LENT}") if found.state == "ready" else found

    def about(self) -> dict[str, str]:
        """As the engine's, and what is reduced."""
        return {"ZeroGPU": REDUCED} | self._engine.about()

    def generate(self, request: Request, folder: Path, cancel: threading.Event | None = None) -> Iterator[Event]:
        """As the engine's. Raises RequestError for what would take longer than a GPU is lent, ResourceError if none
        is."""
        estimate = self._engine.estimate(request)
        if estimate is not None and estimate.total > MOST_SECONDS:
            raise RequestError(
                f"This video would take about {estimate.total:.0f} s, and ZeroGPU lends a GPU for {MOST_SECONDS} s at "
                "most here. Choose fewer steps, fewer frames or a smaller size."
            )
        yield from self._lend("generate", (request, folder), folder, cancel)

    def decode(
        self, latents: Path, settings: DecodeSettings, folder: Path, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        """As the engine's. Raises ResourceError if no GPU is lent."""
        yield from self._lend("decode", (latents, settings, folder), folder, cancel)

    def compare(
        self, latents: Any, a: Any, b: Any, folder: Path, cancel: threading.Event | None = None, *rest: Any
    ) -> Iterator[Event]:
        """As the engine's. Raises ResourceError if no GPU is lent."""
        yield from self._lend("compare", (latents, a, b, folder), folder, cancel, rest)

    def _lend(
        self, name: str, before: tuple, folder: Path, cancel: threading.Event | None, after: tuple = ()
    ) -> Iterator[Event]:
        """Events of one call. before, after: its arguments around the stop."""
        folder.mkdir(parents=True, exist_ok=True)
        error, flag = None, folder / STOP_FILE
        with (
            _relayed(cancel or threading.Event(), flag),
            _refusals_in_words(),
            closing(self._lent(name, before, after, flag)) as sent,
        ):
            for event in sent:
                match event:
                    case Experience():
                        self._engine.experience.adopt(event)
                    case Exception():
                        error = event
                    case _:
                        yield event
        if error is not None:
            raise error

    def _work(self, name: str, before: tuple, after: tuple, flag: Path) -> Iterator[Event | Exception | Experience]:
        """What runs in the process that has the GPU; all that it yields can be pickled."""
        try:
            for event in getattr(self._engine, name)(*before, StopFile(flag), *after):
                yield _without_pixels(event)
        except EngineError as error:
            yield error
        except Exception as error:
            log.exception("%s failed where the GPU is", name)
            yield RuntimeError(f"{type(error).__name__}: {error}")
        yield self._engine.experience

    def _seconds(self, name: str, before: tuple, *_: Any) -> int:
        """How long to ask for a GPU."""
        estimate = self._engine.estimate(before[0]) if name == "generate" else None
        if estimate is None:
            return FIRST_SECONDS
        return round(min(max(MARGIN * estimate.total, LEAST_SECONDS), MOST_SECONDS))


class StopFile(threading.Event):
    """A stop that is asked for by a file, since the processes share nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def is_set(self) -> bool:
        """Whether the file is there."""
        return self._path.exists()


@contextmanager
def _relayed(cancel: threading.Event, flag: Path) -> Iterator[None]:
    """Lay the file down as soon as somebody asks for the stop; afterwards it is gone."""
    over = threading.Event()

    def relay() -> None:
        while not over.is_set():
            if cancel.wait(POLL_SECONDS):
                flag.touch()
                return

    thread = threading.Thread(target=relay, name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        flag.unlink(missing_ok=True)


@contextmanager
def _refusals_in_words() -> Iterator[None]:
    """`spaces` tells of a quota that is used up, a GPU that is not free and a call that was ended as errors for
    Gradio."""
    try:
        yield
    except gr.Error as error:
        title = getattr(error, "title", "ZeroGPU")
        raise ResourceError(f"{title}: {str(error.message).rstrip('. ')}.") from error


def _without_pixels(event: Event) -> Event:
    """The event as it is sent: of frames only their number is asked for."""
    if isinstance(event, FramesReady):
        return dataclasses.replace(event, frames=np.empty((len(event.frames), 0, 0, 3), np.uint8))
    return event
