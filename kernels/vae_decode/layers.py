"""The decoder's layers over passes and convolutions. Each works on bands of rows and knows nothing of the video.

A layer's input is computed row by row, into a buffer that is as high as the plan allows, with a halo row on each side:
the neighbour's where there is one, else zero. So a band needs no padding, and what it gives depends neither on its
height nor on where it begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.vae_decode.convolve import Convolver
from kernels.vae_decode.state import State
from kernels.vae_decode.table import Ways
from kernels.vae_decode.winograd import PHASES, Way, four_phases, nine_planes, tiles, transform_weight


@dataclass(frozen=True)
class Kit:
    """What layers compute with. passes: `passes` or `reference`; ways: see `table`."""

    passes: Any
    convolver: Convolver
    dtype: torch.dtype
    ways: Ways


def _gain(norm: nn.Module) -> Tensor:
    """fp32: the norm's gain with the square root of the channels in it."""
    gamma = norm.gamma.detach().flatten().float()
    return gamma * gamma.numel() ** 0.5


def _bias(module: nn.Module) -> Tensor:
    return module.bias.detach().float()


def _rows_of(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, rows]


class CausalConv:
    """norm and SiLU (where there is a norm), then a 3 x 3 x 3 convolution of this frame and the two before it."""

    def __init__(self, name: str, module: nn.Module, norm: nn.Module | None, level: int, kit: Kit) -> None:
        self.name, self.kit = name, kit
        self.outputs, self.inputs = module.weight.shape[:2]
        self.way: Way = "direct" if norm is None else kit.ways(self.inputs, self.outputs, level)
        self.gain = None if norm is None else _gain(norm)
        self.weight, self.bias = transform_weight(module.weight.detach(), self.way, kit.dtype), _bias(module)

    @property
    def leaves_bias(self) -> bool:
        """Whether a call without residual leaves the bias to the pass that reads its output, which adds it for free."""
        return self.way == "direct" and not self.kit.convolver.fuses

    def __call__(
        self, x: Tensor, out: Tensor, state: State, residual: Tensor | None = None, before: Tensor | None = None
    ) -> None:
        """out [t, h, w, o] = convolution of x [t, h, w, c] + bias + residual. The residual may be out, x may not: bands
        read some of its rows twice. before: a bias that x still lacks."""
        first = state.first(self.name)
        if self.way == "direct":
            self._direct(x, out, state, residual, before)
        elif self.way == "time" and first and len(x) == 1:
            self._last_tap(x, out, state, residual, before)
        else:
            self._tiles(x, out, state, residual, before)

    def _direct(self, x: Tensor, out: Tensor, state: State, residual: Tensor | None, before: Tensor | None) -> None:
        fuses = self.kit.convolver.fuses
        for rows, buffer in self._bands(x, state, before, self.outputs / self.inputs):
            target, beside = out[:, rows], _rows_of(residual, rows)
            if fuses or (residual is None and self.leaves_bias and self.gain is not None):
                self.kit.convolver.direct(buffer, self.weight, self.bias if fuses else None, beside, target, (0, 0))
                continue
            y = torch.empty_like(target, memory_format=torch.contiguous_format)
            self.kit.convolver.direct(buffer, self.weight, None, None, y, (0, 0))
            self.kit.passes.add(target, y, self.bias, beside)
            del y  # before the next band's is made

    def _last_tap(self, x: Tensor, out: Tensor, state: State, residual: Tensor | None, before: Tensor | None) -> None:
        """The video's first frame: behind two of zeros only the last tap counts, which is the last of the weights."""
        for rows, buffer in self._bands(x, state, before, self.outputs / self.inputs / 3):
            product = out.new_empty(1, 1, rows.stop - rows.start, x.shape[2], self.outputs)
            self.kit.convolver.phases(buffer[None, 2:], self.weight[-1:], product, (0, 0), (1, 1))
            self.kit.passes.add(out[:, rows], product[0], self.bias, _rows_of(residual, rows))
            del product

    def _tiles(self, x: Tensor, out: Tensor, state: State, residual: Tensor | None, before: Tensor | None) -> None:
        t, _, w, c = x.shape
        phases, n = PHASES[self.way], tiles(t)
        columns, pad = (w, (1, 1)) if self.way == "time" else (tiles(w), (0, 0))
        share = phases * n * columns / ((t + 2) * w)
        for rows, buffer in self._bands(x, state, before, share * (1 + self.outputs / c)):
            inputs = x.new_empty(phases, n, buffer.shape[1], columns, c)
            self.kit.passes.write_tiles(inputs, buffer)
            products = x.new_empty(phases, n, rows.stop - rows.start, columns, self.outputs)
            self.kit.convolver.phases(inputs, self.weight, products, (0, 0), pad)
            del inputs
            self.kit.passes.write_outputs(out[:, rows], products, self.bias, _rows_of(residual, rows))
            del products

    def _bands(self, x: Tensor, state: State, before: Tensor | None, made: float) -> Iterator[tuple[slice, Tensor]]:
        return bands(self.name, x, self.kit.passes, self.gain, before, state, made)


