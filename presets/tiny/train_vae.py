"""Training of the small VAE on windows of drawn videos, within a time budget; its statistics and quality afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from torch import Tensor

from presets.tiny import world
from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS, decode, encode, new_autoencoder, silence_unused
from presets.tiny.log import TrainingLog

SIZES = ((256, 448), (448, 256), (320, 320))
GRID = 16  # windows start on the latent grid, as pictures do


@dataclass(frozen=True)
class VaePlan:
    """seconds: training time; pool: windows kept on the GPU; batch, frames, window: what one step sees."""

    seconds: float = 270.0
    batch: int = 20
    frames: int = 17
    window: int = 128
    pool: int = 3072
    refresh: int = 96
    rate: float = 2e-3
    kl: float = 1e-4


SMOKE = VaePlan(seconds=8, batch=2, frames=5, window=32, pool=8, refresh=2)


def random_scenes(count: int, rng: np.random.Generator) -> world.Scenes:
    """Scenes of one of the kinds that the model draws."""
    kind = rng.choice(4, p=(0.4, 0.2, 0.2, 0.2))
    return world.sample(count, 2 if kind == 3 else 1, rng, wide=kind == 1, moving_camera=kind == 2)


def random_windows(count: int, plan: VaePlan, rng: np.random.Generator, device: str) -> Tensor:
    """Windows [count, 3, frames, window, window] of random videos of one of the sizes, mostly on an object's edge."""
    scenes = random_scenes(count, rng)
    height, width = SIZES[rng.choice(3, p=(0.6, 0.2, 0.2))]
    start = torch.as_tensor(rng.integers(0, world.CLIP_FRAMES - plan.frames + 1, len(scenes)))
    # Every fourth window is a video's beginning, whose first frame the VAE treats in its own way.
    start[::4] = 0
    middle = (start[:, None] + plan.frames / 2) / (world.CLIP_FRAMES - 1)
    track = world.trajectory(scenes, middle, height, width)
    chosen = torch.as_tensor(rng.integers(0, scenes.things, len(scenes)))[:, None]
    unit = min(height, width)
    corners = []
    for axis, extent in ((track.y, height), (track.x, width)):
        centre = axis[:, :, 0].gather(1, chosen)[:, 0] * unit + extent / 2
        scatter = torch.as_tensor(rng.normal(0, 0.16 * unit, len(scenes)))
        corner = ((centre + scatter - plan.window / 2) / GRID).round() * GRID
        corners.append(corner.clamp(0, (extent - plan.window) // GRID * GRID).float())
    window = world.Window(corners[0], corners[1], plan.window, plan.window)
    return world.render(scenes, height, width, plan.frames, start=start, window=window, device=device)


class WindowPool:
    """Windows drawn in advance and replaced bit by bit, so that drawing never holds training up."""

    def __init__(self, plan: VaePlan, rng: np.random.Generator, device: str) -> None:
        self.plan, self.rng, self.device = plan, rng, device
        parts = [random_windows(plan.refresh, plan, rng, device).bfloat16() for _ in range(plan.pool // plan.refresh)]
        self.windows, self.oldest = torch.cat(parts), 0

    def draw(self) -> Tensor:
        chosen = torch.randint(0, len(self.windows), (self.plan.batch,), device=self.device)
        return self.windows[chosen].float()

    def replace_some(self) -> None:
        fresh = random_windows(self.plan.refresh, self.plan, self.rng, self.device)
        self.windows[self.oldest : self.oldest + len(fresh)] = fresh.bfloat16()
        self.oldest = (self.oldest + len(fresh)) % len(self.windows)


def loss_of(vae: AutoencoderKLWan, video: Tensor, kl_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """L1 + 2 MSE + half of the L1 of the differences between neighbours + a weak pull of the posterior to N(0, 1)."""
    device = video.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        mean, log_variance = (part.float()[:, :USED_CHANNELS] for part in encode(vae, video))
        log_variance = log_variance.clamp(-14, 4)
        latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        unused = latents.new_zeros(len(latents), LATENT_CHANNELS - USED_CHANNELS, *latents.shape[2:])
        error = decode(vae, torch.cat([latents, unused], dim=1)).float() - video
    edges = sum(error.diff(dim=axis).abs().mean() for axis in (3, 4))
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    absolute, square = error.abs().mean(), error.square().mean()
    return absolute + 2 * square + 0.5 * edges + kl_weight * kl, {"l1": absolute, "mse": square, "kl": kl}


def train_vae(plan: VaePlan, device: str, log: TrainingLog, seed: int = 1) -> AutoencoderKLWan:
    """A trained VAE (the running mean of its weights), with the statistics of its latents in the config."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae = new_autoencoder().to(device)
    silence_unused(vae)
    average = [p.detach().clone() for p in vae.parameters()]
    optimiser = torch.optim.AdamW(vae.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=1e-3)
    pool = WindowPool(plan, rng, device)
    log.write("vae pool ready", windows=len(pool.windows))
    for step, progress in _budget(plan.seconds):
        optimiser.param_groups[0]["lr"] = plan.rate * min(1, (step + 1) / 150) * (0.02 + 0.98 * _cosine(progress))
        if step % 12 == 0:
            pool.replace_some()
        loss, parts = loss_of(vae, pool.draw(), plan.kl)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(vae.parameters()), 1 - min(0.998, (step + 1) / (step + 10)))
        if step % 200 == 0:
            log.write("vae", step=step, **{name: part.item() for name, part in parts.items()})
    with torch.no_grad():
        for parameter, mean in zip(vae.parameters(), average, strict=True):
            parameter.copy_(mean)
    return vae.eval()


def _budget(seconds: float) -> Iterator[tuple[int, float]]:
    """Steps and the share of the time that is over, until it is."""
    begin, step = time.time(), 0
    while (progress := (time.time() - begin) / seconds) < 1:
        yield step, progress
        step += 1


def _cosine(progress: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * progress)


@torch.no_grad()
def measure_vae(
    vae: AutoencoderKLWan, device: str, count: int, size: tuple[int, int] = SIZES[0], frames: int = world.CLIP_FRAMES
) -> tuple[list[float], Tensor, Tensor]:
    """PSNR of unseen whole videos over [-1, 1] in dB each, and the mean and deviation of the 48 latent channels."""
    rng = np.random.default_rng(77)
    psnr, latents = [], []
    for options in ({}, {"moving_camera": True}, {"things": 2}):
        things = options.pop("things", 1)
        scenes = world.sample(count, things, rng, held_out=True, **options)
        for i in range(0, count, 4):
            video = world.render(scenes.take(slice(i, i + 4)), *size, frames, device=device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                mean = encode(vae, video)[0].float()
                error = decode(vae, mean).float().clamp(-1, 1) - video
            psnr += (10 * torch.log10(4 / error.square().mean((1, 2, 3, 4)))).tolist()
            latents.append(mean)
    channels = torch.cat(latents).transpose(0, 1).flatten(1)
    mean, std = channels.mean(1), channels.std(1)
    mean[USED_CHANNELS:], std[USED_CHANNELS:] = 0, 1
    return psnr, mean, std


def save_vae(vae: AutoencoderKLWan, path: Path, mean: Tensor, std: Tensor, dtype: torch.dtype = torch.float16) -> None:
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in vae.state_dict().items()}
    save_file(weights | {"latents.mean": mean.cpu().float(), "latents.std": std.cpu().float()}, path)


def load_vae(path: Path, device: str) -> tuple[AutoencoderKLWan, Tensor, Tensor]:
    """The VAE in float32 and its latent statistics, shaped [1, 48, 1, 1, 1]."""
    weights = load_file(path)
    mean, std = weights.pop("latents.mean"), weights.pop("latents.std")
    vae = new_autoencoder(mean.tolist(), std.tolist())
    vae.load_state_dict({name: value.float() for name, value in weights.items()})
    mean, std = (stat.to(device).view(1, -1, 1, 1, 1) for stat in (mean, std))
    return vae.to(device).eval().requires_grad_(False), mean, std
