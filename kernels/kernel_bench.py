"""The command line of one kernel's benchmark: its share of the copy bandwidth at the released shapes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable

import torch

from engine.arguments import positive
from kernels import launch
from kernels.timing import Pass, copy_bandwidth, copy_share, origin, table

TOKENS, WIDTH = 26_598, 4096  # 121 frames at 704 x 1248
SMALL_TOKENS, SMALL_WIDTH = 60, 256
Passes = Callable[[int, int, torch.dtype, torch.device], Iterable[Pass]]


def main(name: str, passes: Passes, sweep: Passes, arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(f"python -m kernels.{name}.bench", description=f"Measure {name}.")
    parser.add_argument("--small", action="store_true", help="a size for a CPU; its figures mean nothing")
    parser.add_argument("--sweep", action="store_true", help="also try other launch sizes")
    parser.add_argument("--tokens", type=positive, help=f"default: {TOKENS}, or {SMALL_TOKENS} with --small")
    given = parser.parse_args(arguments)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    tokens, width = (SMALL_TOKENS, SMALL_WIDTH) if given.small else (TOKENS, WIDTH)
    shape = given.tokens or tokens, width, torch.bfloat16, device
    bandwidth = copy_bandwidth(device)
    rows = [(work.name, *copy_share(work, device, bandwidth)) for work in passes(*shape)]
    if given.sweep and not (lack := launch.lack(device)):
        rows += sorted(
            ((work.name, *copy_share(work, device, bandwidth)) for work in sweep(*shape)), key=lambda r: -r[2]
        )
    elif given.sweep:
        print(f"No sweep: {lack}.")
    print(f"copy {bandwidth / 1e12:.2f} TB/s, {shape[0]} tokens of {width}, {launch.lack(device) or 'Triton'}")
    print(table(("pass", "ms", "share of copy"), rows))
    kernels = [{"name": name, "copy_share": round(share, 4)} for name, _, share in rows]
    print(json.dumps({"bench": name, **origin(device), "tokens": shape[0], "kernels": kernels}))
