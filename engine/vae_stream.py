"""The decoder of Wan 2.2's VAE as a stream: latent frames go in, a few at a time, frames come out, memory stays flat.

It computes what `AutoencoderKLWan.decode` of diffusers computes, over the same weights. What differs is the execution:

* any number of latent frames a pass, and inside a pass the upper levels run a few frames at a time;
* the history of the causal convolutions is in a `DecoderState` made for one request, by layer name, never in a module;
* activations are [frames, height, width, channels], so a frame is one block of memory and norms read rows;
* "double the size, then 3 x 3" is four 2 x 2 convolutions on the small image (4/9 of the multiplications), and the pass
  that puts the four together also adds the level's shortcut, which is therefore never written out;
* a device may have only a band of each frame's rows: `Rows` of the state brings it the rows beside its own.

In fp32 on a CPU a band of rows has the bytes that the whole frame has there, on any number of threads. oneDNN sums in
an order that does not depend on the number of rows, tried over hundreds of shapes, but for one kind: 3 x 3 x 3 over 128
channels or more with AVX-512, so wide layers go row by row. The CPU's matrix products do depend on it: not used.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.bands import Rows
from engine.errors import CheckpointError

HISTORY = 2  # frames that a kernel of three frames looks back
# Bytes of one activation that a level hands to the next. Small on a CPU, so that it stays in the last level of cache.
SLICE_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
ONE_ORDER = 64  # input channels up to which oneDNN was never seen to change its order of summation with the shape
REQUIRED = {
    "z_dim": 48,
    "is_residual": True,
    "patch_size": 2,
    "out_channels": 12,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
}


def check_supported(vae: nn.Module) -> None:
    """Raise CheckpointError where a VAE is not Wan 2.2's layout (its width and number of blocks are free)."""
    for key, wanted in REQUIRED.items():
        value = vae.config.get(key)
        value = list(value) if isinstance(value, tuple) else value
        if value != wanted:
            raise CheckpointError(
                f"The VAE's configuration has {key} = {value!r}; this decoder is for Wan 2.2's VAE, with {wanted!r}. "
                "Use the vae/ folder of PAN 2 or of Wan 2.2 TI2V-5B."
            )
    if len(vae.config["dim_mult"]) != 4:
        raise CheckpointError(f"The VAE's configuration has dim_mult = {vae.config['dim_mult']}; it needs four levels.")


