"""Fewer multiplications, the same sums: every transform against direct convolution in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.vae_decode import reference
from kernels.vae_decode.winograd import (
    INPUTS,
    OUTPUTS,
    four_phases,
    matrix,
    nine_planes,
    transform_weight,
)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def direct(x, weight):
    """x [t + 2, h, w, c] -> [t, h, w, o], zeros around each frame."""
    y = F.conv3d(x.permute(3, 0, 1, 2)[None], weight, padding=(0, 1, 1))
    return y[0].permute(1, 2, 3, 0)


def test_tiles_along_time():
    x, weight = drawn(10, 3, 5, 4), drawn(6, 4, 3, 3, 3, seed=1)
    inputs = torch.einsum("ik,nhwck->inhwc", matrix(INPUTS, x), x.unfold(0, 6, 4))
    kernels = transform_weight(weight, "time", torch.float64)
    products = torch.stack(
        [
            F.conv2d(v.permute(0, 3, 1, 2), u.permute(0, 3, 1, 2), padding=1)
            for v, u in zip(inputs, kernels, strict=True)
        ]
    )
    y = torch.einsum("fi,inohw->nfhwo", matrix(OUTPUTS, x), products).flatten(0, 1)
    assert torch.allclose(y, direct(x, weight), atol=1e-12)


def test_tiles_along_time_and_width():
    x, weight = drawn(6, 3, 8, 4), drawn(6, 4, 3, 3, 3, seed=1)
    rows = F.pad(x, (0, 0, 1, 1)).unfold(0, 6, 4).unfold(2, 6, 4)
    inputs = torch.einsum("ik,jl,nhwckl->ijnhwc", matrix(INPUTS, x), matrix(INPUTS, x), rows).flatten(0, 1)
    kernels = transform_weight(weight, "time_width", torch.float64)
    assert kernels.shape == (36, 6, 3, 1, 4)
    products = torch.stack(
        [
            F.conv2d(v.permute(0, 3, 1, 2), u.permute(0, 3, 1, 2), padding=(1, 0))
            for v, u in zip(inputs, kernels, strict=True)
        ]
    )
    y = torch.einsum("fi,vj,ijnohw->nfhwvo", matrix(OUTPUTS, x), matrix(OUTPUTS, x), products.unflatten(0, (6, 6)))
    assert torch.allclose(y.flatten(3, 4).flatten(0, 1), direct(x, weight), atol=1e-12)


def test_the_last_weight_is_the_last_tap():
    weight = drawn(6, 4, 3, 3, 3)
    last = transform_weight(weight, "time", torch.float64)[-1]
    assert torch.equal(last, weight[:, :, 2].permute(0, 2, 3, 1))


def test_weights_are_rounded_once():
    weight = drawn(8, 8, 3, 3, 3).float()
    for way in ("direct", "time", "time_width"):
        wide = transform_weight(weight, way, torch.float64)
        assert torch.equal(transform_weight(weight, way, torch.float16), wide.half())


@pytest.mark.parametrize("h, w", [(4, 6), (3, 5), (1, 1)])
def test_four_phases_equal_doubling_then_convolving(h, w):
    weight, x, source = drawn(5, 3, 3, 3), drawn(2, 3, h, w, seed=1), torch.zeros(2, h, w, 5)
    expected = F.conv2d(F.interpolate(x, scale_factor=2, mode="nearest-exact"), weight, padding=1)
    z = F.conv2d(x, four_phases(weight, torch.float64).permute(0, 3, 1, 2), padding=1).permute(0, 2, 3, 1).float()
    out = torch.empty(2, 2 * h, 2 * w, 5)
    reference.enlarge(out, z.contiguous(), torch.zeros(5), source)
    assert torch.allclose(out.double(), expected.permute(0, 2, 3, 1), atol=1e-5)


def test_nine_planes_and_their_stencil_are_the_last_convolution():
    x, weight, bias = drawn(4, 5, 6, 8).float(), drawn(12, 8, 3, 3, 3, seed=1).float(), drawn(12, seed=2).float()
    planes = nine_planes(weight, torch.float32)
    assert planes.shape == (112, 3, 1, 1, 8) and not planes[108:].any()
    values = F.conv3d(F.pad(x, (0, 0, 0, 0, 1, 1)).permute(3, 0, 1, 2)[None], planes.permute(0, 4, 1, 2, 3))
    out, finite = torch.empty(2, 5, 6, 12), torch.ones(1, dtype=torch.int32)
    reference.stencil(out, values[0].permute(1, 2, 3, 0).contiguous(), bias, finite)
    assert torch.allclose(out, direct(x, weight) + bias, atol=1e-3) and finite.item() == 1


@pytest.mark.parametrize("size", [1.0, 0.005], ids=["usual", "small"])
@pytest.mark.parametrize("way, limit", [("direct", 5e-4), ("time", 1e-3), ("time_width", 2.1e-3)])
def test_what_sixteen_bits_lose_in_a_layer(way, limit, size):
    """Relative rms against fp64: inputs, weights and products in fp16, sums exact. The usual points, 1 and 2, lose
    1.2e-3 along time and 3.7e-3 with width."""
    buffer = F.silu(drawn(10, 7, 22, 64)).half()
    weight = size * drawn(32, 64, 3, 3, 3, seed=1).float() / (27 * 64) ** 0.5
    convolver, out = reference.Reference(torch.float64), torch.empty(8, 5, 22, 32, dtype=torch.float16)
    kernels, pads = transform_weight(weight, way, torch.float16), ((0, 0), (0, 0) if way == "time_width" else (1, 1))
    if way == "direct":
        convolver.direct(buffer, kernels, None, None, out, (0, 0))
    else:
        inputs = torch.empty(len(kernels), 2, 7, 22 if way == "time" else 6, 64, dtype=torch.float16)
        reference.write_tiles(inputs, buffer)
        products = torch.empty(len(kernels), 2, 5, inputs.shape[3], 32, dtype=torch.float16)
        convolver.phases(inputs, kernels, products, *pads)
        reference.write_outputs(out, products, None, None)
    wanted = direct(buffer.double(), weight.double())[:, 1:-1]
    assert 0.3 * limit < (out.double() - wanted).norm() / wanted.norm() < limit
