"""The whole-video pass equals diffusers' pass in chunks."""

import pytest
import torch

from presets.tiny.autoencoder import USED_CHANNELS, decode, encode, new_autoencoder, silence_unused


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return new_autoencoder().eval().requires_grad_(False)


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_whole_videos_equal_chunks(vae, frames):
    video = torch.rand(1, 3, frames, 32, 64) * 2 - 1
    posterior = vae.encode(video).latent_dist
    mean, log_variance = encode(vae, video)
    torch.testing.assert_close(mean, posterior.mode(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(log_variance.clamp(-30, 20), posterior.logvar, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(decode(vae, mean).clamp(-1, 1), vae.decode(mean).sample, atol=2e-5, rtol=1e-4)


def test_unused_channels_carry_nothing():
    vae = new_autoencoder().eval().requires_grad_(False)
    silence_unused(vae)
    mean, _ = encode(vae, torch.rand(1, 3, 1, 32, 32))
    assert not mean[:, USED_CHANNELS:].any()
    other = mean.clone()
    other[:, USED_CHANNELS:] = 5
    assert torch.equal(decode(vae, mean), decode(vae, other))
