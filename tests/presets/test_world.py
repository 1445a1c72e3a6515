"""The drawn world: reproducible, independent of resolution, and true to its captions."""

import dataclasses

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


@pytest.mark.parametrize("things", [1, 2])
@pytest.mark.parametrize("size", [(256, 448), (448, 256), (320, 320)])
def test_what_goes_on_begins_where_its_pose_says_and_obeys_its_word(things, size):
    many = scenes(800, things, seed=11, anywhere=True)
    track = world.trajectory(many, torch.linspace(0, 1, 25), *size)
    dx, dy, ratio, turn = (
        (part[..., -1] - part[..., 0]).numpy() for part in (track.x, track.y, track.scale.log(), track.angle)
    )
    wanted = {"right": dx, "left": -dx, "down": dy, "up": -dy, "grow": ratio, "shrink": -ratio, "spin": turn}
    for name, way in wanted.items():
        assert (way[many.motion == world.MOTION[name]] > 0.2).all(), name
    for name in ("bounce", "orbit", "still"):
        there = many.motion == world.MOTION[name]
        assert max(abs(dx[there]).max(), abs(dy[there]).max()) < 1e-4, name
    # The first frame shows the same, whatever happens then: only what is pushed off an edge begins a little inside.
    still = dataclasses.replace(many, motion=np.full_like(many.motion, world.MOTION["still"]))
    before = world.trajectory(still, torch.zeros(1), *size)
    here = many.motion >= world.MOTION["bounce"]
    for key in ("x", "y", "scale", "angle"):
        torch.testing.assert_close(getattr(track, key)[here][:, :1], getattr(before, key)[here], atol=1e-5, rtol=0)
    # Half of it stays in sight, or nearly so.
    unit = min(size)
    assert (track.x.abs() <= size[1] / unit / 2 + 0.06).all() and (track.y.abs() <= size[0] / unit / 2 + 0.06).all()


def test_what_goes_on_from_a_usual_beginning_moves_as_usual():
    many = scenes(200, seed=12)
    pose = np.zeros((200, 1, 4))
    for name, place in {"left": (1, 0), "right": (-1, 0), "up": (0, 1), "down": (0, -1), "bounce": (0, 1)}.items():
        pose[many.motion[:, 0] == world.MOTION[name], 0, :2] = place
    pose[..., 2] = 1
    moves = np.isin(many.motion[:, 0], [world.MOTION[name] for name in ("left", "right", "up", "down", "bounce")])
    placed = dataclasses.replace(many, pose=pose, jitter=0 * many.jitter).take(moves)
    usual = dataclasses.replace(many, jitter=0 * many.jitter).take(moves)
    time = torch.linspace(0, 1, 13)
    for first, second in zip(
        *(vars(world.trajectory(s, time, 256, 448)).values() for s in (placed, usual)), strict=True
    ):
        torch.testing.assert_close(first, second, atol=2e-3, rtol=0)


def test_more_spinning_keeps_every_other_motion():
    counts = [np.bincount(scenes(4000, seed=13, spins=share).motion[:, 0], minlength=10) for share in (0, 0.15)]
    spin = world.MOTION["spin"]
    assert counts[1][spin] > 2 * counts[0][spin]
    assert np.delete(counts[1], spin).min() > 250
    assert (scenes(40, seed=14, spins=1.0, held_out=True).motion == spin).all()


def test_what_a_first_frame_shows_may_be_left_out():
    rng = np.random.default_rng(2)
    words = Words((Thing("orange", "star", "up"),), "plain", "teal", "static")
    texts = {varied_caption(words, rng, 0.0, shown=True) for _ in range(300)}
    assert "the star moves up" in texts and "an orange star moves up" in texts
    assert not any("teal" not in varied_caption(words, rng, 0.0) for _ in range(300))


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
