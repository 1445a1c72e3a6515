"""Where a video starts from: the only place in the engine that draws random numbers.

Drawn on the CPU in float32, one generator a sample, so that a seed means the same noise on any device, in any batch and
with any number of processes. Equal noise is promised, equal pixels on different devices are not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from engine.errors import RequestError
from engine.request import MAX_SEED


def check_seed(seed: int) -> int:
    """The seed as a plain int. Raises RequestError unless it is a whole number from 0 to 2**63 - 1."""
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    if isinstance(seed, bool) or not 0 <= value <= MAX_SEED:
        raise RequestError(f"seed = {seed!r} must be a whole number from 0 to {MAX_SEED} (2**63 - 1).")
    return value


def draw_noise(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise for one video: float32 on the CPU, of exactly `shape`, [48, F, h, w] or [1, 48, F, h, w].

    For several videos concatenate several calls, one seed each: with one generator for a batch a sample's noise would
    depend on its neighbours.
    """
    if len(shape) == 5 and shape[0] != 1:
        raise ValueError(f"noise of shape {tuple(shape)} is {shape[0]} samples; draw them one by one, a seed each")
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
