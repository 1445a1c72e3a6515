"""nvcc compiles every tile, for Hopper and for Blackwell, where it is found. Minutes, so it is marked slow."""

import re
from pathlib import Path

import pytest

from kernels.build import arch, preflight, store
from kernels.build.compile import Recipe
from kernels.vae_decode.built import Library
from kernels.vae_decode.recipe import ELEMENTS, RECIPE, TILES, units_of

HOPPER, BLACKWELL, _ = arch.TARGETS


def toolchain_or_skip(targets):
    try:
        return preflight.toolchain(targets, Path.cwd())
    except preflight.MissingError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: target.name)
def test_the_kernels_compile_without_spills_and_load(target, tmp_path, monkeypatch):
    toolchain_or_skip([target])
    # A cache of its own: an object that was built before would prove nothing about these sources.
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    # Each tile in one type, the types in turn: both in all would take twice as long and say little more.
    pairs = [(tile, ELEMENTS[i % 2]) for i, tile in enumerate(TILES[target.family])]
    recipe = Recipe(RECIPE.name, RECIPE.folder, lambda _: units_of(pairs))
    library = Library(store.ensure(recipe, target, print))
    assert list(library.tiles) == [f"{tile}_{element}" for tile, element in pairs]
    (log,) = tmp_path.glob("*/*/build.log")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.read_text(encoding="utf-8"))
    assert len(spills) == len(pairs) + 2 and set(spills) == {("0", "0")}
