"""The cost of a request: the published operation counts, and how an estimate follows from measured rates."""

from types import SimpleNamespace

import pytest
import torch

from engine.compare import Decoder
from engine.decode_cost import DecodeCost
from engine.denoise import Step
from engine.estimate import (
    Rates,
    denoise_bytes,
    denoise_seconds,
    estimate,
    learn_denoise,
    pace,
    pass_flops,
    request_flops,
)
from engine.experience import Experience
from engine.measure import measure
from engine.preset import load_preset
from engine.settings import DenoiseSettings
from engine.telemetry import memory_now

DECODE = DecodeCost(5.0, 0, True)
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
    rates = Rates(flops=request_flops(PAN2, full) / 100, positions=1, basis="a test")
    seconds = estimate(PAN2, full, rates, DecodeCost(5.0, 0, True), 2)
    assert (seconds.denoise, seconds.decode) == pytest.approx((100, 5))
    assert seconds.total == pytest.approx(105 + seconds.other)
    assert seconds.bytes is None, "what is loaded is not known"


def test_a_machine_is_known_from_two_sizes_and_then_tells_all_others(monkeypatch):
    """A machine whose pass takes 5 ms and 1 s a TFLOP, and whose decoder gives 1,000 positions a second: the estimate
    of any other request is what it takes."""
    preset = load_preset("tiny")
    tiny = SimpleNamespace(num_attention_heads=4, attention_head_dim=64, num_layers=6, mlp_ratio=4.0)

    def takes(request):
        work = pass_flops(tiny, request.frames, request.height, request.width)
        return (2 if request.guidance > 1 else 1) * (0.005 + work / 1e12)

    machine = Machine(tiny, takes)
    monkeypatch.setattr("engine.measure.time", SimpleNamespace(perf_counter=lambda: machine.now))
    rates = measure(machine, preset)
    assert rates.pass_seconds == pytest.approx(0.005) and rates.flops == pytest.approx(1e12)
    assert rates.positions == pytest.approx(1000)
    for size in ({}, {"frames": 25}, {"frames": 97}, {"height": 704, "width": 1248}, {"frames": 1}, {"guidance": 1.0}):
        request = preset.request(prompt="x", **size)
        told = estimate(tiny, request, rates, DecodeCost(1.0, 0, True), 4)
        assert told.denoise == pytest.approx(request.steps * takes(request)), size


class Machine:
    """An executor that takes the time that it is told, most of it on the first use of a size."""

    devices = (torch.device("cpu"),)

    def __init__(self, config, takes):
        self.transformer_config, self.takes, self.now = config, takes, 0.0

    def memory(self):
        return memory_now()

    def encode_prompt(self, prompt):
        return None

    def denoise(self, request, text, condition, noise, cancel):
        for k in range(request.steps):
            seconds = self.takes(request) * (1 if k else 10)
            yield Step(k + 1, request.steps, seconds, noise, noise)

    def decode(self, latents, settings, cancel):
        area = latents.shape[3] * latents.shape[4]
        for count, passed in ((1, 1), (16, 4), (16, 4)):
            self.now += count * area / 1000 * (1 if passed == 4 else 3)
            yield SimpleNamespace(frames=[0] * count)


def test_a_run_that_was_slower_than_told_slows_every_estimate_as_much():
    preset = load_preset("pan2")
    request, short = preset.request(prompt="x", steps=10), preset.request(prompt="x", steps=10, frames=5)
    before = Rates(flops=request_flops(PAN2, request) / 100, positions=1, basis="a test", pass_seconds=0.5)
    after = learn_denoise(before, PAN2, request, 220.0, [(22.0, 0)] * 10)
    assert denoise_seconds(PAN2, request, before) == pytest.approx(110)
    assert denoise_seconds(PAN2, request, after) == pytest.approx(220)
    assert denoise_seconds(PAN2, short, after) == pytest.approx(2 * denoise_seconds(PAN2, short, before))


# What a process held on top of its start, in MiB, on two cores in fp32.
SEEN = [((49, 256, 448), 35), ((49, 480, 832), 134), ((49, 704, 1248), 294)]


