"""Each way of each 3 x 3 x 3 layer, timed as the decoder runs it: passes, products, sums. Writes the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import nn

from engine.errors import EngineError
from kernels.vae_decode import table
from kernels.vae_decode.bench_setup import gpu_name, timed
from kernels.vae_decode.convolve import Convolver, Cudnn
from kernels.vae_decode.layers import CausalConv, Kit
from kernels.vae_decode.plan import PLANS
from kernels.vae_decode.portable import passes_for
from kernels.vae_decode.state import State
from kernels.vae_decode.winograd import Way

WARM, RUNS = 2, 7


class Layer(NamedTuple):
    """A convolution at 704 x 1248 with the frames that the usual plan gives it at once."""

    inputs: int
    outputs: int
    level: int
    t: int
    h: int
    w: int


LAYERS = (
    Layer(1024, 1024, 0, 4, 44, 78),
    Layer(1024, 1024, 1, 8, 88, 156),
    Layer(1024, 512, 2, 4, 176, 312),
    Layer(512, 512, 2, 4, 176, 312),
    Layer(512, 256, 3, 4, 352, 624),
    Layer(256, 256, 3, 4, 352, 624),
)
SMALL = (Layer(16, 16, 1, 4, 3, 4), Layer(16, 8, 2, 4, 3, 4))
PATHS = {"portable": "cudnn", "built": "built"}  # whose convolutions a path has
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def convolvers(device: torch.device) -> dict[str, Convolver]:
    """Those that are here, by name."""
    found: dict[str, Convolver] = {"cudnn": Cudnn()}
    try:
        from kernels.vae_decode.built import Built, lack

        if lack(device) is None:
            found["built"] = Built.on(device)
    except EngineError as error:
        print(f"without built: {error}", flush=True)
    return found


def milliseconds(layer: Layer, way: Way, convolver: Convolver, dtype: torch.dtype, device: torch.device) -> float:
    """Median of a layer in a stream of frames, after the video's first one."""
    kit = Kit(passes_for(device), convolver, dtype, lambda i, o, level: way)
    with torch.device(device):
        module, norm = nn.Conv3d(layer.inputs, layer.outputs, 3), nn.Module()
        norm.gamma = nn.Parameter(torch.ones(layer.inputs))
        conv = CausalConv("layer", module, norm, layer.level, kit)
        x = torch.empty(layer.t, layer.h, layer.w, layer.inputs).normal_().to(dtype)
        out = torch.empty(layer.t, layer.h, layer.w, layer.outputs).normal_().to(dtype)
    state = State(PLANS[0])
    conv(x[:1], out[:1], state)
    times = [timed(lambda: conv(x, out, state, residual=out), device) for _ in range(WARM + RUNS)]
    return 1e3 * sorted(times[WARM:])[RUNS // 2]


def ways(precision: str) -> tuple[Way, ...]:
    """bf16 is direct, as published: tiles would cost two of its few decibels."""
    return get_args(Way) if precision == "fp16" else ("direct",)


def run(device: torch.device, small: bool, out: Path | None) -> Iterator[str]:
    """A line for each layer, then the table's rows for both paths.

    out: a folder whose table gets them as well, beside those of other GPUs.
    """
    here = convolvers(device)
    rows: dict[str, dict[str, dict[str, Way]]] = {}
    with torch.no_grad():
        for precision, dtype in PRECISIONS.items():
            for layer in SMALL if small else LAYERS:
                found = {
                    (way, name): milliseconds(layer, way, convolver, dtype, device)
                    for way in ways(precision)
                    for name, convolver in here.items()
                }
                name = table.key(*layer[:3])
                times = "  ".join(f"{way} {by} {value:.2f} ms" for (way, by), value in found.items())
                yield f"{precision} {name:12s} {layer.t}x{layer.h}x{layer.w}: {times}"
                for path, by in PATHS.items():
                    times = {way: found[way, by] for way in ways(precision)} if by in here else {}
                    if times:
                        rows.setdefault(path, {}).setdefault(precision, {})[name] = min(times, key=times.__getitem__)
    text = json.dumps({gpu_name(device): rows}, indent=1)
    yield text
    if out:
        file = out / table.FILE.name
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for path, kinds in rows.items():
            for precision, measured in kinds.items():
                known.setdefault(gpu_name(device), {}).setdefault(path, {}).setdefault(precision, {}).update(measured)
        file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
