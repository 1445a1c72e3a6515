"""Saved latents to decode again: a file, or those of a job, as a request that is checked and can wait in a queue."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine.errors import RequestError
from engine.job import DecodeRequest, JobState
from engine.latents import SavedLatents, load_latents
from engine.preset import Preset
from engine.record import saved_request
from engine.request import Request, check
from engine.settings import DecodeSettings


def of_job(state: JobState | None, settings: DecodeSettings) -> DecodeRequest:
    """Decode what a job made. Raises RequestError if it is not over, or if its latents are not there or broken."""
    if state is None:
        raise RequestError("The video to decode again is not known here. It may have been deleted.")
    if not state.over:
        raise RequestError(f"The video {state.id} is still being made. Wait for its end, or stop it.")
    if not state.latents.is_file():
        raise RequestError(
            f"The video {state.id} has no latents here: it ended before they were made, or they were deleted. Make it "
            "again."
        )
    load_latents(state.latents)
    return DecodeRequest(
        state.latents, dataclasses.replace(state.request, decode=settings), source=state.latents.parent.name
    )


def of_file(latents: Path, settings: DecodeSettings, preset: Preset) -> DecodeRequest:
    """Decode a file from elsewhere. Raises RequestError for one that can't be decoded or is larger than the preset
    allows."""
    saved = load_latents(latents)
    height, width = saved.size
    asked = preset.request(prompt="", height=height, width=width, frames=saved.frames, decode=settings)
    return DecodeRequest(latents, _made_for(saved, asked, preset))


def _made_for(saved: SavedLatents, asked: Request, preset: Preset) -> Request:
    """What the file says of how its latents were made, where it says so; what they are now is what `asked` says."""
    made = saved_request(saved.metadata)
    if made is None:
        return asked
    now = {name: getattr(asked, name) for name in ("height", "width", "frames", "decode")}
    return check(dataclasses.replace(made, image=None, **now), preset.limits)
