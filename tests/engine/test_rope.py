import json

import pytest
import torch
from golden_case import DATA, TF_CASES, Case, assert_near

from engine.rope import rope_tables, rotate_pairs

RELEASED = sorted(path.stem for path in DATA.glob("rope_tables_*.safetensors"))


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def test_the_golden_tables_are_there():
    assert len(RELEASED) == 2


@pytest.fixture(params=RELEASED)
def released(request):
    case = Case(request.param)
    grid, axes = json.loads(case.meta["grid"]), json.loads(case.meta["axes"])
    tables = rope_tables(grid, axes, float(case.meta["theta"]), float(case.meta["temporal_scale"]))
    return case, grid, dict(zip(("cos", "sin"), tables, strict=True))


@pytest.mark.parametrize("function", ["cos", "sin"])
def test_tables_at_released_sizes_are_exact(released, function):
    case, grid, tables = released
    table = tables[function]
    assert table.dtype == torch.float32 and table.shape == (grid[0] * grid[1] * grid[2], 64)
    # 6e-8: half an ulp of float32 near 1; tables made in float32 throughout would be 2.5e-6 off
    torch.testing.assert_close(table[case["token_index"]], case[function], rtol=0, atol=6e-8)
    table = table.view(*grid, 64)
    torch.testing.assert_close(table[:, 1, 2, :8], case[f"{function}_frames"], rtol=0, atol=6e-8)
    torch.testing.assert_close(table[3, :, 2, 8:36], case[f"{function}_rows"], rtol=0, atol=6e-8)
    torch.testing.assert_close(table[3, 1, :, 36:], case[f"{function}_cols"], rtol=0, atol=6e-8)


@pytest.mark.parametrize("name", TF_CASES)
def test_tables_of_the_small_cases(name):
    case = Case(name)
    frames, height, width = case.input("hidden_states").shape[2:]
    config = case.config
    cos, sin = rope_tables(
        (frames, height // 2, width // 2), config["rope_axes_dim"], config["rope_theta"], config["rope_temporal_scale"]
    )
    torch.testing.assert_close(cos, case["intermediates.rope_cos"], rtol=0, atol=2e-6)
    torch.testing.assert_close(sin, case["intermediates.rope_sin"], rtol=0, atol=2e-6)


def test_adjacent_pairs_turn_by_their_own_angle():
    angles = torch.tensor([[0.0, torch.pi / 2], [torch.pi, torch.pi / 6]])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 2, 3, 4)
    turned = rotate_pairs(x, angles.cos(), angles.sin())
    half, root = 0.5, 3**0.5 / 2
    expected = torch.tensor([[1.0, 2.0, -4.0, 3.0], [-1.0, -2.0, 3 * root - 4 * half, 4 * root + 3 * half]])
    torch.testing.assert_close(turned, expected[None, :, None].expand_as(turned), rtol=0, atol=1e-6)


def test_scores_depend_on_the_distance_alone():
    cos, sin = rope_tables((1, 1, 12), (2, 2, 4), 256.0, 1.0)
    q, k = torch.randn(1, 1, 1, 8).expand(1, 12, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 12, 1, 8)
    scores = rotate_pairs(q, cos, sin)[0, :, 0] @ rotate_pairs(k, cos, sin)[0, :, 0].T
    torch.testing.assert_close(scores[2, 5], scores[7, 10], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(scores[2, 5], scores[2, 6], rtol=1e-4, atol=1e-5)


def test_rotation_takes_strided_heads_and_has_the_right_gradient():
    cos, sin = (t.double() for t in rope_tables((2, 1, 3), (2, 2, 4), 256.0, 2 / 3))
    joined = torch.randn(2, 6, 2 * 3 * 8, dtype=torch.float64, requires_grad=True)

    def second_half(x):
        return rotate_pairs(x[..., 24:].unflatten(-1, (3, 8)), cos, sin)

    assert_near(second_half(joined), second_half(joined.clone(memory_format=torch.contiguous_format)), 0, 0)
    assert torch.autograd.gradcheck(second_half, joined)
