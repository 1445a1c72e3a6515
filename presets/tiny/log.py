"""A training log: one JSON object a line, printed and kept."""

from __future__ import annotations

import json
import time
from pathlib import Path


class TrainingLog:
    def __init__(self, path: Path | None) -> None:
        self.path, self.begin = path, time.time()

    def write(self, event: str, **values: object) -> None:
        entry = {"event": event, "seconds": round(time.time() - self.begin, 1), **_rounded(values)}
        line = json.dumps(entry)
        print(line, flush=True)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return value
