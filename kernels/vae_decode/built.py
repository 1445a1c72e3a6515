"""The compiled convolutions behind Python: arguments are checked in words, then a plain C call on PyTorch's stream.

An object takes pointers, sizes and a stream and knows nothing of PyTorch. Whatever it could read out of bounds is
refused here, before a launch. Hopper's have run on an H200; Blackwell's are
compiled, not run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int32, c_int64, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError, listed
from kernels.build import arch, store
from kernels.build.arch import Target
from kernels.checks import HALF, check_dtype, once
from kernels.launch import current
from kernels.vae_decode.geometry import check_beside, check_direct, check_phases, check_stencil, require
from kernels.vae_decode.recipe import ELEMENTS, RECIPE
from kernels.vae_decode.tiles import Row, choose_tile

NAMES = dict(zip((torch.float16, torch.bfloat16), ELEMENTS, strict=True))
GROUP = 8  # channels and filters come in groups of 16 bytes: the copy engine moves nothing smaller
REFUSALS = {
    1: "it has no such tile",
    2: "it was given sizes, pads or addresses that it does not take",
    3: "this tile can't compute this shape",
    4: "its workspace is too small",
}
CUDA, CUTLASS = 1000, 2000
NO_CODE_FOR_THIS_GPU = 209


class Convolution(ctypes.Structure):
    """As csrc/convolution.h has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "residual", "y", "workspace")),
        ("workspace_bytes", c_int64),
        ("stream", c_void_p),
        *((name, c_int64) for name in ("x_step", "residual_step", "y_step")),
        *((name, c_int32) for name in ("phases", "depth", "height", "width", "channels", "filters")),
        *((name, c_int32) for name in ("taps_t", "taps_h", "taps_w")),
        *((name, c_int32) for name in ("pad_top", "pad_bottom", "pad_left", "pad_right")),
        *((name, c_int32) for name in ("frames_apart", "taps_first", "multiprocessors")),
    )


