"""`python -m engine.spread_bench --devices 0,1`: what several devices gain, in one run, as one line of JSON.

Times a decode and a denoising step on 1, 2, 4, 8 of the devices (warm, median), compares the frames with those of one
device, ends a rank in the middle of a request and asks again. On one device it predicts instead
(engine/spread_predict.py). Weights are the checkpoint's, or with --random random ones of the released sizes; latents
are noise.

All that two GPUs have to show, in one command, and the prediction that one GPU allows:

    python -m engine.spread_bench --devices 0,1 --random --out two_gpus.json
    python -m engine.spread_bench --devices 0 --random --path built --precision fp16 --out prediction.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from engine.arguments import amount, exit_code, positive, require_folder
from engine.compare import levels_apart
from engine.condition import make_condition
from engine.devices import RULE, devices_from_environment, parse_devices
from engine.errors import EngineError, GroupError, RequestError
from engine.executor import LocalExecutor
from engine.noise import draw_noise
from engine.preset import Preset, preset_from_environment
from engine.request import Request
from engine.settings import DecodePath, DecodePrecision, DecodeSettings, DenoiseSettings
from engine.shapes import latent_shape
from engine.spread import GroupExecutor
from engine.spread_predict import COUNTS, Assumed, predict

NEVER = threading.Event()
SMALL = {"height": 96, "width": 128, "frames": 17}


def parser() -> argparse.ArgumentParser:
    """The arguments; sizes that are left out are the preset's."""
    parser = argparse.ArgumentParser("python -m engine.spread_bench", description="What several devices gain.")
    parser.add_argument("--devices", default=devices_from_environment(), help=RULE)
    parser.add_argument("--preset")
    parser.add_argument("--checkpoint")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--path", choices=get_args(DecodePath), default="auto", help="of the decode")
    parser.add_argument("--precision", choices=get_args(DecodePrecision), default="auto", help="of the decode")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--random", action="store_true", help="random weights, of the released sizes unless --small")
    parser.add_argument("--small", action="store_true", help=f"a small size: {SMALL}")
    parser.add_argument("--link", type=amount, default=200.0, metavar="GB/S", help="of the prediction (default: 200)")
    parser.add_argument("--delay", type=amount, default=20.0, metavar="US", help="of an exchange there (default: 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as well")
    return parser


def bench(executor: GroupExecutor, request: Request, repeats: int) -> dict[str, Any]:
    """Everything on several devices. request: with the decode's settings."""
    executor.load(request.denoise, _quiet)
    counts = [count for count in COUNTS if count <= len(executor.devices)]
    latents = draw_noise(request.seed, (1, *latent_shape(request.frames, request.height, request.width)))
    truth, decode, denoise = None, {}, {}
    for count in counts:
        executor.most = count
        frames, decode[count] = _decode(executor, latents, request.decode, repeats)
        truth = frames if truth is None else truth
        decode[count] |= {"same_bytes": bool(np.array_equal(frames, truth)), "levels_apart": _apart(frames, truth)}
        for name, guidance in (("guided", 2.5), ("one branch", 1.0)):
            denoise.setdefault(name, {})[count] = _step(executor, dataclasses.replace(request, guidance=guidance))
    executor.most = len(executor.devices)
    return {
        "decode": _efficiency(decode),
        "denoise_step": {name: _efficiency(figures) for name, figures in denoise.items()},
        "killed_rank": _killed(executor, request, latents, truth),
    }


def _decode(
    executor: GroupExecutor, latents: torch.Tensor, settings: DecodeSettings, repeats: int
) -> tuple[np.ndarray, dict[str, Any]]:
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        executor.begin_request()
        began = time.perf_counter()
        frames = np.concatenate([chunk.frames.copy() for chunk in executor.decode(latents, settings, NEVER)])
        seconds.append(time.perf_counter() - began)
    return frames, {"seconds": statistics.median(seconds[1:]), **_shares(executor)}


def _step(executor: GroupExecutor, request: Request) -> dict[str, Any]:
    """The median of the steps after the first."""
    shape = latent_shape(request.frames, request.height, request.width)
    negative = executor.encode_prompt(" ") if request.guidance > 1 else None
    texts = (executor.encode_prompt(request.prompt), negative)
    executor.begin_request()
    noise = draw_noise(request.seed, (1, *shape))
    steps = [step.seconds for step in executor.denoise(request, texts, make_condition(shape), noise, NEVER)]
    return {"seconds": statistics.median(steps[1:]), **_shares(executor)}


