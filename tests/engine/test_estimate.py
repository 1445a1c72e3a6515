"""The cost of a request: the published operation counts, and how an estimate follows from measured rates."""

from types import SimpleNamespace

import pytest

from engine.estimate import Rates, estimate, learn_denoise, pace, pass_flops, request_flops, request_voxels
from engine.preset import load_preset
from engine.settings import DenoiseSettings

PAN2 = SimpleNamespace(num_attention_heads=32, attention_head_dim=128, num_layers=44, mlp_ratio=8.0)


@pytest.mark.parametrize(("frames", "linear", "attention"), [(241, 1.55, 2.01), (313, 2.00, 3.36), (481, 3.07, 7.85)])
def test_operations_of_a_pass_are_the_published_ones(frames, linear, attention):
    # The published figures count 512 text tokens; ours leaves most of them out.
    assert pass_flops(PAN2, frames, 704, 1248) / 1e15 == pytest.approx(linear + attention, rel=0.02)


def test_an_estimate_scales_with_steps_guidance_and_size():
    preset = load_preset("pan2")
    full = preset.request(prompt="x")
    assert request_flops(PAN2, preset.request(prompt="x", guidance=1.0)) * 2 == request_flops(PAN2, full)
    assert request_flops(PAN2, preset.request(prompt="x", steps=25)) * 2 == request_flops(PAN2, full)
    assert request_voxels(full) == 31 * 44 * 78
    rates = Rates(flops=request_flops(PAN2, full) / 100, voxels=request_voxels(full) / 5, basis="a test")
    seconds = estimate(PAN2, full, rates)
    assert (seconds.denoise, seconds.decode) == pytest.approx((100, 5))
    assert seconds.total == pytest.approx(105 + seconds.other)


def test_a_quality_counts_only_once_it_was_measured_here():
    preset = load_preset("pan2")
    full = preset.request(prompt="x", steps=10)
    draft = preset.request(prompt="x", steps=10, denoise=DenoiseSettings(quality="draft"))
    rates = Rates(flops=request_flops(PAN2, full) / 100, voxels=1e6, basis="a test")
    assert estimate(PAN2, draft, rates).denoise == pytest.approx(100)
    # Whole steps take 4 s, skipped ones 1 s; the first one was slow, one skipped on one branch alone.
    steps = [(9.0, 0), (4.0, 0), (4.0, 0), (1.0, 2), (1.0, 2), (2.5, 1), (1.0, 2), (1.0, 2), (4.0, 0), (4.0, 0)]
    rates = learn_denoise(rates, PAN2, draft, 20.0, steps)
    assert estimate(PAN2, full, rates).denoise == pytest.approx(40), "ten whole steps"
    assert estimate(PAN2, draft, rates).denoise == pytest.approx(20)
    assert pace(steps[:3]) == 4.0 and pace(steps) == pytest.approx(2.3125)
    rates = learn_denoise(rates, PAN2, full, 80.0, [(8.0, 0)] * 10)
    assert estimate(PAN2, full, rates).denoise == pytest.approx(80)
    assert estimate(PAN2, draft, rates).denoise == pytest.approx(40)
