"""Two decodes of the same latents, one after the other: what `Engine.compare` does, side by side in files and figures.

Each side runs twice: once for float frames, which also warms the device up, and once as videos are delivered, which is
what is timed and whose memory is watched. Side A's float frames wait on disk until side B's arrive to be measured
against them. Whatever goes wrong with one side, the other side's result stays.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from engine import broken, disk, record
from engine.compare import METHOD, Decoder, FrameFile, Meter, judge, limits_for, plain_json
from engine.decode_plan import Choice
from engine.errors import Cancelled, EngineError, RequestError
from engine.events import (
    ComparisonFinished,
    Event,
    FramesMeasured,
    FramesReady,
    SideEnded,
    SideStarted,
    StageEnded,
    StageStarted,
)
from engine.executors import Executor
from engine.latents import load_latents
from engine.memory import memory_in_words
from engine.noise import draw_noise
from engine.preset import Preset
from engine.settings import DecodePath, DecodePrecision, DecodeSettings, Devices
from engine.shapes import latent_frames, latent_shape, nearest_frames, video_frames
from engine.telemetry import Telemetry, memory_now
from engine.video import VideoWriter

log = logging.getLogger(__name__)

ADVICE = "Compare fewer frames, a smaller size or a decoder that needs less; the other side's result stays."
SIDES = ("a", "b")
RAW_NAME, FLOAT_NAME, RESULT_NAME = "frames.npy", "float.npy", "compare.json"
CHUNK = 16


@dataclass(frozen=True)
class RandomLatents:
    """Latents that are nothing but noise of a seed: enough to compare decoders. frames: 4n + 1; size in pixels."""

    seed: int
    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class CompareRequest:
    """What to compare. latents: a safetensors file, or noise; frames: so many from the start (4n + 1), None for all;
    source: what people call the latents."""

    latents: Path | RandomLatents
    a: DecodeSettings
    b: DecodeSettings
    frames: int | None = None
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; of a file only the name, since its folder may be moved."""
        kept = {name: dataclasses.asdict(getattr(self, name)) for name in SIDES}
        random = isinstance(self.latents, RandomLatents)
        latents = dataclasses.asdict(self.latents) if random else self.latents.name
        return {"latents": latents, **kept, "frames": self.frames, "source": self.source}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompareRequest:
        """What `to_json` gave, to be shown. It can run again only if its latents are random."""
        latents = values["latents"]
        where = Path(latents).name if isinstance(latents, str) else None
        sides = {name: DecodeSettings.from_dict(values[name]) for name in SIDES}
        return cls(
            Path(where) if where else RandomLatents(**latents), **sides, **{k: values[k] for k in ("frames", "source")}
        )


@dataclass(frozen=True)
class Option:
    """One way to decode on this machine, for menus. value: "path:precision"."""

    settings: DecodeSettings
    reason: str

    @property
    def value(self) -> str:
        """As `parse_side` reads it."""
        alone = ":one" if self.settings.devices == "one" else ""
        return f"{self.settings.path}:{self.settings.precision}{alone}"


def options(executor: Executor) -> list[Option]:
    """Every path and precision that this machine has, as `explain` says, in the order in which settings list them."""
    found: dict[Decoder, Option] = {}
    for devices in get_args(Devices):
        for path in get_args(DecodePath)[1:]:
            for precision in get_args(DecodePrecision):
                settings = DecodeSettings(path, precision, devices)
                try:
                    choice = executor.explain_decode(settings)
                except EngineError:
                    continue
                if choice.path == path:
                    explicit = dataclasses.replace(settings, precision=choice.precision)
                    found.setdefault(decoder_of(choice), Option(explicit, choice.reason))
    return list(found.values())


def decoder_of(choice: Choice) -> Decoder:
    """A choice without its reason."""
    return Decoder(choice.path, choice.precision, choice.devices)


def parse_side(text: str) -> DecodeSettings:
    """Settings from "path", "path:precision" or "path:precision:one". Raises RequestError with what is allowed."""
    path, _, rest = str(text).partition(":")
    precision, _, devices = rest.partition(":")
    return DecodeSettings(path, precision or "auto", devices or "all")  # type: ignore[arg-type]


