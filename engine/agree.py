"""Which decoder all devices of a group take: the one that was asked for, or the fastest that none of them lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from engine.decode_plan import Choice
from engine.errors import RequestError
from engine.rank import Facts
from engine.settings import DecodePath, DecodePrecision, DecodeSettings

ALONE = "reference"  # diffusers' decoder can't be cut by rows


def agree(settings: DecodeSettings, facts: Sequence[Facts], names: Sequence[str]) -> Choice:
    """Path, precision and number of devices for these settings, with the reason.

    facts: of every rank; names: what people call them. RequestError if there is no decoder that all of them have.
    """
    if settings.devices == "one" or settings.path == ALONE:
        choice = _own(settings, facts[0], names[0])
        why = "one device was asked for" if settings.devices == "one" else "it can't be cut by rows"
        return choice._replace(reason=f"{choice.reason}; on {names[0]} alone: {why}")
    answers = [entry.choices[settings.path, settings.precision] for entry in facts]
    if all(isinstance(answer, Choice) for answer in answers) and len({_pair(answer) for answer in answers}) == 1:
        return _on_all(answers[0], answers[0].reason, len(facts))
    return _common(settings, facts, names)


def lack(choice: Choice, entry: Facts, why: str) -> None:
    """Note that a device can't run a decoder after all."""
    for pair, known in entry.choices.items():
        if isinstance(known, Choice) and _pair(known) == _pair(choice):
            entry.choices[pair] = why


def _own(settings: DecodeSettings, entry: Facts, name: str) -> Choice:
    answer = entry.choices[settings.path, settings.precision]
    if isinstance(answer, str):
        raise RequestError(f"{name}: {answer}")
    return answer


def _common(settings: DecodeSettings, facts: Sequence[Facts], names: Sequence[str]) -> Choice:
    """The fastest path that every device has. Raises RequestError with the first one's reason if there is none."""
    answers = [entry.choices[settings.path, settings.precision] for entry in facts]
    why = _first_lack(answers, names) or "left to themselves they would take different ones"
    own = [_pair(answer) for answer in answers if isinstance(answer, Choice)]
    paths = [path for path in get_args(DecodePath)[1:] if path != ALONE and settings.path in ("auto", path)]
    precisions = get_args(DecodePrecision)[1:]
    every = [(path, precision) for path in paths for precision in precisions]
    # What a device would take by itself comes first, 16 bits before 32.
    own.sort(key=lambda pair: (paths.index(pair[0]), -precisions.index(pair[1])))
    for path, precision in [*own, *every]:
        if settings.precision not in ("auto", precision):
            continue
        answers = [entry.choices[path, precision] for entry in facts]
        missing = _first_lack(answers, names)
        if missing is None:
            return _on_all(answers[0], f"the fastest that all devices have ({why})", len(facts))
        if (path, precision) in own:
            why = missing
    wanted = f"path {settings.path} and precision {settings.precision}"
    raise RequestError(f"The devices have no decoder in common for {wanted}. {why}")


def _first_lack(answers: Sequence[Choice | str], names: Sequence[str]) -> str | None:
    return next((f"{name}: {x}" for name, x in zip(names, answers, strict=True) if isinstance(x, str)), None)


def _pair(choice: Choice) -> tuple[str, ...]:
    return choice[:2]


def _on_all(choice: Choice, reason: str, devices: int) -> Choice:
    return choice._replace(reason=f"{reason}; rows spread over {devices} devices", devices=devices)
