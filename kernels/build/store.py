"""Find the object for a target, or build it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.errors import ResourceError
from kernels.build import cache, preflight
from kernels.build.arch import Target
from kernels.build.compile import BuildError, Recipe, command_flags, compile_recipe, keep_log
from kernels.build.preflight import MissingError, Toolchain

log = logging.getLogger(__name__)
Say = Callable[[str], None]
# What failed once would fail again after minutes, and a request must not wait for that. A new process tries anew.
_failures: dict[Path, BuildError] = {}


def source_parts(recipe: Recipe, target: Target) -> dict[str, object]:
    """What decides what an object computes. PyTorch is not among it: the sources know nothing of it."""
    files = [path.name for path in recipe.folder.iterdir() if path.is_file()]
    return {
        "target": target.name,
        "sources": cache.hashes(recipe.folder, files),
        "flags": command_flags(recipe, target),
    }


def _parts(recipe: Recipe, target: Target, tools: Toolchain) -> dict[str, object]:
    return {**source_parts(recipe, target), **tools.versions}


def ensure(recipe: Recipe, target: Target, say: Say = log.warning) -> ctypes.CDLL:
    """The loaded object, built first where the cache has none that loads. One process builds, the others wait.

    A machine that can't build (a container without nvcc) loads an object of the same sources and flags that was built
    with any tools. MissingError says what a build lacks, BuildError where the log of a failed one is (the same again
    for as long as this process runs).
    """
    parent = cache.private(cache.root() / target.name)
    try:
        tools = preflight.toolchain([target], parent)
    except MissingError:
        found = _of_any_tools(recipe, target, parent, say)
        if found is None:
            raise
        return found
    parts = _parts(recipe, target, tools)
    folder = parent / cache.digest(parts)
    found = _load(folder, recipe, say)
    if found is None and folder in _failures:
        raise _failures[folder]
    if found is None:
        with cache.locked(parent / f"{folder.name}.lock", say):
            found = _load(folder, recipe, say) or _build(recipe, target, tools, folder, parts, say)
    return found


def obtainable(recipe: Recipe, target: Target) -> str | None:
    """Why this machine has no object for a target and can't build one (or failed to); None where it has or can."""
    try:
        parent = cache.private(cache.root() / target.name)
        tools = preflight.toolchain([target], parent)
    except MissingError as error:
        return None if _of_any_tools(recipe, target, parent, log.warning) else str(error)
    except ResourceError as error:
        return str(error)
    failure = _failures.get(parent / cache.digest(_parts(recipe, target, tools)))
    return str(failure).partition("\n")[0] if failure else None


def state(recipe: Recipe, target: Target, tools: Toolchain) -> tuple[bool, list[str]]:
    """Whether the cache has the object, and if not, which parts of the key differ from the newest one's there."""
    parent = cache.private(cache.root() / target.name)
    parts = _parts(recipe, target, tools)
    there = _is_whole(parent / cache.digest(parts), recipe)
    return there, [] if there else cache.differences(parts, parent)


def _of_any_tools(recipe: Recipe, target: Target, parent: Path, say: Say) -> ctypes.CDLL | None:
    wanted = source_parts(recipe, target)
    for key in sorted(parent.glob(f"*/{cache.KEY_FILE}")):
        parts = cache.read_key(key)
        if all(parts.get(name) == value for name, value in wanted.items()):
            found = _load(key.parent, recipe, say)
            if found:
                return found
    return None


def _is_whole(folder: Path, recipe: Recipe) -> bool:
    return (folder / recipe.file).is_file() and bool(cache.read_key(folder / cache.KEY_FILE))


def _load(folder: Path, recipe: Recipe, say: Say) -> ctypes.CDLL | None:
    """The object if it is there and loads. One that does not load is taken for not there; the builder replaces it."""
    file = folder / recipe.file
    if not _is_whole(folder, recipe):
        return None
    cache.private(folder)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        say(f"{file} can't be loaded and will be built again: {error}")
        return None


def _build(
    recipe: Recipe, target: Target, tools: Toolchain, folder: Path, parts: dict[str, object], say: Say
) -> ctypes.CDLL:
    """Build aside and rename: a folder under its final name is always whole. The caller holds the lock."""
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        built = compile_recipe(recipe, target, tools, aside, say)
        ctypes.CDLL(str(built))
        (aside / cache.KEY_FILE).write_text(json.dumps(parts, indent=1), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(aside, folder)
    except BuildError as error:
        _failures[folder] = keep_log(error, folder.parent / f"{folder.name}.failed.log")
        raise _failures[folder] from error
    except OSError as error:
        raise ResourceError(f"{recipe.name} was built for {target.name} but can't be used: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return ctypes.CDLL(str(folder / recipe.file))
