"""What `op.py` promises, in float32 PyTorch operations: the truth of tests and what runs where no kernel does."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# The largest value is 448. A factor, because PyTorch divides by a number in one way on a CPU and in another on a GPU.
UNIT = 1 / 448
# A row of zeros needs a scale that can be divided by.
LEAST = 1e-12
# GELU (tanh form) never goes below -DIP and rises from there on: its largest magnitude in a row is that of the largest
# value.
DIP = 0.1701


class Quantised(NamedTuple):
    """Rows in fp8; about values * scales."""

    values: Tensor  # e4m3 [..., width]
    scales: Tensor  # float32 [..., 1]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def flatten(self) -> "Quantised":
        """All rows one after the other."""
        return Quantised(*(part.flatten(0, -2) for part in self))


def quantise_rows(x: Tensor) -> Quantised:
    """Scale = largest magnitude of the row * UNIT; values times its reciprocal, rounded to nearest even."""
    x32 = x.float()
    return _quantised(x32, x32.abs().amax(dim=-1, keepdim=True))


def gelu_quantise_rows(x: Tensor) -> Quantised:
    """The same of GELU(x), tanh form; the largest magnitude counts as `DIP` at least."""
    x32 = x.float()
    largest = F.gelu(x32.amax(dim=-1, keepdim=True), approximate="tanh").clamp_min(DIP)
    return _quantised(F.gelu(x32, approximate="tanh"), largest)


def _quantised(x: Tensor, largest: Tensor) -> Quantised:
    scale = (largest * UNIT).clamp_min(LEAST)
    return Quantised((x * (1 / scale)).to(E4M3), scale)


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """float32 again, as a product sees it."""
    return values.float() * scale
