"""A preset says what a model can do: where its checkpoint is, what it starts from, what it refuses. Data, in TOML."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from engine.errors import RequestError, listed, shown
from engine.request import Limits, Request, check, check_integer
from engine.settings import DecodeSettings, DenoiseSettings

PRESETS = Path(__file__).resolve().parent.parent / "presets"
MAX_FPS = 240


@dataclass(frozen=True)
class Size:
    """A named size of the page's menu."""

    label: str
    height: int
    width: int


@dataclass(frozen=True)
class Defaults:
    """What a request is made of where the user says nothing. seed: what the page starts with."""

    height: int
    width: int
    frames: int
    steps: int
    shift: float
    guidance: float
    seed: int = 123
    prompt: str = ""
    negative_prompt: str = ""


@dataclass(frozen=True)
class Trained:
    """The largest that a model saw in training: pixels (height * width) and frames. More is legal and looks worse."""

    pixels: int
    frames: int


@dataclass(frozen=True)
class Fidelity:
    """How near to "full" the final latents stay: decibels of their range, the lowest of the videos that were measured
    at 50 steps (python -m engine.fidelity). None: not measured on this model."""

    balanced: float | None = None
    draft: float | None = None
    fp8: float | None = None


@dataclass(frozen=True)
class Preset:
    """checkpoint: a folder (relative ones lie beside the TOML file) or the name of a repository on the Hub."""

    name: str
    title: str
    about: str
    checkpoint: str
    fps: int
    defaults: Defaults
    limits: Limits
    sizes: tuple[Size, ...]
    examples: tuple[str, ...] = ()
    denoise: DenoiseSettings = field(default_factory=DenoiseSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    trained: Trained | None = None
    fidelity: Fidelity | None = None

    def beyond_training(self, request: Request) -> str | None:
        """A sentence for a request larger or longer than anything that the model saw in training, else None."""
        if self.trained is None:
            return None
        large = request.height * request.width > self.trained.pixels
        if not large and request.frames <= self.trained.frames:
            return None
        size = f"{self.defaults.width} x {self.defaults.height}"
        return (
            f"{self.title} was trained on videos of about {size} and at most {self.trained.frames} frames. "
            f"At this {'size' if large else 'length'} it may lose what the prompt asks for."
        )

    def request(self, **values: Any) -> Request:
        """A checked request: the preset's defaults, overridden by `values`; None means the default, a seed of -1 a
        random one. Raises RequestError with the value, the rule and the nearest legal value."""
        known = {entry.name for entry in dataclasses.fields(Request)} - {"preset"}
        unknown = set(values) - known
        if unknown:
            raise RequestError(f"A request has no field {listed(unknown)}; it has {listed(known)}.")
        given = {key: value for key, value in values.items() if value is not None}
        if given.get("seed") == -1:
            given["seed"] = secrets.randbelow(2**31)
        base = dataclasses.asdict(self.defaults) | {"denoise": self.denoise, "decode": self.decode}
        return check(Request(preset=self.name, **(base | given)), self.limits)


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Say of what is refused inside where it stands."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error


def _table(cls: type, values: Any, where: str) -> Any:
    """Build a dataclass from a TOML table; unknown and missing keys and values of another type are refused by name."""
    if not isinstance(values, Mapping):
        raise RequestError(f"{where} must be a table, not {shown(values)}.")
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}
    unknown = set(values) - set(fields)
    if unknown:
        raise RequestError(f"{where} has unknown keys {listed(unknown)}; known are {listed(fields)}.")
    no_default = (dataclasses.MISSING, dataclasses.MISSING)
    required = {n for n, f in fields.items() if (f.default, f.default_factory) == no_default}
    missing = required - set(values)
    if missing:
        raise RequestError(f"{where} lacks {listed(missing)}.")
    with _within(where):
        for name, kind in get_type_hints(cls).items():
            if name in values:
                _check_type(name, values[name], kind)
    return cls(**values)


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse a value that TOML gives for another type. Annotations of tables and lists are looked at elsewhere."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is str and not isinstance(value, str):
        raise RequestError(f"{name} = {shown(value)} must be text.")
    if kind is int and not (number and isinstance(value, int)):
        raise RequestError(f"{name} = {shown(value)} must be a whole number.")
    if kind in (float, float | None) and not (number and (isinstance(value, int) or math.isfinite(value))):
        raise RequestError(f"{name} = {shown(value)} must be a number.")


