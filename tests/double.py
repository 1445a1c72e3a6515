"""A stand-in for the engine: test frames at a set pace, faults on request, real files. For tests of the page."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvicorn
from PIL import Image
from safetensors import safe_open

import app
from engine import record
from engine.compare import Decoder
from engine.decode_cost import CompareCost, DecodeCost
from engine.engine import Engine
from engine.errors import BusyError, Cancelled, EngineError
from engine.estimate import Estimate
from engine.events import Event, FramesReady, PreviewReady, StageEnded, StageStarted, StepDone, VideoFinished, Warned
from engine.janitor import Keep
from engine.jobs import Jobs
from engine.latents import save_latents
from engine.preset import Preset
from engine.preview import PREVIEW_NAME, write_animation
from engine.readiness import Readiness
from engine.request import Request
from engine.settings import DecodeSettings
from engine.shapes import latent_shape
from engine.sides import Option
from engine.telemetry import Memory, memory_now
from engine.video import VideoWriter, thumbnail
from engine.web.files import visitor
from engine.web.hosting import Hosting
from kernels.choose import Choice

GIB = 2**30


@dataclass
class Pace:
    """Seconds of one load, text, step and chunk; `fail_at`: "text", "denoise" or "decode" raises there, the last after
    `fail_after` frames; `warning`: said in the text stage; `previews`: one after each step."""

    load: float = 0.0
    text: float = 0.0
    step: float = 0.0
    chunk: float = 0.0
    fail_at: str | None = None
    fail_after: int = 1
    warning: str | None = None
    previews: bool = False


def pattern(start: int, count: int, height: int, width: int) -> np.ndarray:
    """Frames uint8 [count, height, width, 3]: a soft gradient, and a bright disc that moves with the frame number."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    frames = np.empty((count, height, width, 3), np.uint8)
    for index in range(count):
        time_ = (start + index) / 48
        shade = 0.5 + 0.5 * np.sin(x / width * 3 + time_ * 2)
        picture = np.stack([30 + 60 * shade, 50 + 60 * y / height, 110 + 80 * (1 - shade)], -1)
        distance = np.hypot(x - width * (0.2 + 0.6 * (time_ % 1)), y - height / 2)
        picture[distance < height * 0.18] = (245, 200, 90)
        frames[index] = picture
    return frames


