"""What is compiled for which architecture. The tiles are defined in csrc/convolution.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernels.build.arch import Target
from kernels.build.compile import Recipe, Unit

ELEMENTS = ("fp16", "bf16")
TILES = {
    "hopper": (
        "cooperative_128x256",
        "cooperative_128x256_2x1",
        "cooperative_256x128_1x2",
        "pingpong_128x128_2x1",
    ),
    "blackwell": ("one_sm_128x128", "two_sm_256x256"),
}


def units_of(pairs: Sequence[tuple[str, str]]) -> list[Unit]:
    """One file for each tile and element type, which take a minute each, then the small ones."""
    large = [Unit(f"{t}_{e}", "convolution.cu", (f"TILE={t}", f"ELEMENT={e}")) for t, e in pairs]
    # nvcc splits macros at commas, so each entry of the table is one name.
    table = "TILES=" + " ".join(f"X({unit.name})" for unit in large)
    return [*large, Unit("stencil", "stencil.cu"), Unit("library", "library.cu", (table,))]


def units(target: Target) -> list[Unit]:
    """Every tile of the target's family in both types."""
    return units_of([(tile, element) for tile in TILES[target.family] for element in ELEMENTS])


RECIPE = Recipe("vae_decode", Path(__file__).with_name("csrc"), units)