class DecoderState:
    """What one request remembers between passes: for each causal convolution its last two input frames, and which
    levels have had their first frame. Drop it and nothing is left of the request. rows: those that this device has."""

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = rows or Rows()
        self.history: dict[str, Tensor] = {}
        self.started: set[str] = set()

    def first(self, name: str) -> bool:
        """True the first time a name is asked for."""
        if name in self.started:
            return False
        self.started.add(name)
        return True

    def extend(self, name: str, x: Tensor, halo: int) -> Tensor:
        """A new [2 + t, halo + h + halo, w, c] for x [t, h, w, c]: two frames of history of `name` (zeros at the
        start), then room for x."""
        t, h, w, c = x.shape
        buffer = x.new_empty(HISTORY + t, h + 2 * halo, w, c)
        if name in self.history:
            buffer[:HISTORY] = self.history[name]
        else:
            buffer[:HISTORY] = 0
        return buffer

    def remember(self, name: str, buffer: Tensor) -> None:
        """Keep the last two frames of a buffer as the history of `name`."""
        if name in self.history:
            self.history[name].copy_(buffer[-HISTORY:])
        else:
            self.history[name] = buffer[-HISTORY:].clone()


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """x [t, h, w, c] with weight [o, c, kt, kh, kw]; so many zeros around each frame, none before or after in time."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.enabled or not x.numel():
        y = F.conv3d(_volume(x), weight, bias, padding=[0, rows, columns])
        return y.squeeze(0).permute(1, 2, 3, 0).contiguous()
    kernel = weight.shape[2:]
    if x.shape[-1] <= ONE_ORDER or kernel.numel() == 1:
        return _one_dnn(x, weight, bias, rows, columns)
    x = F.pad(x, (0, 0, 0, 0, rows, rows))
    above = kernel[1] - 1
    lines = [_one_dnn(x[:, i : i + 1 + above], weight, bias, 0, columns) for i in range(x.shape[1] - above)]
    return torch.cat(lines, dim=1)


def _one_dnn(x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
    # conv3d sends volumes of few channels and frames to a path that is eight times slower than oneDNN's.
    # Winograd along time was measured above it: 1.0x at 16 channels, 1.5x at 64, for ten times the error. Not used.
    y = torch.mkldnn_convolution(_volume(x), weight, bias, [0, rows, columns], [1, 1, 1], [1, 1, 1], 1)
    return y.squeeze(0).permute(1, 2, 3, 0).contiguous()


def _volume(x: Tensor) -> Tensor:
    """[t, h, w, c] as [1, c, t, h, w]; in this order the strides still say channels last."""
    return x.unsqueeze(0).permute(0, 4, 1, 2, 3)


class Norm:
    """x / |x| * sqrt(c) * gamma over the channels; statistics in fp32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        gamma = module.gamma.detach().flatten().float()
        self.gain = (gamma * gamma.numel() ** 0.5).to(dtype)

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        """Write the norm of x [..., c] to out of the same shape."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        torch.mul(x, length.clamp_min_(1e-12).reciprocal_(), out=out)
        return out.mul_(self.gain)


class CausalConv:
    """A convolution over three frames (3 x 3 x 3 or 3 x 1 x 1) that sees this frame and the two before it."""

    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        self.name = name
        self.weight, self.bias = _weights(module.weight, module.bias, dtype)
        self.padding = self.weight.shape[-1] // 2

    def __call__(self, x: Tensor, state: DecoderState, norm: Norm | None = None) -> Tensor:
        """x [t, h, w, c] -> [t, h, w, o], of silu(norm(x)) if a norm is given."""
        rows = state.rows if self.padding else Rows()
        buffer = state.extend(self.name, x, rows.halo)

        def write(a: int, b: int) -> None:
            out = buffer[HISTORY:, rows.halo + a : rows.halo + b]
            if norm is None:
                out.copy_(x[:, a:b])
            else:
                F.silu(norm.into(out, x[:, a:b]), inplace=True)

        rows.fill(buffer[HISTORY:], write)
        state.remember(self.name, buffer)
        return _convolve(buffer, self.weight, self.bias, rows.pad * self.padding, self.padding)


def _weights(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast once from what is stored; on a GPU in the layout of the activations (oneDNN has its own and converts)."""
    weight, bias = weight.detach().to(dtype), bias.detach().to(dtype)
    return (weight if weight.device.type == "cpu" else weight.contiguous(memory_format=torch.channels_last_3d)), bias


class Pointwise:
    """A convolution of one frame, row and column: a matrix product over the channels."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.weight = module.weight.detach().flatten(1).to(dtype)
        self.bias = module.bias.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":  # as fast as the product, and the same bytes for any number of rows
            return _convolve(x, self.weight[:, :, None, None, None], self.bias)
        return F.linear(x, self.weight, self.bias)


class ResidualBlock:
    """norm, SiLU, convolution, twice, plus the input (through a 1 x 1 x 1 where the width changes)."""

    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        self.norm1, self.norm2 = Norm(module.norm1, dtype), Norm(module.norm2, dtype)
        self.conv1 = CausalConv(f"{name}.conv1", module.conv1, dtype)
        self.conv2 = CausalConv(f"{name}.conv2", module.conv2, dtype)
        shortcut = module.conv_shortcut
        self.shortcut = None if isinstance(shortcut, nn.Identity) else Pointwise(shortcut, dtype)

    def __call__(self, x: Tensor, state: DecoderState) -> Tensor:
        y = self.conv1(x, state, self.norm1)
        y = self.conv2(y, state, self.norm2)
        return y.add_(x if self.shortcut is None else self.shortcut(x))


class Attention:
    """One head over the pixels of each frame, plus the input. It needs the whole frame; computed by every device that
    has a band of it, because it is a thousandth of the work."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.norm = Norm(module.norm, dtype)
        self.qkv, self.out = Pointwise(module.to_qkv, dtype), Pointwise(module.proj, dtype)

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        frame = rows.gather(x)
        pixels = self.norm.into(torch.empty_like(frame), frame).flatten(1, 2).unsqueeze(1)
        q, k, v = self.qkv(pixels).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v)
        return rows.take(self.out(y).view_as(frame)).add(x)


