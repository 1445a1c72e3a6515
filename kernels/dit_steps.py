"""Whole denoising steps of the 29B transformer with random weights, a part of `kernels.dit_bench`; needs 60 GiB."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from engine import fp8
from engine.attention import BACKENDS
from engine.mmdit import MMDiTConfig, PAN2Transformer3DModel
from kernels.timing import milliseconds

# Fused or not. Compiled blocks stay so and fp8 weights too: fused passes never call a block, and fp8 comes last.
WAYS = {"plain": False, "plain-best-attention": False, "compiled": False, "ours": True, "ours-fp8": True}
WANTED = ("ours", "ours-fp8", "plain", "compiled", "plain-best-attention")  # while there is time


class Budget:
    """Seconds from the start of a benchmark on."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()


def affordable(block: dict[str, float], config: MMDiTConfig, repeats: int, seconds: float) -> list[str]:
    """Rows whose whole steps fit into so many seconds, by what their block took: a branch to warm up, then steps."""
    chosen = []
    for name in (name for name in WANTED if name in block):
        need = config.num_layers * block[name] / 1000 * (1 + 2 * repeats)
        if need <= seconds:
            seconds -= need
            chosen.append(name)
        else:
            print(f"no whole step of {name}: it takes {need:.0f} s, {max(seconds, 0):.0f} s are left")
    return chosen


def steps(
    config: dict[str, Any],
    grid: tuple[int, int, int],
    text_tokens: int,
    device: torch.device,
    names: list[str],
    choice: str,
    repeats: int,
) -> dict[str, float]:
    """Milliseconds of a step, both guidance branches, with all blocks; by row. choice: the best attention."""
    started = time.perf_counter()
    model = random_model(config, device, torch.bfloat16)
    channels, (frames, rows, columns) = model.config.out_channels, grid
    latents = torch.empty(1, channels, frames, 2 * rows, 2 * columns, device=device).normal_()
    condition = torch.zeros(1, channels + 1, *latents.shape[2:], device=device)
    text = torch.empty(1, text_tokens, model.config.text_embed_dim, device=device, dtype=torch.bfloat16).normal_()
    prepared = model.prepare(text, condition, [0.9, 0.0])
    print(f"whole model ready after {time.perf_counter() - started:.1f} s")

    def branch() -> Tensor:
        return model.velocity(latents, 0, prepared)

    found = {}
    for name in (name for name in WAYS if name in names):
        if name == "ours-fp8":
            fp8.convert(model)
        if name == "compiled":  # one graph for all blocks: their weights are its inputs
            for block in model.transformer_blocks:
                block.compile()
        named, around = for_the_compiler(choice) if name == "compiled" else (choice, nullcontext())
        model.set_attention(None if name == "plain" else named)
        model.set_fused_kernels(WAYS[name])
        with around:
            branch()
            found[name] = statistics.median(milliseconds(lambda: (branch(), branch()), device, repeats))
        print(f"{name}: {found[name]:.1f} ms a step")
    return found


def for_the_compiler(choice: str) -> tuple[str | None, AbstractContextManager[Any]]:
    """What a layer to be compiled has to name as its attention, and what to call it in: a backend of PyTorch's own is
    switched to around the call, any other is left alone by the compiler as it stands."""
    return (None, sdpa_kernel(BACKENDS[choice])) if choice in BACKENDS else (choice, nullcontext())


def randomised(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """A module built on meta, on the device with random weights, which make a block neither vanish nor blow up."""
    module = module.to(dtype).to_empty(device=device).requires_grad_(False)
    for name, parameter in module.named_parameters():
        parameter.normal_(std=0.02)
        if ".norm_" in name or name.endswith(("norm1.weight", "norm2.weight")):
            parameter += 1
    return module


def random_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> PAN2Transformer3DModel:
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**config)
    return randomised(model, device, dtype)
