"""Which way each convolution takes on which GPU, in which precision. Data: `bench --layers` measures and writes it.

A way is fixed by GPU model, precision and layer, never by a timing of the moment, so that a video decodes to the same
frames today and tomorrow. A GPU that is not in the table gets the rule below: direct convolutions in bf16 and fp32, and
in fp16 F(4, 3) along time where layers are wide and large enough to pay for its transforms.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from kernels.vae_decode.winograd import PHASES, Way

FILE = Path(__file__).with_name("table.json")
WIDE = 128  # channels from which tiles are tried on a GPU that was not measured


class Route(NamedTuple):
    """How a convolution is computed, and by whose kernels ("": those that the path prefers)."""

    way: Way
    by: str = ""


Routes = Callable[[int, int, int], Route]  # of a layer's inputs, outputs and level


def key(inputs: int, outputs: int, level: int) -> str:
    """How the table names a layer."""
    return f"{inputs}>{outputs}@{level}"


def rule(precision: str, inputs: int, outputs: int, level: int) -> Route:
    """The way on a GPU that was not measured."""
    tiled = precision == "fp16" and level > 0 and min(inputs, outputs) >= WIDE
    return Route("time" if tiled else "direct")


def routes(gpu: str, precision: str, path: str = "portable", measured: Mapping[str, Any] | None = None) -> Routes:
    """The ways of all layers. gpu: as PyTorch names it; measured: what stands in for the file, shaped like it."""
    rows = (table() if measured is None else measured).get(gpu, {}).get(path, {}).get(precision, {})

    def route(inputs: int, outputs: int, level: int) -> Route:
        row = rows.get(key(inputs, outputs, level))
        return Route(*row) if row else rule(precision, inputs, outputs, level)

    return route


def direct(inputs: int, outputs: int, level: int) -> Route:
    """Every convolution as it stands."""
    return Route("direct")


def is_measured(gpu: str, precision: str, path: str = "portable") -> bool:
    """Whether the table knows this GPU."""
    return precision in table().get(gpu, {}).get(path, {})


@functools.cache
def table() -> dict[str, Any]:
    """The file: {gpu: {path: {precision: {layer: [way, by]}}}}. ValueError for a way that does not exist."""
    if not FILE.exists():
        return {}
    found = json.loads(FILE.read_text(encoding="utf-8"))
    rows = [
        row for paths in found.values() for kinds in paths.values() for rows in kinds.values() for row in rows.values()
    ]
    unknown = [row for row in rows if row[0] not in get_args(Way)]
    if unknown:
        raise ValueError(f"{FILE.name} has ways {unknown}; there are direct, {', '.join(PHASES)}")
    return found
