"""Which way each convolution takes on which GPU, by which path, in which precision. Data: `bench --layers` writes it.

A way is fixed by GPU model, precision and layer, never by a timing of the moment, so that a video decodes to the same
frames today and tomorrow. A GPU that is not in the table gets the rule below: direct convolutions in bf16 and fp32, and
in fp16 F(4, 3) along time where layers are wide and large enough to pay for its transforms.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from engine.errors import ResourceError
from kernels.vae_decode.winograd import PHASES, Way

FILE = Path(__file__).with_name("table.json")
WIDE = 128  # channels from which tiles are tried on a GPU that was not measured


Ways = Callable[[int, int, int], Way]  # of a layer's inputs, outputs and level


def key(inputs: int, outputs: int, level: int) -> str:
    """How the table names a layer."""
    return f"{inputs}>{outputs}@{level}"


def rule(precision: str, inputs: int, outputs: int, level: int) -> Way:
    """The way on a GPU that was not measured."""
    tiled = precision == "fp16" and level > 0 and min(inputs, outputs) >= WIDE
    return "time" if tiled else "direct"


def ways(gpu: str, precision: str, path: str = "portable", measured: Mapping[str, Any] | None = None) -> Ways:
    """The ways of all layers. gpu: as PyTorch names it; measured: what stands in for the file, shaped like it."""
    rows = (table() if measured is None else measured).get(gpu, {}).get(path, {}).get(precision, {})

    return lambda inputs, outputs, level: (
        rows.get(key(inputs, outputs, level)) or rule(precision, inputs, outputs, level)
    )


def direct(inputs: int, outputs: int, level: int) -> Way:
    """Every convolution as it stands."""
    return "direct"


def is_measured(gpu: str, precision: str, path: str = "portable") -> bool:
    """Whether the table knows this GPU."""
    return precision in table().get(gpu, {}).get(path, {})


@functools.cache
def table() -> dict[str, Any]:
    """The file: {gpu: {path: {precision: {layer: way}}}}. ValueError for a way that does not exist."""
    if not FILE.exists():
        return {}
    try:
        found = json.loads(FILE.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResourceError(f"{FILE} is no JSON ({error}). Restore it from the repository.") from error
    ways = [
        way for paths in found.values() for kinds in paths.values() for rows in kinds.values() for way in rows.values()
    ]
    unknown = [way for way in ways if way not in get_args(Way)]
    if unknown:
        raise ValueError(f"{FILE.name} has ways {unknown}; there are direct, {', '.join(PHASES)}")
    return found
