"""The Compare tab's fields and the parameters of `/compare` on one side, a checked comparison on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.errors import RequestError, shown
from engine.job_id import JOB_ID
from engine.record import read_json, video_size
from engine.settings import DecodeSettings
from engine.shapes import SPATIAL_FACTOR, latent_frames, nearest_frames
from engine.sides import SIDES, CompareRequest, Option, RandomLatents, open_latents, parse_side
from engine.web.form import parse_size, size_menu, size_value

LATENTS = "latents.safetensors"
SOURCES = {"Random latents": "random", "A video made here": "job", "A file of latents": "file"}
BEST = "auto:auto"
LISTED = 40
LABEL_LENGTH = 70
FRAMES, FRAMES_SLOW = 21, 9


@dataclass(frozen=True)
class CompareForm:
    """What stands in the fields, in their order. source: one of SOURCES' values; job: of a video; file: an upload's
    path; size: of random latents, "height x width"; frames: at most so many from the start; a, b: "path:precision"."""

    source: str
    job: str | None
    file: str | None
    seed: int | None
    size: str
    frames: int | None
    a: str
    b: str

    def request(self, engine: Engine, outputs: Path) -> tuple[CompareRequest, tuple[int, int, int]]:
        """The comparison that is asked for, and its latents [frames, height, width]. Raises RequestError in words."""
        a, b = parse_side(self.a), parse_side(self.b)
        for settings in (a, b):
            engine.decoder(settings)
        if self.source == "random":
            return self._random(engine, a, b)
        path, name = self._file(outputs)
        try:
            latents, _ = open_latents(path, None, engine.preset)
        except RequestError as error:
            # People know their file by its name; where it lies here is the server's affair.
            raise RequestError(str(error).replace(str(path), path.name)) from error
        frames = min(nearest_frames(self._length()), video_size(latents)[2])
        shape = (latent_frames(frames), latents.shape[3], latents.shape[4])
        return CompareRequest(path, a, b, frames, name), shape

    def _random(self, engine: Engine, a: Any, b: Any) -> tuple[CompareRequest, tuple[int, int, int]]:
        height, width = parse_size(self.size)
        asked = engine.preset.request(prompt="-", seed=self.seed, frames=self.frames, height=height, width=width)
        latents = RandomLatents(asked.seed, asked.frames, height, width)
        shape = (latent_frames(asked.frames), height // SPATIAL_FACTOR, width // SPATIAL_FACTOR)
        return CompareRequest(latents, a, b, None, f"random latents, seed {asked.seed}"), shape

    def _file(self, outputs: Path) -> tuple[Path, str]:
        if self.source == "file":
            if not self.file:
                raise RequestError("Choose a file of latents first, such as latents.safetensors of a job.")
            return Path(self.file), Path(self.file).name
        if self.source != "job":
            raise RequestError(
                f"source = {shown(self.source)} is not known; choose one of {', '.join(SOURCES.values())}."
            )
        known = dict((value, label) for label, value in saved_videos(outputs, None))
        if not isinstance(self.job, str) or self.job not in known:
            raise RequestError("Choose a video that was made here; its latents must still be in the outputs folder.")
        return outputs / self.job / LATENTS, known[self.job]

    def _length(self) -> int:
        frames = self.frames
        if isinstance(frames, bool) or not isinstance(frames, (int, float)) or not 1 <= frames < 1e6:
            raise RequestError(f"frames = {shown(frames)} must be a number of frames, 4n + 1.")
        return int(frames)


def saved_videos(outputs: Path, limit: int | None = LISTED) -> list[tuple[str, str]]:
    """Label and job id of what has latents in the outputs folder, the newest first."""
    found = (path.parent for path in outputs.glob(f"*/{LATENTS}") if JOB_ID.fullmatch(path.parent.name))
    folders = sorted(found, key=lambda folder: folder.name, reverse=True)
    return [(_label(folder), folder.name) for folder in folders[:limit]]


def _label(folder: Path) -> str:
    try:
        request = read_json(folder / "request.json") or {}
        prompt, seed, frames = str(request["prompt"]), request["seed"], request["frames"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
    short = prompt if len(prompt) <= LABEL_LENGTH else prompt[: LABEL_LENGTH - 1] + "…"
    return f"{short or 'without words'} ({frames} frames, seed {seed})"


def has_kernel(options: Sequence[Option]) -> bool:
    """Whether a decoder made for this kind of machine is here, besides those that run anywhere."""
    return any(option.settings.path not in ("plain", "reference") for option in options)


def start_form(engine: Engine) -> CompareForm:
    """What the tab begins with: the decoder that videos get, against the fp32 reference."""
    preset, options = engine.preset, engine.decoders()
    names = [option.value for option in options]
    reference = "reference:fp32" if "reference:fp32" in names else names[-1]
    # The reference takes its time, and without a kernel so does the other side.
    frames = min(preset.defaults.frames, FRAMES if has_kernel(options) else FRAMES_SLOW)
    size, seed = size_value(preset.defaults), preset.defaults.seed or 0
    return CompareForm("random", None, None, seed, size, frames, BEST, reference)


def fields_of(engine: Engine, request: CompareRequest, outputs: Path) -> dict[str, Any]:
    """The fields that say what a comparison was asked for, by name, as far as the form can say it: a file that was
    uploaded is not there any more."""
    menu = [value for _, value in decoder_menu(engine)]
    sides = {name: Option(getattr(request, name), "").value for name in SIDES}
    fields: dict[str, Any] = {name: value for name, value in sides.items() if value in menu}
    latents = request.latents
    if isinstance(latents, RandomLatents):
        fields |= {"source": "random", "seed": latents.seed, "frames": latents.frames}
        size = size_value(latents)
        return fields | ({"size": size} if size in [value for _, value in random_sizes(engine)] else {})
    if latents.parent.parent == outputs and latents.name == LATENTS:
        fields |= {"source": "job", "job": latents.parent.name}
    return fields | ({"frames": request.frames} if request.frames else {})


def random_sizes(engine: Engine) -> list[tuple[str, str]]:
    """The menu of sizes, with the one that the tab begins with."""
    sizes, start = size_menu(engine.preset), size_value(engine.preset.defaults)
    return sizes if start in [value for _, value in sizes] else [*sizes, (start, start)]


def decoder_menu(engine: Engine) -> list[tuple[str, str]]:
    """What the menus of both sides show and what it means; the first is what videos are decoded with."""
    several = any(option.settings.devices == "one" for option in engine.decoders())

    def words(settings: DecodeSettings) -> str:
        path, precision, devices = engine.decoder(settings)
        on = f", {devices} devices" if devices > 1 else ", one device" if several else ""
        return f"{path}, {precision}{on}"

    return [
        (f"best here ({words(parse_side(BEST))})", BEST),
        *((words(option.settings), option.value) for option in engine.decoders()),
    ]


def decoder_paths(engine: Engine) -> list[str]:
    """The paths that this machine has, for a menu of paths alone."""
    return list(dict.fromkeys(["auto", engine.preset.decode.path, *(o.settings.path for o in engine.decoders())]))
