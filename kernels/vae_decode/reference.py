"""What each operation of the decoder means, in plain PyTorch and fp32 or wider: the truth of every fast path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.vae_decode.geometry import check_direct, check_phases


class Reference:
    """The convolver of tests: sums in `wide` (fp32, or fp64 where the order of a sum must not show), one rounding."""

    name, fuses = "reference", True

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide

    def direct(
        self,
        buffer: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        pad_rows: tuple[int, int] = (1, 1),
    ) -> None:
        """As `Convolver.direct`."""
        check_direct(buffer, weight, bias, residual, out, pad_rows)
        columns = weight.shape[3] // 2
        volume = F.pad(buffer.to(self.wide), (0, 0, columns, columns, *pad_rows)).permute(3, 0, 1, 2).unsqueeze(0)
        y = F.conv3d(volume, weight.to(self.wide).permute(0, 4, 1, 2, 3))[0].permute(1, 2, 3, 0)
        if bias is not None:
            y = y + bias
        out.copy_(y if residual is None else y + residual)

    def phases(
        self,
        inputs: Tensor,
        weights: Tensor,
        out: Tensor,
        pad_rows: tuple[int, int] = (1, 1),
        pad_columns: tuple[int, int] = (1, 1),
    ) -> None:
        """As `Convolver.phases`."""
        check_phases(inputs, weights, out, pad_rows, pad_columns)
        for x, weight, target in zip(inputs, weights, out, strict=True):
            image = F.pad(x.to(self.wide), (0, 0, *pad_columns, *pad_rows)).permute(0, 3, 1, 2)
            target.copy_(F.conv2d(image, weight.to(self.wide).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