class Stencil(ctypes.Structure):
    """As csrc/convolution.h has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "bias", "out", "finite", "stream")),
        *((name, c_int64) for name in ("values_step", "out_step")),
        *((name, c_int32) for name in ("depth", "rows", "width", "channels", "bfloat16", "as_float")),
    )


class KernelError(EngineError):
    """A compiled kernel did not start, or a launch before it had failed."""


class Library:
    """A loaded object with typed functions, its tiles by name, and errors in words."""

    def __init__(self, loaded: Any) -> None:
        loaded.tile_name.restype = loaded.cuda_error.restype = c_char_p
        loaded.run_convolution.argtypes = [c_int, ctypes.POINTER(Convolution), ctypes.POINTER(c_int64)]
        loaded.run_stencil.argtypes = [ctypes.POINTER(Stencil)]
        sizes = (loaded.convolution_bytes(), loaded.stencil_bytes())
        if sizes != (ctypes.sizeof(Convolution), ctypes.sizeof(Stencil)):
            raise KernelError(f"The object's structures of {sizes} bytes are not those of this program.")
        self.tiles = {loaded.tile_name(i).decode(): i for i in range(loaded.tile_count())}
        self._loaded = loaded

    def workspace(self, tile: int, call: Convolution) -> int:
        """Bytes that a launch wants beside its tensors."""
        needed = c_int64()
        self._check(self._loaded.run_convolution(tile, ctypes.byref(call), ctypes.byref(needed)))
        return needed.value

    def convolve(self, tile: int, call: Convolution) -> None:
        """Launch. KernelError says why nothing was started."""
        self._check(self._loaded.run_convolution(tile, ctypes.byref(call), None))

    def stencil(self, call: Stencil) -> None:
        """Launch. KernelError says why nothing was started."""
        self._check(self._loaded.run_stencil(ctypes.byref(call)))

    def _check(self, code: int) -> None:
        if code == 0:
            return
        if code >= CUTLASS:
            why = f"CUTLASS answered with status {code - CUTLASS}"
        elif code >= CUDA:
            why = self._loaded.cuda_error(code - CUDA).decode()
            if code - CUDA == NO_CODE_FOR_THIS_GPU:
                why += "; it was compiled for another GPU: python -m kernels.build"
        else:
            why = REFUSALS.get(code, f"it answered with {code}")
        raise KernelError(f"A compiled kernel did not run: {why}. Decode with path portable or plain instead.")


def lack(device: torch.device) -> str | None:
    """Why there are no compiled kernels for a device; None where they are or can be compiled."""
    return _no_target(device) or store.obtainable(RECIPE, _target(device))


def _target(device: torch.device) -> Target | None:
    return arch.of_capability(torch.cuda.get_device_capability(device))


def _no_target(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "compiled kernels need an NVIDIA GPU"
    if _target(device) is None:
        major, minor = torch.cuda.get_device_capability(device)
        return f"there are compiled kernels for {arch.NAMES} only, this GPU is sm_{major}{minor}"
    return None


def width_lack(decoder: nn.Module) -> str | None:
    """Why a VAE's decoder can't run on compiled kernels; None where the channels of each convolution are multiples of
    8. The last one's twelve outputs are computed as 112."""
    layers = [m for m in decoder.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    widths = {n for layer in layers for n in (layer.in_channels, layer.out_channels) if layer is not decoder.conv_out}
    odd = sorted(n for n in widths | {decoder.conv_out.in_channels} if n % GROUP)
    return f"its convolutions take channels in groups of {GROUP}, this VAE has layers of {listed(odd)}" if odd else None


class Built:
    """A `Convolver` of compiled kernels, and the head's stencil. 16-bit tensors on one GPU.

    `on` finds or builds the object for a device and takes minutes the first time.
    """

    name, fuses, workspace = "built", True, 0

    def __init__(self, library: Library, target: Target, device: torch.device, multiprocessors: int) -> None:
        """row: the table's answer for a layer's width, channels, filters and taps; bench and tests put theirs in."""
        self.library, self.target, self.device, self.multiprocessors = library, target, device, multiprocessors
        self.row: Callable[[int, int, int, int], Row] = functools.partial(choose_tile, target.family)

    @classmethod
    def on(cls, device: torch.device, say: Callable[[str], None] = store.log.warning) -> Built:
        """For a CUDA device. ResourceError where its object is neither there nor can be built; ValueError where the
        device has none (see `lack`)."""
        missing = _no_target(device)
        require(missing is None, f"{device}: {missing}")
        here = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        target, count = _target(here), torch.cuda.get_device_properties(here).multi_processor_count
        return cls(Library(store.ensure(RECIPE, target, say)), target, here, count)

    def passes(self) -> SimpleNamespace:
        """Triton's passes with the stencil compiled here."""
        from kernels.vae_decode import passes

        return SimpleNamespace(**{name: getattr(passes, name) for name in passes.__all__} | {"stencil": self.stencil})

    def direct(
        self,
        buffer: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        pad_rows: tuple[int, int] = (1, 1),
    ) -> None:
        """As `Convolver.direct`; bias and residual are added in fp32 before the one rounding."""
        check_direct(buffer, weight, bias, residual, out, pad_rows)
        check_beside(out, residual)
        self._check(buffer, buffer=buffer, weight=weight, bias=bias, residual=residual, out=out)
        columns = weight.shape[3] // 2
        frame = out[0].numel()
        steps = [_step(tensor, frame) for tensor in (out, residual) if tensor is not None]
        call = self._call(buffer, weight[None], out, (*pad_rows, columns, columns))
        call.bias, call.residual = _pointer(bias), _pointer(residual)
        call.y_step, call.residual_step = steps[0], steps[-1]
        call.frames_apart = int(any(step != frame for step in steps))
        self._run(call, buffer.dtype)

    def phases(
        self,
        inputs: Tensor,
        weights: Tensor,
        out: Tensor,
        pad_rows: tuple[int, int] = (1, 1),
        pad_columns: tuple[int, int] = (1, 1),
    ) -> None:
        """As `Convolver.phases`, all of them in one launch."""
        check_phases(inputs, weights, out, pad_rows, pad_columns)
        self._check(inputs, inputs=inputs, weights=weights, out=out)
        call = self._call(inputs[0], weights[:, :, None], out, (*pad_rows, *pad_columns))
        call.y_step = out[0].numel()
        self._run(call, inputs.dtype)

    def stencil(self, out: Tensor, values: Tensor, bias: Tensor, finite: Tensor) -> None:
        """As `reference.stencil`."""
        check_stencil(out, values, bias, finite)
        self._check(values, values=values, bias=bias)
        depth, rows, width, channels = values.shape
        call = Stencil(*map(_pointer, (values, bias, out, finite)), self._stream())
        call.values_step, call.out_step = _step(values, values[0].numel()), _step(out, out[0].numel())
        call.depth, call.rows, call.width, call.channels = depth, rows - 2, width, channels
        call.bfloat16, call.as_float = values.dtype == torch.bfloat16, out.dtype == torch.float32
        with current(self.device):
            self.library.stencil(call)

    def _check(self, data: Tensor, **tensors: Tensor | None) -> None:
        """What the kernels want beyond the shapes: 16-bit data on this GPU, in groups of 16 bytes."""
        check_dtype("the input", data, *HALF)
        here = data.device == self.device
        require(here, f"these kernels were loaded for {self.device}, the input is on {data.device}")
        for name, tensor in tensors.items():
            if tensor is not None:
                _check_groups(name, tensor)

    def _call(self, x: Tensor, weight: Tensor, out: Tensor, pads: tuple[int, int, int, int]) -> Convolution:
        """x [t, h, w, c] of the first phase, weight [p, o, kt, kh, kw, c]."""
        depth, height, width, channels = x.shape
        phases, filters, *taps, _ = weight.shape
        call = Convolution(x=x.data_ptr(), weight=weight.data_ptr(), y=out.data_ptr(), stream=self._stream())
        call.x_step = _step(x, height * width * channels)
        call.phases, call.depth, call.height, call.width = phases, depth, height, width
        call.channels, call.filters, call.multiprocessors = channels, filters, self.multiprocessors
        call.taps_t, call.taps_h, call.taps_w = taps
        call.pad_top, call.pad_bottom, call.pad_left, call.pad_right = pads
        return call

    def _run(self, call: Convolution, dtype: torch.dtype) -> None:
        taps = call.taps_t * call.taps_h * call.taps_w
        row = self.row(call.width, call.channels, call.filters, taps)
        call.taps_first = int(row.taps_first)
        tile = self.library.tiles[f"{row.tile}_{NAMES[dtype]}"]
        with current(self.device):  # the kernels ask CUDA which one it is
            needed = self.library.workspace(tile, call)
            # PyTorch gives the memory to nobody else before the launch is through: both are on its stream.
            workspace = torch.empty(needed, dtype=torch.uint8, device=self.device) if needed else None
            call.workspace, call.workspace_bytes = _pointer(workspace), needed
            self.library.convolve(tile, call)

    def _stream(self) -> int | None:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None


def _check_groups(name: str, tensor: Tensor) -> None:
    require(tensor.data_ptr() % 16 == 0, f"{name} begins at an address that 16 does not divide")
    _check_lengths(name, tensor)


@once
def _check_lengths(name: str, tensor: Tensor) -> None:
    lengths = [tensor.shape[-1], *(s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1)]
    whole = all(length % GROUP == 0 for length in lengths) or tensor.ndim == 1
    require(whole, f"{name} has {lengths[0]} channels and strides {lengths[1:]}, these must be multiples of {GROUP}")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _step(tensor: Tensor, frame: int) -> int:
    """Elements from one frame to the next; a single frame has no next one, whatever its stride says."""
    return tensor.stride(0) if len(tensor) > 1 else frame
