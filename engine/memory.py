"""How much memory a device has left, and words for the case that it is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from engine import broken
from engine.errors import ExhaustedError, ResourceError

CGROUP = Path("/sys/fs/cgroup")
# The last one is how cuBLAS and cuDNN say it.
_REFUSALS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory", "ALLOC_FAILED")
TOO_LARGE = {
    "cuda": "Close what else runs on the GPU, or use one with more memory.",
    "cpu": "Close other programs, or use a machine with more memory.",
}


def in_words(amount: float) -> str:
    """Bytes for people: 62.6 GiB, 35.6 MiB, 812 KiB, 12 bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount / 2**10:.0f} KiB" if amount >= 2**10 else f"{int(amount)} bytes"


def in_use(device: torch.device) -> bool:
    """Whether a device is a GPU that this process has opened. One that it has not opened has no statistics to begin
    again (PyTorch refuses to), and nothing to wait for; one that met a fault answers no more."""
    return device.type == "cuda" and torch.cuda.is_initialized() and not broken.fault()


def free_memory(device: torch.device, sharing: int = 1) -> int | None:
    """Bytes that could still be allocated on a device; None for kinds of device that can't tell.

    CUDA: free on the device, of which each of `sharing` processes gets its part, plus what PyTorch's allocator holds
    without using it. CPU: available to this process without swapping, within the limit of its container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // sharing + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        limits = (psutil.virtual_memory().available, container_memory())
        return min(limit for limit in limits if limit is not None)
    return None


def container_memory(root: Path = CGROUP) -> int | None:
    """Bytes left below the container's limit (cgroup v2), None where there is no limit. Cached files can be given up,
    so they count as free."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def advice(device: torch.device) -> str:
    """What to do about weights that do not fit."""
    return TOO_LARGE.get(device.type, "Use a device with more memory.")


def require_memory(what: str, needed: int, device: torch.device, hint: str) -> None:
    """Raises ResourceError with both numbers if `needed` bytes are more than the device has free."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise ResourceError(f"{what} needs {in_words(needed)} on {device} and {in_words(free)} are free. {hint}")


@contextmanager
def memory_in_words(what: str, needed: int | None, device: torch.device, hint: str) -> Iterator[None]:
    """Turns a failed allocation inside into an ExhaustedError that says what was needed, if known, and what is free."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _REFUSALS):
            raise
        free = free_memory(device)
        facts = [f"it needs {in_words(needed)}"] if needed is not None else []
        facts += [f"{in_words(free)} are free"] if free is not None else []
        raise ExhaustedError(f"{what} does not fit on {device}: {' and '.join(facts)}. {hint}") from error