def open_latents(source: Path | RandomLatents, frames: int | None, preset: Preset) -> tuple[torch.Tensor, dict]:
    """The latents to decode, fp32 [1, 48, F, h, w], and what is known of them. frames: how many from the start.

    Raises RequestError for a broken file, a wrong shape, values that are not finite, an excerpt longer than the video,
    and a size that the preset does not do.
    """
    if isinstance(source, RandomLatents):
        asked = preset.request(prompt="-", **dataclasses.asdict(source))
        latents = draw_noise(asked.seed, (1, *latent_shape(asked.frames, asked.height, asked.width)))
        facts: dict[str, Any] = {"latents": "random", "seed": asked.seed}
    else:
        saved = load_latents(source)
        latents, facts = saved.tensor, {"latents": "file", **saved.metadata}
    if frames is not None:
        latents = latents[:, :, : _excerpt(frames, video_frames(latents.shape[2]))]
    height, width, length = record.video_size(latents)
    preset.request(prompt="-", frames=length, height=height, width=width)
    return latents, facts


def _excerpt(frames: int, available: int) -> int:
    if frames != nearest_frames(frames) or not 1 <= frames <= available:
        nearest = min(nearest_frames(frames), available)
        raise RequestError(
            f"frames = {frames}: an excerpt has 4n + 1 frames, at most the {available} there are; take {nearest}."
        )
    return latent_frames(frames)


