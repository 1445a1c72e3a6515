"""Noise to latents: one Euler step of the flow after the other, with classifier-free guidance."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import Cancelled, EngineError, RequestError
from engine.settings import Quality
from engine.step_cache import make_cache

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler


@dataclass(frozen=True)
class Step:
    """Step k of `steps`, from 1; seconds: of this step; latents: float32 [B, 48, F, h, w], never written to again;
    clean: of the same kind, where this step's velocity would lead if it were followed to the end; passes: of the
    transformer so far, both branches; recalled: those of them that the step cache answered."""

    k: int
    steps: int
    seconds: float
    latents: torch.Tensor
    clean: torch.Tensor
    passes: int = 0
    recalled: int = 0


Velocities = Callable[[Any, torch.Tensor, int, Sequence[Any], Sequence[Any]], list[torch.Tensor]]


def in_turn(
    model: Any, latents: torch.Tensor, k: int, branches: Sequence[Any], caches: Sequence[Any]
) -> list[torch.Tensor]:
    """The velocity of each guidance branch, one after the other: with the prompt, then without."""
    return [model.velocity(latents, k, branch, cache) for branch, cache in zip(branches, caches, strict=True)]


@torch.no_grad()
def denoise(
    model: Any,
    prompt: torch.Tensor,
    negative: torch.Tensor | None,
    condition: torch.Tensor,
    noise: torch.Tensor,
    scheduler: FlowMatchEulerDiscreteScheduler,
    guidance: float,
    cancel: threading.Event | None = None,
    quality: Quality = "full",
    velocities: Velocities = in_turn,
) -> Iterator[Step]:
    """Yield every step of one run; the last one holds the finished latents, normalised.

    model: a `PAN2Transformer3DModel`; prompt, negative: text embeddings [1, L, D], negative unused (and may be None)
    if guidance is 1 or less; condition: [B, 49, F, h, w]; noise: float32 [B, 48, F, h, w]; scheduler: fresh from
    `engine.schedule.build_scheduler`; quality: see `engine.step_cache`; velocities: of all branches at a step. Works on
    the model's device, wherever the tensors are.

    Raises Cancelled between steps once `cancel` is set, and EngineError naming the step if values are not finite.
    """
    if scheduler.step_index is not None:
        raise ValueError("this scheduler has run already; build one for each run")
    guided = _is_guided(guidance, negative)
    sigmas = scheduler.sigmas.tolist()
    latents = noise.to(model.device, torch.float32)
    _stop_if(cancel, 0, sigmas)
    branches = [_prepare(model, text, condition, sigmas) for text in ((prompt, negative) if guided else (prompt,))]
    # One memory a branch, made for this run: nothing of it can reach another request.
    caches = [make_cache(quality, sigmas) for _ in branches]

    for k, timestep in enumerate(scheduler.timesteps):
        _stop_if(cancel, k, sigmas)
        started = time.perf_counter()
        velocity, *others = velocities(model, latents, k, branches, caches)
        for velocity_without in others:
            velocity = velocity_without + guidance * (velocity - velocity_without)
        clean = latents - sigmas[k] * velocity.float()
        # In float32 before the step: the scheduler returns the latents in the velocity's dtype.
        latents = scheduler.step(velocity.float(), timestep, latents, return_dict=False)[0]
        _check_finite(latents, k, sigmas, velocity.dtype)
        recalled = sum(cache.recalled for cache in caches if cache)
        passes = (k + 1) * len(caches)
        yield Step(k + 1, len(sigmas) - 1, time.perf_counter() - started, latents, clean, passes, recalled)


def _is_guided(guidance: float, negative: torch.Tensor | None) -> bool:
    if not math.isfinite(guidance):
        raise RequestError(
            f"guidance = {guidance!r} must be a finite number; PAN2's is 2.5, 1 or less switches it off."
        )
    if guidance > 1 and negative is None:
        raise RequestError(f"guidance = {guidance:g} needs a negative prompt's embedding; an empty prompt will do.")
    return guidance > 1


def _prepare(model: Any, text: torch.Tensor, condition: torch.Tensor, sigmas: list[float]) -> Any:
    return model.prepare(text.expand(condition.shape[0], -1, -1), condition, sigmas)


def _stop_if(cancel: threading.Event | None, k: int, sigmas: list[float]) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"Stopped after {k} of {len(sigmas) - 1} denoising steps.")


def _check_finite(latents: torch.Tensor, k: int, sigmas: list[float], dtype: torch.dtype) -> None:
    """One sum a step: it also waits for the device, so that the seconds of a step are true."""
    if not torch.isfinite(latents.sum()):
        raise EngineError(
            f"Denoising step {k + 1} of {len(sigmas) - 1} (sigma {sigmas[k]:.4f}, model output in {dtype}) gave values "
            "that are not finite. Check the transformer's weights, or run it in fp32."
        )
