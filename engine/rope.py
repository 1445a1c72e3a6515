"""Rotary positions of the video tokens: tables from the patch grid, and the rotation of adjacent pairs.

Token (f, r, c) sits at (f * temporal_scale, r, c). An axis of width d contributes d/2 angles with frequencies
theta^(-2k/d); time comes first, then rows, then columns. Text has no positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def axis_angles(length: int, width: int, theta: float, scale: float = 1.0) -> Tensor:
    """Angles [length, width / 2], float64 on the CPU, of the positions 0 .. length - 1 times `scale`."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    positions = torch.arange(length, dtype=torch.float64) * scale
    return torch.outer(positions, frequencies)


def rope_tables(
    grid: Sequence[int],
    axes: Sequence[int],
    theta: float,
    temporal_scale: float,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each float32 [tokens, sum(axes) / 2], for a patch grid of (frames, rows, columns).

    Tokens are ordered frame, row, column. Angles are float64: in float32 they are off by up to 5e-6 at 481 frames.
    """
    scales = (temporal_scale, 1.0, 1.0)
    angles = [axis_angles(n, width, theta, scale) for n, width, scale in zip(grid, axes, scales, strict=True)]
    return _spread(torch.cos, angles, grid, device), _spread(torch.sin, angles, grid, device)


def _spread(function, angles: list[Tensor], grid: Sequence[int], device: torch.device | str) -> Tensor:
    """Apply `function` to each axis' short table, then repeat the axes over the grid: [tokens, angles]."""
    parts = []
    for axis, table in enumerate(angles):
        shape = [1, 1, 1, table.shape[1]]
        shape[axis] = grid[axis]
        parts.append(function(table).float().to(device).view(shape).expand(*grid, -1))
    return torch.cat(parts, dim=-1).flatten(0, 2)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each adjacent pair (a, b) of the head into (a cos - b sin, b cos + a sin).

    x float32 [B, tokens, heads, head size]; cos, sin float32 [tokens, head size / 2]. Returns x's shape, float32.
    Pairs as complex numbers make this one multiplication: on a CPU about ten times faster than the formula below,
    which is for the compiler, as that has no complex numbers and fuses the formula instead.
    """
    pairs = x.unflatten(-1, (-1, 2))
    cos, sin = cos[:, None], sin[:, None]
    if torch.compiler.is_compiling():
        a, b = pairs.unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)).flatten(-2)