class Upsampler:
    """Twice the height and width, and twice the frames where the level has a time convolution; adds the shortcut."""

    def __init__(self, name: str, module: nn.Module, in_channels: int, dtype: torch.dtype) -> None:
        self.name = name
        spatial = module.resample[1]
        self.out_channels = spatial.out_channels
        self.weight, self.bias = _weights(_four_phases(spatial.weight.detach().float()), spatial.bias.repeat(4), dtype)
        temporal = module.mode == "upsample3d"
        self.time = CausalConv(f"{name}.time_conv", module.time_conv, dtype) if temporal else None
        self.factor = 2 if temporal else 1
        # The shortcut repeats channels; where fewer come out, the four pixels of a position share out the input's.
        self.stride, rest = divmod(in_channels, self.out_channels)
        if rest or 4 % self.stride or (temporal and self.stride > 1):
            steps = f"{in_channels} to {self.out_channels}"
            raise CheckpointError(f"{name} goes from {steps} channels, which is no step that Wan 2.2's VAE makes.")

    def __call__(self, y: Tensor, source: Tensor, state: DecoderState) -> Tensor:
        """y [t, h, w, o], source [t, h, w, c] -> [t * factor, 2h, 2w, o]; the video's first frame is never doubled."""
        alone = 1 if self.time is not None and state.first(self.name) else 0
        t, h, w, _ = y.shape
        out = y.new_empty(alone + (t - alone) * self.factor, 2 * h, 2 * w, self.out_channels)
        if alone:
            self._enlarge(y[:1], source[:1], out[:1], state.rows)
            y, source = y[1:], source[1:]
        if len(y):
            pairs = y if self.time is None else self.time(y, state)
            doubled = out[alone:].unflatten(0, (-1, self.factor))
            for phase, part in enumerate(pairs.chunk(self.factor, dim=-1)):
                self._enlarge(part.contiguous(), source, doubled[:, phase], state.rows)
        return out

    def _enlarge(self, y: Tensor, source: Tensor, out: Tensor, rows: Rows) -> None:
        """out[:, 2i+p, 2j+q] = phase (p, q) of the convolution + the shortcut's channels."""
        t, h, w, c = y.shape
        if rows.halo:
            inner, y = y, y.new_empty(t, h + 2 * rows.halo, w, c)
            rows.fill(y, lambda a, b: y[:, rows.halo + a : rows.halo + b].copy_(inner[:, a:b]))
        z = _convolve(y, self.weight, self.bias, rows.pad, 1)
        for p, q in ((0, 0), (0, 1), (1, 0), (1, 1)):
            k = 2 * p + q
            phase = z[:, p : p + h, q : q + w, k * self.out_channels : (k + 1) * self.out_channels]
            torch.add(phase, source[..., k * self.stride // 4 :: self.stride], out=out[:, p::2, q::2])


def _four_phases(weight: Tensor) -> Tensor:
    """[o, c, 3, 3] after nearest doubling -> [4o, c, 1, 2, 2] on the small image, phases in the order (p, q).

    An even output row sees the small rows i-1, i, i; an odd one i, i, i+1: the weights of a row seen twice add up.
    """

    def fold(w: Tensor, dim: int, phase: int) -> Tensor:
        a, b, c = w.unbind(dim)
        return torch.stack((a, b + c) if phase == 0 else (a + b, c), dim)

    phases = [fold(fold(weight, 2, p), 3, q) for p in (0, 1) for q in (0, 1)]
    return torch.cat(phases).unsqueeze(2)


class UpBlock:
    """A level: residual blocks, then the upsampler (the last level has none)."""

    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        self.blocks = [ResidualBlock(f"{name}.resnets.{i}", m, dtype) for i, m in enumerate(module.resnets)]
        self.out_channels = module.out_dim
        up = module.upsampler
        self.upsampler = None if up is None else Upsampler(f"{name}.upsampler", up, module.in_dim, dtype)

    def __call__(self, x: Tensor, state: DecoderState) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y, state)
        return y if self.upsampler is None else self.upsampler(y, x, state)

    def frame_bytes(self, h: int, w: int, itemsize: int) -> int:
        """Bytes that one frame of h x w input makes at this level's output."""
        growth = 1 if self.upsampler is None else 4 * self.upsampler.factor
        return growth * h * w * self.out_channels * itemsize


class Head:
    """norm, SiLU and the last convolution: 12 channels, the four pixels of each position in three colours."""

    channels = 12

    def __init__(self, decoder: nn.Module, dtype: torch.dtype) -> None:
        self.norm = Norm(decoder.norm_out, dtype)
        self.conv = CausalConv("conv_out", decoder.conv_out, dtype)
        # Four empty channels more: 16 is a whole number of vectors, and twice as fast on a CPU as 12.
        spare = -self.channels % 8
        weight, bias = decoder.conv_out.weight, decoder.conv_out.bias
        weight, bias = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, 0, 0, spare)), F.pad(bias, (0, spare))
        self.conv.weight, self.conv.bias = _weights(weight, bias, dtype)

    def __call__(self, x: Tensor, state: DecoderState) -> Tensor:
        return self.conv(x, state, self.norm)[..., : self.channels]