class Double:
    """The engine's surface, without a model. `pace` may be changed while it works."""

    def __init__(self, preset: Preset, pace: Pace | None = None) -> None:
        self.preset = preset
        self.pace = pace or Pace()
        self.finally_ran = 0
        self._busy, self._began = threading.Lock(), 0.0
        # Every way to denoise is there.
        self.executor = SimpleNamespace(denoise_paths=lambda settings: [])
        self._readiness = Readiness("idle", "The model is loaded with the first request.")

    def load(self) -> None:
        parts = 8 if self.pace.load else 1
        for part in range(parts):
            text = f"Loading {self.preset.title}: {part * 0.5:.1f} of {parts * 0.5:.1f} GiB."
            self._readiness = Readiness("loading", text, part * GIB // 2, parts * GIB // 2)
            time.sleep(self.pace.load / parts)
        self._readiness = Readiness("ready", f"{self.preset.title} is ready on a test bench.")

    def readiness(self) -> Readiness:
        return self._readiness

    def about(self) -> dict[str, str]:
        return {"Model": self.preset.title, "Device": "a test bench", "Decoder": "plain, fp32: no GPU here <b>"}

    def estimate(self, request: Request) -> Estimate | None:
        if self._readiness.state != "ready":
            return None
        work = request.frames * request.height * request.width / 5_600_000
        return Estimate(denoise=work * request.steps / 6, decode=work * 8, other=1.0, basis="the last video made here")

    def paths(self) -> list[Choice]:
        return [Choice("denoise", "plain, fp32", "a test bench"), Choice("decode", "plain, fp32", "no GPU here <b>")]

    def count_tokens(self, prompt: str) -> int | None:
        return len(prompt.split()) if self._readiness.state == "ready" else None

    def figures(self) -> dict:
        return self._figures(time.perf_counter() - self._began) if self._busy.locked() else {}

    def memory(self) -> Memory:
        return memory_now()

    def decoders(self) -> list[Option]:
        return [Option(DecodeSettings(path, "fp32"), "a test bench") for path in ("plain", "reference")]

    def check(self, request: Request) -> Image.Image | None:
        return Engine.check(self, request)

    def decoder(self, settings: DecodeSettings) -> Decoder:
        return Decoder("plain" if settings.path == "auto" else settings.path, "fp32")

    def estimate_comparison(self, a: DecodeSettings, b: DecodeSettings, latents: tuple[int, int, int]) -> CompareCost:
        return CompareCost(DecodeCost(1.0, GIB, True), DecodeCost(3.0, GIB, False), latents[0], latents[1] * latents[2])

    def compare(self, *arguments: object) -> Iterator[Event]:
        raise EngineError("A test bench has no decoders.")

    def generate(self, request: Request, folder: Path, cancel: threading.Event) -> Iterator[Event]:
        if not self._busy.acquire(blocking=False):
            raise BusyError("busy")
        try:
            yield from self._run(request, folder, cancel)
        except Exception:
            record.keep_figures(folder, self.figures())
            raise
        finally:
            self.finally_ran += 1
            self._busy.release()

    def decode(self, latents: Path, settings: DecodeSettings, folder: Path, cancel: threading.Event) -> Iterator[Event]:
        with safe_open(latents, "pt") as file:
            request = Request.from_json(json.loads(file.metadata()["request"]))
        began = time.perf_counter()
        yield from self._plain("load", 0.0, cancel)
        yield from self._decode(dataclasses.replace(request, decode=settings), folder, cancel, began)

    def close(self) -> None:
        self._readiness = Readiness("idle", "closed")

    def _run(self, request: Request, folder: Path, cancel: threading.Event) -> Iterator[Event]:
        began = self._began = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        record.write_json(folder / "request.json", request.to_json())
        yield from self._plain("load", 0.0, cancel)
        yield from self._plain("text", self.pace.text, cancel)
        if self.pace.warning:
            yield Warned(self.pace.warning)
        if request.image:
            yield from self._plain("image", 0.0, cancel)
        yield from self._denoise(request, folder, cancel)
        shape = (1, *latent_shape(request.frames, request.height, request.width))
        notes = record.tags({"request": request.to_json()})
        save_latents(folder / "latents.safetensors", torch.zeros(shape), notes)
        yield from self._decode(request, folder, cancel, began)

    def _plain(self, stage: str, seconds: float, cancel: threading.Event) -> Iterator[Event]:
        yield StageStarted(stage)
        if self.pace.fail_at == stage:
            raise EngineError("The prompt could not be read: the <tokenizer> is missing. Load the checkpoint again.")
        self._pause(seconds, cancel)
        yield StageEnded(stage, seconds)

    def _denoise(self, request: Request, folder: Path, cancel: threading.Event) -> Iterator[Event]:
        yield StageStarted("denoise", request.steps)
        began = time.perf_counter()
        for step in range(1, request.steps + 1):
            if self.pace.fail_at == "denoise" and step > request.steps // 2:
                raise EngineError("cuda:0 ran out of memory (0.2 of 139.8 GiB are free now). Choose a smaller size.")
            self._pause(self.pace.step, cancel)
            yield StepDone(step, request.steps, self.pace.step, (request.steps - step) * self.pace.step)
            if self.pace.previews and step < request.steps:
                small = pattern(0, 25, request.height // 4, request.width // 4)[::4]
                write_animation(folder / PREVIEW_NAME, small, 1 / 6)
                yield PreviewReady(step, request.steps, folder / PREVIEW_NAME)
        yield StageEnded("denoise", time.perf_counter() - began)

    def _decode(self, request: Request, folder: Path, cancel: threading.Event, began: float) -> Iterator[Event]:
        yield StageStarted("decode", request.frames)
        clock, done, first, early = time.perf_counter(), 0, None, None
        size = (request.height, request.width)
        with VideoWriter(folder, *size, self.preset.fps, request.frames, {"request": request.to_json()}) as writer:
            while done < request.frames and early is None:
                count = min(16 if done else 1, request.frames - done)
                frames = pattern(done, count, *size)
                try:
                    if self.pace.fail_at == "decode" and done >= self.pace.fail_after:
                        raise RuntimeError("a fault <b>of ours</b>")
                    self._pause(self.pace.chunk, cancel)
                except (Cancelled, RuntimeError) as error:
                    if not done:
                        raise
                    early = error
                    continue
                yield from map(Warned, writer.write(frames))
                if first is None:
                    first = time.perf_counter() - began
                    thumbnail(frames[0], folder / "thumbnail.jpg")
                yield FramesReady(done, frames, request.frames)
                done += count
            seconds = time.perf_counter() - clock
            yield StageEnded("decode", seconds)
            yield StageStarted("file")
            video = writer.close(partial=early is not None)
            record.keep_last_frame(folder, writer.last)
            yield StageEnded("file", 0.1)
        stats = self._stats(request, done, video, seconds, first, time.perf_counter() - began)
        record.write_json(folder / "stats.json", stats)
        yield VideoFinished(video, early is not None, stats)
        if isinstance(early, RuntimeError):
            raise early

    def _figures(self, total: float) -> dict:
        """Stages that take a fixed share, and memory that rises over them."""
        shares = (("text", 0.0, 0.02), ("denoise", 0.02, 0.6), ("decode", 0.62, 0.33), ("file", 0.95, 0.05))
        moments = [total * index / 40 for index in range(41)]
        levels = [int((1 + 0.6 * (index > 1) + 0.4 * (index > 24) * (index % 4 > 0)) * GIB) for index in range(41)]
        return {
            "seconds": total,
            "stages": [
                {"name": name, "started": total * start, "seconds": total * share, "peaks": {}}
                for name, start, share in shares
            ],
            "peak_bytes": {"host": 2 * GIB},
            "step_seconds": [0.4 + 0.05 * (index % 3) for index in range(12)],
            "memory": {"seconds": moments, "host": levels, "cuda:0": [3 * level for level in levels]},
        }

    def _stats(self, request: Request, frames: int, video: Path, decode: float, first: float, total: float) -> dict:
        return {
            "request": request.to_json(),
            "seconds_to_first_frame": first,
            "frames": frames,
            "height": request.height,
            "width": request.width,
            "fps": self.preset.fps,
            "seconds_per_step": self.pace.step,
            "decode_frames_per_second": frames / decode,
            "decode": {"path": self.decoder(request.decode).path, "precision": "fp32", "reason": "a test bench"},
            **self._figures(total),
            "device": "a test bench",
            "precision": "fp32",
            "latents_sha256": "0" * 64,
            "file_bytes": video.stat().st_size,
        }

    @staticmethod
    def _pause(seconds: float, cancel: threading.Event) -> None:
        if cancel.wait(seconds):
            raise Cancelled("Stopped.")


@dataclass
class Served:
    """A page that is being served. engine: its double."""

    url: str
    engine: Double
    jobs: Jobs


@contextmanager
def serve(engine: Double, outputs: Path, keep: Keep | None = None, **settings: Any) -> Iterator[Served]:
    """The real page over an engine, on a free port, until the block is left. settings: fields of `Hosting`."""
    listener = socket.create_server(("127.0.0.1", 0))
    hosting = Hosting(port=listener.getsockname()[1], **settings)
    jobs = Jobs(engine, outputs, keep, limits=hosting.queue_limits(), visitor=visitor)
    page = app.server(engine, jobs, hosting)
    config = uvicorn.Config(page, log_level="warning", timeout_graceful_shutdown=1, proxy_headers=False)
    server = app.Server(config, jobs)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, jobs)
    finally:
        server.should_exit = True
        thread.join(20)
