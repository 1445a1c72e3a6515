"""A small random VAE of Wan 2.2's layout, and what diffusers decodes with it."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor


def small_vae(base: int = 8, blocks: int = 1, **changes: object) -> AutoencoderKLWan:
    """Random weights with gains and biases that matter; `changes` go into the configuration."""
    config = {
        "base_dim": base,
        "decoder_base_dim": base,
        "z_dim": 48,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": blocks,
        "temperal_downsample": [False, True, True],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "latents_mean": [0.02 * k - 0.5 for k in range(48)],
        "latents_std": [0.6 + 0.01 * k for k in range(48)],
    }
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**(config | changes)).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=draw))
        elif name.endswith("bias"):
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    return vae


def normal_latents(frames: int, h: int = 3, w: int = 5, seed: int = 7) -> Tensor:
    """fp32 [1, 48, frames, h, w], standard normal."""
    return torch.randn(1, 48, frames, h, w, generator=torch.Generator().manual_seed(seed))


def denormalised(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """What the VAE's own decode takes."""
    mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    return latents * std + mean


def theirs(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """diffusers' decode of normalised latents: fp32 [t, 3, H, W] in [-1, 1]."""
    with torch.no_grad():
        return vae.decode(denormalised(vae, latents)).sample[0].transpose(0, 1)
