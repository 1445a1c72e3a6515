"""Prompts and videos checked as the release checks them, where its package `pan2_guardrail` is installed.

The prompt is checked before any work, 16 frames of the video after it. Until they have passed, nothing of the video
lies where the page could show it: no live file, no preview, no thumbnail. Only a description of the package was at
hand, so all that is used of it stands in `Guardrail`, and whatever it does not say clearly is a refusal.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.errors import CheckpointError, EngineError, RequestError
from engine.events import ComparisonFinished, Event, FramesReady, VideoFinished
from engine.request import Request
from engine.settings import DecodeSettings

log = logging.getLogger(__name__)

PACKAGE, CHECKER = "pan2_guardrail", "PAN2SafetyChecker"
FRAMES = 16
PROMPT_REFUSED = "This prompt is refused by the safety check of the model's release. Describe something else."
VIDEO_REFUSED = "This video is refused by the safety check of the model's release, and nothing of it is kept."
CHECKED = "the prompt before a video is made, 16 frames of each video before it is shown (pan2_guardrail)"
UNCHECKED = "nothing is checked: neither prompts nor videos"
# Folders of what has not passed yet; the gate lets nobody see them, and the janitor clears what a crash left of them.
HIDDEN = ".unchecked-"
T = TypeVar("T", VideoFinished, ComparisonFinished)


def installed() -> bool:
    """Whether the release's package is here."""
    return importlib.util.find_spec(PACKAGE) is not None


def guarded(engine: Any, asked: str, public: bool) -> Any:
    """The engine, behind the guardrail where that is wanted. asked: "on", "off", or "auto": on where strangers come
    (`public`) and the package is installed. Raises CheckpointError if it is wanted and can't be used."""
    if asked == "on" or (asked == "auto" and public and installed()):
        return GuardedEngine(engine, Guardrail())
    return engine


def in_words(engine: Any) -> str:
    """What is checked, for people."""
    return CHECKED if getattr(engine, "checked", False) else UNCHECKED


class Guardrail:
    """The release's checker behind two questions. Raises CheckpointError if it is missing or speaks otherwise."""

    def __init__(self) -> None:
        try:
            self._checker = getattr(importlib.import_module(PACKAGE), CHECKER)()
            self._text, self._video = self._checker.check_text_safety, self._checker.check_video_safety
        except Exception as error:
            raise CheckpointError(
                f"The guardrail can't be used ({type(error).__name__}: {error}). Install {PACKAGE} and accept the "
                "licences of its models, or set ENGINE_GUARDRAIL=off."
            ) from error

    def check_prompt(self, prompt: str) -> None:
        """Raise RequestError for a prompt that is refused."""
        if self._ask(self._text, prompt) is not True:
            raise RequestError(PROMPT_REFUSED)

    def check_frames(self, frames: np.ndarray) -> None:
        """Raise EngineError for frames, uint8 [t, height, width, 3], that are refused."""
        answer = self._ask(self._video, frames)
        # Checkers of this family give the frames back if they may be shown.
        if answer is not True and not isinstance(answer, np.ndarray):
            raise EngineError(VIDEO_REFUSED)

    @staticmethod
    def _ask(question: Any, value: Any) -> Any:
        try:
            return question(value)
        except Exception as error:
            log.exception("the guardrail failed")
            raise EngineError(
                "The safety check itself failed, so nothing is shown. Try again; the server's log says why."
            ) from error


class GuardedEngine:
    """An engine whose prompts and videos are checked. Everything else is the engine's own."""

    checked = True

    def __init__(self, engine: Any, guardrail: Guardrail) -> None:
        self._engine, self._guardrail = engine, guardrail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: Request, folder: Path, cancel: threading.Event | None = None) -> Iterator[Event]:
        """As the engine's, without previews. Raises RequestError for a refused prompt, EngineError for a refused
        video."""
        self._guardrail.check_prompt(request.prompt)
        request = dataclasses.replace(request, denoise=dataclasses.replace(request.denoise, preview="off"))
        yield from self._hidden(folder, lambda hidden: self._engine.generate(request, hidden, cancel))

    def decode(
        self, latents: Path, settings: DecodeSettings, folder: Path, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        """As the engine's. Raises EngineError for a refused video."""
        yield from self._hidden(folder, lambda hidden: self._engine.decode(latents, settings, hidden, cancel))

    def compare(self, latents: Any, a: Any, b: Any, folder: Path, *rest: Any) -> Iterator[Event]:
        """As the engine's. Raises EngineError if what was decoded is refused."""
        yield from self._hidden(folder, lambda hidden: self._engine.compare(latents, a, b, hidden, *rest))

    def _hidden(self, folder: Path, work: Any) -> Iterator[Event]:
        """Work in a folder that no page serves, beside the outputs, and move what has passed. Whatever ends the work
        otherwise leaves nothing."""
        hidden = folder.parent / f"{HIDDEN}{folder.name}"
        samples: dict[int, np.ndarray] = {}
        try:
            for event in work(hidden):
                if isinstance(event, FramesReady):
                    _sample(samples, event)
                if isinstance(event, (VideoFinished, ComparisonFinished)):
                    self._guardrail.check_frames(np.stack([samples[index] for index in sorted(samples)]))
                    event = _moved(event, hidden, folder)
                yield event
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _sample(samples: dict[int, np.ndarray], event: FramesReady) -> None:
    """Keep those of the chunk's frames that are checked: 16 of the video, evenly spaced, with the first and last."""
    wanted = {round(index * (event.total - 1) / (FRAMES - 1)) for index in range(FRAMES)}
    for index, frame in enumerate(np.asarray(event.frames), event.start):
        if index in wanted:
            samples[index] = frame.copy()


def _moved(event: T, hidden: Path, folder: Path) -> T:
    """Bring the files of a result that has passed to where they belong."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(hidden.iterdir()):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    return dataclasses.replace(event, path=folder / event.path.name) if isinstance(event, VideoFinished) else event
