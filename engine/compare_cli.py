"""`python -m engine compare`: two decodes of the same latents, their figures as a table or as JSON."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.arguments import require_folder
from engine.compare import decibels
from engine.devices import RULE, devices_from_environment
from engine.engine import Engine
from engine.errors import RequestError
from engine.events import ComparisonFinished, Event
from engine.memory import in_words
from engine.preset import Preset, preset_from_environment, preset_names
from engine.settings import DecodeSettings
from engine.sides import RandomLatents, options, parse_side


def parser() -> argparse.ArgumentParser:
    """The arguments; what is left out comes from the preset."""
    parser = argparse.ArgumentParser(
        "python -m engine compare",
        description="Decode the same latents in two ways and say how far the results are apart.",
        epilog='A video of the word itself: python -m engine -- "compare"',
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--latents", type=Path, metavar="FILE", help="latents.safetensors of a job")
    source.add_argument("--seed", type=int, help="random latents of this seed (default: the preset's)")
    parser.add_argument("--frames", type=int, help="so many from the start, 4n + 1")
    parser.add_argument("--height", type=int, metavar="PIXELS", help="of random latents")
    parser.add_argument("--width", type=int, metavar="PIXELS", help="of random latents")
    side = 'path or path:precision, such as "plain:fp32"; "list" shows what this machine has'
    parser.add_argument("--a", default="auto", metavar="DECODER", help=f"{side} (default: auto)")
    parser.add_argument("--b", default="reference", metavar="DECODER", help="likewise (default: reference)")
    parser.add_argument("--preset", help=f"{', '.join(preset_names())}, or a .toml file")
    parser.add_argument("--checkpoint", help="a checkpoint folder, or a repository on the Hub")
    parser.add_argument("--devices", default=devices_from_environment(), help=f"{RULE} (ENGINE_DEVICES)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep both videos and the raw frames here")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line on standard output")
    return parser


def compare(arguments: argparse.Namespace, cancel: threading.Event, show: Callable[[Event], None]) -> dict[str, Any]:
    """Do what the arguments say; returns the result as in compare.json. show: takes every event."""
    if arguments.keep:
        require_folder("--keep", arguments.keep)
    engine = Engine(preset_from_environment(arguments.preset, arguments.checkpoint), arguments.devices)
    # A wrong name is refused beside "list" too.
    sides = [parse_side(side) for side in (arguments.a, arguments.b) if side != "list"]
    if len(sides) < 2:
        usual = engine.executor.explain_decode(DecodeSettings())
        auto = {"auto": f"{usual.path}:{usual.precision}; {usual.reason}"}
        return {"decoders": auto | {option.value: option.reason for option in options(engine.executor)}}
    a, b = sides
    with _folder(arguments.keep) as folder:
        for event in engine.compare(_source(arguments, engine.preset), a, b, folder, cancel, _excerpt(arguments)):
            show(event)
    assert isinstance(event, ComparisonFinished)
    return event.result


def _source(arguments: argparse.Namespace, preset: Preset) -> Path | RandomLatents:
    if arguments.latents:
        if arguments.height is not None or arguments.width is not None:
            raise RequestError("--height and --width are for random latents; those of a file have their own size.")
        return arguments.latents
    asked = preset.request(
        prompt="-", seed=arguments.seed, frames=arguments.frames, height=arguments.height, width=arguments.width
    )
    return RandomLatents(asked.seed, asked.frames, asked.height, asked.width)


def _excerpt(arguments: argparse.Namespace) -> int | None:
    return arguments.frames if arguments.latents else None


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="compare-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def failed(result: dict[str, Any]) -> bool:
    """Whether a side has no result."""
    return any(side["error"] for side in result.get("sides", {}).values())


def table(result: dict[str, Any]) -> str:
    """A result for people."""
    if "decoders" in result:
        return "\n".join(f"{name:22} {reason}" for name, reason in result["decoders"].items())
    lines = [f"{result['frames']} frames of {result['width']} x {result['height']} (width x height)"]
    for name, side in result["sides"].items():
        lines += [f"{name.upper()}  {side['path']}, {side['precision']}: {side['error'] or side['reason']}"]
        if side["seconds"] is not None:
            peaks = ", ".join(f"{device} {in_words(peak)}" for device, peak in side["peak_bytes"].items())
            lines += [f"   {side['seconds']:.2f} s, {side['frames_per_second']:.1f} frames/s, peak {peaks}"]
    if result["figures"]:
        lines += [f"B takes {result['ratio']:.2f} times as long as A", *_figures(result["figures"])]
        lines += [result["verdict"]["text"]]
    return "\n".join(lines)


def _figures(figures: dict[str, Any]) -> list[str]:
    shown = {name: decibels(float(figures[name])) for name in ("psnr", "psnr_worst", "psnr_8bit", "psnr_8bit_worst")}
    return [
        f"PSNR, float frames   {shown['psnr']}, worst {shown['psnr_worst']} (frame {figures['worst_frame']})",
        f"PSNR, 8-bit frames   {shown['psnr_8bit']}, worst {shown['psnr_8bit_worst']}",
        f"SSIM                 {figures['ssim']:.6f}, worst {figures['ssim_worst']:.6f}",
        f"Largest difference   {figures['max_abs']:.3g} of [-1, 1], {figures['max_levels']} of 255 levels",
        f"Identical bytes      {figures['same_bytes']:.4%}",
    ]
