"""The pieces of training that can go wrong silently."""

import torch

from engine.prompt import TextEncoder
from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS
from presets.tiny.flow import NoiseMix, model_input, sample, shift_sigma
from presets.tiny.muon import Muon, orthogonalise
from presets.tiny.text import PromptIds, TrainableText, new_text_model, new_tokenizer
from presets.tiny.train_dit import rotate_pairs_real


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
