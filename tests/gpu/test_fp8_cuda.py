"""fp8 products on the tensor cores against the exact reference of their arithmetic."""

import pytest
import torch

from engine import checkpoint, fp8
from engine.fp8 import Fp8Linear, convert, reference_product, scaled_product
from kernels.quantise_rows import op, reference
from tests.engine.random_model import random_model

CUDA = torch.device("cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(fp8.lack(CUDA)), reason="needs a CUDA device with fp8 products"
    ),
]


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 130, 515, 26_598 // 8 + 3])
@pytest.mark.parametrize("inputs, outputs", [(64, 48), (4096, 4096), (4096, 32768), (16384, 4096), (32768, 4096)])
def test_scaled_products_are_those_of_the_reference(rows, inputs, outputs):
    torch.manual_seed(0)
    x = (torch.randn(rows, inputs, device=CUDA) * torch.logspace(-1, 1, rows, device=CUDA)[:, None]).bfloat16()
    weight, scale = op.quantise_rows(torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16))
    bias = torch.randn(outputs, device=CUDA, dtype=torch.bfloat16)
    given = op.quantise_rows(x)
    ours = scaled_product(given, weight, scale, bias)
    exact = reference_product(given, weight, scale, bias.float())
    assert ours.dtype == torch.bfloat16
    # One rounding to bf16, and sums that the tensor cores cut to 14 bits after each 32 products.
    assert ours.shape == exact.shape and relative(ours, exact) < 6e-3
    size = exact.abs().amax(1, keepdim=True)
    slack = max(6e-3, 2**-14 * inputs / 32)
    assert ((ours.float() - exact).abs() <= 2**-8 * exact.abs() + slack * size).all()


def test_three_layers_side_by_side_give_what_each_gives():
    """Into the parts of a larger tensor, as the blocks do it, batch 2."""
    layers = [Fp8Linear(torch.nn.Linear(4096, 4096, device=CUDA, dtype=torch.bfloat16)) for _ in range(3)]
    x = torch.randn(2, 515, 4096, device=CUDA, dtype=torch.bfloat16)
    out = torch.full((2, 600, 3 * 4096), torch.nan, device=CUDA, dtype=torch.bfloat16)
    fp8.project(layers, x, out[:, :515])
    assert relative(out[:, :515], torch.cat([layer(x) for layer in layers], dim=-1)) < 6e-3
    assert out[:, 515:].isnan().all()


def test_the_passes_of_a_block_quantise_as_their_parts_do():
    """At the released widths: fused into the gated residual, and behind GELU."""
    from kernels.modulate.op import gated_modulate

    x, y = torch.randn(2, 1, 1001, 4096, device=CUDA, dtype=torch.bfloat16)
    vectors = torch.randn(3, 4096, device=CUDA)
    residual, rows = gated_modulate(x, y, *vectors, quantise=True)
    same, value = gated_modulate(x, y, *vectors)
    assert torch.equal(residual, same)
    assert relative(reference.dequantise(*rows), value) < 0.03
    wide = torch.randn(1001, 32768, device=CUDA, dtype=torch.bfloat16) * 3
    found, expected = op.gelu_quantise_rows(wide), reference.gelu_quantise_rows(wide)
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
    assert relative(reference.dequantise(*found), reference.dequantise(*expected)) < 6e-3


def test_every_output_is_written():
    layer = torch.nn.Linear(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    ours = Fp8Linear(layer)(torch.randn(2, 1000, 4096, device=CUDA, dtype=torch.bfloat16))
    assert ours.shape == (2, 1000, 4096) and ours.isfinite().all() and (ours != 0).float().mean() > 0.99


def test_the_kernel_gives_the_reference_s_bytes_beyond_2_31_values():
    x = torch.randn(66_000, 32_768, device=CUDA, dtype=torch.bfloat16)
    values, scales = op.quantise_rows(x)
    for rows in (slice(0, 64), slice(65_500, 65_600), slice(-64, None)):
        expected, expected_scales = reference.quantise_rows(x[rows])
        assert torch.equal(values[rows].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales[rows], expected_scales)


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_is_as_near_to_bf16_as_the_reference_is(fused):
    model, inputs = random_model(layers=4, batch=2)
    truth = convert(random_model(layers=4, batch=2)[0])(*inputs)
    full = model(*inputs)
    model = convert(model.cast(torch.bfloat16).to(CUDA))
    model.set_fused_kernels(fused)
    ours = model(*(tensor.to(CUDA) for tensor in inputs)).float().cpu()
    assert relative(ours, full) < 2 * relative(truth, full) + 0.02


def test_weights_become_fp8_as_they_come_from_the_file(toy_checkpoint):
    torch.cuda.empty_cache()
    streamed = checkpoint.load_transformer(toy_checkpoint, CUDA, torch.bfloat16, fp8=True, stream=True)
    resident = checkpoint.load_transformer(toy_checkpoint, CUDA, torch.bfloat16, fp8=True)
    assert streamed.state_dict().keys() == resident.state_dict().keys()