class StreamDecoder:
    """The weights of a VAE's decoder, ready to run in one dtype. Holds no state: requests may share it."""

    def __init__(self, vae: nn.Module, dtype: torch.dtype = torch.float32, slice_bytes: int | None = None) -> None:
        """vae: a diffusers AutoencoderKLWan; its fp32 weights are used in place where dtype allows."""
        check_supported(vae)
        decoder = vae.decoder
        self.dtype, self.device = dtype, vae.post_quant_conv.weight.device
        self.slice_bytes = slice_bytes or SLICE_BYTES.get(self.device.type, 1 << 28)
        self.post_quant = Pointwise(vae.post_quant_conv, dtype)
        self.conv_in = CausalConv("conv_in", decoder.conv_in, dtype)
        mid = decoder.mid_block
        self.mid = [ResidualBlock(f"mid_block.resnets.{i}", m, dtype) for i, m in enumerate(mid.resnets)]
        self.attentions = [Attention(m, dtype) for m in mid.attentions]
        self.levels = [UpBlock(f"up_blocks.{i}", m, dtype) for i, m in enumerate(decoder.up_blocks)]
        self.head = Head(decoder, dtype)

    def run(self, latents: Tensor, state: DecoderState) -> Iterator[Tensor]:
        """Decode the next latent frames [48, f, h, w] (denormalised, the decoder's dtype and device; our rows).

        Yields the frames in order as pieces [t, 8h, 8w, 12], unclamped; the 12 channels are not yet spread to pixels.
        Take all pieces of one pass before the next pass begins.
        """
        x = self.post_quant(latents.permute(1, 2, 3, 0))
        x = self.conv_in(x, state)
        x = self.mid[0](x, state)
        for attention, block in zip(self.attentions, self.mid[1:], strict=True):
            x = block(attention(x, state.rows), state)
        yield from self._climb(x, state, 0)

    def _climb(self, x: Tensor, state: DecoderState, level: int) -> Iterator[Tensor]:
        """Levels from `level` on, depth first, so that only a few frames exist at the large sizes."""
        if level == len(self.levels):
            yield self.head(x, state)
            return
        block = self.levels[level]
        size = block.frame_bytes(state.rows.height(x.shape[1]), x.shape[2], x.element_size())
        for part in x.split(max(1, self.slice_bytes // size)):
            yield from self._climb(block(part, state), state, level + 1)
