"""The small VAE: Wan 2.2's layout at a small width, and a forward pass over a whole video at once to train it with.

diffusers' class walks through a video in chunks of four frames with a cache for every convolution. Without chunks the
same arithmetic is a plain function of the whole video, several times faster in training; a test shows that both agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

LATENT_CHANNELS = 48
# Only these carry anything. A patch of 2 x 2 latents is then 96 numbers for the transformer to keep apart in its
# residual stream of 256, not 192. The others are 0 after encoding and are not read by the decoder.
USED_CHANNELS = 24
PATCH = 2


def new_autoencoder(mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> AutoencoderKLWan:
    """An untrained small VAE; mean and std: the statistics of its 48 latent channels."""
    return AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
        latents_mean=list(mean) if mean is not None else [0.0] * LATENT_CHANNELS,
        latents_std=list(std) if std is not None else [1.0] * LATENT_CHANNELS,
    )


@torch.no_grad()
def silence_unused(vae: AutoencoderKLWan) -> None:
    """Make the unused channels exactly 0 in the posterior's mean and unread by the decoder."""
    vae.quant_conv.weight[USED_CHANNELS:LATENT_CHANNELS] = 0
    vae.quant_conv.bias[USED_CHANNELS:LATENT_CHANNELS] = 0
    vae.post_quant_conv.weight[:, USED_CHANNELS:] = 0


def encode(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and log variance, [B, 48, F, h, w] each, of videos [B, 3, 1 + 4 (F - 1), 16 h, 16 w]."""
    encoder = vae.encoder
    x = _convolve(encoder.conv_in, _channels_last(_patchify(video)))
    for block in encoder.down_blocks:
        x = _channels_last(_down(block, x))
    x = _convolve(encoder.conv_out, F.silu(_norm(encoder.norm_out, _middle(encoder.mid_block, x))))
    return _convolve(vae.quant_conv, x).chunk(2, dim=1)


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """The reverse of `encode`, not clamped. latents: in the VAE's own scale."""
    decoder = vae.decoder
    x = _convolve(decoder.conv_in, _convolve(vae.post_quant_conv, _channels_last(latents)))
    x = _middle(decoder.mid_block, x)
    for block in decoder.up_blocks:
        x = _channels_last(_up(block, x))
    return _unpatchify(_convolve(decoder.conv_out, F.silu(_norm(decoder.norm_out, x))))


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def _convolve(layer: nn.Module, x: Tensor) -> Tensor:
    """A causal convolution: the past before the first frame is zero."""
    time, height, width = layer.kernel_size
    if time > 1 and layer.stride[0] == 1:
        x = F.pad(x, (0, 0, 0, 0, time - 1, 0))
    return F.conv3d(x, layer.weight, layer.bias, layer.stride, (0, height // 2, width // 2))


def _norm(layer: nn.Module, x: Tensor) -> Tensor:
    # F.normalize(x) * sqrt(C) is RMSNorm; over the last dimension of channels-last memory it is one fused pass.
    last = x.movedim(1, -1)
    weight = layer.gamma.flatten().to(x.dtype)
    return F.rms_norm(last, weight.shape, weight, 1e-12).movedim(-1, 1)


def _residual(block: nn.Module, x: Tensor) -> Tensor:
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _convolve(block.conv_shortcut, x)
    y = _convolve(block.conv1, F.silu(_norm(block.norm1, x)))
    return shortcut + _convolve(block.conv2, F.silu(_norm(block.norm2, y)))


def _middle(block: nn.Module, x: Tensor) -> Tensor:
    return _residual(block.resnets[1], _attention(block.attentions[0], _residual(block.resnets[0], x)))


def _attention(block: nn.Module, x: Tensor) -> Tensor:
    batch, channels, frames, height, width = x.shape
    tokens = _norm(block.norm, x).permute(0, 2, 3, 4, 1).reshape(batch * frames, 1, height * width, channels)
    q, k, v = F.linear(tokens, block.to_qkv.weight.flatten(1), block.to_qkv.bias).chunk(3, dim=-1)
    mixed = F.scaled_dot_product_attention(q, k, v)
    out = F.linear(mixed, block.proj.weight.flatten(1), block.proj.bias)
    return x + out.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)


def _by_frame(function, x: Tensor) -> Tensor:
    batch, _, frames = x.shape[:3]
    y = function(x.transpose(1, 2).flatten(0, 1))
    return y.unflatten(0, (batch, frames)).transpose(1, 2)


def _down(block: nn.Module, x: Tensor) -> Tensor:
    shortcut = block.avg_shortcut(x.contiguous())
    for residual in block.resnets:
        x = _residual(residual, x)
    if block.downsampler is not None:
        layer = block.downsampler
        x = _by_frame(layer.resample, x)
        if layer.mode == "downsample3d" and x.shape[2] > 1:
            x = torch.cat([x[:, :, :1], _convolve(layer.time_conv, x)], dim=2)
    return x + shortcut


def _up(block: nn.Module, x: Tensor) -> Tensor:
    start = x
    for residual in block.resnets:
        x = _residual(residual, x)
    if block.upsampler is not None:
        layer = block.upsampler
        if layer.mode == "upsample3d" and x.shape[2] > 1:
            # The first frame stays single, and the convolution over time does not see it.
            x = torch.cat([x[:, :, :1], _double_frames(_convolve(layer.time_conv, x[:, :, 1:]))], dim=2)
        x = _by_frame(lambda y: layer.resample[1](F.interpolate(y, scale_factor=2.0, mode="nearest")), x)
    if block.avg_shortcut is not None:
        x = x + block.avg_shortcut(start.contiguous(), first_chunk=True)
    return x


def _double_frames(x: Tensor) -> Tensor:
    """[B, 2 C, T, h, w] to [B, C, 2 T, h, w]: the two halves of the channels are alternate frames."""
    return torch.stack(x.chunk(2, dim=1), dim=3).flatten(2, 3)


def _patchify(x: Tensor) -> Tensor:
    x = x.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))  # [B, 3, T, h, row, w, column]
    return x.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def _unpatchify(x: Tensor) -> Tensor:
    x = x.unflatten(1, (-1, PATCH, PATCH))  # [B, 3, column, row, T, h, w]
    return x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
