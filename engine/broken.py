"""A GPU that met a fault which CUDA does not forgive: whatever is asked of it fails until this process has ended.

An assertion in a kernel, an address that is none, a failed launch: the first call that notices says which, every later
one the same or something more obscure. What counts is therefore not the error but whether the GPU answers at all. This
is known of the whole process, as the fault is. Workers of a group end with a fault of theirs, and others are started.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from engine.errors import BrokenError

log = logging.getLogger(__name__)

_fault: str | None = None


def fault() -> str | None:
    """What people are told once a GPU can't be used any more; None before."""
    return _fault


def look(device: torch.device) -> None:
    """Wait for a GPU that this process has opened, and remember if it does not answer."""
    global _fault
    # What is told once, and not again when asked again, is no such fault.
    if not _fault and _refusal(device) and (said := _refusal(device)):
        _fault = (
            f"{device} met a fault after which it does nothing more for this program ({said}). Restart the program; "
            "until then no work is taken. What was made is kept, and latents in a job's folder can be decoded then."
        )
        log.error("%s", _fault)


def _refusal(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def refuse() -> None:
    """Raises BrokenError once a GPU can't be used any more."""
    if _fault:
        raise BrokenError(_fault)


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Refuses as `refuse`, and raises the same for whatever fails inside by such a fault."""
    refuse()
    try:
        yield
    except Exception as error:
        look(device)
        if _fault and not isinstance(error, BrokenError):
            raise BrokenError(_fault) from error
        raise
    look(device)


def leave(status: int) -> NoReturn:
    """End the process. Where a GPU can't be used any more, at once: as Python ends it gives memory back to the GPU,
    which would abort the process with a trace of C++ behind what was said."""
    if _fault:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