def bands(
    name: str, x: Tensor, passes: Any, gain: Tensor | None, before: Tensor | None, state: State, made: float
) -> Iterator[tuple[slice, Tensor]]:
    """Bands of rows of x [t, h, w, c], each with a packed buffer [t + 2, rows + 2, w, c] of activations behind their
    history, halo rows included, valid until the next one is taken; x must stay as it is until the last one is.

    gain, before: see `reference.activate`; made: bytes that are made of each byte of a buffer.
    """
    t, h, w, c = x.shape
    history, ranks = state.history(name, x), state.rows
    neighbours = functools.cache(ranks.neighbours(x))  # on their way while our own rows are written
    height = state.plan.band((t + 2) * w * c * x.element_size(), made, h)
    memory = x.new_empty((t + 2) * (height + 2) * w * c)

    for a in range(0, h, height):
        b = min(a + height, h)
        buffer = memory[: (t + 2) * (b - a + 2) * w * c].view(t + 2, b - a + 2, w, c)
        past, first, last = history[:, a : b + 2], a == 0, b == h
        above, below = int(first and ranks.above is not None), int(last and ranks.below is not None)
        own, near = slice(above, b - a + 2 - below), x[:, max(a - 1, 0) : b + 1]
        # The next band computes the rows that both need again, from a history that this one left alone.
        kept = 0 if last else 2
        passes.write_frames(buffer[:, own], near, gain, before, past[:, own], int(first) - above, kept)
        if above:
            passes.write_frames(buffer[:, :1], neighbours()[0], gain, before, past[:, :1])
        if below:
            passes.write_frames(buffer[:, -1:], neighbours()[1], gain, before, past[:, -1:])
        yield slice(a, b), buffer


class ResidualBlock:
    """norm, SiLU, convolution, twice, plus the input (through a 1 x 1 x 1 where the width changes)."""

    def __init__(self, name: str, module: nn.Module, level: int, kit: Kit) -> None:
        self.conv1 = CausalConv(f"{name}.conv1", module.conv1, module.norm1, level, kit)
        self.conv2 = CausalConv(f"{name}.conv2", module.conv2, module.norm2, level, kit)
        self.shortcut = None
        if not isinstance(module.conv_shortcut, nn.Identity):
            self.shortcut = module.conv_shortcut.weight.detach().flatten(1).to(kit.dtype)
            # One sum, one rounding: the shortcut's bias goes where the second convolution's goes.
            self.conv2.bias = self.conv2.bias + _bias(module.conv_shortcut)

    def __call__(self, x: Tensor, out: Tensor, state: State) -> None:
        """x [t, h, w, c] -> out [t, h, w, o], which may be x where the width stays."""
        middle = torch.empty_like(out, memory_format=torch.contiguous_format)
        self.conv1(x, middle, state)
        if self.shortcut is not None:
            torch.mm(x.flatten(0, 2), self.shortcut.T, out=out.flatten(0, 2))
        residual = x if self.shortcut is None else out
        self.conv2(middle, out, state, residual, self.conv1.bias if self.conv1.leaves_bias else None)


