"""What the steps are heading for, seen before they are done: latents to small pictures by one matrix product.

The matrix is fitted to the loaded VAE by least squares on drawn scenes that the VAE itself encodes and decodes, once
for each set of weights, and kept in the user's cache. It gives every latent position SUB x SUB pixels, the mean of the
frames that the position stands for: as many numbers as a latent has channels, so that little of it is lost. The first
latent frame, which stands for one frame and not for four, has a matrix of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d

from engine.cache import user_cache
from engine.condition import encode_image
from engine.decode import float_frames
from engine.denoise import Step
from engine.events import PreviewReady, Warned
from engine.shapes import LATENT_CHANNELS, SPATIAL_FACTOR, TEMPORAL_FACTOR

log = logging.getLogger(__name__)

PREVIEW_NAME = "preview.webp"
SUB = 4
LARGEST = 320
SCENES, SCENE_FRAMES, SCENE_SIDE = 8, 9, 128
# Keeps directions of the latents that hardly any scene excites from blowing up; others have a variance of about 1.
RIDGE = 3e-3
# At most this share of the time, and not more often than anybody would notice.
SHARE, SECONDS_APART = 0.02, 1.0
QUALITY = 60


@dataclass(frozen=True)
class LinearMap:
    """weight: float32 [2, 48, 3 * SUB * SUB]; bias: [2, 3 * SUB * SUB]; of the first frame and of the later ones, on
    the device of the latents."""

    weight: Tensor
    bias: Tensor

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> np.ndarray:
        """Normalised latents [1, 48, F, h, w] as frames uint8 [F, SUB * h, SUB * w, 3] on the host."""
        inputs = latents[0].float().movedim(0, -1)
        which = (torch.arange(len(inputs), device=inputs.device) > 0).long()
        values = torch.einsum("fhwc,fcp->fhwp", inputs, self.weight[which]) + self.bias[which][:, None, None]
        frames, height, width, _ = values.shape
        pixels = values.view(frames, height, width, 3, SUB, SUB).permute(0, 1, 4, 2, 5, 3)
        pixels = pixels.reshape(frames, SUB * height, SUB * width, 3)
        return pixels.div_(2).add_(0.5).clamp_(0, 1).mul_(255).round_().to(torch.uint8).cpu().numpy()


def fit(latents: Tensor, patches: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Weight [48, p] and bias [p] of least squares. latents: [n, 48]; patches: [n, p], what each position decodes to;
    ridge: added to the mean square of every input."""
    inputs = torch.cat((latents, torch.ones_like(latents[:, :1])), dim=1).double()
    square = inputs.T @ inputs
    square.diagonal().add_(ridge * len(inputs))
    solved = torch.linalg.solve(square, inputs.T @ patches.double()).float()
    return solved[:-1], solved[-1]


@torch.no_grad()
def fit_to(vae: Any) -> LinearMap:
    """The map of a VAE (diffusers' `AutoencoderKLWan`), from scenes that it encodes and decodes; on its device."""
    latents, patches = [], []
    for scene in scenes():
        encoded = encode_image(vae, scene)
        latents.append(encoded[0].movedim(0, -1).flatten(1, 2))
        patches.append(patches_of(torch.cat(list(float_frames(vae, encoded)))))
    latents, patches = torch.stack(latents), torch.stack(patches)
    first = fit(latents[:, 0].flatten(0, 1), patches[:, 0].flatten(0, 1))
    later = fit(latents[:, 1:].flatten(0, 2), patches[:, 1:].flatten(0, 2))
    return LinearMap(*(torch.stack(pair) for pair in zip(first, later, strict=True)))


