"""Settings from a file: an mp4 that was made here, or JSON as the page copies it and jobs keep it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import MediaError, RequestError
from engine.preset import Preset
from engine.request import Request, check
from engine.settings import DecodeSettings, DenoiseSettings
from engine.video import read_settings

KINDS = [".mp4", ".json"]
LARGEST_JSON = 2**20
SETTINGS = {"denoise": DenoiseSettings, "decode": DecodeSettings}


def read_settings_file(path: Path, preset: Preset) -> Request:
    """The request that a file tells of; of its first frame there is only the name.

    Raises RequestError, with the file by its name, if it is another kind of file, holds no settings, or asks for what
    the preset does not do.
    """
    try:
        values = read_settings(path) if path.suffix.lower() == ".mp4" else _read_json(path)
    except MediaError as error:
        # ffmpeg names the path, which is the server's affair.
        raise RequestError(str(error).replace(str(path), path.name)) from error
    return check_settings(Request.from_json(_request(values, path.name)), preset)


def check_settings(request: Request, preset: Preset) -> Request:
    """The same settings, if this preset can be asked for them. Raises RequestError with the reason."""
    try:
        check(dataclasses.replace(request, image=None), preset.limits)
    except RequestError as error:
        other = f" They were made with the preset {request.preset}." if request.preset != preset.name else ""
        raise RequestError(f"These settings can't be used with the preset {preset.name}: {error}{other}") from error
    return request


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise RequestError(f"{path.name} is too large for settings. Give the JSON that the page copies.")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path.name} is no JSON that can be read ({error}). Give an mp4 or JSON.") from error


def _request(values: Any, name: str) -> dict[str, Any]:
    """The fields of a request among what a file holds; what it says besides is how it went."""
    if isinstance(values, Mapping) and isinstance(values.get("request"), Mapping):
        values = values["request"]
    if not isinstance(values, Mapping) or "prompt" not in values:
        raise RequestError(f"{name} holds no settings of a video. Give a video that was made here, or its settings.")
    kept = {field.name: values[field.name] for field in dataclasses.fields(Request) if field.name in values}
    for key, kind in SETTINGS.items():
        if isinstance(kept.get(key), Mapping):
            known = {field.name for field in dataclasses.fields(kind)}
            kept[key] = {name: value for name, value in kept[key].items() if name in known}
    return kept
