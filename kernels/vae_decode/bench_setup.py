"""What the decoder's bench stands on: a VAE by the recipe, the machine's matrix rate, the work of the layers."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import RequestError

FULL = {"base_dim": 160, "decoder_base_dim": 256, "num_res_blocks": 2}
SMALL = {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1}
LAYOUT = {
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "temperal_downsample": [False, True, True],
    "attn_scales": [],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
CHANNELS = ((1024, 1024), (1024, 1024), (1024, 512), (512, 256))  # into and out of the four levels at full width


def load_vae(weights: Path | None, small: bool, frames: int, height: int, width: int) -> tuple[nn.Module, Tensor]:
    """A VAE in fp32 on the CPU without its encoder, and latents [1, 48, F, h, w] for it.

    weights: a folder as diffusers saves it, None for random ones: PyTorch's initialisation after seed 0, then from a
    generator of seed 1, in the order of the parameters, each gain 1 + 0.2 n and each bias 0.05 n, then the latents n.
    """
    try:
        from diffusers import AutoencoderKLWan
    except ImportError as error:
        raise RequestError(
            "The bench compares with diffusers, which is not installed: pip install diffusers, or carry its wheel to a "
            "machine without a network (kernels/vae_decode/benchmarks.md)."
        ) from error
    draw = torch.Generator()
    draw.manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        config = LAYOUT | (SMALL if small else FULL)
        vae = AutoencoderKLWan.from_pretrained(weights) if weights else AutoencoderKLWan(**config)
    vae.eval().requires_grad_(False)
    if weights is None:
        for name, parameter in vae.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            if kind in ("gamma", "bias"):
                scale, offset = (0.2, 1.0) if kind == "gamma" else (0.05, 0.0)
                parameter.copy_(torch.empty(parameter.shape).normal_(generator=draw) * scale + offset)
    shape = (1, 48, (frames + 3) // 4, height // 16, width // 16)
    latents = torch.empty(shape).normal_(generator=draw)
    vae.encoder = vae.quant_conv = None  # nothing here encodes, and its memory would count
    return vae, latents


def direct_flops(frames: int, height: int, width: int, channels: Any = CHANNELS, blocks: int = 3) -> float:
    """Floating-point operations of all convolutions as they stand: two for a multiplication and its sum.

    blocks: residual blocks of a level. The 3 x 3 behind a nearest doubling counts at the large size with nine taps; the
    attention does not count.
    """
    latents, h, w = (frames + 3) // 4, height // 16, width // 16
    top = channels[0][0]
    total = latents * h * w * (48 * top + 4 * top * top) * 27  # the first convolution and two blocks in the middle
    t = latents
    for level, (inputs, outputs) in enumerate(channels):
        convolutions = inputs * outputs + (2 * blocks - 1) * outputs * outputs
        shortcut = inputs * outputs if inputs != outputs else 0
        total += t * h * w * (27 * convolutions + shortcut)
        if level < 2:
            total += t * h * w * 3 * outputs * 2 * outputs
            t = 2 * t - 1
        if level < 3:
            h, w = 2 * h, 2 * w
            total += t * h * w * 9 * outputs * outputs
    return 2.0 * (total + t * h * w * 27 * channels[-1][1] * 12)


def matmul_rate(device: torch.device, size: int, seconds: float = 1.0) -> float:
    """The best rate of a large matrix product, TFLOP/s: random numbers in fp16 (fp32 on a CPU), best of many runs."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.empty(size, size, device=device).normal_().to(dtype) for _ in range(2))
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds or best == float("inf"):
        best = min(best, timed(lambda: torch.mm(a, b), device))
    return 2 * size**3 / best / 1e12


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run, between two moments at which the device had nothing to do."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_reset(device: torch.device) -> None:
    """Begin to watch the highest memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The highest since; None on a CPU, where nothing counts it."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def commit() -> str:
    """Of the working tree, or "unknown" where there is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gpu_name(device: torch.device) -> str:
    """As PyTorch calls the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
