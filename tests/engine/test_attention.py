import re
import sys
from types import SimpleNamespace

import pytest
import torch

from engine import attention
from engine.attention import Shape, attend, choose_attention, probe
from engine.errors import RequestError

CPU = torch.device("cpu")
SHAPE = Shape(torch.float32, heads=3, head_size=16)


@pytest.fixture(autouse=True)
def fresh():
    """What was tried in one test is not remembered in the next."""
    caches = probe, attention._flash3
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def by_hand(q, k, v):
    scores = torch.einsum("bqhe,bkhe->bhqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v.double()).flatten(2)


@pytest.mark.parametrize("backend", [None, "flash", "math"])
def test_attention_is_softmax_of_scaled_products(backend):
    qkv = torch.randn(2, 13, 3, 4, 10)
    q, k, v = qkv[:, :9, 0], qkv[:, :, 1], qkv[:, :, 2]
    out = attend(q, k, v, backend)
    assert out.shape == (2, 9, 40)
    torch.testing.assert_close(out.double(), by_hand(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("result", [lambda out: out, lambda out: (out, None)], ids=["tensor", "with sums"])
def test_flash_attention_3_takes_tokens_first(monkeypatch, result):
    """Its interface has [B, S, H, E] and, in older releases, a second result."""

    def flash_attn_func(q, k, v):
        assert q.shape == (2, 9, 4, 10) and k.shape == v.shape == (2, 13, 4, 10)
        return result(by_hand(q, k, v).to(q.dtype).view(q.shape))

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    qkv = torch.randn(2, 13, 3, 4, 10)
    q, k, v = qkv[:, :9, 0], qkv[:, :, 1], qkv[:, :, 2]
    torch.testing.assert_close(attend(q, k, v, "flash3"), attend(q, k, v, "math"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_takes_the_blocked_kernel(dtype):
    choice = choose_attention("auto", CPU, SHAPE._replace(dtype=dtype))
    assert choice == ("attention", "flash", "PyTorch's flash attention")
    assert choose_attention("math", CPU, SHAPE).path == "math"
    for name in ("cudnn", "flash3", "efficient"):
        with pytest.raises(RequestError, match=rf"'{name}' can't run here: it needs an NVIDIA GPU.*auto, flash, math"):
            choose_attention(name, CPU, None)


def wrong(q, k, v, backend=None):
    out = by_hand(q, k, v).float()
    return out if backend == "math" else out + 0.1


def not_finite(q, k, v, backend=None):
    return by_hand(q, k, v).float() * (1 if backend == "math" else float("nan"))


def refuses(q, k, v, backend=None):
    if backend != "math":
        raise RuntimeError("no such kernel\nmore words")
    return by_hand(q, k, v).float()


def wrong_when_large(q, k, v, backend=None):
    return by_hand(q, k, v).float() + (0.1 if backend != "math" and k.shape[1] > 300 else 0)


@pytest.mark.parametrize(
    "fake, words",
    [
        (wrong, "wrong by .* with 197 tokens, allowed is 1e-03"),
        (not_finite, "wrong by nan with 197 tokens"),
        (refuses, "RuntimeError: no such kernel$"),
        (wrong_when_large, "wrong by .* with 400 tokens"),
    ],
)
def test_a_backend_that_fails_its_trial_is_passed_over_with_the_reason(monkeypatch, fake, words):
    monkeypatch.setattr(attention, "attend", fake)
    shape = SHAPE._replace(tokens=400)
    choice = choose_attention("auto", CPU, shape)
    assert choice.path == "math" and "not flash: " in choice.reason
    (lack,) = (path.lack for path in probe(CPU, shape) if path.name == "flash")
    assert re.search(words, lack)
    with pytest.raises(RequestError, match="'flash' can't run here"):
        choose_attention("flash", CPU, shape)


def test_a_device_too_full_for_the_large_trial_does_not_condemn_a_backend(monkeypatch, caplog):
    def full_when_large(q, k, v, backend=None):
        if backend != "math" and k.shape[1] > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return by_hand(q, k, v).float()

    monkeypatch.setattr(attention, "attend", full_when_large)
    assert choose_attention("auto", CPU, SHAPE._replace(tokens=400)).path == "flash"
    assert "flash was not tried with 400 tokens" in caplog.text


def test_pytorchs_own_reason_is_quoted():
    warned = ["Flash attention kernel not used because:", "head_dim should be 8. (Triggered internally at x.cpp:1.)"]
    assert attention._words("flash", RuntimeError("No available kernel."), warned) == "head_dim should be 8"
    assert (
        attention._words("cudnn", RuntimeError("No available kernel."), warned) == "RuntimeError: No available kernel"
    )


@pytest.mark.parametrize(
    "error, words",
    [(ModuleNotFoundError(name="flash_attn_interface"), "not installed"), (ImportError("undefined symbol"), "symbol")],
)
def test_an_absent_and_a_broken_package_are_different_reasons(monkeypatch, error, words):
    def fail(name):
        raise error

    monkeypatch.setattr(attention.importlib, "import_module", fail)
    assert words in attention._without_flash3()


@pytest.mark.parametrize("major, first", [(8, "flash"), (9, "flash3"), (10, "cudnn"), (12, "flash")])
def test_every_gpu_generation_has_its_order_with_all_backends(monkeypatch, major, first):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    names = [path.name for path in probe(torch.device("cuda:0"), None)]
    assert names[0] == first and sorted(names) == sorted(attention.ABOUT)
