"""One request for one video, and the rules that it must obey before any work starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.errors import RequestError, listed, shown
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import SIZE_MULTIPLE, TEMPORAL_FACTOR, frames_of_seconds, nearest_frames, nearest_size

MAX_SEED = 2**63 - 1
MAX_PROMPT = 20_000
MAX_SECONDS = 1e6
# Of any preset: what is more can't be meant.
MOST = 1_000_000


@dataclass(frozen=True)
class Limits:
    """The most that a preset does. pixels: height * width; volume: height * width * frames."""

    steps: int
    frames: int
    pixels: int
    volume: int
    min_side: int = 64
    guidance: float = 20.0
    shift: float = 100.0


@dataclass(frozen=True)
class Request:
    """A video to make. height, width: pixels; frames: 4n + 1; image: path of the first frame, None for text alone;
    shift: of the noise schedule; guidance: 1 or less means without a negative branch."""

    preset: str
    prompt: str
    height: int
    width: int
    frames: int
    steps: int
    shift: float
    guidance: float
    seed: int
    negative_prompt: str = ""
    image: Path | None = None
    denoise: DenoiseSettings = field(default_factory=DenoiseSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values; `Request.from_json` reads it back."""
        return asdict(self) | {"image": str(self.image) if self.image else None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        """The inverse of `to_json`. Unknown or missing fields, and values of other types, are refused by name. Does not
        check a preset's limits."""
        if not isinstance(values, Mapping):
            raise RequestError(f"A request must be a table of its fields, not {shown(values)}.")
        known = {entry.name for entry in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise RequestError(f"A request has no field {listed(unknown)}; it has {listed(known)}.")
        missing = {entry.name for entry in fields(cls) if entry.default is entry.default_factory is MISSING} - set(
            values
        )
        if missing:
            raise RequestError(f"The request lacks {listed(missing)}. Give every one of them.")
        given = dict(values)
        given["image"] = _path("image", given.get("image"))
        for name, settings in (("denoise", DenoiseSettings), ("decode", DecodeSettings)):
            given[name] = settings.from_dict({} if given.get(name) is None else given[name])
        request = cls(**given)
        for name in ("preset", "prompt", "negative_prompt"):
            _text(name, getattr(request, name))
        for name in ("height", "width", "frames", "steps"):
            check_integer(name, getattr(request, name), 1, MOST)
        check_integer("seed", request.seed, 0, MAX_SEED)
        for name in ("shift", "guidance"):
            _real(name, getattr(request, name), 0.0, MOST)
        return request


def _path(name: str, value: Any) -> Path | None:
    if value is None or value == "":
        return None
    if not isinstance(value, (str, Path)):
        raise RequestError(f"{name} = {shown(value)} must be the path of a picture.")
    return Path(value)


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raises RequestError unless the value is a whole number from low to high; True and 1.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} = {shown(value)} must be a whole number from {low} to {high}.")
    if not low <= value <= high:
        raise RequestError(
            f"{name} = {shown(value)} must lie between {low} and {high}; the nearest is {min(max(value, low), high)}."
        )


def _real(name: str, value: Any, low: float, high: float) -> None:
    # Whole numbers are finite, and large ones don't fit into a float to be asked.
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and not (isinstance(value, float) and math.isfinite(value)):
        raise RequestError(f"{name} = {shown(value)} must be a number from {low:g} to {high:g}.")
    if not low <= value <= high:
        text = shown(value) if whole else f"{value:g}"
        nearest = low if value < low else high
        raise RequestError(f"{name} = {text} must lie between {low:g} and {high:g}; the nearest is {nearest:g}.")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {type(value).__name__}.")
    if len(value) > MAX_PROMPT:
        raise RequestError(f"{name} has {len(value)} characters; at most {MAX_PROMPT} are taken. Shorten it.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Half of a pair that stands for one character: no tokenizer and no file takes it.
        code = ord(value[error.start])
        raise RequestError(
            f"{name} is not valid text: its character {error.start + 1} is U+{code:04X}, which is half a character. "
            "Remove it."
        ) from error


def _side(name: str, value: Any, limits: Limits) -> None:
    check_integer(name, value, limits.min_side, limits.pixels // limits.min_side)
    if value % SIZE_MULTIPLE:
        raise RequestError(
            f"{name} = {value} must be a multiple of {SIZE_MULTIPLE}; the nearest is {nearest_size(value)}."
        )


def frames_for(seconds: Any, fps: int, limits: Limits) -> int:
    """The legal frame count nearest to a length, 0 for a single frame. Raises RequestError for no number and for a
    length beyond the limits."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds < MAX_SECONDS:
        raise RequestError(f"seconds = {shown(seconds)} must be a number of seconds, 0 for a single frame.")
    frames = frames_of_seconds(seconds, fps)
    if frames > limits.frames:
        most = (limits.frames - 1) // TEMPORAL_FACTOR * TEMPORAL_FACTOR
        raise RequestError(
            f"seconds = {seconds:g} (frames = {frames}) must lie between 0 and {most / fps:g}; the "
            f"nearest is {most / fps:g} (frames = {most + 1})."
        )
    return frames


def _frames(frames: Any, limits: Limits) -> None:
    check_integer("frames", frames, 1, limits.frames)
    if (frames - 1) % TEMPORAL_FACTOR:
        nearest = min(nearest_frames(frames), limits.frames)
        raise RequestError(
            f"frames = {frames} must be {TEMPORAL_FACTOR}n + 1 (1, 5, 9, ...); the nearest is {nearest}."
        )


def check(request: Request, limits: Limits) -> Request:
    """Return the request if it obeys every rule, else raise RequestError naming value, rule and nearest legal value."""
    _text("prompt", request.prompt)
    _text("negative_prompt", request.negative_prompt)
    _side("height", request.height, limits)
    _side("width", request.width, limits)
    _frames(request.frames, limits)
    check_integer("steps", request.steps, 1, limits.steps)
    _real("shift", request.shift, 0.01, limits.shift)
    _real("guidance", request.guidance, 0.0, limits.guidance)
    check_integer("seed", request.seed, 0, MAX_SEED)
    pixels = request.height * request.width
    if pixels > limits.pixels:
        raise RequestError(
            f"{request.width} x {request.height} (width x height) has {pixels} pixels; this preset takes at most "
            f"{limits.pixels}. Choose a smaller size."
        )
    if pixels * request.frames > limits.volume:
        longest = (limits.volume // pixels - 1) // TEMPORAL_FACTOR * TEMPORAL_FACTOR + 1
        raise RequestError(
            f"{request.frames} frames of {request.width} x {request.height} are too many for this preset; at this size "
            f"it makes at most {max(1, longest)} frames."
        )
    image = _path("image", request.image)
    # Path.is_file raises for a name that is too long.
    if image is not None and not os.path.isfile(image):
        raise RequestError(f"The first frame {shown(str(image), 300)} is not a file. Give a picture (PNG, JPEG, WebP).")
    return request
