"""What the decoder asks of whatever convolves, and cuDNN as the first to answer.

Everything is NHWC in one dtype (bf16, fp16 or fp32), weights are [outputs, taps..., channels], sums are kept in fp32.
Rows above and below a band are either in memory (its halo; pad 0 on that side) or zero (pad 1 on that side), so that a
layer can run on any band of rows and any device's share of them. Left and right of a frame is always zero. Nothing is
padded in time: what a kernel looks back on stands in front of the buffer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.vae_decode.geometry import check_beside, check_direct, check_phases


class Convolver(Protocol):
    """name: as tables and reports call it; fuses: whether `direct` adds bias and residual for free (else it takes
    another pass over memory, and the decoder prefers to hand the bias to the next pass); workspace: bytes that it takes
    beside its tensors."""

    name: str
    fuses: bool
    workspace: int

    def direct(
        self,
        buffer: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        pad_rows: tuple[int, int] = (1, 1),
    ) -> None:
        """out = convolution of buffer + bias + residual: three frames deep, 3 x 3 or 1 x 1 in space.

        buffer [t + 2, h', w, c]; weight [o, 3, 3, 3, c] or [o, 3, 1, 1, c]; bias fp32 [o]; residual and out
        [t, h, w, o], which may be the same memory; h = h' + sum(pad_rows) - 2 (3 x 3), or h' with pad_rows (0, 0).
        Frames of buffer, residual and out may be apart (a band of rows), a frame itself is one block.
        Raises ValueError for anything else.
        """
        ...

    def phases(
        self,
        inputs: Tensor,
        weights: Tensor,
        out: Tensor,
        pad_rows: tuple[int, int] = (1, 1),
        pad_columns: tuple[int, int] = (1, 1),
    ) -> None:
        """out[i] = convolution of inputs[i] with weights[i]: the products of one Winograd layer, or one 2D convolution.

        inputs [p, n, h', w', c]; weights [p, o, kh, kw, c]; out [p, n, h, w, o], h = h' + sum(pad_rows) - kh + 1, the
        same for w. All three are packed. Kernels that the decoder uses: 3 x 3, 3 x 1, 1 x 1 and 2 x 2.
        Raises ValueError for anything else.
        """
        ...


class Cudnn:
    """The convolutions of PyTorch, which are cuDNN's on a GPU. Adds bias and residual in fp32 to a sum that cuDNN has
    already rounded to the dtype of the output."""

    name, fuses = "cudnn", False
    workspace = 512 * 2**20  # seen on an H200: 0.4 GiB

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
        check_beside(out, residual)
        volume = _volume(buffer)
        kernel, extra = weight.permute(0, 4, 1, 2, 3), pad_rows[0] - pad_rows[1]
        target = _volume(out)
        columns = weight.shape[3] // 2
        if bias is None and residual is None and extra == 0 and out.is_contiguous():
            _convolve(volume, kernel, [0, pad_rows[0], columns], target)
            return
        y = _convolve(volume, kernel, [0, max(pad_rows), columns], None)[0].permute(1, 2, 3, 0)
        y = _without(y, 1, extra)
        if bias is not None or residual is not None:
            y = y.float() if bias is None else y.float() + bias
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
        if weights.shape[2:4] == (1, 1) and (*pad_rows, *pad_columns) == (0, 0, 0, 0):
            torch.bmm(inputs.flatten(1, 3), weights.flatten(2).mT, out=out.flatten(1, 3))
            return
        rows, columns = pad_rows[0] - pad_rows[1], pad_columns[0] - pad_columns[1]
        padding = [max(pad_rows), max(pad_columns)]
        for x, weight, target in zip(inputs, weights, out, strict=True):
            image, kernel = x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)
            if rows == columns == 0:
                _convolve(image, kernel, padding, target.permute(0, 3, 1, 2))
            else:
                y = _convolve(image, kernel, padding, None).permute(0, 2, 3, 1)
                target.copy_(_without(_without(y, 1, rows), 2, columns))


def _volume(frames: Tensor) -> Tensor:
    """[t, h, w, c] as [1, c, t, h, w]. A dimension of one that is put in front after the permutation gets the stride of
    the channels: PyTorch then does not see that these lie last, and copies everything to another layout and back."""
    return frames.unsqueeze(0).permute(0, 4, 1, 2, 3)


def _without(y: Tensor, dim: int, extra: int) -> Tensor:
    """y without what a pad too many made: at the end (extra > 0) or at the front of a dimension."""
    if extra == 0:
        return y
    return y.narrow(dim, 0 if extra > 0 else 1, y.shape[dim] - 1)


def _convolve(x: Tensor, weight: Tensor, padding: list[int], out: Tensor | None) -> Tensor:
    """A convolution without bias, written to `out` where cuDNN can do so by itself; TF32 as the switches say."""
    ones = [1] * len(padding)
    if x.is_cuda and out is not None:
        cudnn = torch.backends.cudnn
        flags = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
        return torch.ops.aten.cudnn_convolution.out(x, weight, padding, ones, ones, 1, *flags, out=out)
    function = F.conv3d if len(padding) == 3 else F.conv2d
    y = function(x, weight, padding=padding)
    return y if out is None else out.copy_(y)
