"""How near the faster ways of denoising stay to the plain one, and how much faster they are, on a model's own prompts.

    python -m engine.fidelity [--preset tiny] [--ways balanced draft fp8] [--steps 50] [--frames 49]

Every video is denoised in full quality and in each way, from the same noise. PSNR is of the final latents, its range
their largest less their smallest value in full quality. A video from a first frame is among them. For fp8 the error of
single velocities is measured too, at latents of the full run. On a CPU fp8 is the exact reference of its arithmetic in
float32: its figures are those of the products, its times mean nothing. The last line is JSON; benchmarks.md keeps such.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import checkpoint as files
from engine import fp8
from engine.arguments import in_one_line
from engine.condition import make_condition
from engine.denoise import Step, denoise
from engine.devices import choose_device
from engine.executor import DTYPES
from engine.noise import draw_noise
from engine.preset import Preset, preset_from_environment
from engine.request import Request
from engine.schedule import build_scheduler
from engine.settings import DenoiseSettings
from engine.shapes import latent_shape
from engine.telemetry import synchronize

WAYS = ("balanced", "draft", "fp8")
SEEDS = (123, 7, 11, 5, 42)
PROBES = 5  # velocities of a run that fp8 is compared at


@dataclass(frozen=True)
class Video:
    """One to denoise. texts: embeddings with and without the prompt; condition [1, 49, F, h, w]."""

    request: Request
    texts: tuple[Tensor, Tensor]
    condition: Tensor


@dataclass(frozen=True)
class Run:
    """seconds: of all steps, on a CPU of its own work; last: the last step; kept: what went into some, by step."""

    seconds: float
    last: Step
    kept: dict[int, Tensor]


def decibels(latents: Tensor, full: Tensor) -> float:
    """PSNR of latents over the range of those in full quality."""
    reach, error = full.max() - full.min(), (latents - full).double().square().mean()
    return float(10 * torch.log10(reach.double() ** 2 / error))


class Bench:
    """A model of a preset and its videos. changes: frames, steps, ... of the requests."""

    def __init__(self, preset: Preset, device: torch.device, videos: int, **changes: Any) -> None:
        folder, self.preset, self.device = files.resolve(preset.checkpoint, None), preset, device
        dtype = DTYPES["bf16" if device.type == "cuda" else "fp32"]
        self.scheduler = files.load_scheduler(folder)
        self.encoder = files.load_text_encoder(folder, device, dtype)
        self.model = files.load_transformer(folder, device, dtype)
        prompts = (preset.examples or (preset.defaults.prompt,)) * len(SEEDS)
        requests = [
            preset.request(prompt=prompt, seed=seed, **changes)
            for prompt, seed in zip(prompts, SEEDS[: max(1, videos - 1)], strict=False)
        ]
        self.videos = [self._video(request) for request in requests]

    def _video(self, request: Request, first: Tensor | None = None) -> Video:
        texts = tuple(self.encoder.encode(text).embedding for text in (request.prompt, request.negative_prompt))
        shape = latent_shape(request.frames, request.height, request.width)
        return Video(request, texts, make_condition(shape, None if first is None else first.cpu()))

    def run(self, video: Video, way: str = "full") -> Run:
        """Denoise a video; fp8 is run in full quality, with a model that was converted before."""
        request, kept = video.request, {}
        probes = {round(i * (request.steps - 1) / (PROBES - 1)) for i in range(PROBES)}
        noise = draw_noise(request.seed, (1, *latent_shape(request.frames, request.height, request.width)))
        quality = way if way in ("balanced", "draft") else "full"
        scheduler = build_scheduler(self.scheduler, request.steps, request.shift)
        # Processor time on a CPU, where other programs would count too.
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        started, latents = clock(), noise.to(self.device)
        for step in denoise(
            self.model, *video.texts, video.condition, noise, scheduler, request.guidance, quality=quality
        ):
            if step.k - 1 in probes:
                kept[step.k - 1] = latents
            latents = step.latents
        synchronize(self.device)
        return Run(clock() - started, step, kept)

    def with_first_frame(self, full: Run) -> Video:
        """The first prompt once more, continuing from the first frame of a video that is there."""
        request = dataclasses.replace(self.videos[0].request, seed=SEEDS[-1])
        return self._video(request, full.last.latents[:, :, :1])

    def velocities(self, video: Video, full: Run) -> list[Tensor]:
        """With the prompt, at the latents that the full run kept."""
        sigmas = build_scheduler(self.scheduler, video.request.steps, video.request.shift).sigmas.tolist()
        prepared = self.model.prepare(video.texts[0], video.condition, sigmas)
        return [self.model.velocity(latents, k, prepared).float() for k, latents in full.kept.items()]


def measure(bench: Bench, ways: Sequence[str], say: Any = print) -> dict[str, Any]:
    """Figures of each way over all videos. say: gets a line of text after each."""
    full = [bench.run(video) for video in bench.videos]
    bench.videos.append(bench.with_first_frame(full[0]))
    full.append(bench.run(bench.videos[-1]))
    found: dict[str, Any] = {"full": {"seconds": [run.seconds for run in full]}}
    exact = [bench.velocities(video, run) for video, run in zip(bench.videos, full, strict=True)]
    # fp8 last: it changes the model.
    for way in sorted(ways, key=lambda name: name == "fp8"):
        if way == "fp8":
            fp8.convert(bench.model)
        runs = [bench.run(video, way) for video in bench.videos]
        found[way] = _figures(runs, full)
        if way == "fp8":
            ours = [bench.velocities(video, run) for video, run in zip(bench.videos, full, strict=True)]
            found[way]["velocity_error"] = [
                max(float((a - b).norm() / b.norm()) for a, b in zip(mine, truth, strict=True))
                for mine, truth in zip(ours, exact, strict=True)
            ]
        say(line(way, found[way]))
    return found


def _figures(runs: Sequence[Run], full: Sequence[Run]) -> dict[str, list[float]]:
    return {
        "psnr": [decibels(run.last.latents, truth.last.latents) for run, truth in zip(runs, full, strict=True)],
        "speedup": [truth.seconds / run.seconds for run, truth in zip(runs, full, strict=True)],
        "skipped": [run.last.recalled / run.last.passes for run in runs],
    }


def line(way: str, figures: dict[str, list[float]]) -> str:
    """One row of a table: lowest PSNR first."""
    each = " ".join(f"{value:.1f}" for value in figures["psnr"])
    speed, skipped = statistics.fmean(figures["speedup"]), statistics.fmean(figures["skipped"])
    worst = max(figures.get("velocity_error", [0]))
    error = f", velocities off by {worst:.1e} at most" if worst else ""
    return (
        f"{way:9} {min(figures['psnr']):.1f} dB at the lowest ({each}), {speed:.2f}x, {skipped:.0%} of passes "
        f"skipped{error}"
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m engine.fidelity", description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset")
    parser.add_argument("--checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--videos", type=int, default=5, choices=range(2, 6), help="one of them from a first frame")
    for name in ("steps", "frames", "height", "width"):
        parser.add_argument(f"--{name}", type=int, default=50 if name == "steps" else None)
    with in_one_line():
        _run(parser.parse_args(arguments))


def _run(given: argparse.Namespace) -> None:
    preset, device = preset_from_environment(given.preset, given.checkpoint), choose_device(given.device)
    full = DenoiseSettings()
    changes = {name: getattr(given, name) for name in ("steps", "frames", "height", "width")}
    bench = Bench(preset, device, given.videos, denoise=full, **changes)
    request = bench.videos[0].request
    size = f"{request.frames} frames of {request.width} x {request.height}, {request.steps} steps"
    print(f"{preset.title} on {device}, {bench.model.dtype}: {given.videos} videos, {size}")
    found = measure(bench, given.ways)
    facts = {"preset": preset.name, "device": str(device), "torch": torch.__version__, "date": time.strftime("%F")}
    size = {name: getattr(request, name) for name in ("frames", "height", "width", "steps", "shift", "guidance")}
    print(json.dumps({"bench": "fidelity", **facts, **size, **found}))


if __name__ == "__main__":
    main()
