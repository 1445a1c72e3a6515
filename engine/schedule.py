"""The noise levels of a run: diffusers' flow-matching Euler scheduler, given PAN2's own sigmas.

The sigmas are handed over unshifted, `linspace(1, 0, steps + 1)` without the 0. Left to itself the scheduler starts
from end points that are shifted already and shifts them once more: 50 steps at shift 9 would end at 0.075, not 0.155.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import CheckpointError, RequestError

if TYPE_CHECKING:  # takes seconds to import, which those who only check a configuration need not wait for
    from diffusers import FlowMatchEulerDiscreteScheduler

TRAIN_TIMESTEPS = 1000
MAX_STEPS = 1000
MIN_SHIFT, MAX_SHIFT = 0.01, 1000.0

SHIFT_TYPES = ("exponential", "linear")  # unused without dynamic shifting, but diffusers insists

# Each of these would bend the schedule or add noise to the step, and PAN2 was trained for neither.
_PLAIN_OPTIONS = {
    "num_train_timesteps": TRAIN_TIMESTEPS,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "invert_sigmas": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}


def build_scheduler(
    scheduler: FlowMatchEulerDiscreteScheduler, steps: int, shift: float | None = None
) -> FlowMatchEulerDiscreteScheduler:
    """A fresh scheduler for one run of `steps` steps. scheduler: the checkpoint's, read and left as it is.

    shift: s' = shift * s / (1 + (shift - 1) * s); None takes the checkpoint's. The result has `.sigmas` [steps + 1],
    float32, falling from 1 to 0, and `.timesteps` [steps] = 1000 * sigmas. Raises RequestError for steps or shift out
    of range and CheckpointError for a scheduler configuration that PAN2 does not have.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    check_config(scheduler.config)
    steps = _check_steps(steps)
    shift = _check_shift(scheduler.config.shift if shift is None else shift)
    fresh = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, shift=shift)
    fresh.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1].tolist())
    return fresh


def sigmas(scheduler: FlowMatchEulerDiscreteScheduler, steps: int, shift: float | None = None) -> list[float]:
    """The steps + 1 noise levels of a run, falling from 1 to 0. Arguments and errors as of `build_scheduler`."""
    return build_scheduler(scheduler, steps, shift).sigmas.tolist()


def check_config(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a scheduler configuration that PAN2 does not have. Needs no scheduler: of such values
    diffusers could often not make one."""
    found = {name: config.get(name, plain) for name, plain in _PLAIN_OPTIONS.items()}
    wrong = [f"{name} = {found[name]!r}" for name, plain in _PLAIN_OPTIONS.items() if not _same(found[name], plain)]
    if (kind := config.get("time_shift_type", SHIFT_TYPES[0])) not in SHIFT_TYPES:
        wrong.append(f"time_shift_type = {kind!r}")
    if wrong:
        raise CheckpointError(
            f"The checkpoint's scheduler sets {', '.join(wrong)}, which PAN2's schedule does not have. "
            "Use the scheduler folder that belongs to the checkpoint."
        )
    try:
        _check_shift(config.get("shift", 1.0))
    except RequestError as error:
        raise CheckpointError(f"The checkpoint's scheduler: {error}") from error


def _same(found: Any, plain: Any) -> bool:
    """None, 0 and False all mean "off" to the scheduler; a number of steps must be a whole one, 1000.0 fails in it."""
    return not found if not plain else type(found) is type(plain) and found == plain


def _check_steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or not 1 <= steps <= MAX_STEPS:
        raise RequestError(f"steps = {steps!r} must be a whole number from 1 to {MAX_STEPS}; PAN2's is 50.")
    return int(steps)


def _check_shift(shift: float) -> float:
    number = isinstance(shift, (int, float, np.number)) and not isinstance(shift, bool)
    if not number or not MIN_SHIFT <= shift <= MAX_SHIFT:
        raise RequestError(f"shift = {shift!r} must be a number from {MIN_SHIFT} to {MAX_SHIFT:g}; PAN2's is 9.")
    return float(shift)