class Upsampler:
    """Twice the height and width, and twice the frames where the level has a time convolution; adds the shortcut, which
    is read where it is added and never written out."""

    def __init__(self, name: str, module: nn.Module, kit: Kit) -> None:
        self.name, self.kit = name, kit
        spatial = module.resample[1]
        self.outputs = spatial.out_channels
        self.weight, self.bias = four_phases(spatial.weight.detach(), kit.dtype)[None], _bias(spatial)
        self.time_weights: tuple[Tensor, ...] = ()
        self.factor = 1
        if module.mode == "upsample3d":
            self.factor = 2
            weight = transform_weight(module.time_conv.weight.detach(), "direct", kit.dtype)
            self.time_weights, self.time_biases = weight.chunk(2), _bias(module.time_conv).chunk(2)

    def __call__(self, stream: Tensor, source: Tensor, state: State) -> Tensor:
        """stream: what `room` made, with the frames in it; source [t, h, w, c] -> [t * factor, 2h, 2w, o]. The video's
        first frame is never doubled in time."""
        t, h, w, _ = source.shape
        alone = state.first(self.name)
        factor = 1 if alone else self.factor
        out = stream.new_empty(t * factor, 2 * h, 2 * w, self.outputs)
        if factor == 1:
            self._enlarge(stream[len(stream) - t :], source, out, state)
            return out
        history = state.history(self.name, stream, halo=0)
        stream[:2] = history
        for phase, (weight, bias) in enumerate(zip(self.time_weights, self.time_biases, strict=True)):
            y = torch.empty_like(stream[2:])
            fuses = self.kit.convolver.fuses
            self.kit.convolver.direct(stream, weight, bias if fuses else None, None, y, (0, 0))
            if not fuses:
                self.kit.passes.add(y, y, bias, None)
            self._enlarge(y, source, out[phase::2], state)
        history.copy_(stream[-2:])
        return out

    def room(self, t: int, h: int, w: int, channels: int, like: Tensor) -> Tensor:
        """Memory for a level's frames: with two in front where a time convolution will look back on them."""
        return like.new_empty(t + (2 if self.factor == 2 else 0), h, w, channels)

    def _enlarge(self, y: Tensor, source: Tensor, out: Tensor, state: State) -> None:
        """out[:, 2i+p, 2j+q] = phase (p, q) of the convolution + bias + shortcut, a few frames at a time."""
        above, below = state.rows.neighbours(y)()
        pads = (int(above is None), int(below is None))
        t, h, w, _ = source.shape
        step = state.plan.frames_of((h + 1) * (w + 1) * 4 * self.outputs * y.element_size(), t)
        for k in range(0, t, step):
            part = slice(k, min(k + step, t))
            halo = [piece[part] for piece in (above, y, below) if piece is not None]
            rows = halo[0] if len(halo) == 1 else torch.cat(halo, 1)
            z = y.new_empty(1, len(rows), h + 1, w + 1, 4 * self.outputs)
            self.kit.convolver.phases(rows[None], self.weight, z, pads, (1, 1))
            self.kit.passes.enlarge(out[part], z[0], self.bias, source[part])
            del z, rows, halo


class UpBlock:
    """A level: residual blocks in one stream of frames, then the upsampler (the last level has none)."""

    def __init__(self, name: str, module: nn.Module, level: int, kit: Kit) -> None:
        self.blocks = [ResidualBlock(f"{name}.resnets.{i}", m, level, kit) for i, m in enumerate(module.resnets)]
        self.outputs = module.out_dim
        up = module.upsampler
        self.upsampler = None if up is None else Upsampler(f"{name}.upsampler", up, kit)

    def __call__(self, x: Tensor, state: State) -> Tensor:
        """x [t, h, w, c] -> the next level's input."""
        t, h, w, _ = x.shape
        up = self.upsampler
        stream = x.new_empty(t, h, w, self.outputs) if up is None else up.room(t, h, w, self.outputs, x)
        y = stream[len(stream) - t :]
        for k, block in enumerate(self.blocks):
            block(y if k else x, y, state)
        return y if up is None else up(stream, x, state)


class Head:
    """norm, SiLU and the last convolution: twelve channels, the four pixels of each position in three colours."""

    def __init__(self, decoder: nn.Module, kit: Kit) -> None:
        self.kit, self.gain = kit, _gain(decoder.norm_out)
        self.weight, self.bias = nine_planes(decoder.conv_out.weight.detach(), kit.dtype), _bias(decoder.conv_out)

    def __call__(self, x: Tensor, out: Tensor, finite: Tensor, state: State) -> None:
        """x [t, h, w, c] -> out as in `reference.stencil`."""
        t, _, w, c = x.shape
        scale, made = 2 if out.dtype == torch.uint8 else 1, len(self.weight) / c
        for rows, buffer in bands("conv_out", x, self.kit.passes, self.gain, None, state, made):
            values = x.new_empty(t, buffer.shape[1], w, len(self.weight))
            self.kit.convolver.direct(buffer, self.weight, None, None, values, (0, 0))
            self.kit.passes.stencil(out[:, scale * rows.start : scale * rows.stop], values, self.bias, finite)
            del values
