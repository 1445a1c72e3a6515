"""What jobs are called: the second in which they were asked for, and random digits."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

from engine.errors import RequestError, shown

JOB_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8,16}")


def new_id() -> str:
    """A name that no other job has; names sort as their jobs were asked for."""
    # Who knows the name may see the video, so that it must not be guessed.
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(8)


def known_id(value: Any) -> str | None:
    """A job's id from a file or an address. Raises RequestError for what can be none, such as a path."""
    if value is None or (isinstance(value, str) and JOB_ID.fullmatch(value)):
        return value
    raise RequestError(f"{shown(value)} is no id of a job; ids look like 20260131-235959-0123abcd.")
