"""What is compiled for which architecture. The tiles are defined in csrc/convolution.cuh."""

from __future__ import annotations

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


def units(target: Target) -> list[Unit]:
    """One file for each tile and element type, which take a minute each, then the small ones."""
    pairs = [(tile, element) for tile in TILES[target.family] for element in ELEMENTS]
    table = "TILES=" + " ".join(f"X({tile},{element})" for tile, element in pairs)
    large = [
        Unit(f"{tile}_{element}", "convolution.cu", (f"TILE={tile}", f"ELEMENT={element}")) for tile, element in pairs
    ]
    return [*large, Unit("head", "head.cu"), Unit("library", "library.cu", (table,))]


RECIPE = Recipe("vae_decode", Path(__file__).with_name("csrc"), units)
