import ast
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import RequestError
from engine.noise import MAX_SEED, draw_noise

ENGINE = Path(__file__).parents[2] / "engine"
SHAPE = (48, 2, 2, 5)


def test_noise_of_a_seed_is_fixed():
    noise = draw_noise(123, SHAPE)
    assert noise.shape == SHAPE
    assert noise.dtype == torch.float32
    assert noise.device.type == "cpu"
    # Coarse cells, because PyTorch's vectorised logarithm differs in the last bits from one kind of CPU to the next.
    cells = noise.double().numpy() * 8
    assert np.abs(cells - np.floor(cells) - 0.5).min() > 1e-4
    digest = hashlib.sha256(np.rint(cells).astype("<i2").tobytes()).hexdigest()
    assert digest[:16] == "d3604a7fc640cbb8"


def test_same_seed_same_noise_whatever_happens_around_it():
    first = draw_noise(7, SHAPE)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    assert torch.equal(draw_noise(7, SHAPE), first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(draw_noise(7, (1, *SHAPE))[0], first)
    assert not torch.equal(draw_noise(8, SHAPE), first)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(draw_noise(7, SHAPE), first)
    finally:
        torch.set_default_dtype(default)


def test_noise_is_standard_normal():
    noise = draw_noise(1, (48, 4, 16, 16))
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02


def test_a_batch_is_refused_because_one_generator_serves_one_sample():
    with pytest.raises(ValueError, match="one by one"):
        draw_noise(1, (2, *SHAPE))


@pytest.mark.parametrize("seed", [0, MAX_SEED, np.int64(5)])
def test_seeds_taken(seed):
    assert draw_noise(seed, (1, 1, 1, 1)).isfinite().all()


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 1.0, "3", None, True])
def test_seeds_refused(seed):
    with pytest.raises(RequestError, match=r"whole number from 0 to 9223372036854775807"):
        draw_noise(seed, (1, 1, 1, 1))


def test_nothing_else_in_the_engine_draws_random_numbers():
    drawing = {"randn", "randn_like", "rand", "rand_like", "randn_tensor"}
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and path.name != "noise.py":
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert called not in drawing, f"{path.name}:{node.lineno} draws random numbers; only noise.py does"
