"""Wan 2.2's decoder with passes of our own around library convolutions: same interface as `engine.vae_stream`.

Each pass of latent frames climbs four levels, a slice of frames at a time, depth first. Inside a level one tensor is
the stream that residual blocks add to in place. `winograd` says how the multiplications were halved, `plan` what fits.

fp16: what convolutions read comes from a norm and is bounded; the stream is not. It stays fp16, because a wider one
costs memory traffic at every layer, and because people run these weights in fp16. Where it overflows, the next norm
makes NaN of infinity and every layer after it carries that to the frames, whose flag `frames` hands out; the caller
decodes again in a wider type and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.bands import Rows
from engine.vae_stream import Attention, Pointwise, check_supported
from kernels.vae_decode import reference
from kernels.vae_decode.convolve import Convolver, Cudnn
from kernels.vae_decode.layers import CausalConv, Head, Kit, ResidualBlock, UpBlock
from kernels.vae_decode.plan import PLANS, Level, Plan, peak
from kernels.vae_decode.state import State
from kernels.vae_decode.table import Ways, direct


class PortableDecoder:
    """The weights of a VAE's decoder, transformed and ready in one dtype. Holds no state: requests may share it."""

    def __init__(
        self,
        vae: nn.Module,
        dtype: torch.dtype,
        ways: Ways = direct,
        convolver: Convolver | None = None,
        passes: Any = None,
    ) -> None:
        """vae: a diffusers AutoencoderKLWan on the device that computes; ways: see `table`; passes: Triton's on a GPU,
        plain PyTorch elsewhere, unless given."""
        check_supported(vae)
        decoder = vae.decoder
        self.dtype, self.device = dtype, vae.post_quant_conv.weight.device
        kit = Kit(passes or passes_for(self.device), convolver or Cudnn(), dtype, ways)
        self.convolver = kit.convolver
        with torch.no_grad():
            self.post_quant = Pointwise(vae.post_quant_conv, dtype)
            self.conv_in = CausalConv("conv_in", decoder.conv_in, None, 0, kit)
            mid = decoder.mid_block
            self.mid = [ResidualBlock(f"mid_block.resnets.{i}", m, 0, kit) for i, m in enumerate(mid.resnets)]
            self.attentions = [Attention(m, dtype) for m in mid.attentions]
            self.levels = [UpBlock(f"up_blocks.{i}", m, i, kit) for i, m in enumerate(decoder.up_blocks)]
            self.head = Head(decoder, kit)

    def run(self, latents: Tensor, state: State) -> Iterator[Tensor]:
        """Decode the next latent frames [48, f, h, w] (denormalised, dtype and device of the decoder).

        Yields the frames in order as fp32 pieces [t, 8h, 8w, 12], unclamped; take all of a pass before the next begins.
        Raises ValueError where a pass before this one ended inside a tile (see `winograd`).
        """
        for x in self._climb_all(latents, state):
            t, h, w, _ = x.shape
            out = x.new_empty(t, h, w, 12, dtype=torch.float32)
            self.head(x, out, torch.ones(1, dtype=torch.int32, device=x.device), state)
            del x  # before the next slice is made
            yield out

    def frames(self, latents: Tensor, state: State) -> Iterator[tuple[Tensor, Tensor]]:
        """The same as uint8 [t, 16h, 16w, 3], each piece with int32 [1] on the device, one for all pieces of a pass: 0
        from the first value on that is not finite."""
        finite = torch.ones(1, dtype=torch.int32, device=latents.device)
        for x in self._climb_all(latents, state):
            t, h, w, _ = x.shape
            out = x.new_empty(t, 2 * h, 2 * w, 3, dtype=torch.uint8)
            self.head(x, out, finite, state)
            del x
            yield out, finite

    def start(self, plan: Plan = PLANS[0], rows: Rows | None = None) -> State:
        """The state of a new request."""
        return State(plan, rows)

    def peak(self, plan: Plan, h: int, w: int) -> int:
        """Bytes that decoding latents of h x w takes at most, weights included, whatever the number of frames."""
        size = self.dtype.itemsize
        held = self.weight_bytes + self._history_bytes(h, w) * size + self.convolver.workspace
        return peak(plan, self._shapes(), held, h, w, size)

    def _shapes(self) -> list[Level]:
        return [
            Level(block.blocks[0].conv1.inputs, block.outputs, block.upsampler.factor if block.upsampler else 0)
            for block in self.levels
        ]

    def _history_bytes(self, h: int, w: int) -> int:
        """Numbers that histories hold."""
        row = sum(2 * conv.inputs for conv in (self.conv_in, *_convolutions(self.mid)))
        total = row * (h + 2) * w
        for block in self.levels:
            total += sum(2 * conv.inputs for conv in _convolutions(block.blocks)) * (h + 2) * w
            up = block.upsampler
            if up is not None:
                total += 2 * block.outputs * h * w if up.factor == 2 else 0
                h, w = 2 * h, 2 * w
        return total + 2 * self.levels[-1].outputs * (h + 2) * w

    def tensors(self) -> dict[int, Tensor]:
        """Everything that was prepared, each piece of memory once."""
        found: dict[int, Tensor] = {}
        _collect(vars(self), found, set())
        return found

    @property
    def weight_bytes(self) -> int:
        """Of everything that was prepared."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors().values())

    def _climb_all(self, latents: Tensor, state: State) -> Iterator[Tensor]:
        """The last level's output, slice by slice. The video's first frame goes alone, whatever came with it."""
        first = state.latents == 0
        state.admit(latents.shape[1])
        for part in (latents[:, :1], latents[:, 1:]) if first else (latents,):
            if part.shape[1]:
                yield from self._climb(self._begin(part, state), state, 0)

    def _begin(self, latents: Tensor, state: State) -> Tensor:
        z = self.post_quant(latents.permute(1, 2, 3, 0)).contiguous()
        x = z.new_empty(*z.shape[:3], self.conv_in.outputs)
        self.conv_in(z, x, state)
        self.mid[0](x, x, state)
        for attention, block in zip(self.attentions, self.mid[1:], strict=True):
            x = attention(x, state.rows)
            block(x, x, state)
        return x

    def _climb(self, x: Tensor, state: State, level: int) -> Iterator[Tensor]:
        if level == len(self.levels):
            yield x
            return
        for part in x.split(state.plan.slices[level]):
            yield from self._climb(self.levels[level](part, state), state, level + 1)


def passes_for(device: torch.device) -> Any:
    """Triton's kernels on a GPU. A CPU never meets Triton, whatever TRITON_INTERPRET says."""
    if device.type != "cuda":
        return reference
    from kernels.vae_decode import passes

    return passes


def _convolutions(blocks: list[ResidualBlock]) -> list[CausalConv]:
    return [conv for block in blocks for conv in (block.conv1, block.conv2)]


def _collect(value: object, found: dict[int, Tensor], seen: set[int]) -> None:
    """Every tensor that is reachable, by the place of its memory."""
    if isinstance(value, Tensor):
        found[value.untyped_storage()._cdata] = value
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found, seen)
    elif isinstance(value, dict):
        _collect(list(value.values()), found, seen)
    elif type(value).__module__.startswith(("kernels.", "engine.")) and id(value) not in seen:
        seen.add(id(value))
        _collect(getattr(value, "__dict__", {}), found, seen)
