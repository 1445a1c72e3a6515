"""The latents of a job as a file: what the model made, before decoding, so that it can be decoded again."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import RequestError, ResourceError
from engine.shapes import LATENT_CHANNELS, SPATIAL_FACTOR, video_frames

KEY = "latents"
# The header of a file of ours has a few thousand bytes; one of millions only keeps whoever parses it busy.
MAX_HEADER = 2**20
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    """Write latents [1, 48, F, h, w] as fp32 under a temporary name, then rename; returns their SHA-256.

    The folder is made again if it is gone. Raises ResourceError if they can't be written there; it names the file in a
    temporary folder that holds them instead.
    """
    tensor = latents.detach().to("cpu", torch.float32).contiguous()
    digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    notes = {**metadata, "sha256": digest}
    try:
        _write(path, tensor, notes)
    except (OSError, SafetensorError) as error:
        where = _rescue(tensor, notes)
        raise ResourceError(f"The latents could not be written to {path} ({error}). {where}") from error
    return digest


def _write(path: Path, tensor: torch.Tensor, metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        save_file({KEY: tensor}, part, metadata=metadata)
        part.replace(path)
    except BaseException:
        # Half a file of this size would keep the disk full.
        with suppress(OSError):
            part.unlink()
        raise


def _rescue(tensor: torch.Tensor, metadata: dict[str, str]) -> str:
    """Write latents to a temporary folder, since they are the costly part of a video; says where they are."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="latents-"))
        _write(folder / "latents.safetensors", tensor, metadata)
    except (OSError, SafetensorError) as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        return (
            f"Nor could they be written to a temporary folder ({error}), so they are lost. Free some disk space, or "
            "choose another output folder, and start again."
        )
    return (
        f"They are kept in {folder / 'latents.safetensors'}; move that file to a safe place and decode it from there. "
        "Free some disk space, or choose another output folder, before the next video."
    )


def load_latents(path: Path) -> SavedLatents:
    """Read latents back, as fp32. Raises RequestError if the file can't be read, is not safetensors, holds no latents,
    has a wrong shape or dtype, or values that are not finite in fp32."""
    if not Path(path).is_file():
        raise RequestError(f"The latents file {path} does not exist.")
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            if KEY not in file.keys():  # noqa: SIM118 - safe_open is no mapping
                raise RequestError(
                    f"{path} has no tensor named {KEY!r}; it has {', '.join(sorted(file.keys())) or 'none'}."
                )
            tensor, metadata = file.get_tensor(KEY), file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is not a whole safetensors file ({error}).") from error
    return SavedLatents(_checked(tensor, path), metadata)


def saved_shape(path: Path) -> tuple[int, int, int]:
    """Frames, height and width that saved latents decode to, without reading them. Errors as of `load_latents`."""
    try:
        with safe_open(path, framework="pt") as file:
            _, _, frames, rows, columns = file.get_slice(KEY).get_shape()
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{path} is no file of latents ({error}).") from error
    return video_frames(frames), rows * SPATIAL_FACTOR, columns * SPATIAL_FACTOR


def _check_header(path: Path) -> None:
    """Refuse by its first eight bytes what only claims to be safetensors, before anything is parsed."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise RequestError(f"{path} can't be read ({error}). Check its permissions, or give another file.") from error
    if length > MAX_HEADER:
        raise RequestError(
            f"{path} is not a whole safetensors file of latents: it announces a header of {length} bytes, at most "
            f"{MAX_HEADER} are read."
        )


def _checked(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The latents as float32, which is what is decoded and so what must be finite."""
    shape = tuple(tensor.shape)
    if tensor.dim() != 5 or shape[0] != 1 or shape[1] != LATENT_CHANNELS or 0 in shape:
        raise RequestError(
            f"The latents in {path} have the shape {list(shape)}; needed is "
            f"[1, {LATENT_CHANNELS}, frames, height, width]."
        )
    if shape[3] % 2 or shape[4] % 2:
        raise RequestError(f"The latents in {path} are {shape[3]} x {shape[4]} (height x width); both must be even.")
    if tensor.dtype not in DTYPES:
        raise RequestError(
            f"The latents in {path} are stored as {tensor.dtype}; needed is float32, or another floating-point type of "
            "16 bits or more. Save them again as float32."
        )
    converted = tensor.float()
    if not torch.isfinite(converted).all():
        raise RequestError(
            f"The latents in {path} hold values that are not finite numbers in float32 (they are stored as "
            f"{tensor.dtype}). Make them again."
        )
    return converted


def folder_hash(folder: Path) -> str:
    """SHA-256 over the safetensors files of a folder, which tells one set of weights from another."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
