"""Shapes that convolutions must have, checked in words before anything reads out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import FLOATS, check_device, check_dtype, check_inner_stride, check_shape, once
from kernels.vae_decode.winograd import tiles


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


def check_bias(bias: Tensor | None, channels: int, device: torch.device, name: str = "bias") -> None:
    """fp32, one number a channel."""
    if bias is not None:
        fits = bias.dtype == torch.float32 and tuple(bias.shape) == (channels,) and bias.is_contiguous()
        message = f"the {name} must be packed float32 [{channels}] on {device}"
        require(fits and bias.device == device, f"{message}, not {bias.dtype} {shape_of(bias)} on {bias.device}")


def _packed_frames(name: str, tensor: Tensor | None) -> None:
    if tensor is not None:
        whole = tensor[0].is_contiguous() if len(tensor) else True
        require(whole, f"each frame of {name} must be one block of memory; its strides are {list(tensor.stride())}")
        _apart("frames", name, tensor)


def _apart(what: str, name: str, tensor: Tensor) -> None:
    apart = len(tensor) < 2 or tensor.stride(0) >= tensor[0].numel()
    require(apart, f"the {what} of {name} lie on one another; its strides are {list(tensor.stride())}")


def _four(name: str, tensor: Tensor) -> None:
    whole = tensor.ndim == 4 and tensor.shape[-1] > 0
    require(whole, f"{name} must be [frames, rows, columns, channels], not {shape_of(tensor)}")


def _pads(pad: tuple[int, int], name: str) -> None:
    require(len(pad) == 2 and set(pad) <= {0, 1}, f"{name} = {pad}: zeros are added as 0 or 1 on each of two sides")


def check_beside(out: Tensor, residual: Tensor | None) -> None:
    """ValueError where a residual of out's shape shares a part of its memory, which would be read after it was written.
    It may be out itself. Addresses are looked at, so this is checked at every call."""
    if residual is None:
        return
    away, size, t = residual.data_ptr() - out.data_ptr(), out.element_size(), len(out)
    ours, theirs = size * out.stride(0), size * residual.stride(0)
    if away == 0 and (ours == theirs or t == 1):
        return
    frame = size * out[0].numel()
    # Bands of rows of one tensor lie between one another and share nothing.
    near = -(t - 1) * theirs - frame < away < (t - 1) * ours + frame
    shared = near and any(abs(away + i * theirs - j * ours) < frame for i in range(t) for j in range(t))
    require(not shared, "the residual shares a part of its memory with out; give out itself, or one apart from it")


@once
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


@once
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


def _gain(gain: Tensor | None, bias: Tensor | None, channels: int, device: torch.device) -> None:
    check_bias(gain, channels, device, "gain")
    check_bias(bias, channels, device)


@once
def check_frames(
    out: Tensor, x: Tensor, gain: Tensor | None, bias: Tensor | None, history: Tensor, above: int, kept: int
) -> None:
    """ValueError unless these fit together as `write_frames` says."""
    check_kinds(x.dtype, x.device, x=x, out=out, history=history)
    _four("x", x)
    t, h, w, c = x.shape
    check_shape("out", out, (t + 2, -1, w, c))
    rows = out.shape[1]
    check_shape("history", history, (2, rows, w, c))
    require(0 <= above <= rows - h, f"above = {above}: x has {h} rows, out {rows}")
    require(0 <= kept <= rows, f"kept = {kept}: history has {rows} rows")
    _gain(gain, bias, c, x.device)
    for name, tensor in (("out", out), ("history", history)):
        _packed_frames(name, tensor)


@once
def check_tiles(out: Tensor, frames: Tensor) -> None:
    """ValueError unless these fit together as `write_tiles` says."""
    check_kinds(frames.dtype, frames.device, frames=frames, out=out)
    _four("frames", frames)
    t, h, w, c = frames.shape
    require(t > 2, f"frames {shape_of(frames)} have none behind their history of two")
    n = tiles(t - 2)
    check_shape("out", out, (6, n, h, w, c), (36, n, h, tiles(w), c))
    _packed_frames("frames", frames)
    _packed_frames("out", out[0])
    _apart("phases", "out", out)


@once
def check_sum(out: Tensor, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """ValueError unless these fit together as `add` says."""
    check_kinds(out.dtype, out.device, residual=residual, out=out)
    check_dtype("y", y, *FLOATS)
    check_device(out.device, y=y)
    for name, tensor in (("y", y), ("residual", residual)):
        if tensor is not None:
            check_shape(name, tensor, tuple(out.shape))
            _packed_frames(name, tensor)
    _packed_frames("out", out)
    check_bias(bias, out.shape[-1], out.device)


@once
def check_outputs(out: Tensor, products: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """ValueError unless these fit together as `write_outputs` says."""
    check_kinds(products.dtype, products.device, products=products, out=out, residual=residual)
    _four("out", out)
    t, h, w, o = out.shape
    n = tiles(t)
    check_shape("products", products, (6, n, h, w, o), (36, n, h, tiles(w), o))
    require(products.is_contiguous(), "the products must be packed")
    check_sum(out, out, bias, residual)


@once
def check_enlarge(out: Tensor, z: Tensor, bias: Tensor, source: Tensor) -> None:
    """ValueError unless these fit together as `enlarge` says."""
    check_kinds(z.dtype, z.device, z=z, source=source, out=out)
    t, h, w, c = source.shape
    o = out.shape[-1]
    require(c % o == 0 and c // o in (1, 2, 4), f"a shortcut takes 1, 2 or 4 times {o} channels, not {c}")
    check_shape("out", out, (t, 2 * h, 2 * w, o))
    check_shape("z", z, (t, h + 1, w + 1, 4 * o))
    check_bias(bias, o, z.device)
    for name, tensor in (("out", out), ("z", z), ("source", source)):
        _packed_frames(name, tensor)


@once
def check_stencil(out: Tensor, values: Tensor, bias: Tensor, finite: Tensor) -> None:
    """ValueError unless these fit together as `stencil` says: a plane of another depth or height would be read out of
    bounds."""
    check_kinds(values.dtype, values.device, values=values)
    check_device(values.device, out=out, bias=bias, finite=finite)
    require(values.ndim == 4 and values.shape[1] > 2, f"values {shape_of(values)} have no rows between their halo")
    require(values.shape[3] >= 108, f"values must hold nine planes of 12, 108 channels, not {values.shape[3]}")
    t, h, w = values.shape[0], values.shape[1] - 2, values.shape[2]
    shape = (t, 2 * h, 2 * w, 3) if out.dtype == torch.uint8 else (t, h, w, 12)
    check_dtype("out", out, torch.uint8, torch.float32)
    check_shape("out", out, shape)
    check_bias(bias, 12, values.device)
    check_dtype("finite", finite, torch.int32)
    check_shape("finite", finite, (1,))
    for name, tensor in (("values", values), ("out", out)):
        _packed_frames(name, tensor)
