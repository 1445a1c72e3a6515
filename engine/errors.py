"""What can go wrong, in words. Every message names the value, the rule that it breaks and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable


class EngineError(Exception):
    """Base of every error that is shown to people as it stands."""


class RequestError(EngineError):
    """The request asks for something that this preset or this machine does not do. Nothing was started."""


class CheckpointError(EngineError):
    """A checkpoint is missing, incomplete or not what its configuration says."""


class NotFiniteError(EngineError):
    """A result holds NaN or infinity. start: of which frame on."""

    def __init__(self, message: str, start: int = 0) -> None:
        super().__init__(message)
        self.start = start


class ResourceError(EngineError):
    """Memory or disk is too small for the work. Says what is needed and what is free."""


class ExhaustedError(ResourceError):
    """An allocation failed, in the middle of work that was expected to fit."""


class BrokenError(EngineError):
    """A GPU met a fault after which this process can't use it. Only a restart helps."""


class GroupError(EngineError):
    """A device of a group stopped taking part. Says which rank, on which device, in which stage."""


class MediaError(EngineError):
    """A video or picture could not be written or read."""


class BusyError(EngineError):
    """The engine is at work for somebody else."""


class Cancelled(EngineError):  # noqa: N818 - it is a decision of the user, not a fault
    """The user stopped the work. What was finished before stays."""


def shown(value: object, length: int = 60) -> str:
    """A value as messages quote it: its repr, shortened. Never fails, whatever the value is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes out no number of thousands of digits and no nesting of thousands of levels.
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= length else f"{text[: length - 4]} ..."


def listed(keys: Iterable[object]) -> str:
    """Keys as messages list them, sorted; they need not be text."""
    return ", ".join(sorted(key if isinstance(key, str) and len(key) <= 60 else shown(key) for key in keys))
