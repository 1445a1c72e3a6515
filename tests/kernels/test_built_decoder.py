"""The whole decoder on the compiled convolutions' terms: every call of its layers is one that they take, and with the
memory that a kernel would see the frames come out right (see `cpu_library`)."""

import pytest
import torch

from kernels.vae_decode.portable import PortableDecoder
from tests.engine.wan_vae import normal_latents, small_vae, theirs
from tests.kernels.test_built import on_cpu
from tests.kernels.test_decode_portable import CUT, WAYS, WHOLE, always, ours

DECIBELS = {torch.float16: 65, torch.bfloat16: 48}  # of cuDNN's convolutions in the same way: 69 to 75, 51 to 56


def psnr(a, b):
    return float(10 * torch.log10(4 / (a.double() - b.double()).square().mean()))


@pytest.fixture(scope="module")
def vae():
    return small_vae()


@WAYS
@pytest.mark.parametrize(
    ("dtype", "plan"),
    [(torch.float16, WHOLE), (torch.float16, CUT), (torch.bfloat16, CUT)],
    ids=["fp16 whole", "fp16 cut", "bf16 cut"],
)
def test_equals_diffusers(vae, way, dtype, plan):
    latents, kernels = normal_latents(6), on_cpu()
    wanted = theirs(vae, latents)
    got = ours(PortableDecoder(vae, dtype, always(way), kernels), vae, latents, [1, 4, 1], plan)
    assert psnr(got, wanted) > DECIBELS[dtype]
    cudnn = ours(PortableDecoder(vae, dtype, always(way)), vae, latents, [1, 4, 1], plan)
    # Bias and residual join before the one rounding, which can only help.
    assert psnr(got, wanted) > psnr(cudnn, wanted) - 0.3
    assert any(call.frames_apart for _, call in kernels.library.calls) == (plan is CUT)
