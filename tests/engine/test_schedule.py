import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from engine.errors import CheckpointError, RequestError
from engine.schedule import build_scheduler, check_config, sigmas

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "schedules.json").read_text())


@pytest.fixture
def released():
    return FlowMatchEulerDiscreteScheduler(shift=9.0)


@pytest.mark.parametrize("steps", ["50", "8", "4", "1"])
def test_sigmas_and_timesteps_are_the_models(released, steps):
    golden = GOLDEN[steps]
    built = build_scheduler(released, int(steps))
    assert built.sigmas.tolist() == golden["sigmas"]
    assert built.timesteps.tolist() == golden["timesteps"]
    assert sigmas(released, int(steps)) == built.sigmas.tolist()


def test_shift_is_applied_exactly_once(released):
    base = torch.linspace(1, 0, 13)[:-1]
    for shift in (1.0, 3.0, 9.0, 40.0):
        expected = shift * base / (1 + (shift - 1) * base)
        torch.testing.assert_close(torch.tensor(sigmas(released, 12, shift)[:-1]), expected, rtol=0, atol=2e-7)


def test_shift_comes_from_the_checkpoint_unless_the_request_says_otherwise(released):
    assert sigmas(released, 4)[1] == pytest.approx(27 / 28)
    assert sigmas(released, 4, shift=3)[1] == pytest.approx(0.9)
    assert sigmas(FlowMatchEulerDiscreteScheduler(shift=3.0), 4)[1] == pytest.approx(0.9)
    assert released.shift == 9.0


def test_each_run_gets_a_scheduler_of_its_own(released):
    built = build_scheduler(released, 4)
    sample = torch.zeros(1)
    for timestep in built.timesteps:
        sample = built.step(torch.ones(1), timestep, sample, return_dict=False)[0]
    assert sample.item() == pytest.approx(-1.0)
    assert released.step_index is None
    assert build_scheduler(released, 4).step_index is None


def test_extreme_schedules_still_fall_strictly(released):
    for shift in (0.01, 1000.0):
        assert np.all(np.diff(sigmas(released, 1000, shift)) < 0)


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, 4.0, True, None, "8"])
def test_bad_steps_are_refused(released, steps):
    with pytest.raises(RequestError, match=r"steps = .* from 1 to 1000"):
        sigmas(released, steps)


@pytest.mark.parametrize("shift", [0, -9, float("nan"), float("inf"), 1001, "9", True])
def test_bad_shifts_are_refused(released, shift):
    with pytest.raises(RequestError, match=r"shift = .* from 0.01 to 1000"):
        sigmas(released, 4, shift)


@pytest.mark.parametrize(
    "option",
    [
        {"use_dynamic_shifting": True},
        {"shift_terminal": 0.1},
        {"invert_sigmas": True},
        {"use_karras_sigmas": True},
        {"stochastic_sampling": True},
        {"num_train_timesteps": 500},
    ],
)
def test_a_scheduler_that_would_bend_the_schedule_is_refused(option):
    with pytest.raises(CheckpointError, match=next(iter(option))):
        sigmas(FlowMatchEulerDiscreteScheduler(shift=9.0, **option), 4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"shift": "abc"}, "shift = 'abc'"),
        ({"shift": None}, "shift = None"),
        ({"shift": float("nan")}, "shift = nan"),
        ({"num_train_timesteps": 0}, "num_train_timesteps = 0"),
        ({"num_train_timesteps": -5}, "num_train_timesteps = -5"),
        ({"num_train_timesteps": 10**11}, "num_train_timesteps = 100000000000"),
        ({"num_train_timesteps": 1000.0}, "num_train_timesteps = 1000.0"),
        ({"time_shift_type": "cubic"}, "time_shift_type = 'cubic'"),
        ({"time_shift_type": ["linear"]}, "time_shift_type = "),
        ({"use_karras_sigmas": True, "use_beta_sigmas": True}, "use_karras_sigmas = True, use_beta_sigmas = True"),
    ],
)
def test_a_configuration_is_checked_before_there_is_a_scheduler(values, words):
    with pytest.raises(CheckpointError, match=words):
        check_config({"shift": 9.0} | values)


def test_settings_that_are_off_in_other_words_are_fine():
    check_config({"shift": 9, "num_train_timesteps": 1000, "shift_terminal": 0, "use_karras_sigmas": None})
    check_config({"time_shift_type": "linear"})
