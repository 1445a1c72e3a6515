import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kernels import launch
from kernels.modulate import op, reference
from kernels.quantise_rows.reference import E4M3, dequantise
from tests.engine.golden_case import DATA
from tests.kernels.truth import DTYPES, assert_as_good_as_plain, one_rounding

EPS = 1e-6
SIZES = [(1, 1, 4096), (2, 5, 96), (3, 67, 24), (1, 9, 1), (2, 3, 257)]


def per_token(m):
    return m if m.dim() == 1 else m[:, None]


def plain_modulate(x, shift, scale):
    """As people write it, in x's dtype throughout."""
    shift, scale = (per_token(m).to(x.dtype) for m in (shift, scale))
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def plain_gated(x, y, gate, shift, scale):
    residual = x + y * per_token(gate).to(x.dtype)
    return residual, plain_modulate(residual, shift, scale)


def exact(function, *tensors):
    return function(*(tensor.double().cpu() for tensor in tensors))


def inputs(shape, dtype, device, shared):
    batch, _, width = shape
    x, y = (torch.randn(shape, dtype=torch.float32).to(device, dtype) for _ in range(2))
    vectors = torch.randn(3, *([] if shared else [batch]), width).to(device)
    return x, y, *vectors


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per sample"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_kernel_is_as_good_as_plain_operations(device, shape, dtype, shared):
    x, y, gate, shift, scale = inputs(shape, dtype, device, shared)
    expected = exact(plain_modulate, x, shift, scale)
    assert_as_good_as_plain(op.modulate(x, shift, scale), plain_modulate(x, shift, scale), expected)
    results = zip(
        op.gated_modulate(x, y, gate, shift, scale),
        plain_gated(x, y, gate, shift, scale),
        exact(plain_gated, x, y, gate, shift, scale),
        ("residual", "modulated"),
        strict=True,
    )
    for ours, plain, truth, what in results:
        assert_as_good_as_plain(ours, plain, truth, what)


@pytest.mark.parametrize("name", ["ln_modulate_f32", "ln_modulate_bf16_mod32_b2", "ln_modulate_bf16_modbf16"])
@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_golden(request, name, path):
    """Outlier channels, a constant row, a row of tiny variance on a large offset. One final rounding is allowed."""
    device = request.getfixturevalue("device") if path == "kernel" else torch.device("cpu")
    case = {key: value.to(device) for key, value in load_file(DATA / f"{name}.safetensors").items()}
    x, y, gate, shift, scale = (case[f"inputs.{key}"] for key in ("x", "y", "gate", "shift", "scale"))
    residual, after = op.gated_modulate(x, y, gate, shift, scale)
    context = op.modulate(case["inputs.context_x"], case["inputs.context_shift"], case["inputs.context_scale"])
    found = {
        "modulated": op.modulate(x, shift, scale),
        "residual": residual,
        "residual_modulated": after,
        "context_modulated": context,
    }
    for key, value in found.items():
        truth = case[f"output.{key}"].double()
        difference = (value.double() - truth).abs()
        rounding = one_rounding(device, path)
        relative, floor, l2 = (rounding, 4e-6, rounding / 2) if x.dtype == torch.bfloat16 else (1e-6, 7e-4, 1.1e-4)
        assert (difference <= relative * truth.abs() + floor).all(), key
        assert difference.norm() <= l2 * truth.norm(), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input_is_read_where_it_lies(device, dtype):
    """As near to exact arithmetic as packed input is; not the same bits: strides that are multiples of 16 let a thread
    load four values where it else loads one, so a row is added up in another order."""
    big = torch.randn(2, 14, 3, 40).to(device, dtype)
    vectors = torch.randn(2, 6, 40).to(device)
    x, y = big[:, ::2, 1], big[:, 7:, 2]
    gate, shift, scale = (vectors[:, i] for i in (0, 2, 5))
    assert not x.is_contiguous() and not shift.is_contiguous()
    given = x, y, gate, shift, scale
    results = zip(op.gated_modulate(*given), plain_gated(*given), exact(plain_gated, *given), strict=True)
    for ours, plain, truth in results:
        assert ours.is_contiguous()
        assert_as_good_as_plain(ours, plain, truth)
    one = big[:1, :7, 0].as_strided((1, 7, 40), (3, 120, 1))  # a batch of one may have any stride
    for given in ((x, shift, scale), (one, shift[0], scale[0])):
        assert_as_good_as_plain(op.modulate(*given), plain_modulate(*given), exact(plain_modulate, *given))


