import pytest
import torch
import torch.nn.functional as F
from golden_case import DATA, Case, assert_near

from engine.layers import (
    BLOCK_EPS,
    AdaNorm,
    FeedForward,
    add_gated,
    attend,
    modulate,
    qk_norm_rope,
    rms_norm,
    split_modulation,
    time_features,
)

QK_CASES = sorted(path.stem for path in DATA.glob("qknorm_rope_*.safetensors"))
LN_CASES = sorted(path.stem for path in DATA.glob("ln_modulate_*.safetensors"))
ONE_BF16_ROUNDING = 3.9e-3


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def test_the_golden_cases_are_there():
    assert len(QK_CASES) == 4 and len(LN_CASES) == 3


def assert_rounded_once(value, expected, max_abs):
    """float32: a few ulps. bf16: each element within half an ulp of the exact one, as after one rounding at the end."""
    if value.dtype == torch.float32:
        assert_near(value, expected, max_abs=max_abs, rel_l2=2.5e-7)
    else:
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), expected, rtol=ONE_BF16_ROUNDING, atol=4e-6)


@pytest.mark.parametrize("name", QK_CASES)
@pytest.mark.parametrize("which", ["q", "k"])
def test_qk_norm_rope(name, which):
    case = Case(name)
    rope = case.input("rope_cos"), case.input("rope_sin")
    value = qk_norm_rope(case.input(which), case.input(f"norm_{which}"), rope, BLOCK_EPS)
    assert_rounded_once(value, case[f"output.{which}"], max_abs=2e-6)


@pytest.mark.parametrize("name", QK_CASES)
@pytest.mark.parametrize("which", ["q", "k"])
def test_text_is_normed_but_not_turned(name, which):
    case = Case(name)
    value = qk_norm_rope(case.input(f"text_{which}"), case.input(f"norm_added_{which}"), None, BLOCK_EPS)
    assert_rounded_once(value, case[f"output.text_{which}"], max_abs=2e-6)


def test_a_head_of_zeros_stays_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("name", LN_CASES)
def test_modulate(name):
    case = Case(name)
    value, expected = modulate(*(case.input(key) for key in ("x", "shift", "scale"))), case["output.modulated"]
    tiny = case.input("x").float().var(-1) < 1e-5  # constant rows, and one of tiny variance on an offset of 5
    assert tiny.any()
    assert_rounded_once(value[~tiny], expected[~tiny], max_abs=2e-5)
    torch.testing.assert_close(value[tiny].float(), expected[tiny], rtol=ONE_BF16_ROUNDING, atol=1e-3)


@pytest.mark.parametrize("name", LN_CASES)
def test_a_constant_row_becomes_the_shift(name):
    case = Case(name)
    x, shift = torch.full_like(case.input("x"), 3.0), case.input("shift")
    expected = shift[:, None].to(x.dtype).expand_as(x)
    torch.testing.assert_close(modulate(x, shift, case.input("scale")), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LN_CASES)
def test_modulate_with_a_vector_that_the_batch_shares(name):
    case = Case(name)
    value = modulate(*(case.input(f"context_{key}") for key in ("x", "shift", "scale")))
    assert_rounded_once(value, case["output.context_modulated"], max_abs=2e-6)


@pytest.mark.parametrize("name", LN_CASES)
def test_gated_residual(name):
    case = Case(name)
    value = add_gated(case.input("x"), case.input("y"), case.input("gate"))
    assert_rounded_once(value, case["output.residual"], max_abs=1e-6)
    exact = add_gated(case.input("x").float(), case.input("y"), case.input("gate"))
    value = modulate(exact, case.input("shift"), case.input("scale")).to(case.input("x").dtype)
    assert_rounded_once(value, case["output.residual_modulated"], max_abs=2e-5)


def test_shared_and_separate_modulations_agree():
    x, y, vectors = torch.randn(2, 5, 12), torch.randn(2, 5, 12), torch.randn(3, 12)
    shift, scale, gate = vectors
    each_shift, each_scale, each_gate = vectors[:, None].expand(3, 2, 12)
    torch.testing.assert_close(modulate(x, shift, scale), modulate(x, each_shift, each_scale), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(add_gated(x, y, gate), add_gated(x, y, each_gate), rtol=1e-6, atol=1e-6)


def test_six_modulations_in_their_order():
    attention, mlp = split_modulation(torch.arange(12.0).expand(2, 12))
    assert [m[0].tolist() for m in (*attention, *mlp)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert (attention.gate[0, 0], mlp.shift[0, 0]) == (4, 6)


def test_time_features_are_exact():
    case = Case("time_features")
    features = time_features(case["timestep"])
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, case["features_exact"], rtol=0, atol=1.2e-7)
    torch.testing.assert_close(features, case["features_f32"], rtol=0, atol=6e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_modulations_are_float32_whatever_surrounds_them(autocast):
    norm, temb = AdaNorm(8, 6), torch.randn(2, 8)
    expected = F.linear(F.silu(temb), norm.linear.weight, norm.linear.bias)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(norm(temb), expected)
    rounded = norm.to(torch.bfloat16)(temb)
    assert rounded.dtype == torch.float32
    assert_near(rounded, expected, max_abs=0.02, rel_l2=0.01)


def test_gated_unit_is_value_times_silu_of_gate():
    ff = FeedForward(4, 6, gated=True)
    x = torch.randn(2, 3, 4)
    value, gate = ff.net[0].proj.weight[:6], ff.net[0].proj.weight[6:]
    expected = ((x @ value.T) * F.silu(x @ gate.T)) @ ff.net[2].weight.T
    torch.testing.assert_close(ff(x), expected, rtol=1e-5, atol=1e-6)


def test_attention_against_its_formula():
    q, k, v = torch.randn(2, 3, 2, 4), torch.randn(2, 5, 2, 4), torch.randn(2, 5, 2, 4)
    weights = torch.softmax(torch.einsum("bqhe,bkhe->bhqk", q, k) / 2, dim=-1)
    expected = torch.einsum("bhqk,bkhe->bqhe", weights, v).flatten(2)
    torch.testing.assert_close(attend(q, k, v), expected, rtol=1e-5, atol=1e-6)
