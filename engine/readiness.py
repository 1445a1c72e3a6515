"""How far an engine is with loading its model, for pages and health checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Readiness:
    """Whether a request could start at once. text: a sentence for people; done, total: bytes while loading."""

    state: Literal["idle", "loading", "ready", "failed"]
    text: str
    done: int = 0
    total: int = 0
