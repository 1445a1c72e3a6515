"""How a video is made again: its settings as a command line, and all that its bytes depend on as a text to copy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.request import Request

OF_DENOISE = {
    "precision": "--precision",
    "quality": "--quality",
    "attention": "--attention",
    "fused_kernels": "--fused-kernels",
}
# Where weights lie, how much memory there may be and what is shown on the way change no byte of a video; devices that
# share the work change the last bits of the latents at most, and another machine has others.
WITHOUT_EFFECT = ("offload", "preview", "memory_gib", "devices")
OF_DECODE = {"path": "--decode-path", "precision": "--decode-precision"}


def command(request: Request, checkpoint: str | None = None) -> str:
    """`python -m engine ...` for a POSIX shell that asks for the same. checkpoint: where it is not the preset's own.

    A first frame is named by its file name alone: its path on this machine means nothing elsewhere.
    """
    words = ["python", "-m", "engine", "--preset", request.preset]
    if checkpoint:
        words += ["--checkpoint", checkpoint]
    for name in ("height", "width", "frames", "steps", "shift", "guidance", "seed"):
        words += [f"--{name}", f"{getattr(request, name)!r}"]
    if request.negative_prompt:
        words.append(f"--negative={request.negative_prompt}")
    if request.image:
        words.append(f"--image={Path(request.image).name}")
    for settings, options in ((request.denoise, OF_DENOISE), (request.decode, OF_DECODE)):
        # Spelled out, since a preset may have another default.
        words += [word for name, option in options.items() for word in (option, getattr(settings, name))]
    return shlex.join([*words, "--", request.prompt])


def paths(stats: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Operation, path and reason of all that stats.json tells."""
    rows = [(path["operation"], path["path"], path["reason"]) for path in (stats.get("paths") or {}).values()]
    decode = stats.get("decode") or {}
    if decode.get("path"):
        rows.append(("decode", f"{decode['path']}, {decode.get('precision', '')}", decode.get("reason", "")))
    return rows


def card(request: Request, stats: Mapping[str, Any]) -> str:
    """All that the bytes of a video depend on, a line each. stats: as in stats.json; what is not in it is left out."""
    versions = stats.get("versions") or {}
    lines = {
        "Prompt": request.prompt,
        "Negative prompt": request.negative_prompt,
        "First frame": Path(request.image).name if request.image else "",
        "Size": f"{request.width} x {request.height} (width x height), {request.frames} frames",
        "Denoising": f"{request.steps} steps, shift {request.shift:g}, guidance {request.guidance:g}",
        "Seed": f"{request.seed} (noise is drawn on the CPU, so that it is the same on any device)",
        "Preset": str(stats.get("preset") or request.preset),
        "Checkpoint": str(stats.get("checkpoint") or ""),
        "Device": str(stats.get("device") or ""),
        "Precision": str(stats.get("precision") or ""),
        **{operation.replace("_", " ").capitalize(): f"{path} ({reason})" for operation, path, reason in paths(stats)},
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "VAE": _hash(stats.get("vae_sha256")),
        "Latents": _hash(stats.get("latents_sha256")),
    }
    return "\n".join(f"{name}: {text}" for name, text in lines.items() if text)


def _hash(digest: Any) -> str:
    return f"sha256 {digest}" if digest else ""
