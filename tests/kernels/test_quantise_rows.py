import pytest
import torch
import torch.nn.functional as F

from kernels.quantise_rows import op, reference
from tests.kernels.truth import DTYPES

SHAPES = [(1, 16), (7, 24), (5, 4096), (3, 257), (67, 1), (2, 32768)]


def by_kernel(x, gelu=False):
    """What the kernel makes of x. Triton's interpreter loses the carry when it rounds to fp8 (126 becomes 64), so on a
    CPU the kernel writes float32 and PyTorch rounds."""
    if x.is_cuda:
        return op.gelu_quantise_rows(x) if gelu else op.quantise_rows(x)
    from kernels.quantise_rows import kernel

    values, scales = torch.full(x.shape, torch.nan), torch.full((len(x), 1), torch.nan)
    (kernel.run_gelu if gelu else kernel.run)(x, values, scales)
    return values.to(reference.E4M3), scales


@pytest.fixture(params=["kernel", "reference"])
def quantise(request):
    """A way to quantise, and the device for it."""
    if request.param == "reference":
        return reference.quantise_rows, torch.device("cpu")
    return by_kernel, request.getfixturevalue("device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_lie_within_half_a_step_of_e4m3(quantise, shape, dtype):
    run, device = quantise
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(device, dtype)
    values, scales = run(x)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (shape[0], 1)
    scaled = x.double().cpu() / scales.double().cpu()
    torch.testing.assert_close(scaled.abs().amax(1), torch.full((shape[0],), 448.0).double(), rtol=1e-6, atol=0)
    # Three bits of mantissa: half a unit is 1/16 of the power of two below; under 2^-6 steps stay 2^-9.
    step = 2.0 ** (scaled.abs().clamp_min(2.0**-6).log2().floor() - 3)
    assert ((values.double().cpu() - scaled).abs() <= step / 2 * (1 + 1e-6)).all()


def test_kernel_and_reference_agree_to_the_bit(device):
    x = torch.randn(33, 200).to(device, torch.bfloat16)
    values, scales = by_kernel(x)
    expected, expected_scales = reference.quantise_rows(x.cpu())
    assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected_scales)


@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, torch.bfloat16) for shape in SHAPES), *((SHAPES[2], dtype) for dtype in DTYPES)],
    ids=str,
)
@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_gelu_is_applied_before_it_is_quantised(request, path, shape, dtype):
    run, device = reference.gelu_quantise_rows, torch.device("cpu")
    if path == "kernel":
        run, device = lambda x: by_kernel(x, gelu=True), request.getfixturevalue("device")
    x = (torch.randn(shape) * torch.logspace(-1, 2, shape[0])[:, None]).to(device, dtype)
    values, scales = run(x)
    truth = F.gelu(x.double().cpu(), approximate="tanh")
    largest = truth.abs().amax(1, keepdim=True)
    # No value is beyond what the scale stands for, and rows with a value of some size use all of it.
    assert (448 * scales.double().cpu() >= largest * (1 - 1e-5)).all()
    size = largest.clamp_min(reference.DIP)
    torch.testing.assert_close(448 * scales.double().cpu(), size, rtol=1e-5, atol=0)
    step = 2.0 ** ((truth / scales.cpu()).abs().clamp_min(2.0**-6).log2().floor() - 3) * scales.cpu()
    error = (reference.dequantise(values, scales).double().cpu() - truth).abs()
    assert (error <= 0.51 * step + 1e-5 * size).all()


def test_gelu_never_falls_below_its_dip():
    x = torch.linspace(-20, 0, 100_001, dtype=torch.float64)
    lowest = float(F.gelu(x, approximate="tanh").min())
    assert -reference.DIP < lowest < 1e-3 - reference.DIP


def test_rows_of_zeros_and_strided_rows(quantise):
    run, device = quantise
    wide = torch.randn(6, 96).to(device, torch.bfloat16)
    wide[2] = 0
    values, scales = run(wide[:, 32:64])
    expected, _ = reference.quantise_rows(wide[:, 32:64].contiguous().cpu())
    assert torch.equal(values.cpu().float(), expected.float())
    assert (values[2].float() == 0).all() and scales.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(quantise, bad):
    run, device = quantise
    x = torch.ones(2, 32).to(device)
    x[1, 5] = bad
    back = reference.dequantise(*run(x)).cpu()
    assert back[0].isfinite().all() and not back[1].isfinite().all()


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(0, 4), torch.zeros(4, 6).t(), torch.zeros(2, 2).double()])
def test_what_does_not_fit_is_refused(x):
    with pytest.raises(ValueError, match="x "):
        op.quantise_rows(x)
