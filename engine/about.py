"""What runs here, in words: the model, the machine, and which path each operation takes and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.executor import choose_precision
from engine.executors import Executor
from engine.hub import REPOSITORY
from engine.preset import Preset
from kernels.choose import Choice


def about(preset: Preset, executor: Executor) -> dict[str, str]:
    """Model, checkpoint, parts, device, precision, where all is, and versions."""
    return {
        "Model": f"{preset.title}: {preset.about}",
        "Checkpoint": preset.checkpoint,
        **_parts(executor),
        "Device": executor.device_name(),
        **_denoising(preset, executor),
        **{name: str(value) for name, value in executor.versions().items()},
    }


def paths(preset: Preset, executor: Executor) -> list[Choice]:
    """The path of every operation with the preset's settings."""
    path, precision, reason, _ = executor.explain_decode(preset.decode)
    return [*executor.denoise_paths(preset.denoise), Choice("decode", f"{path}, {precision}", reason)]


def machine(preset: Preset, executor: Executor) -> dict[str, Any]:
    """What stats.json says of model and machine; the paths are those of the request that ran last."""
    return {
        "preset": preset.name,
        "checkpoint": place_name(preset.checkpoint),
        "vae_sha256": executor.vae_hash,
        "device": executor.device_name(),
        "precision": executor.precision,
        "paths": {choice.operation: choice._asdict() for choice in executor.paths},
        "versions": executor.versions(),
    }


def place_name(checkpoint: str) -> str:
    """What may be told of where a checkpoint is: a repository, or a folder without its path on this machine."""
    return checkpoint if REPOSITORY.fullmatch(checkpoint) else Path(checkpoint).name


def _denoising(preset: Preset, executor: Executor) -> dict[str, str]:
    """Precision with its reason, weights and memory as planned; before loading, and on several devices, the first."""
    if executor.placement:
        return executor.placement.lines()
    return {"Denoising": executor.precision or choose_precision(preset.denoise, executor.devices[0])}


def _parts(executor: Executor) -> dict[str, str]:
    if executor.folder is None:
        return {}
    return {
        _title(part.name): f"{part.kind}, {part.parameters / 1e6:,.1f} M parameters" for part in executor.info.parts
    }


def _title(part: str) -> str:
    return part.upper() if part == "vae" else part.replace("_", " ").capitalize()
