"""Convolutions on bands of rows: equal to one convolution of the whole, whatever halo and zeros they are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.vae_decode.convolve import Cudnn
from kernels.vae_decode.reference import Reference

STREAM = torch.zeros(3, 5, 6, 16)
CONVOLVERS = pytest.mark.parametrize(
    "convolver", [Cudnn(), Reference(), Reference(torch.float64)], ids=["torch", "fp32", "fp64"]
)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(buffer, weight, bias, residual):
    """fp64 [t, h, w, o], zeros around each frame."""
    pad = weight.shape[2] // 2
    y = F.conv3d(
        buffer.double().permute(3, 0, 1, 2)[None], weight.double().permute(0, 4, 1, 2, 3), padding=(0, pad, pad)
    )
    return y[0].permute(1, 2, 3, 0) + bias.double() + residual.double()


@CONVOLVERS
@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_direct_on_any_band_equals_the_whole(convolver, kernel, dtype, tolerance):
    buffer, weight = drawn(5, 7, 5, 8, dtype=dtype), drawn(16, *kernel, 8, seed=1, dtype=dtype) / 8
    bias, residual = drawn(16, seed=2), drawn(3, 7, 5, 16, seed=3, dtype=dtype)
    expected = truth(buffer, weight, bias, residual)
    for first, last in ((0, 7), (0, 3), (2, 5), (5, 7)):
        reach = kernel[1] // 2
        pads = (reach if first == 0 else 0, reach if last == 7 else 0)
        rows = buffer[:, max(0, first - reach) : min(7, last + reach)]
        out = residual.new_full((3, last - first, 5, 16), torch.nan)
        convolver.direct(rows, weight, bias, residual[:, first:last], out, pads)
        assert (out.double() - expected[:, first:last]).abs().max() < tolerance
        stream = residual.clone()[:, first:last]
        convolver.direct(rows, weight, bias, stream, stream, pads)
        assert torch.equal(stream, out)


@CONVOLVERS
def test_direct_without_bias_and_residual(convolver):
    buffer, weight, out = drawn(4, 5, 6, 8), drawn(16, 3, 3, 3, 8, seed=1), torch.full((2, 5, 6, 16), torch.nan)
    convolver.direct(buffer, weight, None, None, out)
    assert torch.allclose(out, truth(buffer, weight, torch.zeros(16), torch.zeros(16)).float(), atol=1e-4)


@CONVOLVERS
@pytest.mark.parametrize("kernel", [(3, 3), (3, 1), (1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("rows", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("columns", [(0, 0), (1, 1), (0, 1)], ids=str)
def test_phases_are_so_many_convolutions(convolver, kernel, rows, columns):
    inputs, weights = drawn(3, 2, 5, 4, 8), drawn(3, 16, *kernel, 8, seed=1)
    h, w = 5 + sum(rows) - kernel[0] + 1, 4 + sum(columns) - kernel[1] + 1
    out = torch.full((3, 2, h, w, 16), torch.nan)
    convolver.phases(inputs, weights, out, rows, columns)
    for i in range(3):
        image = F.pad(inputs[i].double(), (0, 0, *columns, *rows)).permute(0, 3, 1, 2)
        expected = F.conv2d(image, weights[i].double().permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        assert torch.allclose(out[i].double(), expected, atol=1e-4)


@CONVOLVERS
@pytest.mark.parametrize(
    "change, words",
    [
        ({"buffer": drawn(4, 5, 6, 7)}, "takes 8 channels, the buffer has 7"),
        ({"buffer": drawn(4, 5, 6, 16)[..., ::2]}, "buffer has stride 2 in its last dimension"),
        ({"buffer": drawn(4, 6, 5, 8).transpose(1, 2)}, "each frame of buffer must be one block"),
        ({"buffer": drawn(2, 5, 6, 8)}, "too small"),
        ({"weight": drawn(16, 3, 2, 2, 8)}, "3 x 3 x 3 and 3 x 1 x 1"),
        ({"weight": drawn(16, 3, 3, 3, 8).half()}, "weight is torch.float16"),
        ({"bias": drawn(16).half()}, r"bias must be packed float32 \[16\]"),
        ({"bias": drawn(8)}, r"bias must be packed float32 \[16\]"),
        ({"residual": drawn(2, 4, 6, 16)}, r"residual must be \[2, 5, 6, 16\]"),
        ({"out": drawn(2, 5, 6, 8)}, r"out must be \[2, 5, 6, 16\]"),
        ({"pad_rows": (2, 0)}, "pad_rows"),
        ({"out": STREAM[:2], "residual": STREAM[1:]}, "residual shares a part of its memory with out"),
    ],
)
def test_direct_refuses_what_does_not_fit(convolver, change, words):
    fitting = {
        "buffer": drawn(4, 5, 6, 8),
        "weight": drawn(16, 3, 3, 3, 8),
        "bias": drawn(16),
        "residual": drawn(2, 5, 6, 16),
        "out": drawn(2, 5, 6, 16),
    }
    convolver.direct(**fitting)
    with pytest.raises(ValueError, match=words):
        convolver.direct(**fitting | change)


@CONVOLVERS
@pytest.mark.parametrize(
    "change, words",
    [
        ({"inputs": drawn(2, 2, 5, 6, 8)}, "weights for 3 phases of 8 channels, inputs have 2 of 8"),
        ({"inputs": drawn(3, 2, 7, 6, 8)[:, :, 1:6]}, "inputs must be packed"),
        ({"out": drawn(3, 2, 5, 5, 16)}, r"out must be \[3, 2, 5, 6, 16\]"),
        ({"pad_columns": (1, 2)}, "pad_columns"),
        ({"weights": drawn(3, 16, 8, 8, 8)}, "too small"),
    ],
)
def test_phases_refuse_what_does_not_fit(convolver, change, words):
    fitting = {"inputs": drawn(3, 2, 5, 6, 8), "weights": drawn(3, 16, 3, 3, 8), "out": drawn(3, 2, 5, 6, 16)}
    convolver.phases(**fitting)
    with pytest.raises(ValueError, match=words):
        convolver.phases(**fitting | change)
