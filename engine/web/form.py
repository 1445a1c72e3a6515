"""The page's form and the API's parameters on one side, a checked request on the other."""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.condition import open_image
from engine.engine import Engine
from engine.errors import RequestError, shown
from engine.preset import Preset
from engine.request import Request, frames_for
from engine.settings import DecodeSettings, DenoiseSettings
from engine.web.words import pixels

# Shapes whose logarithms differ by less than this look the same: 7 : 4 and 16 : 9.
SAME_SHAPE = 0.05


@dataclass(frozen=True)
class Form:
    """What stands in the page's fields, in their order. size: "height x width"; randomise: draw a new seed."""

    prompt: str
    negative_prompt: str
    image: str | None
    seconds: float
    size: str
    seed: int | None
    randomise: bool
    steps: int
    guidance: float
    shift: float
    decoder: str
    quality: str
    precision: str

    def request(self, preset: Preset) -> Request:
        """The request that the form asks for. Raises RequestError in the engine's words."""
        height, width = parse_size(self.size)
        for name in ("seconds", "steps", "guidance", "shift"):
            # The API takes the preset's value for None; on the page the visitor emptied the field.
            if getattr(self, name) is None:
                raise RequestError(f"{name} is empty. Give a number.")
        return build_request(
            preset,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            image=self.image,
            seconds=self.seconds,
            height=height,
            width=width,
            seed=-1 if self.randomise else self.seed,
            steps=self.steps,
            guidance=self.guidance,
            shift=self.shift,
            decoder=self.decoder,
            quality=self.quality,
            precision=self.precision,
        )

    def sketch(self, preset: Preset) -> Request:
        """The request as far as it decides how long the work takes; texts and picture may still be missing."""
        return dataclasses.replace(self, prompt="-", negative_prompt="", image=None).request(preset)

    @classmethod
    def of(cls, preset: Preset, request: Request | None = None) -> Form:
        """The fields that say what a request says, or the preset's defaults."""
        source = request or preset.defaults
        return cls(
            prompt=source.prompt,
            negative_prompt=source.negative_prompt,
            image=str(request.image) if request and request.image else None,
            seconds=(source.frames - 1) / preset.fps,
            size=size_value(source),
            seed=source.seed,
            randomise=False,
            steps=source.steps,
            guidance=source.guidance,
            shift=source.shift,
            decoder=(request or preset).decode.path,
            quality=(request or preset).denoise.quality,
            precision=(request or preset).denoise.precision,
        )


def build_request(
    preset: Preset,
    prompt: str,
    image: str | None,
    seconds: float | None,
    decoder: str | None,
    quality: str | None = None,
    precision: str | None = None,
    **values: Any,
) -> Request:
    """A request from what page and API have in common, within the preset's limits. seconds: rounded to the nearest
    legal length. Raises RequestError."""
    return preset.request(
        prompt=prompt,
        image=Path(image) if image and isinstance(image, str) else image or None,
        frames=None if seconds is None else frames_for(seconds, preset.fps, preset.limits),
        denoise=_denoise(preset, quality, precision),
        decode=_decode(preset, decoder),
        **values,
    )


def checked(engine: Engine, request: Request) -> Request:
    """The request, if the engine takes it. Raises RequestError in its words, with a picture by its name: its path is
    the server's affair."""
    try:
        engine.check(request)
    except RequestError as error:
        if request.image is None:
            raise
        raise RequestError(str(error).replace(str(request.image), request.image.name)) from error
    return request


def _denoise(preset: Preset, quality: str | None, precision: str | None) -> DenoiseSettings:
    """The preset's settings but for what is given."""
    given = {"quality": quality, "precision": precision}
    return dataclasses.replace(preset.denoise, **{name: value for name, value in given.items() if value is not None})


def _decode(preset: Preset, decoder: str | None) -> DecodeSettings | None:
    """The preset's settings; for another decoder than its own with the precision that suits that one."""
    if decoder is None or decoder == preset.decode.path:
        return None
    return DecodeSettings(decoder)  # type: ignore[arg-type]


def parse_gib(text: str | None) -> Any:
    """A budget of memory as somebody writes it, None for nothing. What is no number is left for the settings to
    refuse."""
    written = (text or "").strip()
    try:
        return float(written.replace(",", ".")) if written else None
    except ValueError:
        return written


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from "height x width"."""
    try:
        height, width = (int(part) for part in str(text).split("x"))
    except ValueError as error:
        raise RequestError(f"size = {shown(text)} must be height x width in pixels, such as 704x1248.") from error
    return height, width


def size_value(size: Any) -> str:
    """A size (anything with height and width) as the value of the page's menu."""
    return f"{size.height}x{size.width}"


def size_menu(preset: Preset) -> list[tuple[str, str]]:
    """What the page's menu shows and what it means."""
    return [(f"{pixels(size.height, size.width)}, {size.label}", size_value(size)) for size in preset.sizes]


def quality_menu(preset: Preset) -> list[tuple[str, str]]:
    """What the page offers and what it means; with the fidelity where it was measured for this model."""
    known = dataclasses.asdict(preset.fidelity) if preset.fidelity else {}
    measured = {name: f", {value:.0f} dB from full" for name, value in known.items() if value is not None}
    menu = {
        "full": "full: every step is computed",
        "balanced": f"balanced: skips what hardly changes{measured.get('balanced', ', not measured on this model')}",
        "draft": f"draft: skips more{measured.get('draft', ', not measured on this model')}",
    }
    return [(text, name) for name, text in menu.items()]


def fitting_size(preset: Preset, image: str | None) -> str | None:
    """The first size of the menu that has about a picture's shape; None for an empty menu and for a picture that can't
    be read (that is said later). Sizes of nearly the same shape differ in cost, and the menu begins with the cheap
    ones."""
    try:
        picture = open_image(image) if image else None
    except RequestError:
        picture = None
    if picture is None or not preset.sizes:
        return None
    shape = math.log(picture.width / picture.height)
    far = [abs(math.log(size.width / size.height) - shape) for size in preset.sizes]
    return size_value(next(size for size, by in zip(preset.sizes, far, strict=True) if by < min(far) + SAME_SHAPE))


def unknown_words(preset: Preset, prompt: str) -> list[str]:
    """Words that the preset's model has never seen; empty for a preset without a vocabulary of its own."""
    module = f"presets.{preset.name}.vocabulary"
    try:
        vocabulary = importlib.import_module(module)
    except ModuleNotFoundError:
        return []
    return vocabulary.unknown_words(prompt)