def quantised_by_kernel(x, shift, scale, gated=None):
    """What the kernel makes of it. Triton's interpreter rounds to fp8 wrongly, so on a CPU PyTorch does."""
    from kernels.modulate import kernel

    values = torch.full(x.shape, torch.nan, device=x.device).to(E4M3 if x.is_cuda else torch.float32)
    scales = torch.full((*x.shape[:-1], 1), torch.nan, device=x.device)
    kernel.run(x, values, shift, scale, EPS, gated, scales=scales)
    return values.to(E4M3), scales


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_quantised_rows_are_within_half_a_step_of_exact_values(device, shape):
    x, y, gate, shift, scale = inputs(shape, torch.bfloat16, device, shared=False)
    residual = torch.empty_like(x)
    found = {
        "alone": (quantised_by_kernel(x, shift, scale), plain_modulate, (x, shift, scale)),
        "gated": (
            quantised_by_kernel(x, shift, scale, (y, gate, residual)),
            lambda *given: plain_gated(*given)[1],
            (x, y, gate, shift, scale),
        ),
    }
    assert torch.equal(residual, op.gated_modulate(x, y, gate, shift, scale)[0])
    for what, ((values, scales), plain, given) in found.items():
        truth = exact(plain, *given)
        assert scales.shape == (*shape[:-1], 1), what
        largest = truth.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(448 * scales.double().cpu(), largest, rtol=1e-5, atol=1e-6)
        step = 2.0 ** ((truth / scales.double().cpu()).abs().clamp_min(2.0**-6).log2().floor() - 3) * scales.cpu()
        error = (dequantise(values, scales).double().cpu() - truth).abs()
        assert (error <= 0.51 * step + 1e-5 * largest).all(), what


def test_the_reference_quantises_what_it_would_have_returned():
    x, y, gate, shift, scale = inputs((2, 5, 64), torch.float32, torch.device("cpu"), False)
    (residual, after), (same, rows) = (op.gated_modulate(x, y, gate, shift, scale, quantise=q) for q in (False, True))
    assert torch.equal(residual, same) and rows.shape == after.shape
    torch.testing.assert_close(dequantise(*rows), after, rtol=0.07, atol=1e-3)
    alone = op.modulate(x, shift, scale, quantise=True)
    torch.testing.assert_close(dequantise(*alone), op.modulate(x, shift, scale), rtol=0.07, atol=1e-3)


def test_offsets_beyond_32_bits(device):
    """Two tokens 2^31 values apart in memory that is never touched in between."""
    apart = 2**31 + 64
    memory = torch.empty(apart + 256, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((1, 2, 256), (0, apart, 1))
    x.copy_(torch.randn(1, 2, 256))
    y, (gate, shift, scale) = torch.randn(1, 2, 256).to(device, torch.bfloat16), torch.randn(3, 256).to(device)
    assert torch.equal(op.modulate(x, shift, scale), op.modulate(x.clone(), shift, scale))
    found, wanted = (op.gated_modulate(tensor, y, gate, shift, scale) for tensor in (x, x.clone()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_no_row_depends_on_its_neighbours(device):
    """Rows beyond the last and sizes that came before leave no trace."""
    x, _, _, shift, scale = inputs((2, 7, 40), torch.bfloat16, device, False)
    first = op.modulate(x, shift, scale)
    op.modulate(x[:, :3].repeat(1, 1, 2), shift.repeat(1, 2), scale.repeat(1, 2))
    assert torch.equal(op.modulate(x, shift, scale), first)
    assert torch.equal(op.modulate(x[1:, 2:5], shift[1:], scale[1:]), first[1:, 2:5])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.zeros(3, 4)}, r"x has shape \[3, 4\]"),
        ({"x": torch.zeros(1, 3, 4).double()}, r"x is torch.float64"),
        ({"y": torch.zeros(1, 2, 4)}, r"y has shape \[1, 2, 4\], it must be \[1, 3, 4\]"),
        ({"y": torch.zeros(1, 3, 4).half()}, r"y is torch.float16, it must be torch.float32"),
        ({"scale": torch.zeros(3, 4)}, r"scale has shape \[3, 4\], it must be \[4\] or \[1, 4\]"),
        ({"shift": torch.zeros(4, device="meta")}, r"shift is on meta"),
        ({"x": torch.zeros(1, 4, 3).transpose(1, 2)}, r"x has stride 3 in its last dimension"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change, words):
    arguments = {name: torch.zeros(1, 3, 4) for name in ("x", "y")}
    arguments |= {name: torch.zeros(4) for name in ("gate", "shift", "scale")} | change
    with pytest.raises(ValueError, match=words):
        op.gated_modulate(**arguments)


def test_rows_too_wide_for_a_program_are_refused(device):
    with pytest.raises(ValueError, match=r"rows have 40000 values, at most 32768"):
        op.modulate(torch.zeros(1, 1, 40000, device=device), *torch.zeros(2, 40000, device=device))


def test_without_the_hook_a_cpu_tensor_never_reaches_the_interpreter(monkeypatch):
    """TRITON_INTERPRET is set while these tests run without a GPU."""
    monkeypatch.setattr(launch, "launch", None)
    x, shift, scale = torch.randn(1, 3, 8), torch.randn(8), torch.randn(8)
    assert torch.equal(op.modulate(x, shift, scale), reference.modulate(x, shift, scale, EPS))
