"""The latents of a job as a file: what the model made, before decoding, so that it can be decoded again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import RequestError
from engine.shapes import LATENT_CHANNELS, SPATIAL_FACTOR, video_frames

KEY = "latents"


@dataclass(frozen=True)
class SavedLatents:
    """tensor: fp32 [1, 48, F, h, w], normalised, on the CPU; metadata: preset, seed, vae hash, versions, as strings."""

    tensor: torch.Tensor
    metadata: dict[str, str]

    @property
    def frames(self) -> int:
        """Frames that they decode to."""
        return video_frames(self.tensor.shape[2])

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.tensor.shape[3] * SPATIAL_FACTOR, self.tensor.shape[4] * SPATIAL_FACTOR


def save_latents(path: Path, latents: torch.Tensor, metadata: dict[str, str]) -> str:
    """Write latents [1, 48, F, h, w] as fp32 under a temporary name, then rename; returns their SHA-256."""
    tensor = latents.detach().to("cpu", torch.float32).contiguous()
    digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    part = path.with_name(path.name + ".part")
    save_file({KEY: tensor}, part, metadata={**metadata, "sha256": digest})
    part.rename(path)
    return digest


def load_latents(path: Path) -> SavedLatents:
    """Read latents back. Raises RequestError if the file is not safetensors, holds no latents, has a wrong shape or
    values that are not finite."""
    if not Path(path).is_file():
        raise RequestError(f"The latents file {path} does not exist.")
    try:
        with safe_open(path, framework="pt") as file:
            if KEY not in file.keys():  # noqa: SIM118 - safe_open is no mapping
                raise RequestError(
                    f"{path} has no tensor named {KEY!r}; it has {', '.join(sorted(file.keys())) or 'none'}."
                )
            tensor, metadata = file.get_tensor(KEY), file.metadata() or {}
    except SafetensorError as error:
        raise RequestError(f"{path} is not a whole safetensors file ({error}).") from error
    _check(tensor, path)
    return SavedLatents(tensor.float(), metadata)


def _check(tensor: torch.Tensor, path: Path) -> None:
    shape = tuple(tensor.shape)
    if tensor.dim() != 5 or shape[0] != 1 or shape[1] != LATENT_CHANNELS or 0 in shape:
        raise RequestError(
            f"The latents in {path} have the shape {list(shape)}; needed is "
            f"[1, {LATENT_CHANNELS}, frames, height, width]."
        )
    if shape[3] % 2 or shape[4] % 2:
        raise RequestError(f"The latents in {path} are {shape[3]} x {shape[4]} (height x width); both must be even.")
    if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
        raise RequestError(f"The latents in {path} hold values that are not finite numbers ({tensor.dtype}).")


def folder_hash(folder: Path) -> str:
    """SHA-256 over the safetensors files of a folder, which tells one set of weights from another."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
