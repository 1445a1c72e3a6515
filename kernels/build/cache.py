"""Where built objects lie: <cache>/<target>/<key>/, in folders that belong to their user alone.

An object is code that this process will run, so a folder that somebody else owns or may write to is refused. The key is
in the path: two GPUs, two versions of the sources or two compilers never share an object.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ResourceError

log = logging.getLogger(__name__)

APP = "pan2-demo"
KEY_FILE = "key.json"
WAIT = 3600.0  # a build on a slow machine takes minutes; an hour means that something is wrong


def root() -> Path:
    """The cache folder, made if need be: KERNELS_CACHE where it is set, else below XDG_CACHE_HOME or ~/.cache, else in
    the folder for temporary files; the first of these that can be written to. ResourceError if none can."""
    if os.environ.get("KERNELS_CACHE"):
        return private(Path(os.environ["KERNELS_CACHE"]).expanduser())
    homes = [os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME") and str(Path(os.environ["HOME"], ".cache"))]
    places = [Path(home, APP, "kernels") for home in homes if home]
    places.append(Path(tempfile.gettempdir(), f"{APP}-kernels-{os.getuid()}"))
    refusals = []
    for place in places:
        try:
            return private(place)
        except ResourceError as error:
            refusals.append(str(error))
    raise ResourceError(" ".join(refusals))


def private(folder: Path) -> Path:
    """The folder, made with mode 0700; ResourceError if it can't be written to or is not its user's alone."""
    advice = "Set KERNELS_CACHE to a folder of your own."
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{folder} can't be made for built kernels: {error.strerror}. {advice}") from error
    if folder.is_symlink():
        raise ResourceError(f"{folder} is a link, and built kernels are only loaded from a folder itself. {advice}")
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        raise ResourceError(f"{folder} belongs to user {facts.st_uid}, so what lies in it is not run. {advice}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ResourceError(f"{folder} can be written to by others, so what lies in it is not run. {advice}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(f"{folder} can't be written to. {advice}")
    return folder


def digest(parts: dict[str, object]) -> str:
    """The key of an object: a hash of everything that decides what it holds."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def hashes(folder: Path, names: list[str]) -> dict[str, str]:
    """Contents of source files, by name."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(names)}


def differences(parts: dict[str, object], target_folder: Path) -> list[str]:
    """Which parts of the key differ from those of the newest object in a target's folder; empty where there is none."""
    keys = sorted(target_folder.glob(f"*/{KEY_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    newest = next(filter(None, map(read_key, keys)), None)
    return sorted(name for name in {*parts, *newest} if parts.get(name) != newest.get(name)) if newest else []


def read_key(file: Path) -> dict[str, object]:
    """What an object's key was made of; empty, with a warning, where the file is damaged: that object is as good as not
    there."""
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(parts, dict):
            raise ValueError("it holds no table")
    except (OSError, ValueError) as error:
        log.warning("%s can't be read (%s): what is built there is taken for not there.", file, error)
        return {}
    return parts


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`. The system gives it up when its holder ends, however it ends; the file itself stays.

    Waits for another process, saying so once; ResourceError after an hour.
    """
    with open(path, "a+", encoding="utf-8") as file:
        _take(file, path, say)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _take(file, path: Path, say: Callable[[str], None]) -> None:
    deadline, told = time.monotonic() + WAIT, False
    while not _try(file):
        file.seek(0)
        holder = file.read().strip() or "unknown"
        if not told:
            say(f"Process {holder} is building the kernels; waiting for it.")
            told = True
        if time.monotonic() > deadline:
            raise ResourceError(f"Process {holder} has held {path} for an hour. End it if it hangs, then try again.")
        time.sleep(0.2)


def _try(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
