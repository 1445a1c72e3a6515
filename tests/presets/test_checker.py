"""The checker on true videos and on videos with other prompts, at a small size."""

import numpy as np
import pytest
import torch

from presets.tiny import world
from presets.tiny.checker import look, score
from presets.tiny.evaluate import TRIALS, scenes_of

SIZE = (96, 168)


def scored(scenes, shift=0, size=SIZE):
    videos = world.render(scenes, *size)
    count = len(scenes)
    return [score(look(video), scenes.words((i + shift) % count)) for i, video in enumerate(videos)]


@pytest.mark.parametrize(("things", "moving_camera"), [(1, False), (2, False), (1, True)])
def test_true_videos_are_read_right(things, moving_camera):
    scenes = world.sample(10, things, np.random.default_rng(21), moving_camera=moving_camera)
    marks = scored(scenes)
    for key in ("background", "objects", "solid", "colour", "shape", "motion", "recognisable"):
        assert sum(row[key] for row in marks) >= 10 - (things == 2 or moving_camera), key
    if moving_camera:
        assert all(row["camera"] for row in marks)


@pytest.mark.parametrize("name", ["going on", "spin"])
def test_trials_that_begin_anywhere_or_turn_are_read_right(name):
    (trial,) = (trial for trial in TRIALS if trial.name == name)
    scenes = scenes_of(trial, 20)
    seen = [look(video) for video in world.render(scenes, *SIZE)]
    marks = [score(one, scenes.words(i)) for i, one in enumerate(seen)]
    for key in ("background", "objects", "solid", "colour", "motion"):
        assert all(row[key] for row in marks), key
    # A thing that leaves in part is not always recognisable in the last frame.
    assert sum(row["recognisable"] for row in marks) >= (20 if trial.spins else 16)
    assert np.mean([thing.kept for one in seen for thing in one.things]) > 0.85
    if trial.edge:
        track = world.trajectory(scenes, torch.zeros(1), *SIZE)
        assert (track.x.abs() > 0.5).all() and not scenes.pose[..., 3].any()


def test_other_prompts_score_as_chance_does():
    scenes = world.sample(16, 1, np.random.default_rng(22))
    marks = scored(scenes, shift=1)
    assert sum(row["all_three"] for row in marks) == 0
    assert sum(row["colour"] for row in marks) <= 6
    assert sum(row["background"] for row in marks) <= 4


def test_a_picture_without_things_has_none():
    scenes = world.sample(1, 1, np.random.default_rng(23))
    empty = world.Scenes(
        *(np.zeros((1, 0), dtype=np.int64) for _ in range(3)),
        scenes.kind, scenes.ground, scenes.camera, np.zeros((1, 0, 3)), scenes.reach, scenes.pose[:, :0],
    )  # fmt: skip
    assert look(world.render(empty, *SIZE)[0]).things == ()


def test_a_thing_in_two_colours_is_not_solid():
    scenes = world.sample(1, 1, np.random.default_rng(24))
    video = world.render(scenes, *SIZE)[0]
    other = world.render(world.Scenes(**{**vars(scenes), "colour": (scenes.colour + 1) % 8}), *SIZE)[0]
    mixed = torch.where(torch.arange(SIZE[1])[None] % 8 < 4, video, other)
    assert not look(mixed).things[0].solid


def test_noise_obeys_nothing():
    noise = torch.rand(3, 49, *SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    words = world.sample(1, 1, np.random.default_rng(25)).words(0)
    marks = score(look(noise), words)
    assert not marks["all_three"]
    assert not marks["solid"]
