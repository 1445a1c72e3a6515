"""The folder of this user for what is costly to make and can be made again."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "pan2-demo"


def user_cache() -> Path:
    """ENGINE_CACHE, else pan2-demo below XDG_CACHE_HOME or ~/.cache; made if need be, closed to other users.

    Raises OSError if it can't be made.
    """
    given = os.environ.get("ENGINE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given).expanduser() if given else base / NAME
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