def _shares(executor: GroupExecutor) -> dict[str, Any]:
    lanes = [lane for lane in executor.stats() if lane["busy_seconds"]]
    return {
        "waiting_share": max(lane["waiting_share"] for lane in lanes),
        "bytes_sent": [lane["bytes_sent"] for lane in lanes],
        "peak_bytes": [lane["peak_bytes"] for lane in lanes],
    }


def _apart(a: np.ndarray, b: np.ndarray) -> int:
    """The largest difference of two videos, in levels of 255."""
    return max(int(levels_apart(x, y).max()) for x, y in zip(a, b, strict=True))


def _efficiency(figures: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    one = figures[1]["seconds"]
    for count, found in figures.items():
        found["speedup"] = one / found["seconds"]
        found["efficiency"] = found["speedup"] / count
    return figures


def _killed(
    executor: GroupExecutor, request: Request, latents: torch.Tensor, truth: np.ndarray
) -> dict[str, Any] | None:
    """End the last rank after the first chunk; what is said, how soon, and whether the next request works."""
    if len(executor.devices) < 2:
        return None
    chunks = executor.decode(latents, request.decode, NEVER)
    next(chunks)
    executor.group.members[-1].process.kill()
    began, said = time.perf_counter(), ""
    try:
        for _ in chunks:
            pass
    except GroupError as error:
        said = str(error)
    seconds = time.perf_counter() - began
    executor.load(request.denoise, _quiet)
    again, _ = _decode(executor, latents, request.decode, 1)
    return {"error": said, "seconds_to_error": seconds, "next_request_same_bytes": bool(np.array_equal(again, truth))}


def _request(arguments: argparse.Namespace, preset: Preset) -> Request:
    size = {name: getattr(arguments, name) for name in SMALL}
    asked = {name: value if value is not None else SMALL[name] for name, value in size.items()}
    decode = DecodeSettings(arguments.path, arguments.precision)
    return preset.request(steps=4, denoise=DenoiseSettings(), decode=decode, **(asked if arguments.small else size))


def _executor(arguments: argparse.Namespace, preset: Preset, devices: tuple) -> GroupExecutor | LocalExecutor:
    if not arguments.random:
        group = len(devices) > 1
        return GroupExecutor(preset.checkpoint, devices) if group else LocalExecutor(preset.checkpoint, devices[0])
    # Here, since diffusers takes seconds to import.
    from engine.random_group import RandomGroup, RandomLocal
    from engine.rehearsal import FULL, SMALL

    scene = SMALL if arguments.small else FULL
    return RandomGroup(devices, scene) if len(devices) > 1 else RandomLocal(devices[0], scene)


def _quiet(*_: Any) -> None:
    pass


def run(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The figures, by name."""
    full = "pan2" if arguments.random and not arguments.small else None
    preset = preset_from_environment(arguments.preset or full, arguments.checkpoint)
    request, devices = _request(arguments, preset), parse_devices(arguments.devices)
    yield "devices", [str(device) for device in devices]
    yield "size", {name: getattr(request, name) for name in SMALL}
    if devices[0].type == "cpu":
        yield "note", "processes that share the cores of one CPU: shows that it works, not how it scales"
    elif len(set(devices)) < len(devices):
        yield "note", "processes that share one GPU, by way of the host: shows that it works, not how it scales"
    executor = _executor(arguments, preset, devices)
    try:
        executor.load(request.denoise, _quiet)
        yield "device_name", executor.device_name()
        yield "versions", executor.versions()
        several = isinstance(executor, GroupExecutor)
        assumed = Assumed(arguments.link * 1e9, arguments.delay * 1e-6, arguments.repeats)
        figures = bench(executor, request, arguments.repeats) if several else predict(executor, request, assumed)
        yield from figures.items()
    finally:
        executor.close()


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done, and every decode had the same bytes (on GPUs, whose library may change its order of summation
    with the shape, bytes one level apart at most); 1: not, or it failed; 2: bad input."""
    given = parser().parse_args(arguments)
    try:
        if given.out:
            require_folder("The folder of --out", given.out.absolute().parent)
            if given.out.is_dir():
                raise RequestError(f"--out {given.out} is a folder. Name a file.")
        figures = dict(run(given))
    except EngineError as error:
        return exit_code(error)
    print(json.dumps(figures))
    if given.out:
        given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    allowed = 0 if figures["devices"][0] == "cpu" else 1
    return 0 if all(found["levels_apart"] <= allowed for found in figures.get("decode", {}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
