"""Folders of safetensors files: what they hold, by their headers alone, and the way of their tensors into a module.

Only safetensors is read. The pickled formats (.bin, .pt, .ckpt) can run code when they are opened, so they are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.errors import CheckpointError
from engine.fp8 import Fp8Linear
from engine.memory import in_use

Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all. May raise `Cancelled`, which ends the work."""

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".distcp")
MAX_HEADER = 100_000_000  # safetensors' own limit
LISTED = 10
STAGING = 64 * 2**20
AGAIN = "Delete it and download it again."


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. key: its name there; dtype: safetensors' code, such as BF16; start: its first byte."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """Where a tensor goes. mapped: it stays in its file, memory-mapped on the host, and is read when it is used."""

    dtype: torch.dtype
    device: torch.device
    mapped: bool = False


Plan = tuple[tuple[str, Placement], ...]
"""Name patterns to placements; the first match decides."""


def placement(plan: Plan, name: str) -> Placement:
    """The placement of a parameter by its name."""
    return next(place for pattern, place in plan if fnmatchcase(name, pattern))


def some(names: Iterable[str]) -> str:
    """The first ten names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if it is missing or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {_again(path)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}. {AGAIN}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(values).__name__}. {AGAIN}")
    return values


def _again(path: Path) -> str:
    return f"Download {path.parent.name}/ again; the checkpoint is incomplete."


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}. {AGAIN}")


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file by key. Raises CheckpointError for a file that is cut short or damaged."""
    size, raw = _raw_header(path)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {key: _entry(path, key, value, 8 + len(raw)) for key, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header can't be read ({error})") from error
    end = 8 + len(raw)
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            raise _damaged(path, f"{entry.key} starts at byte {entry.start} and the tensor before it ends at {end}")
        end += entry.nbytes
    if end != size:
        raise _damaged(path, f"it has {size} bytes and its header describes {end}")
    return entries


def _raw_header(path: Path) -> tuple[int, bytes]:
    """Size of a safetensors file, and its header as it stands there."""
    try:
        with path.open("rb") as file:
            size, start = path.stat().st_size, file.read(8)
            if start == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder."
                )
            length = int.from_bytes(start, "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _damaged(path, f"its {size} bytes are not a whole safetensors file")
            return size, file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read ({error}). Check its permissions, or download it again."
        ) from error


def _entry(path: Path, key: str, value: Mapping[str, Any], base: int) -> Entry:
    (start, end), shape, dtype = value["data_offsets"], tuple(value["shape"]), value["dtype"]
    # Python would calculate with 8.0 or True too, and fail only where bytes are counted.
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or not isinstance(dtype, str):
        raise ValueError(f"{key} has shape {list(shape)}, offsets {[start, end]} and dtype {dtype!r}")
    entry = Entry(path, key, dtype, shape, base + start, end - start)
    if entry.dtype in FLOATS and entry.numel * FLOATS[entry.dtype].itemsize != entry.nbytes:
        raise ValueError(f"{key} of shape {list(entry.shape)} in {entry.dtype} can't have {entry.nbytes} bytes")
    return entry


def list_tensors(folder: Path) -> dict[str, Entry]:
    """Every tensor of a folder by key, from an index file with its shards, or from all .safetensors files there are.

    Raises CheckpointError, naming files and keys, for a shard or key that is missing, a key that is there twice, and
    folders that hold no safetensors.
    """
    index = _read_index(folder)
    names = sorted(set(index.values())) if index else _loose_files(folder)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of its {len(names)} weight files: {some(absent)}. Download them again."
        )
    tensors: dict[str, Entry] = {}
    for name in names:
        entries = read_header(folder / name)
        if twice := set(tensors) & set(entries):
            other = tensors[min(twice)].file.name
            raise CheckpointError(
                f"{folder} holds {len(twice)} tensors both in {other} and in {name}: {some(twice)}. "
                "Keep one of the two files, or add the index file that says which one counts."
            )
        tensors.update(entries)
    if lost := [key for key, name in (index or {}).items() if key not in tensors or tensors[key].file.name != name]:
        raise CheckpointError(
            f"The index file of {folder} promises {len(lost)} tensors that its weight files do not hold: {some(lost)}. "
            "Download the folder again."
        )
    return tensors


