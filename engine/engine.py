"""From a request to a video: the whole path, read top to bottom in `Engine.generate`.

The engine speaks in events and knows nothing of pages, queues or how many devices there are. One request at a time: a
busy engine refuses in words.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image

from engine import about as facts
from engine import broken, disk, record
from engine import estimate as cost
from engine.compare import Decoder
from engine.condition import check_picture, make_condition, open_image
from engine.decode_cost import CompareCost
from engine.denoise import Step
from engine.errors import BusyError, Cancelled, EngineError, MediaError, RequestError, ResourceError
from engine.events import Event, FramesReady, Stage, StageEnded, StageStarted, StepDone, VideoFinished, Warned
from engine.executor import usable
from engine.executors import Executor, build_executor
from engine.experience import Experience
from engine.latents import load_latents, save_latents
from engine.memory import in_words, memory_in_words
from engine.noise import draw_noise
from engine.preset import Preset
from engine.preview import LinearMap, Previews
from engine.prompt import TextEmbedding
from engine.readiness import Readiness
from engine.request import Request, check
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import latent_shape
from engine.sides import Comparison, Option, RandomLatents, decoder_of, open_latents, options
from engine.telemetry import Memory, Telemetry
from engine.video import VideoWriter
from kernels.choose import Choice

log = logging.getLogger(__name__)

ADVICE = (
    "Choose a smaller size or fewer frames, or end other programs that use it. Latents that were made are kept in the "
    "job's folder."
)
T = TypeVar("T")
Run = Generator[Event, None, T]


class Engine:
    """One model on this machine. preset: what it does by default and at most; devices: see `engine.devices`; measured:
    whether loading ends with a short run that tells how fast it is, else the first video does."""

    def __init__(self, preset: Preset, devices: str = "auto", measured: bool = True) -> None:
        self.preset, self._measured = preset, measured
        self.executor: Executor = build_executor(preset.checkpoint, devices)
        self.executor.typical = preset.request()
        self._readiness = Readiness("idle", "The model is loaded with the first request.")
        self.experience = Experience(self.executor.devices[0].type)
        self._preview_map: LinearMap | None = None
        self._running: Telemetry | None = None
        self._busy, self._loading = threading.Lock(), threading.Lock()

    def generate(self, request: Request, folder: Path, cancel: threading.Event | None = None) -> Iterator[Event]:
        """Make one video in `folder` and tell how it goes.

        Yields events; the last one is VideoFinished. Raises before any work RequestError, BusyError or ResourceError;
        during the work CheckpointError, ResourceError, MediaError, and Cancelled if stopped before there were frames.
        A stop while frames arrive ends with a shorter, whole video instead. A fault while frames arrive does so too,
        and is raised after VideoFinished.
        """
        image = self.check(request)
        cancel = cancel or threading.Event()
        with (
            self._exclusive(),
            self._watched(folder) as telemetry,
            memory_in_words("This video", None, self.executor.device, ADVICE),
        ):
            record.prepare_folder(folder, request, image)
            if (beyond := self.preset.beyond_training(request)) is not None:
                yield Warned(beyond)
            yield from self._stage(telemetry, "load", lambda: self.load(request.denoise))
            self.decoder(request.decode)  # again, before all the work: now the widths of the VAE are known
            texts = yield from self._read_prompts(telemetry, request)
            seen = yield from self._see_image(telemetry, request, image)
            step = yield from self._denoise(telemetry, request, texts, seen, folder, cancel)
            notes, latents = self._notes(request, texts, step), step.latents
            notes["latents_sha256"] = save_latents(folder / record.LATENTS_NAME, latents, record.tags(notes))
            yield from self._deliver(telemetry, latents, request.decode, folder, notes, cancel)

    def decode(
        self, latents: Path, settings: DecodeSettings, folder: Path, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        """Decode saved latents again, with other settings or after a failure, into `folder`. Events and errors as of
        `generate`."""
        saved = load_latents(latents)
        self.decoder(settings)
        cancel = cancel or threading.Event()
        with (
            self._exclusive(),
            self._watched(folder) as telemetry,
            memory_in_words("This video", None, self.executor.device, ADVICE),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            disk.require(folder, disk.video(saved.frames, *saved.size), "This video")
            yield from self._stage(telemetry, "load", self.load)
            if saved.metadata.get("vae_sha256", self.executor.vae_hash) != self.executor.vae_hash:
                yield Warned("These latents were made for another VAE than this one, so the picture may be wrong.")
            notes = record.decode_notes(saved.metadata, settings) | facts.machine(self.preset, self.executor)
            yield from self._deliver(telemetry, saved.tensor, settings, folder, notes, cancel)

    def compare(
        self,
        latents: Path | RandomLatents,
        a: DecodeSettings,
        b: DecodeSettings,
        folder: Path,
        cancel: threading.Event | None = None,
        frames: int | None = None,
    ) -> Iterator[Event]:
        """Decode the same latents in two ways and measure how far they are apart, into `folder`.

        latents: a file, or noise of a seed; frames: so many from the start (4n + 1), None for all. The last event is
        ComparisonFinished. What fails on one side is said in its figures; errors as of `generate` if no side is left.
        """
        cancel = cancel or threading.Event()
        tensor, source = open_latents(latents, frames, self.preset)
        for settings in (a, b):
            self.decoder(settings)  # what this machine does not have is refused before any work
        with (
            self._exclusive(),
            self._watched() as telemetry,
            Comparison(tensor, source, folder, self.preset.fps) as comparison,
        ):
            yield from self._stage(telemetry, "load", self.load)
            for side, settings in (("a", a), ("b", b)):
                yield from comparison.run(side, settings, self.executor, telemetry, cancel)
            self.experience.learn_sides(comparison)
            yield from comparison.finish(facts.machine(self.preset, self.executor))

    def check(self, request: Request) -> Image.Image | None:
        """Raise RequestError for everything that can be known before the work, BrokenError where none can be done any
        more; returns the opened first frame."""
        broken.refuse()
        check(request, self.preset.limits)
        self.decoder(request.decode)
        self.executor.denoise_paths(request.denoise)
        if not request.prompt.strip() and request.image is None:
            raise RequestError("The prompt is empty. Say what should happen, or give a first frame.")
        if request.image is None:
            return None
        image = open_image(request.image)
        check_picture(image, request.height, request.width)
        return image

    def load(self, settings: DenoiseSettings | None = None) -> None:
        """Load what is not there yet and measure this machine; `readiness` tells how far it is.

        settings: None means the preset's.
        """
        settings = settings or self.preset.denoise
        with self._loading, broken.guarded(self.executor.device):
            try:
                self._hold(settings)
                if self._measured:
                    self.experience.measure(self.executor, self.preset, self.decoder(self.preset.decode))
                    self._hold(settings)  # a group ends its workers where one of them runs out of memory
                if self._preview_map is None and settings.preview == "on" and usable(self.executor.device):
                    self._preview_map = self._fit_preview()
            except Exception as error:
                words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                self._readiness = Readiness("failed", words)
                raise
            self._readiness = Readiness("ready", f"{self.preset.title} is ready on {self.executor.device_name()}.")

    def _hold(self, settings: DenoiseSettings) -> None:
        if not self.executor.holds(settings):
            self._readiness = Readiness("loading", f"Loading {self.preset.title} ...")
            self.executor.load(settings, self._report)

    def _fit_preview(self) -> LinearMap | None:
        try:
            return self.executor.preview_map()
        except Exception:  # videos are made without previews as well
            log.exception("there is no map for previews")
            return None

    def readiness(self) -> Readiness:
        """How far loading is; what is not known yet is asked of `experience`, which learns when nothing is loaded."""
        if fault := broken.fault():
            return Readiness("failed", fault)
        now, unmeasured = self._readiness, self.experience.unmeasured
        return Readiness("ready", f"{now.text} {unmeasured}") if unmeasured and now.state == "ready" else now

    def estimate(self, request: Request) -> cost.Estimate | None:
        """What a request will take; None before the model is loaded. RequestError for an absent decoder."""
        return self.experience.estimate(self.executor, request, self.decoder(request.decode))

    def decoder(self, settings: DecodeSettings) -> Decoder:
        """Path and precision that settings mean on this machine. RequestError where there is no such path, and for a
        budget of memory that it would not keep to."""
        decoder = decoder_of(self.executor.explain_decode(settings))
        settings.check_budget(decoder.path)
        return decoder

    def decoders(self) -> list[Option]:
        """Every way to decode on this machine, with its reason."""
        return options(self.executor)

    def estimate_comparison(self, a: DecodeSettings, b: DecodeSettings, latents: tuple[int, int, int]) -> CompareCost:
        """What a comparison of latents [frames, height, width] will take. RequestError for an absent decoder."""
        config = self.executor.vae_config if self.executor.folder else None
        return self.experience.estimate_comparison([self.decoder(side) for side in (a, b)], latents, config)

    def about(self) -> dict[str, str]:
        """What runs here, for people to read."""
        return facts.about(self.preset, self.executor)

    def paths(self) -> list[Choice]:
        """Which path each operation takes with the preset's settings, and why."""
        return facts.paths(self.preset, self.executor)

    def count_tokens(self, prompt: str) -> int | None:
        """How many of the MAX_TOKENS tokens a prompt takes, None before the model is loaded. RequestError for text that
        is none."""
        return self.executor.count_tokens(prompt) if self._readiness.state == "ready" else None

    def memory(self) -> Memory:
        """What this process, its workers and its devices hold at this moment."""
        return self.executor.memory()

    def figures(self) -> dict[str, Any]:
        """The figures of the request that runs, as far as it is (`Telemetry.summary`); empty where none runs."""
        running = self._running
        return running.summary() if running else {}

    def close(self) -> None:
        """Give back every byte."""
        self.executor.close()
        self.experience, self._preview_map = Experience(self.executor.devices[0].type), None
        self._readiness = Readiness("idle", "The model is loaded with the first request.")

    # The stages of a run, in order.

    def _read_prompts(self, telemetry: Telemetry, request: Request) -> Run[tuple[TextEmbedding, TextEmbedding | None]]:
        def read() -> tuple[TextEmbedding, TextEmbedding | None]:
            encode = self.executor.encode_prompt
            return encode(request.prompt), encode(request.negative_prompt) if request.guidance > 1 else None

        texts = yield from self._stage(telemetry, "text", read)
        for name, text in zip(("prompt", "negative prompt"), texts, strict=True):
            if text and text.warning:
                yield Warned(text.warning if name == "prompt" else f"Negative prompt: {text.warning}")
        return texts

    def _see_image(self, telemetry: Telemetry, request: Request, image: Any) -> Run[torch.Tensor]:
        shape = latent_shape(request.frames, request.height, request.width)
        if image is None:
            return make_condition(shape)
        latents = yield from self._stage(
            telemetry, "image", lambda: self.executor.encode_image(image, request.height, request.width)
        )
        return make_condition(shape, latents)

    def _denoise(
        self,
        telemetry: Telemetry,
        request: Request,
        texts: tuple[TextEmbedding, TextEmbedding | None],
        condition: torch.Tensor,
        folder: Path,
        cancel: threading.Event,
    ) -> Run[Step]:
        noise = draw_noise(request.seed, (1, *latent_shape(request.frames, request.height, request.width)))
        wanted = request.denoise.preview == "on"
        if wanted and self._preview_map is None:
            yield Warned("There are no previews of this video, which is not affected; the log says why.")
        previews = Previews(self._preview_map if wanted else None, folder, self.preset.fps)
        yield StageStarted("denoise", request.steps)
        steps, recalled = [], 0
        with telemetry.stage("denoise") as stage:
            for step in self.executor.denoise(request, texts, condition, noise, cancel):
                telemetry.step_took(step.seconds)
                steps.append((step.seconds, step.recalled - recalled))
                recalled = step.recalled
                yield StepDone(step.k, request.steps, step.seconds, (request.steps - step.k) * cost.pace(steps))
                yield from previews.after(step)
        yield StageEnded("denoise", stage.seconds, stage.peaks)
        self.experience.learn_denoise(self.executor.transformer_config, request, stage.seconds, steps)
        needed = cost.denoise_bytes(self.executor.transformer_config, request, self.executor.itemsize)
        self.experience.learn_peak(needed, stage.peaks)
        return step

    def _deliver(
        self,
        telemetry: Telemetry,
        latents: torch.Tensor,
        settings: DecodeSettings,
        folder: Path,
        notes: dict[str, Any],
        cancel: threading.Event,
    ) -> Run[None]:
        notes |= {"decode": self.executor.explain_decode(settings)._asdict()}
        height, width, frames = record.video_size(latents)
        with VideoWriter(folder, height, width, self.preset.fps, frames, record.metadata(notes)) as writer:
            error = yield from self._decode(telemetry, latents, settings, writer, frames, cancel)
            video = yield from self._stage(telemetry, "file", lambda: writer.close(partial=error is not None))
        size = {"frames": writer.written, "height": height, "width": width, "fps": self.preset.fps}
        figures = telemetry.summary() | {"devices": self.executor.stats()}
        stats = record.stats(notes | size, figures, video)
        try:
            record.keep_last_frame(folder, writer.last)
            record.write_json(folder / record.STATS_NAME, stats)
        except ResourceError as unwritten:
            yield Warned(f"The video is whole, its figures or its last frame are not kept. {unwritten}")
        yield VideoFinished(video, error is not None, stats)
        if error is not None and not isinstance(error, Cancelled):
            raise error

    def _decode(
        self,
        telemetry: Telemetry,
        latents: torch.Tensor,
        settings: DecodeSettings,
        writer: VideoWriter,
        frames: int,
        cancel: threading.Event,
    ) -> Run[Exception | None]:
        """Frames to the writer as they arrive. Returns what ended it early, a stop or a fault, if there are frames to
        keep; raises it if there are none."""
        yield StageStarted("decode", frames)
        early = None
        with telemetry.stage("decode") as stage:
            try:
                for chunk in self.executor.decode(latents, settings, cancel):
                    telemetry.frame_arrived()
                    yield from map(Warned, (*chunk.stats.notes, *writer.write(chunk.frames)))
                    record.keep_thumbnail(writer.path.parent, chunk.frames, writer.written, frames)
                    yield FramesReady(chunk.start, chunk.frames, frames)
            except MediaError:
                raise
            except Exception as error:
                if not writer.written:
                    raise
                early = error
        yield StageEnded("decode", stage.seconds, stage.peaks)
        part = writer.written / frames
        decoder, shape = self.decoder(settings), latents.shape[2:]
        self.experience.learn_decode(decoder, shape, part, stage.seconds)
        self.experience.learn_decode_peak(decoder, shape, self.executor.vae_config, stage.peaks)
        return early

    def _stage(self, telemetry: Telemetry, name: Stage, work: Callable[[], T]) -> Run[T]:
        yield StageStarted(name)
        with telemetry.stage(name) as stage:
            result = work()
        yield StageEnded(name, stage.seconds, stage.peaks)
        return result

    # What the engine knows of itself.

    def _notes(self, request: Request, texts: tuple[TextEmbedding, TextEmbedding | None], step: Step) -> dict[str, Any]:
        tokens = {"prompt": texts[0].tokens, "negative_prompt": texts[1].tokens if texts[1] else None}
        skipped = record.step_cache(request.denoise.quality, step, self.preset.fidelity)
        return {"request": request.to_json(), "tokens": tokens} | skipped | facts.machine(self.preset, self.executor)

    def _report(self, part: str, done: int, total: int) -> None:
        words = f"Loading {self.preset.title}, {part.replace('_', ' ')}: {in_words(done)} of {in_words(total)}."
        self._readiness = Readiness("loading", words if total else part, done, total)

    @contextmanager
    def _watched(self, folder: Path | None = None) -> Iterator[Telemetry]:
        """folder: where the figures of a video that is cut short are kept."""
        self.executor.begin_request()
        with Telemetry(self.executor.device, self.executor.memory) as telemetry:
            self._running = telemetry
            try:
                yield telemetry
            except Exception:
                if folder:
                    record.keep_figures(folder, telemetry.summary())
                raise
            finally:
                self._running = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise BusyError("The engine makes another video at the moment. Wait until it has finished, or stop it.")
        try:
            with broken.guarded(self.executor.device):
                yield
        finally:
            self._busy.release()
