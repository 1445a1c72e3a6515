"""The drawn world: reproducible, independent of resolution, and true to its captions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from presets.tiny import vocabulary, world
from presets.tiny.vocabulary import Thing, Words, caption, unknown_words, varied_caption


def scenes(count=6, things=1, seed=0, **options):
    return world.sample(count, things, np.random.default_rng(seed), **options)


def test_the_same_seed_gives_the_same_video():
    first, second = (world.render(scenes(2), 32, 56, 5) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (2, 3, 5, 32, 56)
    assert first.abs().max() <= 1


@pytest.mark.parametrize("size", [(32, 56), (56, 32), (40, 40)])
def test_a_larger_picture_shows_the_same(size):
    both = scenes(4, 2, seed=3)
    small = world.render(both, *size, 3)
    large = world.render(both, 4 * size[0], 4 * size[1], 3)
    pooled = F.avg_pool3d(large, (1, 4, 4))
    # Edges are softer in the small picture; elsewhere both are equal.
    assert (pooled - small).abs().mean() < 0.03


def test_a_window_is_a_part_of_the_picture():
    one = scenes(2, seed=5)
    whole = world.render(one, 64, 112, 2)
    corner = torch.tensor([16.0, 32.0])
    part = world.render(one, 64, 112, 2, window=world.Window(corner, 2 * corner, 32, 32))
    for i, top in enumerate((16, 32)):
        torch.testing.assert_close(part[i], whole[i, :, :, top : top + 32, 2 * top : 2 * top + 32], atol=1e-5, rtol=0)


def test_frames_from_the_middle_equal_those_of_the_whole():
    one = scenes(1, seed=6)
    whole = world.render(one, 32, 56, 9)
    later = world.render(one, 32, 56, 4, start=torch.tensor([5]))
    torch.testing.assert_close(later, whole[:, :, 5:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("things", [1, 2])
@pytest.mark.parametrize("size", [(256, 448), (448, 256), (320, 320)])
@pytest.mark.parametrize("wide", [False, True])
def test_things_stay_inside(things, size, wide):
    many = scenes(300, things, seed=7, wide=wide)
    track = world.trajectory(many, torch.linspace(0, 1, 9), *size)
    unit = min(size)
    assert (track.x.abs() + 0.8 * track.scale < size[1] / unit / 2 + 0.06).all()
    assert (track.y.abs() + 0.8 * track.scale < size[0] / unit / 2 + 0.06).all()


def test_training_never_shows_what_is_held_out():
    seen, unseen = scenes(400, seed=8), scenes(400, seed=8, held_out=True)
    triples = [
        set(zip(s.colour[:, 0].tolist(), s.shape[:, 0].tolist(), s.motion[:, 0].tolist(), strict=True))
        for s in (seen, unseen)
    ]
    assert not triples[0] & triples[1]
    # Every word by itself is seen.
    assert len({c for c, _, _ in triples[0]}) == 8
    assert len({s for _, s, _ in triples[0]}) == 6
    assert len({m for _, _, m in triples[0]}) == 10


def test_round_things_never_spin_and_two_things_differ_in_colour():
    many = scenes(500, 2, seed=9)
    spinning = many.motion == world.MOTION["spin"]
    assert not np.isin(many.shape[spinning], world.ROUND).any()
    assert (many.colour[:, 0] != many.colour[:, 1]).all()


def test_captions_say_what_is_drawn():
    words = Words((Thing("orange", "star", "up"),), "plain", "navy", "static")
    assert caption(words) == "an orange star moves up on a plain navy background, static camera"


def test_captions_use_known_words_alone():
    rng = np.random.default_rng(1)
    many = scenes(100, 2, seed=10)
    for i in range(len(many)):
        text = varied_caption(many.words(i), rng, 0.0).replace("[UNK]", "")
        assert unknown_words(text) == []
    assert unknown_words("A shiny red Ball, and a dragon") == ["shiny", "dragon"]
    assert unknown_words("a navy star on a plain purple background") == ["purple background"]


def test_the_written_grammar_is_current(tmp_path):
    vocabulary.write_grammar(tmp_path / "vocabulary.json")
    stored = world.__file__.replace("world.py", "vocabulary.json")
    with open(stored, encoding="utf-8") as file:
        assert file.read() == (tmp_path / "vocabulary.json").read_text(encoding="utf-8")