def _read_index(folder: Path) -> dict[str, str] | None:
    """Key to file name by the folder's index file, None where there is none."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if not found:
        return None
    if len(found) > 1:
        names = some(path.name for path in found)
        raise CheckpointError(f"{folder} has {len(found)} index files: {names}. Keep the one whose weights you want.")
    weight_map = read_json(found[0]).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    # Plain names only: an index must not reach out of its folder.
    if not weight_map or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise _damaged(found[0], "its weight_map must map tensor names to file names of the same folder")
    return weight_map


def _loose_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing. {_again(folder)}")
    if names := sorted(path.name for path in folder.glob("*.safetensors")):
        return names
    pickled = [path.name for path in folder.iterdir() if path.suffix in PICKLED]
    if pickled:
        raise CheckpointError(
            f"{folder} holds only pickled or training files ({some(pickled)}). They can run code when opened, so only "
            "safetensors is read. Get the release's .safetensors files, or convert these with safetensors' save_file."
        )
    raise CheckpointError(f"{folder} holds no weights (*.safetensors). {_again(folder)}")


def check_tensors(where: Path, shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry]) -> None:
    """Raises CheckpointError unless `entries` are exactly the tensors of `shapes`, in a floating-point dtype."""
    wrong = []
    if missing := set(shapes) - set(entries):
        wrong.append(f"{len(missing)} tensors are missing: {some(missing)}")
    if unknown := set(entries) - set(shapes):
        wrong.append(f"{len(unknown)} tensors are unknown: {some(unknown)}")
    if wrong:
        raise CheckpointError(f"{where} does not fit its configuration: {'; '.join(wrong)}. Download it again.")
    misshapen = [
        f"{name} has {list(entries[name].shape)} in {entries[name].file.name} and must have {list(shape)}"
        for name, shape in shapes.items()
        if entries[name].shape != tuple(shape)
    ]
    if misshapen:
        raise CheckpointError(
            f"{where} does not fit its configuration: {len(misshapen)} shapes are wrong: {some(misshapen)}."
        )
    if strange := {f"{name} ({entry.dtype})" for name, entry in entries.items() if entry.dtype not in FLOATS}:
        raise CheckpointError(
            f"{where} holds {len(strange)} tensors that are not floating point of 16 bits or more: {some(strange)}. "
            "Quantized conversions are not read; use the release's bf16 weights."
        )


def fill(
    module: nn.Module, entries: Mapping[str, Entry], plan: Plan, part: str, progress: Progress | None = None
) -> None:
    """Give a module built on the meta device its weights: name to entry, one file after the other.

    Each tensor goes from its file to its device and dtype on its own, so that the host never holds more than one of
    them besides those that stay there. Raises CheckpointError for a file that can't be read.
    """
    done, total = 0, sum(entry.nbytes for entry in entries.values())
    for path in dict.fromkeys(entry.file for entry in entries.values()):
        for name in _copy(module, path, {n: e for n, e in entries.items() if e.file == path}, plan):
            done += entries[name].nbytes
            if progress:
                progress(part, done, total)


def _copy(module: nn.Module, path: Path, entries: Mapping[str, Entry], plan: Plan) -> Iterator[str]:
    """Move the tensors of one file into the module; yields each name when it is there."""
    mapped = [name for name in entries if placement(plan, name).mapped]
    try:
        with path.open("rb", buffering=0) as file:
            for name in (name for name in entries if name not in mapped):
                assign(module, name, place(file, entries[name], placement(plan, name)))
                yield name
        with safe_open(path, framework="pt", device="cpu") if mapped else nullcontext() as file:
            for name in mapped:
                assign(module, name, file.get_tensor(entries[name].key).to(placement(plan, name).dtype))
                yield name
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


def place(file: BinaryIO, entry: Entry, where: Placement) -> torch.Tensor:
    """A tensor read from its open file, in memory of its own where it belongs.

    Copying from a memory mapping instead costs a page fault for every 4 KiB: 3.7 s for each GiB against 1.1 s.
    """
    tensor = torch.empty(entry.shape, dtype=FLOATS[entry.dtype], device=where.device)
    raw = tensor.view(-1).view(torch.uint8)
    file.seek(entry.start)
    if where.device.type == "cpu":
        _read(file, raw)
    else:
        # Where CUDA has not begun yet it has no pinned memory either: a GPU that is lent for single calls.
        _read_staged(file, raw, pinned=in_use(where.device))
    return tensor.to(where.dtype)


def _read_staged(file: BinaryIO, target: torch.Tensor, block_bytes: int = STAGING, pinned: bool = False) -> None:
    """Fill bytes on a device by way of a block on the host."""
    block = torch.empty(min(block_bytes, len(target)), dtype=torch.uint8, pin_memory=pinned)
    for start in range(0, len(target), block_bytes):
        part = block[: len(target) - start]
        _read(file, part)
        target[start : start + len(part)].copy_(part)


def _read(file: BinaryIO, target: torch.Tensor) -> None:
    """Fill bytes on the host from where the file stands. One call of the system reads 2 GiB at most."""
    view = memoryview(target.numpy())
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError("it ends before its last tensor does")
        view = view[count:]


def assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in place of a parameter or buffer of a module, or into the memory that a parameter has already."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, Fp8Linear) and leaf == "weight":
        owner.take(tensor)
    elif leaf in owner._parameters and not owner._parameters[leaf].is_meta:
        owner._parameters[leaf].data.copy_(tensor)
    elif leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def refuse_meta(module: nn.Module, where: Path) -> None:
    """Raises CheckpointError if a parameter or buffer is still without memory."""
    everything = (*module.named_parameters(), *module.named_buffers())
    if left := [name for name, tensor in everything if tensor.is_meta]:
        raise CheckpointError(
            f"{where}: {len(left)} tensors of {type(module).__name__} were never loaded: {some(left)}. This version of "
            "the library builds the model differently; install the versions that the project names."
        )
