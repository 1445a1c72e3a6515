"""A dress rehearsal of the full-size model without its weights: `python -m engine.rehearse`, on one large GPU.

The transformer is built with random weights in the released dtypes on the device, a prompt's worth of random text is
denoised for a few steps with both guidance branches, the latents are decoded, the frames come to the host and, where
there is an ffmpeg, go into a file. Shapes and finiteness are checked. Printed are seconds a step, what 50 steps would
take, the peak of memory by stage and how fast a few shards of true shape load; the last line is JSON. `--small` runs
the same with a toy configuration in seconds, on a CPU unless `--device` says otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import get_args

from engine.arguments import exit_code, require_folder
from engine.devices import RULE
from engine.errors import EngineError
from engine.settings import Attention, AutoSwitch, DecodePath, DenoiseSettings, Offload, Precision, Quality

# What a bare machine for rehearsals may lack; carried there as wheels.
NEEDED = {
    "diffusers": "diffusers",
    "psutil": "psutil",
    "safetensors": "safetensors",
}


def missing() -> str | None:
    """A sentence on what must be installed first; None if nothing is missing."""
    absent = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if not absent:
        return None
    names = " ".join(absent)
    return f"The rehearsal needs {names}, which {sys.executable} does not have. Install: python -m pip install {names}"


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser("python -m engine.rehearse", description=__doc__.split("\n\n")[0])
    parser.add_argument("--small", action="store_true", help="a toy configuration, on a CPU if nothing else is said")
    parser.add_argument("--device", help=f"{RULE} (default: auto, with --small cpu); the first one is taken")
    parser.add_argument("--frames", type=int, help="4n + 1 (default: 121)")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, help="how many to run (default: 3)")
    parser.add_argument("--precision", choices=get_args(Precision), default="auto")
    parser.add_argument("--quality", choices=get_args(Quality), default="full")
    parser.add_argument("--offload", choices=get_args(Offload), default="none")
    parser.add_argument("--attention", choices=get_args(Attention), default="auto")
    parser.add_argument("--fused-kernels", choices=get_args(AutoSwitch), default="auto")
    parser.add_argument("--decoder", choices=(*get_args(DecodePath), "none"), default="auto", help="none: no decoding")
    parser.add_argument("--shards", type=int, default=2, help="how many to write and load, 1.5 GiB each; 0: none")
    parser.add_argument("--folder", type=Path, help="for shards and video (default: a temporary one)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: everything was finite and of the right shape; 1: it was not, or could not run; 2: bad input."""
    given = parser().parse_args(arguments)
    if lack := missing():
        print(lack, file=sys.stderr)
        return 1
    from engine.rehearsal import FULL, SMALL, rehearse

    settings = DenoiseSettings(
        precision=given.precision,
        quality=given.quality,
        offload=given.offload,
        attention=given.attention,
        fused_kernels=given.fused_kernels,
    )
    sizes = {name: getattr(given, name) for name in ("frames", "height", "width", "steps", "shards")}
    try:
        decoder = None if given.decoder == "none" else given.decoder
        scene = (SMALL if given.small else FULL).changed(**sizes)
        if given.folder is not None:
            require_folder("--folder", given.folder)
        device = ("cpu" if given.small else "auto") if given.device is None else given.device
        rehearse(scene, device, settings, decoder, given.folder)
    except EngineError as error:
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
