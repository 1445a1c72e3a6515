"""The pieces of training that can go wrong silently."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from engine.prompt import TextEncoder
from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS
from presets.tiny.flow import NoiseMix, model_input, sample, shift_sigma
from presets.tiny.log import TrainingLog
from presets.tiny.muon import Muon, orthogonalise
from presets.tiny.pools import CAPTIONS, KINDS, Pool
from presets.tiny.text import PromptIds, TrainableText, new_text_model, new_tokenizer
from presets.tiny.train_dit import DitPlan, Optimiser, Trainer, rotate_pairs_real


def test_the_noise_mix_puts_its_share_high():
    torch.manual_seed(0)
    sigma = NoiseMix().draw(20_000, 13, "cpu")
    assert sigma.min() > 0 and sigma.max() < 1
    # Where the words are decided for whole videos: above 0.97.
    assert 0.3 < (sigma > 0.97).float().mean() < 0.6


def test_the_model_sees_condition_and_mask_in_the_first_frame_alone():
    whole = model_input(torch.ones(2, USED_CHANNELS, 3, 4, 6), torch.full((2, USED_CHANNELS, 4, 6), 2.0))
    assert whole.shape == (2, 97, 3, 4, 6)
    assert (whole[:, LATENT_CHANNELS : LATENT_CHANNELS + USED_CHANNELS, 0] == 2).all()
    assert (whole[:, 2 * LATENT_CHANNELS, 0] == 1).all()
    assert not whole[:, LATENT_CHANNELS:, 1:].any()
    assert not whole[:, USED_CHANNELS:LATENT_CHANNELS].any()


def test_the_sampler_follows_a_straight_flow_exactly():
    target, noise = torch.randn(1, USED_CHANNELS, 1, 2, 2), torch.randn(1, USED_CHANNELS, 1, 2, 2)

    def model(whole, time, text):
        velocity = torch.zeros(1, LATENT_CHANNELS, 1, 2, 2)
        velocity[:, :USED_CHANNELS] = noise - target
        return velocity

    text = torch.zeros(1, 1, 4)
    result = sample(model, text, text, noise, steps=3, shift=9.0, guidance=2.5)
    torch.testing.assert_close(result, target, atol=1e-5, rtol=1e-5)
    assert shift_sigma(torch.tensor(0.5), 9.0) == 0.9


def test_orthogonal_updates_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 32, 32), (1, 64, 16), (1, 16, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        # Five steps do not lift the very smallest ones of a square matrix all the way.
        assert values.max() < 1.35
        assert (values > 0.6).float().mean() > 0.9


def test_muon_goes_downhill():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 16))
    muon, start = Muon([weight]), weight.detach().square().sum()
    muon.rate = 0.05
    for _ in range(20):
        weight.grad = 2 * weight.detach()
        muon.step()
    assert weight.square().sum() < start


def test_training_and_the_engine_read_a_prompt_alike():
    torch.manual_seed(0)
    tokenizer = new_tokenizer()
    ids = PromptIds(tokenizer)
    model = new_text_model(len(tokenizer)).eval()
    text = TrainableText(model, ids.start)
    for prompt in ("a red circle moves right, static camera.", " ", "A SHINY blue Box"):
        with torch.no_grad():
            expected = text(torch.tensor(ids([prompt])))
        torch.testing.assert_close(TextEncoder(tokenizer, model).encode(prompt).embedding, expected)


def test_the_real_rotation_equals_the_complex_one():
    from engine.rope import rotate_pairs

    x, angle = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
    cos, sin = angle.cos(), angle.sin()
    torch.testing.assert_close(rotate_pairs_real(x, cos, sin), rotate_pairs(x, cos, sin))


def bare_trainer(**plan):
    """A trainer without a model, whose clock a test moves."""
    trainer = object.__new__(Trainer)
    trainer.plan, trainer.device, trainer.step = DitPlan(**plan), "cpu", 1000
    trainer.progress = trainer.plan.begin
    return trainer


def test_the_rate_rises_to_its_peak_and_falls_to_nearly_nothing():
    trainer = bare_trainer(begin=0.55, end=1.0, rate=5e-4)
    rates = []
    for trainer.progress in (0.55, 0.6, 0.8, 1.0):
        rates.append(trainer.rate())
    assert rates == pytest.approx([5e-4, 5e-4, 2.5e-4, 1e-5])
    trainer.progress, trainer.step = 0.55, 0
    assert trainer.rate() < 5e-6


@pytest.mark.parametrize("took", [0.1, 3.0])
def test_training_ends_in_time_at_its_end_whatever_a_step_takes(monkeypatch, took):
    clock = [1000.0]
    monkeypatch.setattr("presets.tiny.train_dit.time.time", lambda: clock[0])
    trainer = bare_trainer(begin=0.55, end=1.0, seconds=500.0, until=1100.0, probe_every=10**9)
    seen = []

    def step():
        seen.append(trainer.progress)
        clock[0] += took
        return torch.zeros(())

    trainer.train_step = step
    trainer.plan = dataclasses.replace(trainer.plan, check_every=1e9, refresh_every=1e9)
    trainer.run(lambda: None)
    assert clock[0] <= 1100 + took
    assert seen[0] == 0.55 and 1 - 0.45 * 2 * took / 100 < seen[-1] <= 1.0


def test_pools_grow_until_their_time_is_over(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("presets.tiny.train_dit.time.time", lambda: clock[0])
    trainer = bare_trainer(videos=4800, fill=15.0)
    trainer.encoder, trainer.log = SimpleNamespace(chunk=12), TrainingLog(None)

    def make(kind, count):
        clock[0] += 1
        return Pool(kind, torch.zeros(count, 1), [[1, 2]] * (CAPTIONS * count))

    trainer._make = make
    trainer.fill_pools()
    assert clock[0] == 2 * len(KINDS)
    assert [len(pool.ids) for pool in trainer.pools] == [CAPTIONS * len(pool.latents) for pool in trainer.pools]
    assert 2000 < sum(len(pool.latents) for pool in trainer.pools) < 2800


def test_a_step_that_is_not_finite_changes_nothing():
    model = torch.nn.Linear(2, 2)
    optimiser = object.__new__(Optimiser)
    optimiser.parameters = list(model.parameters())
    optimiser.muon, optimiser.adam = Muon([model.weight]), torch.optim.AdamW([model.bias])
    before = model.weight.detach().clone()
    for value, taken in ((float("nan"), False), (1.0, True)):
        for parameter in optimiser.parameters:
            parameter.grad = torch.full_like(parameter, value)
        assert optimiser.step(1e-2) is taken
        assert torch.equal(model.weight, before) is not taken
        assert all(p.isfinite().all() for p in optimiser.parameters)


def test_every_kind_of_video_has_a_share():
    assert sum(kind.share for kind in KINDS) == pytest.approx(1)
