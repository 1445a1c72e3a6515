"""The route that serves a job's mp4 while it grows."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from engine.web.routes import is_inside

POLL_SECONDS = 0.1
READ_BYTES = 256 * 1024
JOB_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
# X-Accel-Buffering: a proxy such as nginx would otherwise collect the body before it passes it on.
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class LiveSource:
    """A file that may still grow. path: need not exist yet; finished: whether it grows no more, asked often."""

    path: Path
    finished: Callable[[], bool]


def live_router(find_job: Callable[[str], LiveSource | None]) -> APIRouter:
    """`/live/<job>.mp4`. find_job: the source of a job's id, None if there is no such job.

    Answers 200 with the file from its beginning, or from byte `from` to go on after a lost connection, and ends when
    the file grows no more; 202 while there is nothing to send yet: ask again in a second; 404 for an unknown job and
    for one that ended without a live file; 416 for a `from` behind the end. All but 200 carry a sentence for people.
    """
    router = APIRouter()

    @router.get("/live/{job}.mp4")
    async def live(job: str, request: Request) -> Response:
        # The id is only ever a key among the jobs that are known; paths come from the job itself.
        source = find_job(job) if JOB_NAME.fullmatch(job) else None
        if source is None:
            return _say(404, "There is no such job here. It may have been deleted.")
        return _answer(source, request)

    return router


def _answer(source: LiveSource, request: Request) -> Response:
    over = source.finished()
    try:
        file = _open(source.path)
    except OSError:
        if over:
            return _say(404, "This job ended without a live video.")
        return _say(202, "Decoding has not begun yet.", {"Retry-After": "1"})
    start = request.query_params.get("from", "0")
    if not re.fullmatch(r"[0-9]{1,15}", start) or int(start) > file.seek(0, 2):
        file.close()
        return _say(416, f"The live video has no byte {start}. Start again from its beginning.")
    file.seek(int(start))
    return StreamingResponse(_grow(file, source, request), media_type="video/mp4", headers=HEADERS)


def _open(path: Path) -> FileIO:
    if not is_inside(path.parent, path):
        raise OSError(f"{path} leads out of its folder")
    return FileIO(path)


async def _grow(file: FileIO, source: LiveSource, request: Request) -> AsyncIterator[bytes]:
    """What is in the file and what is added to it, until it grows no more or the client has gone."""
    with file:
        while True:
            # Asked before reading: what was added in between is then read in the next round.
            over = source.finished()
            data = await anyio.to_thread.run_sync(file.read, READ_BYTES)
            if data:
                yield data
            elif over or await request.is_disconnected():
                return
            else:
                await anyio.sleep(POLL_SECONDS)


def _say(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(text, status, {"Cache-Control": "no-store"} | (headers or {}))
