"""What each operation of the decoder means, in plain PyTorch and fp32 or wider: the truth of every fast path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.vae_decode.geometry import (
    check_beside,
    check_direct,
    check_enlarge,
    check_frames,
    check_outputs,
    check_phases,
    check_stencil,
    check_sum,
    check_tiles,
)
from kernels.vae_decode.winograd import INPUTS, OUTPUTS, matrix


class Reference:
    """The convolver of tests: sums in `wide` (fp32, or fp64 where the order of a sum must not show), one rounding."""

    name, fuses, workspace = "reference", True, 0

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
        check_beside(out, residual)
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


def activate(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """silu(norm(x + bias)) in the dtype of x: norm(v) = v / |v| * gain over the channels (RMSNorm whose gain holds the
    square root of their number); without a gain x + bias alone."""
    y = x.float() if bias is None else x.float() + bias
    if gain is not None:
        y = F.silu(y * (1 / torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_min(1e-12)) * gain)
    return y.to(x.dtype)


def write_frames(
    out: Tensor, x: Tensor, gain: Tensor | None, bias: Tensor | None, history: Tensor, above: int = 0, kept: int = 0
) -> None:
    """out [2 + t, rows, w, c] = history, then the activations of x [t, h, w, c], which begin in row `above`; zeros in
    the rows above and below those.

    history [2, rows, w, c] becomes the last two frames of out, but for its last `kept` rows. gain, bias: fp32 [c] or
    None, see `activate`. x may have any strides but the channels'.
    """
    check_frames(out, x, gain, bias, history, above, kept)
    rows, h = out.shape[1], x.shape[1]
    out[:2], out[2:] = history, F.pad(activate(x, gain, bias), (0, 0, 0, 0, above, rows - above - h))
    history[:, : rows - kept] = out[-2:, : rows - kept]


def write_tiles(out: Tensor, frames: Tensor) -> None:
    """out [6, n, h, w, c] or [36, n, h, ceil(w / 4), c]: the inputs of F(4, 3) along time, and of another along width.

    frames [t + 2, h, w, c], the first two of history: tile k takes frames 4 k to 4 k + 5. Frames after the last and
    columns outside are zero.
    """
    check_tiles(out, frames)
    t, _, w, _ = frames.shape
    x = F.pad(frames.float(), (0, 0, 0, 0, 0, 0, 0, 4 * out.shape[1] + 2 - t)).unfold(0, 6, 4)
    y = torch.einsum("ik,nhwck->inhwc", matrix(INPUTS, x).float(), x)
    if len(out) == 36:
        columns = F.pad(y, (0, 0, 1, 4 * out.shape[3] + 1 - w)).unfold(3, 6, 4)
        y = torch.einsum("jk,inhwck->ijnhwc", matrix(INPUTS, x).float(), columns).flatten(0, 1)
    out.copy_(y)


def add(out: Tensor, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out = y + bias + residual, each [t, h, w, o], in fp32, rounded once. residual may be out."""
    check_sum(out, y, bias, residual)
    check_beside(out, residual)
    total = y.float() if bias is None else y.float() + bias
    out.copy_(total if residual is None else total + residual)


def write_outputs(out: Tensor, products: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out [t, h, w, o] = the outputs of the products of `write_tiles`' inputs + bias + residual, rounded once."""
    check_outputs(out, products, bias, residual)
    t, _, w, _ = out.shape
    y = products.float()
    if len(products) == 36:
        y = torch.einsum("vj,ijnhwo->inhwvo", matrix(OUTPUTS, y).float(), y.unflatten(0, (6, 6)))
        y = y.flatten(3, 4)[..., :w, :]
    y = torch.einsum("fi,inhwo->nfhwo", matrix(OUTPUTS, y).float(), y).flatten(0, 1)[:t]
    add(out, y, bias, residual)


def enlarge(out: Tensor, z: Tensor, bias: Tensor, source: Tensor) -> None:
    """out [t, 2h, 2w, o]: pixel (2 i + p, 2 j + q) is phase k = 2 p + q of z at (i + p, j + q), + bias + the shortcut.

    z [t, h + 1, w + 1, 4 o]; source [t, h, w, c]: the shortcut repeats its channels; where o is c / 2 or c / 4,
    channel m of phase k is channel m (c / o) + k (c / o) / 4 of the source (DupUp3D of diffusers).
    """
    check_enlarge(out, z, bias, source)
    _, h, w, c = source.shape
    stride = c // out.shape[3]
    for k, phase in enumerate(z.chunk(4, dim=-1)):
        p, q = divmod(k, 2)
        shortcut = source[..., k * stride // 4 :: stride]
        out[:, p::2, q::2] = phase[:, p : p + h, q : q + w].float() + bias + shortcut


def stencil(out: Tensor, values: Tensor, bias: Tensor, finite: Tensor) -> None:
    """The last convolution's second half: the sum of nine shifted planes + bias, as pixels or as numbers.

    values [t, h + 2, w, 9 * 12 or more]: channel 12 (3 a + b) + k is what row a - 1, column b - 1 away adds to value k;
    its rows include the halo. out uint8 [t, 2h, 2w, 3]: round(255 * clamp(v / 2 + 0.5, 0, 1)) of v [t, h, w, 12], whose
    channel 4 c + 2 j + i is colour c at row i, column j of two by two pixels; or fp32 [t, h, w, 12], v itself. finite:
    int32 [1], becomes 0 where a value is not.
    """
    check_stencil(out, values, bias, finite)
    h, w = values.shape[1] - 2, values.shape[2]
    wide = F.pad(values.float(), (0, 0, 1, 1))
    taps = [wide[:, a : a + h, b : b + w, 12 * (3 * a + b) :][..., :12] for a in range(3) for b in range(3)]
    v = sum(taps[1:], taps[0]) + bias
    finite.mul_(torch.isfinite(v).all().int())
    if out.dtype == torch.float32:
        out.copy_(v)
        return
    pixels = v.div(2).add_(0.5).clamp_(0, 1).mul_(255).round_().nan_to_num_(0).to(torch.uint8)
    out.copy_(pixels.unflatten(-1, (3, 2, 2)).permute(0, 1, 5, 2, 4, 3).reshape(out.shape))