def patches_of(frames: Tensor) -> Tensor:
    """Frames [4n + 1, 3, H, W] as [n + 1, positions, 3 * SUB * SUB]: the first alone, then means of four."""
    small = avg_pool2d(frames, SPATIAL_FACTOR // SUB)
    later = small[1:].view(-1, TEMPORAL_FACTOR, *small.shape[1:]).mean(1)
    small = torch.cat((small[:1], later))
    count, _, height, width = small.shape
    cut = small.view(count, 3, height // SUB, SUB, width // SUB, SUB)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, 3 * SUB * SUB)


def scenes() -> Iterator[Tensor]:
    """Drawn clips, float32 [1, 3, SCENE_FRAMES, SCENE_SIDE, SCENE_SIDE] in [-1, 1], the same every time: a ground that
    changes from one colour to another, in every other clip with a grating on it, and a disc or square that moves."""
    t = torch.linspace(-0.5, 0.5, SCENE_FRAMES)[:, None, None]
    y = torch.linspace(-0.5, 0.5, SCENE_SIDE)[None, :, None]
    x = torch.linspace(-0.5, 0.5, SCENE_SIDE)[None, None, :]
    for index in range(SCENES):
        cos, sin = math.cos(2.4 * index), math.sin(2.4 * index)
        along, across = x * cos + y * sin, y * cos - x * sin
        grating = index % 2 * torch.cos(2 * math.pi * (2 ** (index // 2 % 4 + 1) * across + t))
        left, top = (x - 0.2 * _spread(index) - 0.3 * cos * t), (y - 0.2 * _spread(3 * index) - 0.3 * sin * t)
        far = torch.maximum(left.abs(), top.abs()) if index % 3 == 0 else torch.hypot(left, top)
        inside = far < 0.2 + 0.08 * _spread(2 * index)
        channels = []
        for channel in range(3):
            base, slope = _spread(5 * index + 11 * channel + 1), _spread(3 * index + 7 * channel)
            wave, thing = _spread(index + 5 * channel), _spread(8 * index + 13 * channel + 5)
            ground = base + 0.8 * slope * along + 0.3 * wave * grating
            channels.append(torch.where(inside, torch.full_like(ground, thing), ground))
        yield torch.stack(channels)[None].clamp(-1, 1)


def _spread(index: int) -> float:
    """Numbers that fill [-1, 1] evenly (multiples of the golden ratio)."""
    return 2 * (index * 0.6180339887 % 1) - 1


def map_for(vae: Any, vae_hash: str) -> LinearMap:
    """The map of a VAE with this hash: from the cache, else fitted and kept there. A file that is damaged, or of
    another shape, counts as absent; a cache that can't be written to is only logged."""
    device = next(vae.parameters()).device
    try:
        path = user_cache() / f"preview-{SUB}-{vae_hash[:32]}.safetensors"
    except OSError as error:
        log.warning("the map for previews is not kept: %s", error)
        return fit_to(vae)
    kept = _load(path)
    if kept is None:
        kept = fit_to(vae)
        _save(path, kept)
    return LinearMap(kept.weight.to(device), kept.bias.to(device))


def _load(path: Path) -> LinearMap | None:
    try:
        tensors = load_file(path)
        found = LinearMap(tensors["weight"].float(), tensors["bias"].float())
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError) as error:
        log.warning("%s is damaged and is made again: %s", path, error)
        return None
    values = 3 * SUB * SUB
    right = found.weight.shape == (2, LATENT_CHANNELS, values) and found.bias.shape == (2, values)
    if right and torch.isfinite(found.weight).all() and torch.isfinite(found.bias).all():
        return found
    log.warning("%s does not hold a map for previews and is made again", path)
    return None


def _save(path: Path, linear: LinearMap) -> None:
    part = path.with_name(f"{path.name}.{time.monotonic_ns()}.part")
    try:
        save_file({"weight": linear.weight.cpu(), "bias": linear.bias.cpu()}, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        log.warning("%s could not be written: %s", path, error)
        with suppress(OSError):
            part.unlink()


def write_animation(path: Path, frames: np.ndarray, seconds_each: float) -> None:
    """Frames uint8 [F, H, W, 3] as an endless animated WebP of at most LARGEST pixels a side, whole or not at all."""
    pictures = [Image.fromarray(frame) for frame in frames]
    for picture in pictures:
        picture.thumbnail((LARGEST, LARGEST))
    part = path.with_name(path.name + ".part")
    first, *rest = pictures
    options = {"duration": round(1000 * seconds_each), "loop": 0, "quality": QUALITY, "method": 0}
    first.save(part, "WEBP", save_all=True, append_images=rest, **options)
    part.replace(path)


class Previews:
    """Previews of one run: after which steps there is one, and its file. clock: seconds.

    linear: None switches it off. What goes wrong is logged and said once; the run goes on without previews.
    """

    def __init__(
        self, linear: LinearMap | None, folder: Path, fps: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.linear, self.path, self.clock = linear, folder / PREVIEW_NAME, clock
        self.seconds_each = TEMPORAL_FACTOR / fps
        self._next = clock() + SECONDS_APART

    def after(self, step: Step) -> Iterator[PreviewReady | Warned]:
        """A preview of where this step leads, if one is due; the last step has the video itself."""
        began = self.clock()
        if self.linear is None or step.k == step.steps or began < self._next:
            return
        try:
            write_animation(self.path, self.linear(step.clean), self.seconds_each)
        except Exception as error:  # whatever it is, a video is worth more than its preview
            log.exception("no preview after step %d", step.k)
            self.linear = None
            yield Warned(f"The preview failed and is off for this video, which is not affected: {error}")
            return
        ended = self.clock()
        self._next = ended + max(SECONDS_APART, (ended - began) / SHARE)
        yield PreviewReady(step.k, step.steps, self.path)
