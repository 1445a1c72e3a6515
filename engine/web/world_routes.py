"""`/chain/<job>.mp4`, a video with those that led to it; `/last/<job>.png`, the frame to go on from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, HTTPException
from fastapi.responses import FileResponse, PlainTextResponse, Response

from engine.chain import chain_file, forget_chains, join, lineage
from engine.errors import MediaError
from engine.job import JobState
from engine.record import LAST_FRAME
from engine.web import words
from engine.web.routes import NO_JOB, own_file

FindJob = Callable[[str], JobState | None]


def world_router(find: FindJob) -> APIRouter:
    """find: a video's snapshot by the job's id, None if there is none."""
    router = APIRouter()
    # A browser asks for parts of one video in several requests at once; it is joined by the first of them.
    joining = threading.Lock()

    @router.get("/chain/{job}.mp4")
    def chain(job: str, download: bool = False) -> Response:
        states = lineage(find, job)
        if not states:
            raise HTTPException(404, NO_JOB)
        try:
            with joining:
                path = _joined(states)
        except MediaError as error:
            return PlainTextResponse(str(error), 500)
        disposition = "attachment" if download else "inline"
        name = words.file_name(states[-1].request)
        return FileResponse(path, media_type="video/mp4", filename=name, content_disposition_type=disposition)

    @router.get("/last/{job}.png")
    def last(job: str) -> FileResponse:
        state = find(job)
        if state is None:
            raise HTTPException(404, NO_JOB)
        path = own_file(state, state.folder / LAST_FRAME, "This job has no last frame, or not yet.")
        return FileResponse(path, media_type="image/png")

    return router


def _joined(states: list[JobState]) -> Path:
    """The chain's file, made when it is first asked for; none of the videos of a chain changes any more."""
    forget_chains(states)
    videos = [own_file(state, state.video) for state in states]
    if len(states) == 1:
        return videos[0]
    path = chain_file(states)
    return own_file(states[-1], path if path.is_file() else join(videos, path))