def _list(name: str, values: Any, of: str) -> list[Any]:
    if not isinstance(values, list):
        raise RequestError(f"{name} = {shown(values)} must be a list of {of}.")
    return values


def _examples(values: Any) -> tuple[str, ...]:
    for text in _list("examples", values, "texts"):
        _check_type("examples", text, str)
    return tuple(values)


def _check_limits(limits: Limits) -> None:
    """Refuse limits that no request could obey, since its refusal would offer what can't be had."""
    square = limits.min_side**2
    least = {"min_side": 1, "steps": 1, "frames": 1, "pixels": square, "volume": square, "guidance": 0, "shift": 0.01}
    for name, low in least.items():
        value = getattr(limits, name)
        if value < low:
            why = " (min_side * min_side)" if low == square != 1 else ""
            raise RequestError(f"{name} = {shown(value)} must be at least {low}{why}.")


def _check_requests(preset: Preset, where: str) -> None:
    """What the page begins with or offers must be taken by the engine."""
    with _within(f"{where}, [defaults]"):
        preset.request()
    for size in preset.sizes:
        with _within(f"{where}, [[sizes]]"):
            preset.request(height=size.height, width=size.width)
    for prompt in preset.examples:
        with _within(f"{where}, examples"):
            preset.request(prompt=prompt)


def _read_toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise RequestError(f"Preset {name} is nested too deeply.") from error
    except ValueError as error:
        # Besides TOML's own error also Python's, of numbers with thousands of digits.
        raise RequestError(f"Preset {name} is not valid TOML: {error}.") from error


def parse_preset(text: str, name: str, folder: Path = PRESETS) -> Preset:
    """A preset from TOML text. The defaults, each size and each example must themselves be legal requests."""
    values, where = _read_toml(text, name), f"preset {name}"
    with _within(where):
        sizes = _list("sizes", values.get("sizes", []), "tables")
        tables = {
            "examples": _examples(values.get("examples", [])),
            "denoise": DenoiseSettings.from_dict(values.get("denoise", {})),
            "decode": DecodeSettings.from_dict(values.get("decode", {})),
        }
    tables |= {
        "defaults": _table(Defaults, values.get("defaults", {}), f"{where}, [defaults]"),
        "limits": _table(Limits, values.get("limits", {}), f"{where}, [limits]"),
        "sizes": tuple(_table(Size, size, f"{where}, [[sizes]]") for size in sizes),
    }
    for key, cls in (("trained", Trained), ("fidelity", Fidelity)):
        if key in values:
            tables[key] = _table(cls, values[key], f"{where}, [{key}]")
    preset = _table(Preset, {**values, **tables, "name": name}, where)
    with _within(where):
        check_integer("fps", preset.fps, 1, MAX_FPS)
        if not preset.checkpoint:
            raise RequestError("checkpoint is empty. Give a folder, or the name of a repository on the Hub.")
    with _within(f"{where}, [limits]"):
        _check_limits(preset.limits)
    _check_requests(preset, where)
    # Path.is_dir raises for a name that is too long.
    local = folder / preset.checkpoint
    return dataclasses.replace(preset, checkpoint=str(local)) if os.path.isdir(local) else preset


def preset_names() -> list[str]:
    """The presets that ship with the project."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_preset(name: str, checkpoint: str | None = None) -> Preset:
    """A preset by name, or from a .toml file of the user's; `checkpoint` overrides where its weights are."""
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not name.endswith(".toml") and name not in preset_names():
        raise RequestError(
            f"There is no preset {shown(name)}; there are {', '.join(preset_names())}, or give a .toml file."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"The preset file {path} is not valid UTF-8. Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise RequestError(f"There is no preset file {path} that can be read ({error}).") from error
    preset = parse_preset(text, path.stem, path.resolve().parent)
    return dataclasses.replace(preset, checkpoint=checkpoint) if checkpoint else preset


def preset_from_environment(name: str | None = None, checkpoint: str | None = None) -> Preset:
    """What was asked for, else what ENGINE_PRESET and ENGINE_CHECKPOINT say.

    A checkpoint alone means PAN2; with nothing said it is the small model.
    """
    name = name or os.environ.get("ENGINE_PRESET", "").strip()
    checkpoint = checkpoint or os.environ.get("ENGINE_CHECKPOINT", "").strip() or None
    return load_preset(name or ("pan2" if checkpoint else "tiny"), checkpoint)
