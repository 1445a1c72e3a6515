"""python -m kernels.vae_decode.tile_bench: how fast each compiled tile is on each layer, on the GPU that is here.

Layers of the decoder at 704 x 1248, four latent frames a pass: the 3 x 3 x 3 convolutions as they stand, with bias and
residual, as the six products of F(4, 3) along time, and as the 36 with width too. A star marks the fastest, an arrow
the one that `tiles.TABLE` takes: where they differ, the table is to be changed. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import EngineError
from kernels.vae_decode import tiles
from kernels.vae_decode.built import Built
from kernels.vae_decode.recipe import TILES
from kernels.vae_decode.tiles import Row
from kernels.vae_decode.winograd import tiles as tiles_of

WARM, RUNS = 3, 11
Time = Callable[[Callable[[], None]], float]


class Layer(NamedTuple):
    """A 3 x 3 x 3 convolution of t frames."""

    channels: int
    filters: int
    t: int
    h: int
    w: int

    def __str__(self) -> str:
        return f"{self.channels}>{self.filters} {self.t}x{self.h}x{self.w}"


LAYERS = (
    Layer(1024, 1024, 4, 44, 78),
    Layer(1024, 1024, 8, 88, 156),
    Layer(1024, 512, 16, 176, 312),
    Layer(512, 512, 16, 176, 312),
    Layer(512, 256, 16, 352, 624),
    Layer(256, 256, 16, 352, 624),
)


def milliseconds(run: Callable[[], None]) -> float:
    """Median of a few runs after warming up, by events."""
    for _ in range(WARM):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(RUNS)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in pairs)[RUNS // 2]


def numbers(kernels: Built, *shape: int) -> Tensor:
    """Random fp16, scaled so that a convolution's output stays near 1. Zeros would run faster than real data."""
    return torch.empty(shape, device=kernels.device).normal_().div_(shape[-1] ** 0.25).half()


def direct(kernels: Built, layer: Layer) -> tuple[Callable[[], None], float]:
    """The layer as one convolution, and its floating-point operations."""
    c, o, t, h, w = layer
    buffer, weight = numbers(kernels, t + 2, h, w, c), numbers(kernels, o, 3, 3, 3, c)
    bias, stream = torch.zeros(o, device=kernels.device), numbers(kernels, t, h, w, o)
    out = torch.empty_like(stream)
    return lambda: kernels.direct(buffer, weight, bias, stream, out), 54.0 * c * o * t * h * w


def phases(kernels: Built, layer: Layer) -> tuple[Callable[[], None], float]:
    """The layer's six products of F(4, 3), and the operations that they really take."""
    c, o, t, h, w = layer
    inputs, weights = numbers(kernels, 6, t // 4, h, w, c), numbers(kernels, 6, o, 3, 3, c)
    out = numbers(kernels, 6, t // 4, h, w, o)
    return lambda: kernels.phases(inputs, weights, out), 6 * 18.0 * c * o * (t // 4) * h * w


def wide_phases(kernels: Built, layer: Layer) -> tuple[Callable[[], None], float]:
    """The 36 products of F(4, 3) along time and width, and the operations that they really take."""
    c, o, t, h, w = layer
    across = tiles_of(w)
    inputs, weights = numbers(kernels, 36, t // 4, h + 2, across, c), numbers(kernels, 36, o, 3, 1, c)
    out = numbers(kernels, 36, t // 4, h, across, o)
    return lambda: kernels.phases(inputs, weights, out, (0, 0), (0, 0)), 36 * 6.0 * c * o * (t // 4) * h * across


WAYS = {"direct": direct, "time": phases, "time_width": wide_phases}


def measure(kernels: Built, layer: Layer, way: str, time: Time = milliseconds) -> dict[str, float]:
    """TFLOP/s of each tile in each order of taps."""
    run, operations = WAYS[way](kernels, layer)
    found = {}
    for tile in TILES[kernels.target.family]:
        for first in (False, True):
            row = Row(0, 0, tile, first)
            kernels.row = lambda *_, row=row: row
            found[_name(tile, first)] = operations / time(run) / 1e9
    return found


def _name(tile: str, taps_first: bool) -> str:
    return f"{tile} taps first" if taps_first else tile


def report(kernels: Built, layer: Layer, way: str, found: dict[str, float]) -> str:
    """A block of text: the fastest with a star, the table's with an arrow."""
    width, taps = (tiles_of(layer.w), 3) if way == "time_width" else (layer.w, 27)
    row = tiles.choose_tile(kernels.target.family, width, layer.channels, layer.filters, taps)
    best, ours = max(found, key=found.__getitem__), _name(row.tile, row.taps_first)
    marks = {name: ("*" if name == best else " ") + ("<" if name == ours else " ") for name in found}
    return "\n".join([f"{layer}, {way}", *(f"  {marks[name]} {rate:6.0f}  {name}" for name, rate in found.items())])


def main(kernels: Built | None = None, time: Time = milliseconds) -> int:
    """Prints a block for each layer and way. 1 where there are no compiled kernels."""
    try:
        kernels = kernels or Built.on(torch.device("cuda" if torch.cuda.is_available() else "cpu"), say=print)
    except (EngineError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = []
    for layer in LAYERS:
        for way in WAYS:
            found = measure(kernels, layer, way, time)
            print(report(kernels, layer, way, found), flush=True)
            rows.append({"layer": str(layer), "way": way, "tflops": {name: round(r) for name, r in found.items()}})
    gpu = torch.cuda.get_device_name(kernels.device) if kernels.device.type == "cuda" else kernels.device.type
    print(json.dumps({"bench": "vae_decode_tiles", "gpu": gpu, "torch": torch.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
