"""A denoising run shared out over ranks that are threads, against the run of one device."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.checkpoint import load_scheduler
from engine.denoise import denoise
from engine.mmdit import PAN2Transformer3DModel
from engine.rank import EulerSteps
from engine.schedule import build_scheduler
from engine.step_cache import POLICIES, Policy
from engine.ulysses import SpreadModel, form_team
from tests.engine.test_bands import links

TOLERANCE = 1e-4
CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "context_mlp_ratio": 2.0,
    "refiner_mlp_ratio": 2.0,
    "text_embed_dim": 12,
    "rope_axes_dim": [4, 2, 2],
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = PAN2Transformer3DModel(**CONFIG)
    for parameter in made.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (parameter.dim() == 1)
    return made.requires_grad_(False)


def inputs(frames=3, h=6, w=10, text=5, negative=3):
    """Odd counts: 3 x 3 x 5 = 45 video tokens."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(1, n, CONFIG["text_embed_dim"], generator=generator) for n in (text, negative)]
    condition = torch.randn(1, 49, frames, h, w, generator=generator)
    return texts, condition, torch.randn(1, 48, frames, h, w, generator=generator)


def sigmas(steps):
    return torch.linspace(1, 0, steps + 1)


def run(model, guidance, quality="full", steps=3, **how):
    (prompt, negative), condition, noise = inputs(**how.pop("sizes", {}))
    steps = EulerSteps(sigmas(steps))
    negative = negative if guidance > 1 else None
    return list(denoise(model, prompt, negative, condition, noise, steps, guidance, None, quality, **how))


def spread(model, ranks, guidance, quality="full", steps=3, **how):
    """Every step of every rank that takes part."""
    team = form_team(ranks, CONFIG["num_attention_heads"], guidance > 1, 45)

    def work(place):
        rank, link = place
        mine = SpreadModel(copy.deepcopy(model), team, rank, link)
        return run(mine, guidance, quality, steps, velocities=mine.velocities, **how)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, enumerate(links(ranks)[: team.ranks])))


@pytest.mark.parametrize("ranks, guidance", [(2, 2.5), (2, 1.0), (4, 2.5), (4, 1.0), (8, 2.5), (3, 2.5), (3, 1.0)])
def test_a_run_on_several_ranks_is_that_of_one(model, ranks, guidance):
    expected = run(model, guidance)
    assert expected[-1].latents.std() > 0.1
    for steps in spread(model, ranks, guidance):
        for ours, truth in zip(steps, expected, strict=True):
            assert (ours.latents - truth.latents).abs().max() < TOLERANCE * truth.latents.abs().max()


def test_all_ranks_have_the_same_latents(model):
    runs = spread(model, 4, 2.5)
    assert all(torch.equal(steps[-1].latents, runs[0][-1].latents) for steps in runs)


def test_a_text_that_is_shorter_than_the_ranks(model):
    sizes = {"text": 1, "negative": 2}
    expected = run(model, 1.0, sizes=sizes)
    for steps in spread(model, 4, 1.0, sizes=sizes):
        assert (steps[-1].latents - expected[-1].latents).abs().max() < TOLERANCE * expected[-1].latents.abs().max()


@pytest.mark.parametrize("ranks, guidance", [(2, 2.5), (2, 1.0), (4, 2.5)])
def test_the_step_cache_skips_the_same_steps_on_every_rank(model, monkeypatch, ranks, guidance):
    monkeypatch.setitem(POLICIES, "draft", Policy(0.6))
    expected = run(model, guidance, "draft", steps=20)
    assert 0 < expected[-1].recalled < expected[-1].passes - 8
    for steps in spread(model, ranks, guidance, "draft", steps=20):
        assert [step.recalled for step in steps] == [step.recalled for step in expected]
        assert (steps[-1].latents - expected[-1].latents).abs().max() < TOLERANCE * expected[-1].latents.abs().max()


def test_the_model_is_left_as_it_was(model):
    team, (link, _) = form_team(1, 4, False, 45), links(2)
    model.set_attention("math")
    run(SpreadModel(model, team, 0, link), 1.0, velocities=SpreadModel(model, team, 0, link).velocities)
    assert {block.attn.backend for block in model.transformer_blocks} == {"math"}
    model.set_attention(None)


@pytest.mark.parametrize(
    "ranks, heads, guided, halves",
    [
        (1, 32, True, [1]),
        (2, 32, True, [1, 1]),
        (2, 32, False, [2]),
        (3, 32, True, [1, 1]),
        (3, 24, True, [3]),
        (4, 32, True, [2, 2]),
        (6, 32, True, [2, 2]),
        (8, 32, True, [4, 4]),
        (8, 32, False, [8]),
        (8, 2, False, [2]),
        (5, 5, False, [5]),
    ],
)
def test_teams_use_as_many_ranks_as_the_heads_allow(ranks, heads, guided, halves):
    team = form_team(ranks, heads, guided, 1000)
    assert [len(half) for half in team.halves] == halves
    assert [rank for half in team.halves for rank in half] == list(range(team.ranks))


def test_no_rank_is_without_tokens():
    assert form_team(8, 32, False, 3).ranks == 2


def test_the_workers_euler_step_is_that_of_the_scheduler(toy_checkpoint):
    theirs = build_scheduler(load_scheduler(toy_checkpoint), 4, 9.0)
    ours = EulerSteps(theirs.sigmas)
    a = b = torch.randn(1, 48, 2, 4, 4)
    for timestep in theirs.timesteps:
        velocity = torch.randn_like(a)
        a = theirs.step(velocity, timestep, a, return_dict=False)[0]
        b = ours.step(velocity, timestep, b, return_dict=False)[0]
        assert torch.equal(a, b)
    assert torch.equal(ours.timesteps, theirs.timesteps)