@dataclass
class Side:
    """One decode. seconds: of delivering all frames, warm; peak_bytes: the highest of each device meanwhile; added:
    what came on top of what an accelerator held before (None on a CPU, where a process gives memory back too late to
    tell); error: why there is no result, in words; notes: what took over while it was decoded, if something did; gpu:
    whether GPUs decoded it."""

    name: str
    settings: DecodeSettings
    folder: Path
    decoder: Decoder | None = None
    gpu: bool = False
    reason: str = ""
    seconds: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    added: int | None = None
    raw: FrameFile | None = None
    video: Path | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all its frames are there."""
        return self.error is None and self.raw is not None and self.raw.complete

    def to_json(self, frames: int) -> dict[str, Any]:
        """As in compare.json."""
        return {
            "path": self.decoder.path if self.decoder else self.settings.path,
            "precision": self.decoder.precision if self.decoder else self.settings.precision,
            "devices": self.decoder.devices if self.decoder else None,
            "reason": "; ".join((self.reason, *self.notes)),
            "seconds": self.seconds,
            "frames_per_second": frames / self.seconds if self.seconds else None,
            "peak_bytes": self.peak_bytes,
            "added_bytes": self.added,
            "video": str(self.video.relative_to(self.folder.parent)) if self.video else None,
            "error": self.error,
        }


class Comparison:
    """One comparison at work; a context manager that leaves videos, raw 8-bit frames and the result, nothing else.

    latents: fp32 [1, 48, F, h, w]; facts: what is known of them; folder: made if need be. Raises ResourceError if the
    disk is too small for the frames.
    """

    def __init__(self, latents: torch.Tensor, facts: dict, folder: Path, fps: int) -> None:
        self.latents, self.facts, self.folder, self.fps = latents, facts, folder, fps
        self.height, self.width, self.frames = record.video_size(latents)
        self.sides: list[Side] = []
        self.meter = Meter()
        self._floats: FrameFile | None = None
        folder.mkdir(parents=True, exist_ok=True)
        disk.require(folder, disk.comparison(self.frames, self.height, self.width), "This comparison")

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exception: object) -> None:
        self.meter.__exit__(*exception)
        (self.folder / FLOAT_NAME).unlink(missing_ok=True)
        for side in self.sides:
            if not side.complete:
                (side.folder / RAW_NAME).unlink(missing_ok=True)

    def run(
        self,
        name: str,
        settings: DecodeSettings,
        executor: Executor,
        telemetry: Telemetry,
        cancel: threading.Event,
    ) -> Iterator[Event]:
        """Decode one side. Its errors become its `error`; Cancelled is raised only if no side is whole yet."""
        side = Side(name, settings, self.folder / name)
        self.sides.append(side)
        try:
            with memory_in_words(f"Side {name.upper()}", None, executor.device, ADVICE):
                yield from self._work(side, executor, telemetry, cancel)
        except Cancelled as stopped:
            if not any(other.complete for other in self.sides):
                raise
            side.error = side.error or str(stopped)
        except EngineError as error:
            side.error = str(error)
        except Exception as error:
            # A fault of ours on one side: the other side's result is still worth having.
            log.exception("side %s", name)
            side.error = broken.fault() or f"Internal error, please report it: {type(error).__name__}: {error}"
        yield SideEnded(name, side.to_json(self.frames))

    def _work(self, side: Side, executor: Executor, telemetry: Telemetry, cancel: threading.Event) -> Iterator[Event]:
        choice = executor.explain_decode(side.settings)
        side.decoder, side.reason = decoder_of(choice), choice.reason
        side.gpu = executor.devices[0].type == "cuda"
        yield SideStarted(side.name, choice.path, choice.precision, side.reason)
        side.folder.mkdir(exist_ok=True)
        first = len(self.sides) == 1
        if first or self._floats is not None:
            yield from self._measure(side, first, executor, telemetry, cancel)
        yield from self._deliver(side, executor, telemetry, cancel)
        yield from self._film(side, telemetry)

    def _measure(
        self, side: Side, first: bool, executor: Executor, telemetry: Telemetry, cancel: threading.Event
    ) -> Iterator[Event]:
        """Float frames: the first side's to disk, the second's against them."""
        yield StageStarted("measure", self.frames)
        shape = (self.frames, 3, self.height, self.width)
        floats = FrameFile(self.folder / FLOAT_NAME, shape, np.float32) if first else self._floats
        done = 0
        with telemetry.stage("measure") as stage:
            for chunk in executor.float_frames(self.latents, side.settings, cancel):
                values = chunk.numpy()
                if first:
                    floats.append(values)
                else:
                    self.meter.add(floats.read(done, len(values)), values)
                done += len(values)
                yield FramesMeasured(done, self.frames)
        self._floats = floats
        yield StageEnded("measure", stage.seconds, stage.peaks)

    def _deliver(
        self, side: Side, executor: Executor, telemetry: Telemetry, cancel: threading.Event
    ) -> Iterator[Event]:
        """Frames as they are delivered, timed. They go to disk raw: an encoder at work would slow the decoder down."""
        side.raw = FrameFile(side.folder / RAW_NAME, (self.frames, self.height, self.width, 3), np.uint8)
        before = _held(executor.device)
        yield StageStarted("decode", self.frames)
        with telemetry.stage("decode") as stage:
            for chunk in executor.decode(self.latents, side.settings, cancel):
                frames = np.asarray(chunk.frames)
                side.raw.append(frames)
                side.notes += chunk.stats.notes
                yield FramesReady(chunk.start, frames, self.frames)
        side.seconds, side.peak_bytes = stage.seconds, dict(stage.peaks)
        side.added = stage.peaks[before[0]] - before[1] if before else None
        yield StageEnded("decode", stage.seconds, stage.peaks)

    def _film(self, side: Side, telemetry: Telemetry) -> Iterator[Event]:
        yield StageStarted("file")
        notes = {"decode": {"path": side.decoder.path, "precision": side.decoder.precision}, "latents": self.facts}
        with (
            telemetry.stage("file") as stage,
            VideoWriter(side.folder, self.height, self.width, self.fps, self.frames, notes) as writer,
        ):
            for frames in side.raw.chunks(CHUNK):
                writer.write(frames)
            side.video = writer.close()
            writer.live.unlink(missing_ok=True)
        yield StageEnded("file", stage.seconds, stage.peaks)

    def finish(self, notes: dict[str, Any]) -> Iterator[Event]:
        """The result: figures and a verdict if both sides are there, what there is otherwise.

        notes: of the machine. Raises EngineError if neither side has a result.
        """
        a, b = self.sides
        if a.error and b.error:
            raise EngineError(f"Neither side could be decoded. A: {a.error} B: {b.error}")
        result = self._facts(notes)
        if a.complete and b.complete and len(self.meter.floats) == self.frames:
            yield StageStarted("compare")
            for ours, theirs in zip(a.raw.chunks(CHUNK), b.raw.chunks(CHUNK), strict=True):
                self.meter.add_bytes(ours, theirs)
            figures = self.meter.figures()
            verdict = judge(figures, limits_for(a.decoder, b.decoder, a.gpu))
            result |= {"ratio": b.seconds / a.seconds, "figures": figures, "verdict": verdict}
            yield StageEnded("compare", 0.0)
        result = plain_json(result)
        record.write_json(self.folder / RESULT_NAME, result)
        yield ComparisonFinished(result)

    def _facts(self, notes: dict[str, Any]) -> dict[str, Any]:
        size = {"frames": self.frames, "height": self.height, "width": self.width, "fps": self.fps}
        sides = {side.name: side.to_json(self.frames) for side in self.sides}
        nothing = {"ratio": None, "figures": None, "verdict": None}
        return {"source": self.facts, **size, "sides": sides, **nothing, "method": METHOD, **notes}


def _held(device: torch.device) -> tuple[str, int] | None:
    """Name and allocated bytes of an accelerator."""
    return next(((entry.name, entry.allocated) for entry in memory_now().devices if entry.name == str(device)), None)


def drop_raw(folder: Path) -> None:
    """Delete the raw frames of a comparison; videos and figures stay."""
    for name in SIDES:
        (folder / name / RAW_NAME).unlink(missing_ok=True)
