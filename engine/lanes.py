"""What each device of a group did when: for stats.json, for the page and for the bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.rank import Usage

MOST_KEPT = 400  # spans of a device; later ones add to the sums only


@dataclass
class Lane:
    """One device. busy, waiting: seconds in calls, and of those for other ranks; sent: bytes; peak: bytes held at most;
    spans: stage, begin and end in seconds since the request began."""

    name: str
    busy: float = 0.0
    waiting: float = 0.0
    sent: int = 0
    peak: int = 0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, stage: str, usage: Usage, zero: float) -> None:
        """Take in one call."""
        self.busy += usage.ended - usage.began
        self.waiting += usage.waiting
        self.sent += usage.sent
        self.peak = max(self.peak, usage.memory.peak if usage.memory else usage.host)
        if len(self.spans) < MOST_KEPT:
            self.spans.append((stage, usage.began - zero, usage.ended - zero))

    def to_json(self) -> dict[str, Any]:
        """As in stats.json."""
        return {
            "name": self.name,
            "busy_seconds": round(self.busy, 4),
            "waiting_seconds": round(self.waiting, 4),
            "waiting_share": round(self.waiting / self.busy, 4) if self.busy else 0.0,
            "bytes_sent": self.sent,
            "peak_bytes": self.peak,
            "spans": [[stage, round(began, 3), round(ended, 3)] for stage, began, ended in self.spans],
        }


class Lanes:
    """All devices of a group since `zero`, by `time.perf_counter`."""

    def __init__(self, names: Sequence[str], zero: float) -> None:
        self.zero = zero
        self.lanes = [Lane(name) for name in names]

    def add(self, stage: str, usages: Sequence[Usage]) -> None:
        """Take in one call of the first ranks."""
        for lane, usage in zip(self.lanes, usages, strict=False):
            lane.add(stage, usage, self.zero)

    def to_json(self) -> list[dict[str, Any]]:
        """As in stats.json."""
        return [lane.to_json() for lane in self.lanes]
