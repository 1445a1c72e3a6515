"""What is written down about a job: its folder, its request, its figures."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from engine import disk
from engine.denoise import Step
from engine.errors import MediaError, RequestError, ResourceError
from engine.preset import Fidelity
from engine.request import Request
from engine.settings import DecodeSettings
from engine.shapes import SPATIAL_FACTOR, video_frames
from engine.step_cache import POLICIES
from engine.video import thumbnail

log = logging.getLogger(__name__)

IMAGE_NAME, LATENTS_NAME, STATS_NAME = "image.png", "latents.safetensors", "stats.json"
LAST_FRAME = "last.png"


def prepare_folder(folder: Path, request: Request, image: Image.Image | None) -> None:
    """Make the job's folder, write its request and first frame there.

    Raises ResourceError if the disk is too full or the folder can't be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = request.frames, request.height, request.width
        disk.require(folder, disk.video(*size) + disk.latents(*size), "This video")
        request = keep_image(folder, request, image)
        _replace(folder / "request.json", request.to_json())
    except OSError as error:
        raise ResourceError(
            f"The output folder {folder} can't be written to ({error}). Make it writable, or choose another one "
            "(ENGINE_OUTPUTS)."
        ) from error


def keep_image(folder: Path, request: Request, image: Image.Image | None) -> Request:
    """Write the opened first frame into the job's folder; returns the request with it."""
    kept = folder / IMAGE_NAME
    if image is not None and request.image != kept:
        image.save(kept)
    return dataclasses.replace(request, image=kept if image is not None else None)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON table, None if there is none. Raises ValueError if it is broken, nested too deep or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds no table")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON under a temporary name, then rename, so that a reader never sees half of it.

    Raises ResourceError with the path if it can't be written.
    """
    try:
        _replace(path, values)
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"{path} could not be written ({error}). Free some disk space, or choose another output folder."
    )


def _replace(path: Path, values: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def keep_thumbnail(folder: Path, frames: Any, written: int, total: int) -> None:
    """Write thumbnail.jpg of the first chunk, and once more when the middle of the video has come. frames: uint8
    [t, height, width, 3], the newest ones; written: frames so far; total: frames of the whole video.

    One that can't be written is only logged: a video is worth more than its thumbnail.
    """
    middle = total // 2 - (written - len(frames))
    if written == len(frames) or 0 <= middle < len(frames):
        path = folder / "thumbnail.jpg"
        try:
            thumbnail(frames[min(max(middle, 0), len(frames) - 1)], path)
        except (OSError, MediaError) as error:
            log.warning("%s could not be written: %s", path, error)
            with suppress(OSError):
                path.with_name(path.name + ".part").unlink()


def keep_last_frame(folder: Path, frame: Any) -> None:
    """Write last.png, a frame uint8 [height, width, 3] as it was decoded: what goes on from here begins with it.

    Raises ResourceError with the path if it can't be written.
    """
    path = folder / LAST_FRAME
    part = path.with_name(path.name + ".part")
    try:
        Image.fromarray(frame).save(part, format="PNG", compress_level=1)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise _unwritten(path, error) from error


def keep_figures(folder: Path, summary: dict[str, Any]) -> None:
    """Write stats.json of a job that is cut short, unless it has one of its video. One that can't be written is only
    logged: the reason why the job ended matters more."""
    path = folder / STATS_NAME
    if not path.exists():
        try:
            write_json(path, summary)
        except ResourceError as error:
            log.warning("%s", error)


def video_size(latents: torch.Tensor) -> tuple[int, int, int]:
    """Height, width and frames that latents [1, 48, F, h, w] decode to."""
    _, _, frames, height, width = latents.shape
    return height * SPATIAL_FACTOR, width * SPATIAL_FACTOR, video_frames(frames)


def decode_notes(metadata: Mapping[str, str], settings: DecodeSettings) -> dict[str, Any]:
    """The notes of a job that decodes saved latents: what their file says of them, decoded by `settings` now."""
    request = saved_request(metadata)
    made = {"request": request.to_json() | {"decode": dataclasses.asdict(settings)}} if request else {}
    return made | {"latents_sha256": metadata.get("sha256"), "latents": dict(metadata)}


def saved_request(metadata: Mapping[str, str]) -> Request | None:
    """The request that latents were made for, as `tags` kept it in their file; None if it holds none that is known."""
    try:
        return Request.from_json(json.loads(metadata["request"]))
    except (KeyError, ValueError, RecursionError, RequestError):
        return None


def tags(notes: dict[str, Any]) -> dict[str, str]:
    """A job's notes as the string map that a safetensors file can hold."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in notes.items()}


def step_cache(quality: str, step: Step, fidelity: Fidelity | None) -> dict[str, Any]:
    """What the step cache did in a run that ended with `step`; nothing for "full", which has none.

    psnr: decibels of the final latents against full as measured for this model, None where it was not."""
    if quality not in POLICIES:
        return {}
    figures = {"passes": step.passes, "skipped": step.recalled, "share": step.recalled / step.passes}
    policy = {"quality": quality, "threshold": POLICIES[quality].threshold}
    return {"step_cache": policy | figures | {"psnr": getattr(fidelity, quality, None)}}


def metadata(notes: dict[str, Any]) -> dict[str, Any]:
    """What the mp4 itself says of how it was made. Paths of this machine stay out of it."""
    kept = {key: value for key, value in notes.items() if key != "checkpoint"}
    request = dict(kept.get("request") or {})
    if request.get("image"):
        request["image"] = Path(request["image"]).name
    return kept | {"request": request}


def stats(notes: dict[str, Any], summary: dict[str, Any], video: Path) -> dict[str, Any]:
    """The figures of a finished job: notes, telemetry, and the speeds that follow from them."""
    seconds = {stage["name"]: stage["seconds"] for stage in summary["stages"]}
    steps = (notes.get("request") or {}).get("steps")
    speeds = {
        "seconds_per_step": seconds["denoise"] / steps if "denoise" in seconds else None,
        "decode_frames_per_second": notes["frames"] / max(seconds["decode"], 1e-9),
    }
    return notes | summary | speeds | {"file_bytes": video.stat().st_size}
