"""Which path of an operation runs here, decided once, with the reason as text.

Use: list the paths of an operation from the most to the least wanted, say of each what it lacks on this machine, and
keep the `Choice` that comes back; the page prints it.

    Path("built", "compiled for this GPU", lack="nvcc is not on the PATH")    can't run here
    Path("built", "compiled for this GPU", held_back="not yet tested")        runs only when it is asked for by name
    Path("plain", "PyTorch operations")                                       runs anywhere

    choice = choose("decode", paths, settings.path)     settings.path: "auto" or the name of a path
    choice.path, choice.reason         "plain", "PyTorch operations; not built: nvcc is not on the PATH"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import RequestError

AUTO = "auto"


@dataclass(frozen=True)
class Path:
    """One way to compute an operation.

    about: what it is, in a few words; lack: why it can't run here; held_back: why "auto" passes it over although it
    could run. A missing toolkit, a failed build and a failed check are different lacks: say which.
    """

    name: str
    about: str
    lack: str | None = None
    held_back: str | None = None


class Choice(NamedTuple):
    """What runs, and why, for people to read."""

    operation: str
    path: str
    reason: str


def choose(operation: str, paths: Sequence[Path], wanted: str = AUTO) -> Choice:
    """The first of `paths` that runs here and is not held back, or the one that is `wanted` by name.

    Raises RequestError where the wanted path is unknown or can't run, and where nothing is left.
    """
    if wanted != AUTO:
        return _named(operation, paths, wanted)
    for rank, path in enumerate(paths):
        if not _against(path):
            passed = [f"not {other.name}: {_against(other)}" for other in paths[:rank]]
            return Choice(operation, path.name, "; ".join((path.about, *passed)))
    raise RequestError(f"{operation} can't run here: {_refusals(paths)}.")


def _named(operation: str, paths: Sequence[Path], wanted: str) -> Choice:
    path = next((path for path in paths if path.name == wanted), None)
    if path is None:
        names = ", ".join((AUTO, *(path.name for path in paths)))
        raise RequestError(f"{operation} = {wanted!r} is not known; choose one of {names}.")
    if path.lack:
        others = ", ".join((AUTO, *(other.name for other in paths if not other.lack)))
        raise RequestError(f"{operation} = {wanted!r} can't run here: {path.lack}. Choose one of {others}.")
    warning = f"; {path.held_back}" if path.held_back else ""
    return Choice(operation, path.name, f"{path.about}, as asked for{warning}")


def _against(path: Path) -> str | None:
    return path.lack or path.held_back


def _refusals(paths: Sequence[Path]) -> str:
    return "; ".join(f"{path.name}: {_against(path)}" for path in paths)
