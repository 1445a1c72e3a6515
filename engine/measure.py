"""How fast this machine is with this model: a short run after loading, which also warms everything up."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

import torch

from engine.condition import make_condition
from engine.estimate import Rates, pass_flops
from engine.noise import draw_noise
from engine.preset import Preset
from engine.request import Request
from engine.shapes import SIZE_MULTIPLE, latent_shape

if TYPE_CHECKING:
    from engine.executors import Executor

# Latent frames to decode: two passes after the first frame, the first of them cold.
DECODED = 9
NEVER = threading.Event()


def measure(executor: Executor, preset: Preset) -> Rates:
    """Rates from two passes of the smallest size, two of the preset's own, and the decoding of its first frames.

    executor: with everything loaded. The second of each is taken: shapes that are new cost a
    library more than half of the time of a pass. A run of the preset's size is slow where videos are, a few seconds
    where a video takes minutes, and tells the truth: passes of fewer frames run at other speeds.
    """
    loaded = loaded_bytes(executor)
    least = -(-preset.limits.min_side // SIZE_MULTIPLE) * SIZE_MULTIPLE
    small, full = _request(preset, frames=1, height=least, width=least), _request(preset)
    config = executor.transformer_config
    fixed, _ = _pass(executor, small)
    seconds, latents = _pass(executor, full)
    work = pass_flops(config, full.frames, full.height, full.width)
    least_work = pass_flops(config, small.frames, small.height, small.width)
    # Two sizes give two unknowns: what a pass takes whatever its size, and operations a second.
    flops = max(work - least_work, 0.1 * work) / max(seconds - fixed, 0.1 * seconds)
    return Rates(
        flops=flops,
        positions=_decode(executor, preset, latents[:, :, :DECODED]),
        basis="a short run when the model was loaded",
        pass_seconds=max(0.0, fixed - least_work / flops),
        loaded=loaded,
    )


def loaded_bytes(executor: Executor) -> int | None:
    """What is held now: of an accelerator (the first of several) by live tensors, on a CPU by the processes."""
    memory = executor.memory()
    if executor.devices[0].type == "cpu":
        return memory.host
    first = f"cuda:{executor.devices[0].index or 0}"
    return next((seen.allocated for seen in memory.devices if seen.name == first), None)


def _request(preset: Preset, **size: int) -> Request:
    settings = dataclasses.replace(preset.denoise, quality="full")
    return preset.request(prompt="", steps=2, guidance=1.0, denoise=settings, **size)


def _pass(executor: Executor, request: Request) -> tuple[float, torch.Tensor]:
    """Seconds of a pass that is not the first of its size, and what came out."""
    shape = latent_shape(request.frames, request.height, request.width)
    text = (executor.encode_prompt(request.prompt), None)
    *_, last = executor.denoise(request, text, make_condition(shape), draw_noise(0, (1, *shape)), NEVER)
    return last.seconds, last.latents


def _decode(executor: Executor, preset: Preset, latents: torch.Tensor) -> float:
    """Positions a second (`engine.decode_cost.decode_work`) of the last chunk, since the first ones also warm up."""
    came, clock = [], time.perf_counter()
    for chunk in executor.decode(latents, preset.decode, NEVER):
        came.append((len(chunk.frames), time.perf_counter() - clock))
        clock = time.perf_counter()
    frames, seconds = came[-1]
    return frames * latents.shape[3] * latents.shape[4] / max(seconds, 1e-9)
