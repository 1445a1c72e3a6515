"""Shapes that convolutions must have, checked in words before anything reads out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import FLOATS, check_device, check_dtype, check_inner_stride


def require(holds: bool, message: str) -> None:
    """ValueError with `message` unless it holds."""
    if not holds:
        raise ValueError(message)


def shape_of(tensor: Tensor) -> str:
    """The shape as messages write it."""
    return str(list(tensor.shape))


def check_kinds(dtype: torch.dtype, device: torch.device, **tensors: Tensor | None) -> None:
    """Every tensor has this dtype and device, and channels that lie side by side."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_dtype(name, tensor, *FLOATS)
            require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, the input is {dtype}; they must be the same")
    check_device(device, **tensors)
    check_inner_stride(**tensors)


def check_bias(bias: Tensor | None, channels: int, device: torch.device) -> None:
    """fp32, one number a channel."""
    if bias is not None:
        fits = bias.dtype == torch.float32 and tuple(bias.shape) == (channels,) and bias.is_contiguous()
        message = f"the bias must be packed float32 [{channels}] on {device}"
        require(fits and bias.device == device, f"{message}, not {bias.dtype} {shape_of(bias)} on {bias.device}")


def _packed_frames(name: str, tensor: Tensor | None) -> None:
    if tensor is not None:
        whole = tensor[0].is_contiguous() if len(tensor) else True
        require(whole, f"each frame of {name} must be one block of memory; its strides are {list(tensor.stride())}")


def _pads(pad: tuple[int, int], name: str) -> None:
    require(len(pad) == 2 and set(pad) <= {0, 1}, f"{name} = {pad}: zeros are added as 0 or 1 on each of two sides")


def check_direct(
    buffer: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    pad_rows: tuple[int, int],
) -> None:
    """ValueError unless these fit together as `Convolver.direct` says."""
    require(
        buffer.ndim == 4 and weight.ndim == 5 and out.ndim == 4,
        "direct takes buffer, weight and out of 4, 5 and 4 dimensions",
    )
    check_kinds(buffer.dtype, buffer.device, buffer=buffer, weight=weight, residual=residual, out=out)
    t, h, w, c = buffer.shape
    o, depth, kh, kw, inner = weight.shape
    kernel = (depth, kh, kw)
    require(kernel in ((3, 3, 3), (3, 1, 1)), f"direct knows kernels of 3 x 3 x 3 and 3 x 1 x 1, not {kernel}")
    require(inner == c, f"the weight takes {inner} channels, the buffer has {c}")
    require(weight.is_contiguous(), "the weight must be packed")
    _pads(pad_rows, "pad_rows")
    require(kh == 3 or tuple(pad_rows) == (0, 0), "a kernel of one row has no use for pad_rows; give (0, 0)")
    wanted = (t - 2, h + sum(pad_rows) - kh + 1, w, o)
    require(min(wanted) > 0, f"a buffer of {shape_of(buffer)} is too small for a kernel of {kernel}")
    for name, tensor in (("out", out), ("residual", residual)):
        fits = tensor is None or tuple(tensor.shape) == wanted
        require(fits, f"{name} must be {list(wanted)}, not {None if tensor is None else shape_of(tensor)}")
    check_bias(bias, o, buffer.device)
    for name, tensor in (("buffer", buffer), ("residual", residual), ("out", out)):
        _packed_frames(name, tensor)


def check_phases(
    inputs: Tensor, weights: Tensor, out: Tensor, pad_rows: tuple[int, int], pad_columns: tuple[int, int]
) -> None:
    """ValueError unless these fit together as `Convolver.phases` says."""
    require(inputs.ndim == weights.ndim == out.ndim == 5, "phases takes inputs, weights and out of 5 dimensions each")
    check_kinds(inputs.dtype, inputs.device, inputs=inputs, weights=weights, out=out)
    p, n, h, w, c = inputs.shape
    count, o, kh, kw, inner = weights.shape
    require(count == p and inner == c, f"weights for {count} phases of {inner} channels, inputs have {p} of {c}")
    _pads(pad_rows, "pad_rows")
    _pads(pad_columns, "pad_columns")
    wanted = (p, n, h + sum(pad_rows) - kh + 1, w + sum(pad_columns) - kw + 1, o)
    require(min(wanted) > 0, f"inputs of {shape_of(inputs)} are too small for a kernel of {kh} x {kw}")
    require(tuple(out.shape) == wanted, f"out must be {list(wanted)}, not {shape_of(out)}")
    for name, tensor in (("inputs", inputs), ("weights", weights), ("out", out)):
        require(tensor.is_contiguous(), f"{name} must be packed; its strides are {list(tensor.stride())}")
