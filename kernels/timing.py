"""How benchmarks measure: warm, many times, the median; a floor is the best. The yardstick is the device's own copy.

A benchmark prints a table and then, as its last line, one JSON object.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Any]
COPY_BYTES = {"cuda": 2**31, "cpu": 2**24}


class Pass(NamedTuple):
    """A kernel to measure. nbytes: what it must read and write, each once."""

    name: str
    call: Call
    nbytes: int


def milliseconds(call: Call, device: torch.device, repeats: int) -> list[float]:
    """How long each of `repeats` calls took; the device is idle before the first one."""
    if device.type != "cuda":
        return [_on_the_host(call) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in marks]


def _on_the_host(call: Call) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def medians(calls: Sequence[Call], device: torch.device, rounds: int, repeats: int, rest: float = 0) -> list[float]:
    """Median milliseconds of each call. They take turns, so that a clock that sinks is fair to all.

    rest: seconds that the device stands still before each turn.
    """
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        milliseconds(call, device, 2)
    for _ in range(rounds):
        for times, call in zip(found, calls, strict=True):
            time.sleep(rest)
            times += milliseconds(call, device, repeats)
    return [statistics.median(times) for times in found]


def best(call: Call, device: torch.device, repeats: int) -> float:
    """The fastest of `repeats` warm calls, in milliseconds."""
    milliseconds(call, device, 2)
    return min(milliseconds(call, device, repeats))


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes read and written in a second by the fastest of some large copies."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (best(lambda: target.copy_(source), device, repeats) / 1000)


def copy_share(work: Pass, device: torch.device, bandwidth: float, repeats: int = 20) -> tuple[float, float]:
    """Median milliseconds of a kernel, and its bytes a second as a share of the copy's."""
    (took,) = medians([work.call], device, 3, repeats)
    return took, work.nbytes / (took / 1000) / bandwidth


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 100 else f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"
    return "" if value is None else str(value)


def origin(device: torch.device) -> dict[str, str]:
    """Where and when figures were made: gpu, torch, date, commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = run.stdout.strip() if run.returncode == 0 else "unknown"
    except FileNotFoundError:  # no git
        commit = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
    }
