"""The one place from which Triton kernels start: whether they can run on a device, and on which device they start."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

log = logging.getLogger(__name__)

OFF = ("", "0", "false", "off", "no", "n", "f")
_faults: dict[torch.device, str | None] = {}  # of devices that were tried out


def lack(device: torch.device) -> str | None:
    """Why Triton kernels can't run on a device; None where they can.

    TRITON_INTERPRET makes Triton compute with NumPy on the host, thousands of times slower: it is for tests, which
    start kernels themselves, and never sends anybody else's work there.
    """
    if device.type != "cuda":
        return "Triton kernels need an NVIDIA GPU"
    if not installed():
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return "TRITON_INTERPRET is set, which would send every kernel through an interpreter on the host"
    return _faults.get(device)


def try_out(device: torch.device) -> None:
    """Start a small kernel, once a process, and remember for `lack` if that fails: Triton compiles its launcher with
    the C compiler and the headers of Python, which a machine that has PyTorch need not have."""
    if device in _faults or lack(device):
        return
    from kernels import trial

    try:
        right = trial.run(device)
    except torch.OutOfMemoryError:  # which says nothing about Triton
        raise
    except Exception as error:  # no C compiler, no Python.h, a driver too old: each fails in its own way
        log.warning("no Triton kernel starts on %s", device, exc_info=True)
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
        _faults[device] = f"no Triton kernel starts, which takes a C compiler and Python's headers ({fault})"
        return
    _faults[device] = None if right else "Triton's kernels give wrong values"


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels that are defined now would run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() not in OFF


def launch(kernel: Any, grid: Sequence[int], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the device where its tensors lie, not on the one that happens to be current."""
    with current(device):
        kernel[tuple(grid)](*arguments, **constants)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one for a while, where it is not yet: most launches are spared that."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
