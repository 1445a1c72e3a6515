"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.preset import Defaults, Preset, Size
from engine.request import Limits
from tests.toy import write_toy_checkpoint

# Toy models are faster on one thread than on many that wait for each other; programs that tests start inherit it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU the tests of the Triton kernels start them in Triton's interpreter, which must be said before anything
# imports Triton. It is set for every test: nothing but those tests may ever go through the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `gpu` waits for a machine that has one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests keep is not kept in the user's own cache."""
    before = os.environ.get("ENGINE_CACHE")
    os.environ["ENGINE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("ENGINE_CACHE")
    if before is not None:
        os.environ["ENGINE_CACHE"] = before


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny complete checkpoint in the released layout. Shared: copy it before changing it."""
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy") / "checkpoint")


@pytest.fixture(scope="session")
def toy_preset(toy_checkpoint: Path) -> Preset:
    """A preset of the toy checkpoint: 64 x 96 (height x width), 9 frames, 2 steps."""
    defaults = Defaults(height=64, width=96, frames=9, steps=2, shift=9.0, guidance=2.5, prompt="a red circle")
    return Preset(
        name="toy",
        title="Toy",
        about="Random weights.",
        checkpoint=str(toy_checkpoint),
        fps=24,
        defaults=defaults,
        limits=Limits(steps=8, frames=41, pixels=128 * 128, volume=128 * 128 * 41),
        sizes=(Size("landscape", 64, 96),),
    )
