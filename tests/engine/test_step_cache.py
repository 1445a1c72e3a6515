"""The step cache: what it skips, what it answers, and that nothing of a run reaches the next."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors import safe_open

from engine import step_cache
from engine.checkpoint import load_text_encoder, load_transformer
from engine.denoise import denoise
from engine.mmdit import PAN2Transformer3DModel
from engine.preset import load_preset
from engine.schedule import build_scheduler
from engine.step_cache import Policy, StepCache, make_cache

DATA = Path(__file__).parents[1] / "data"
SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]


@pytest.fixture(scope="module")
def model():
    with safe_open(DATA / "sampler_t2v.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        model = PAN2Transformer3DModel(**json.loads(file.metadata()["config"])).eval()
    model.load_state_dict({k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")})
    model.text = tensors["inputs.prompt_embeds"], tensors["inputs.negative_prompt_embeds"]
    return model


@pytest.fixture(scope="module")
def trained():
    folder = Path(load_preset("tiny").checkpoint)
    model = load_transformer(folder, "cpu", torch.float32)
    encoder = load_text_encoder(folder, "cpu", torch.float32)
    model.text = [encoder.encode(text).embedding for text in ("a red circle moves right, static camera", "")]
    return model


def run(model, quality, size=(2, 4, 6), steps=12, guidance=2.5, seed=0):
    frames, height, width = size
    channels = model.config.out_channels
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, channels, *size, generator=generator)
    condition = torch.zeros(1, channels + 1, frames, height, width)
    scheduler = build_scheduler(FlowMatchEulerDiscreteScheduler(shift=9.0), steps)
    return list(denoise(model, *model.text, condition, noise, scheduler, guidance, quality=quality))


def test_a_witness_that_stays_makes_it_answer_on_a_straight_line():
    cache = StepCache(Policy(threshold=0.1, first=2, last=1), SIGMAS)
    x = torch.ones(1, 3, 4)
    answers = []
    for k in range(5):
        if cache.recalls(k, x, x + 1):
            answers.append(cache.velocity(k))
        else:
            cache.keep(k, torch.full((1, 2), 10 * SIGMAS[k], dtype=torch.bfloat16))
    assert cache.recalled == 2, "steps 2 and 3; the first two and the last are computed"
    for sigma, answer in zip(SIGMAS[2:4], answers, strict=True):
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer, torch.full((1, 2), 10 * sigma))


def test_the_change_is_counted_since_the_last_computed_step():
    cache = StepCache(Policy(threshold=0.25, first=0, last=0), SIGMAS)
    x, asked = torch.zeros(1, 2, 2), []
    for k, added in enumerate([1.0, 1.1, 1.2, 1.3, 1.4]):
        asked.append(cache.recalls(k, x, x + added))
        if not asked[-1]:
            cache.keep(k, torch.zeros(1))
    # Two computed steps are needed for a line; 1.2 and 1.3 lie within 25 % of 1.1, 1.4 does not.
    assert asked == [False, False, True, True, False]


@pytest.mark.parametrize("added", [float("nan"), float("inf"), 0.0])
def test_a_change_that_is_no_number_is_computed(added):
    cache = StepCache(Policy(threshold=0.5, first=0, last=0), SIGMAS)
    x = torch.zeros(1, 2, 2)
    for k in range(4):
        assert not cache.recalls(k, x, x + added)
        cache.keep(k, torch.zeros(1))


def test_full_has_no_cache_and_is_today_s_result(model):
    assert make_cache("full", SIGMAS) is None
    *_, last = run(model, "full")
    assert (last.passes, last.recalled) == (24, 0)


def test_a_threshold_that_is_never_met_gives_the_same_bits(model, monkeypatch):
    monkeypatch.setitem(step_cache.POLICIES, "draft", Policy(0.0))
    *_, full = run(model, "full")
    *_, cached = run(model, "draft")
    assert cached.recalled == 0
    assert torch.equal(full.latents, cached.latents)


@pytest.mark.parametrize(("quality", "decibels"), [("balanced", 40), ("draft", 30)])
def test_on_a_trained_model_most_is_skipped_and_the_latents_stay(trained, quality, decibels):
    *_, full = run(trained, "full", size=(5, 8, 8), steps=40)
    *_, cached = run(trained, quality, size=(5, 8, 8), steps=40)
    assert 0.4 < cached.recalled / cached.passes < 1
    error = (cached.latents - full.latents).square().mean()
    reach = full.latents.max() - full.latents.min()
    assert 10 * torch.log10(reach**2 / error) > decibels


def test_branches_remember_apart(model, monkeypatch):
    seen = []

    class Watched(StepCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(self)

    monkeypatch.setattr(step_cache, "StepCache", Watched)
    run(model, "draft")
    assert len(seen) == 2 and not torch.equal(seen[0]._known[1][1], seen[1]._known[1][1])
    run(model, "draft", guidance=1.0)
    assert len(seen) == 3


def test_nothing_reaches_the_next_run(model, monkeypatch):
    monkeypatch.setitem(step_cache.POLICIES, "draft", Policy(10.0))
    first = run(model, "draft")[-1]
    other = run(model, "draft", size=(3, 6, 4), seed=1)[-1]
    again = run(model, "draft")[-1]
    assert first.recalled == other.recalled == again.recalled > 0
    assert torch.equal(first.latents, again.latents)
