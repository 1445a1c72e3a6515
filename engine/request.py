"""One request for one video, and the rules that it must obey before any work starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import SIZE_MULTIPLE, TEMPORAL_FACTOR, nearest_frames, nearest_size

MAX_SEED = 2**63 - 1
MAX_PROMPT = 20_000


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
        """The inverse of `to_json`. Unknown or missing fields are refused by name. Does not check limits."""
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(f"A request has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        given = dict(values)
        given["image"] = Path(given["image"]) if given.get("image") else None
        given["denoise"] = DenoiseSettings.from_dict(given.get("denoise") or {})
        given["decode"] = DecodeSettings.from_dict(given.get("decode") or {})
        try:
            return cls(**given)
        except TypeError as error:
            raise RequestError(f"The request is incomplete: {error}.") from error


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} = {value!r} must be a whole number from {low} to {high}.")
    if not low <= value <= high:
        raise RequestError(
            f"{name} = {value} must lie between {low} and {high}; the nearest is {min(max(value, low), high)}."
        )


def _real(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} = {value!r} must be a number from {low:g} to {high:g}.")
    if not low <= value <= high:
        raise RequestError(
            f"{name} = {value:g} must lie between {low:g} and {high:g}; the nearest is {min(max(value, low), high):g}."
        )


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {type(value).__name__}.")
    if len(value) > MAX_PROMPT:
        raise RequestError(f"{name} has {len(value)} characters; at most {MAX_PROMPT} are taken. Shorten it.")


def _side(name: str, value: Any, limits: Limits) -> None:
    _integer(name, value, limits.min_side, limits.pixels // limits.min_side)
    if value % SIZE_MULTIPLE:
        raise RequestError(
            f"{name} = {value} must be a multiple of {SIZE_MULTIPLE}; the nearest is {nearest_size(value)}."
        )


def _frames(frames: Any, limits: Limits) -> None:
    _integer("frames", frames, 1, limits.frames)
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
    _integer("steps", request.steps, 1, limits.steps)
    _real("shift", request.shift, 0.01, limits.shift)
    _real("guidance", request.guidance, 0.0, limits.guidance)
    _integer("seed", request.seed, 0, MAX_SEED)
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
    if request.image is not None and not Path(request.image).is_file():
        raise RequestError(f"The first frame {request.image} is not a file. Give a picture (PNG, JPEG, WebP).")
    return request
