"""`/compare/<job>...`: figures, both videos, single frames and differences of a comparison."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from PIL import Image

from engine.compare import amplified, read_frame
from engine.errors import MediaError
from engine.job import CompareState
from engine.sides import RAW_NAME, SIDES
from engine.video import FINAL_NAME
from engine.web.routes import own_file

FindComparison = Callable[[str], CompareState | None]
NO_COMPARISON = "There is no such comparison here. It may have been deleted."
# Frames of a job never change.
CACHED = {"Cache-Control": "private, max-age=3600"}


def compare_router(find: FindComparison) -> APIRouter:
    """find: a comparison's snapshot by the job's id, None if there is none."""
    router = APIRouter(prefix="/compare")

    @router.get("/{job}.json")
    def figures(job: str, download: bool = False) -> JSONResponse:
        state = _state(find, job)
        if state.result is None:
            raise HTTPException(404, "This comparison has no figures, or not yet.")
        name = {"Content-Disposition": f'attachment; filename="compare-{state.id}.json"'}
        return JSONResponse(state.result, headers=name if download else None)

    @router.get("/{job}/{side}.mp4")
    def video(job: str, side: str) -> FileResponse:
        state = _state(find, job)
        path = own_file(state, _side(state, side) / FINAL_NAME, "This side has no video, or not yet.")
        return FileResponse(path, media_type="video/mp4")

    @router.get("/{job}/difference/{frame}.png")
    def difference(job: str, frame: int, gain: Annotated[float, Query(ge=1, le=255)] = 16) -> Response:
        state = _state(find, job)
        return _png(lambda: amplified(*(read_frame(_raw(state, side), frame) for side in SIDES), gain))

    @router.get("/{job}/{side}/{frame}.png")
    def still(job: str, side: str, frame: int) -> Response:
        path = _raw(_state(find, job), side)
        return _png(lambda: read_frame(path, frame))

    return router


def _state(find: FindComparison, job: str) -> CompareState:
    # The id is only ever a key among the jobs that are known; paths come from the job's own state.
    state = find(job)
    if state is None:
        raise HTTPException(404, NO_COMPARISON)
    return state


def _side(state: CompareState, side: str) -> Path:
    if side not in SIDES:
        raise HTTPException(404, "A comparison has the sides a and b.")
    return state.folder / side


def _raw(state: CompareState, side: str) -> Path:
    return own_file(state, _side(state, side) / RAW_NAME, "The raw frames of this comparison are not there any more.")


def _png(frame: Callable[[], np.ndarray]) -> Response:
    try:
        picture = frame()
    except MediaError as error:
        return PlainTextResponse(str(error), 404)
    data = io.BytesIO()
    Image.fromarray(picture).save(data, format="PNG", compress_level=1)
    return Response(data.getvalue(), media_type="image/png", headers=CACHED)
