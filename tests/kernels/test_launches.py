"""How many kernels a pass of the released decoder starts at 704 x 1248, counted with tensors that hold no numbers: each
one takes the host some ten microseconds, which is what limits devices that share a frame."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.bands import Band
from engine.decode_paths import cuts
from engine.spread_predict import CountingLink
from tests.kernels.released import Products, latents, released_decoder

PASSES = ("add", "enlarge", "stencil", "write_frames", "write_outputs", "write_tiles")


class Torch(TorchDispatchMode):
    """Counts what PyTorch starts; `zero_` is what a counting link puts in place of what neighbours would send."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not func.is_view and "empty" not in name and name not in ("zero_", "_unsafe_view"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def ours():
    """What is started of ours, by name."""
    return Counter()


@pytest.fixture(scope="module")
def decoder(ours):
    def counted(name):
        return lambda *arguments: ours.update([name])

    passes = SimpleNamespace(**{name: counted(name) for name in PASSES})
    return released_decoder(Products(lambda name: ours.update([name])), passes)


@pytest.mark.parametrize("ranks, rank, most", [(1, 0, 691), (2, 0, 361), (4, 1, 321), (8, 3, 305)])
def test_a_pass_starts_no_more_kernels_than_it_needs(decoder, ours, ranks, rank, most):
    rows = Band(44, rank, ranks, CountingLink()) if ranks > 1 else None
    state = decoder.start(cuts(ranks)[0], rows)
    height = rows.count if rows else 44
    for count in (1, 4, 4):  # histories are made in the first two
        ours.clear()
        with Torch() as theirs, torch.no_grad():
            for _ in decoder.frames(latents(count, height, 78), state):
                pass
    assert ours.total() + theirs.counts.total() <= most, ours + theirs.counts