@pytest.mark.parametrize(("size", "mib"), SEEN)
def test_predicted_memory_of_denoising_is_near_what_was_measured(size, mib):
    tiny = SimpleNamespace(num_attention_heads=4, attention_head_dim=64, mlp_ratio=4.0)
    frames, height, width = size
    request = load_preset("tiny").request(prompt="x", frames=frames, height=height, width=width)
    assert denoise_bytes(tiny, request, 4) / 2**20 == pytest.approx(mib, rel=0.15)


def test_the_larger_of_denoising_and_decoding_is_the_peak():
    preset = load_preset("pan2")
    request = preset.request(prompt="x")
    rates = Rates(flops=1e15, positions=1, basis="a test", loaded=60 * 2**30)
    ring = 48 * 704 * 1248 * 3
    small, large = (estimate(PAN2, request, rates, DecodeCost(1.0, size * 2**30, True), 2).bytes for size in (0, 200))
    assert small == 60 * 2**30 + denoise_bytes(PAN2, request, 2)
    assert large == 260 * 2**30 + ring


def test_a_quality_counts_only_once_it_was_measured_here():
    preset = load_preset("pan2")
    full = preset.request(prompt="x", steps=10)
    draft = preset.request(prompt="x", steps=10, denoise=DenoiseSettings(quality="draft"))
    rates = Rates(flops=request_flops(PAN2, full) / 100, positions=1, basis="a test")
    assert estimate(PAN2, draft, rates, DECODE, 2).denoise == pytest.approx(100)
    # Whole steps take 4 s, skipped ones 1 s; the first one was slow, one skipped on one branch alone.
    steps = [(9.0, 0), (4.0, 0), (4.0, 0), (1.0, 2), (1.0, 2), (2.5, 1), (1.0, 2), (1.0, 2), (4.0, 0), (4.0, 0)]
    rates = learn_denoise(rates, PAN2, draft, 20.0, steps)
    assert estimate(PAN2, full, rates, DECODE, 2).denoise == pytest.approx(40), "ten whole steps"
    assert estimate(PAN2, draft, rates, DECODE, 2).denoise == pytest.approx(20)
    assert pace(steps[:3]) == 4.0 and pace(steps) == pytest.approx(2.3125)
    rates = learn_denoise(rates, PAN2, full, 80.0, [(8.0, 0)] * 10)
    assert estimate(PAN2, full, rates, DECODE, 2).denoise == pytest.approx(80)
    assert estimate(PAN2, draft, rates, DECODE, 2).denoise == pytest.approx(40)


@pytest.mark.parametrize(("device", "name"), [("cpu", "host"), ("cuda", "cuda:0")])
def test_what_a_stage_was_seen_to_hold_is_promised_the_next_time(device, name):
    experience = Experience(device)
    experience.learn_peak(5, {name: 1000})
    experience.rates = Rates(flops=1e9, positions=1, basis="a test", loaded=700)
    for peak, unforeseen in ((780, 0), (1015, 215), (900, 215)):
        experience.learn_peak(100, {"host": 0, name: peak})
        assert experience.rates.unforeseen == unforeseen
    request = load_preset("pan2").request(prompt="a")
    foreseen = Rates(flops=1e9, positions=1, basis="a test", loaded=700)
    told, before = (estimate(PAN2, request, rates, DECODE, 4).bytes for rates in (experience.rates, foreseen))
    assert told == before + 215


def test_a_decoder_that_fills_what_is_free_teaches_no_need():
    experience = Experience("cuda")
    experience.rates = Rates(flops=1e9, positions=1, basis="a test", loaded=0)
    experience.learn_decode_peak(Decoder("portable", "fp16"), (2, 4, 4), None, {"cuda:0": 2**40})
    assert experience.rates.unforeseen == 0
    experience.learn_decode_peak(Decoder("plain", "fp16"), (2, 4, 4), None, {"cuda:0": 2**40})
    assert experience.rates.unforeseen > 2**39
