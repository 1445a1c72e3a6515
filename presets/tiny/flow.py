"""Flow matching: noise levels to train at, what the transformer sees, and a plain Euler sampler for batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS


@dataclass(frozen=True)
class NoiseMix:
    """Where training puts its noise levels: shares of (high, middle, uniform). `high` is the shift for one frame of the
    default size; more frames carry more evidence, so the shift grows with the square root of their number."""

    shares: tuple[float, float, float] = (0.45, 0.3, 0.25)
    high: float = 12.0
    middle: float = 3.0

    def draw(self, count: int, frames: int, device: torch.device | str) -> Tensor:
        """Sigmas [count] in (0, 1), stratified within the batch."""
        uniform = (torch.rand(count, device=device) + torch.arange(count, device=device)) / count
        part = torch.randperm(count, device=device) / count
        high, middle = (shift * math.sqrt(frames) for shift in (self.high, self.middle))
        shift = torch.where(part < self.shares[0], high, torch.where(part < sum(self.shares[:2]), middle, 1.0))
        return shift_sigma(uniform, shift).clamp(1e-3, 1 - 1e-5)


def shift_sigma(sigma: Tensor, shift: Tensor | float) -> Tensor:
    return shift * sigma / (1 + (shift - 1) * sigma)


def model_input(noisy: Tensor, first: Tensor | None) -> Tensor:
    """[B, 97, F, h, w] from the used latent channels [B, 24, F, h, w] and, for image-to-video, the clean first frame.

    The unused channels are 0 here and noise in a request; the weights that would read them are 0.
    """
    batch, used, frames, height, width = noisy.shape
    whole = noisy.new_zeros(batch, 2 * LATENT_CHANNELS + 1, frames, height, width)
    whole[:, :used] = noisy
    if first is not None:
        whole[:, LATENT_CHANNELS : LATENT_CHANNELS + used, 0] = first
        whole[:, 2 * LATENT_CHANNELS, 0] = 1
    return whole


def velocity_loss(model: nn.Module, clean: Tensor, text: Tensor, sigma: Tensor, noise: Tensor, image: bool) -> Tensor:
    """Squared error of the velocity, [B]. clean, noise: [B, 24, F, h, w] float32; text: [B, L, D]."""
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = torch.lerp(clean, noise, level)
    guess = model(model_input(noisy, clean[:, :, 0] if image else None), 1000 * sigma, text)
    return (guess[:, :USED_CHANNELS].float() - (noise - clean)).square().mean((1, 2, 3, 4))


@torch.no_grad()
def sample(
    model: nn.Module,
    text: Tensor,
    empty: Tensor,
    noise: Tensor,
    *,
    steps: int,
    shift: float,
    guidance: float,
    first: Tensor | None = None,
) -> Tensor:
    """Euler from noise [B, 24, F, h, w] to latents, with guidance against the empty prompt's embedding [1, L0, D]."""
    levels = shift_sigma(torch.linspace(1, 0, steps + 1, device=noise.device), shift).tolist()
    x, empty = noise, empty.expand(len(noise), -1, -1)
    for level, following in itertools.pairwise(levels):
        whole = model_input(x, first)
        time = torch.full((len(x),), 1000 * level, device=x.device)
        velocity = model(whole, time, text)[:, :USED_CHANNELS].float()
        if guidance > 1:
            without = model(whole, time, empty)[:, :USED_CHANNELS].float()
            velocity = without + guidance * (velocity - without)
        x = x + (following - level) * velocity
    return x
