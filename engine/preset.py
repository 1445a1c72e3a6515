"""A preset says what a model can do: where its checkpoint is, what it starts from, what it refuses. Data, in TOML."""

from __future__ import annotations

import dataclasses
import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.request import Limits, Request, check
from engine.settings import DecodeSettings, DenoiseSettings

PRESETS = Path(__file__).resolve().parent.parent / "presets"


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

    def request(self, **values: Any) -> Request:
        """A checked request: the preset's defaults, overridden by `values`; None means the default, a seed of -1 a
        random one. Raises RequestError with the value, the rule and the nearest legal value."""
        known = {entry.name for entry in dataclasses.fields(Request)} - {"preset"}
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(f"A request has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        given = {key: value for key, value in values.items() if value is not None}
        if given.get("seed") == -1:
            given["seed"] = secrets.randbelow(2**31)
        base = dataclasses.asdict(self.defaults) | {"denoise": self.denoise, "decode": self.decode}
        return check(Request(preset=self.name, **(base | given)), self.limits)


def _table(cls: type, values: Any, where: str) -> Any:
    """Build a dataclass from a TOML table; unknown and missing keys are refused by name."""
    if not isinstance(values, Mapping):
        raise RequestError(f"{where} must be a table, not {values!r}.")
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise RequestError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(fields))}.")
    no_default = (dataclasses.MISSING, dataclasses.MISSING)
    required = {n for n, f in fields.items() if (f.default, f.default_factory) == no_default}
    missing = sorted(required - set(values))
    if missing:
        raise RequestError(f"{where} lacks {', '.join(missing)}.")
    return cls(**values)


def parse_preset(text: str, name: str, folder: Path = PRESETS) -> Preset:
    """A preset from TOML text. The defaults, each size and each example must themselves be legal requests."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"Preset {name} is not valid TOML: {error}.") from error
    where = f"preset {name}"
    tables = {
        "defaults": _table(Defaults, values.get("defaults", {}), f"{where}, [defaults]"),
        "limits": _table(Limits, values.get("limits", {}), f"{where}, [limits]"),
        "sizes": tuple(_table(Size, size, f"{where}, [[sizes]]") for size in values.get("sizes", [])),
        "examples": tuple(values.get("examples", ())),
        "denoise": DenoiseSettings.from_dict(values.get("denoise", {})),
        "decode": DecodeSettings.from_dict(values.get("decode", {})),
    }
    preset = _table(Preset, {**values, **tables, "name": name}, where)
    local = folder / preset.checkpoint
    if local.is_dir():
        preset = dataclasses.replace(preset, checkpoint=str(local))
    for size in preset.sizes:
        preset.request(prompt="a test", height=size.height, width=size.width)
    return preset


def preset_names() -> list[str]:
    """The presets that ship with the project."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_preset(name: str, checkpoint: str | None = None) -> Preset:
    """A preset by name, or from a .toml file of the user's; `checkpoint` overrides where its weights are."""
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not name.endswith(".toml") and name not in preset_names():
        raise RequestError(f"There is no preset {name!r}; there are {', '.join(preset_names())}, or give a .toml file.")
    if not path.is_file():
        raise RequestError(f"There is no preset file {path}.")
    preset = parse_preset(path.read_text(encoding="utf-8"), path.stem, path.resolve().parent)
    return dataclasses.replace(preset, checkpoint=checkpoint) if checkpoint else preset


def preset_from_environment(name: str | None = None, checkpoint: str | None = None) -> Preset:
    """What was asked for, else what ENGINE_PRESET and ENGINE_CHECKPOINT say.

    A checkpoint alone means PAN2; with nothing said it is the small model.
    """
    name = name or os.environ.get("ENGINE_PRESET")
    checkpoint = checkpoint or os.environ.get("ENGINE_CHECKPOINT") or None
    return load_preset(name or ("pan2" if checkpoint else "tiny"), checkpoint)
