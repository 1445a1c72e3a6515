"""The cost of a request: the published operation counts, and how an estimate follows from measured rates."""

from types import SimpleNamespace

import pytest

from engine.estimate import Rates, estimate, pass_flops, request_flops, request_voxels
from engine.preset import load_preset

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
