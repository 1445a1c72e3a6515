"""What `op.py` promises, in float32 PyTorch operations: the truth of tests and what runs where no kernel does."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# A row of zeros needs a scale that can be divided by.
LEAST = 1e-12


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale = largest magnitude of the row / 448; values divided by it, rounded to nearest even."""
    x32 = x.float()
    scale = x32.abs().amax(dim=-1, keepdim=True).div(LARGEST).clamp_min(LEAST)
    return (x32 / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """float32 again, as a product sees it."""
    return values.float() * scale
