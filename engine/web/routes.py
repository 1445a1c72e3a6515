"""What the server answers besides the page: health, the page's own files, and the files of a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, HTTPException
from fastapi.responses import FileResponse, JSONResponse, Response

from engine.job import Job, JobState
from engine.readiness import Readiness
from engine.web import words

FindJob = Callable[[str], JobState | None]
HERE = Path(__file__).resolve().parent
# A closed list: a name from an address never becomes a path.
ASSETS = {
    "style.css": "text/css",
    "page.js": "text/javascript",
    "player.css": "text/css",
    "player.js": "text/javascript",
    "clock.js": "text/javascript",
    "compare_tab.css": "text/css",
    "compare.css": "text/css",
    "compare.js": "text/javascript",
    "world.css": "text/css",
    "history.css": "text/css",
    "grid.css": "text/css",
    "grid.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
NO_JOB = "There is no such job here. It may have been deleted."

NO_FILE = "This job has no such file, or not yet."


def health_router(readiness: Callable[[], Readiness]) -> APIRouter:
    """`/healthz`: the server answers; `/readyz`: 200 once the model is in memory, 503 before, with the reason."""
    router = APIRouter()

    @router.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    def readyz() -> JSONResponse:
        now = readiness()
        return JSONResponse(
            {"state": now.state, "text": now.text, "done": now.done, "total": now.total},
            status_code=200 if now.state == "ready" else 503,
        )

    return router


def asset_router() -> APIRouter:
    """`/web/<name>`: scripts and styles of the page."""
    router = APIRouter()

    @router.get("/web/{name}")
    def asset(name: str) -> FileResponse:
        path = HERE / name
        if name not in ASSETS or not path.is_file():
            raise HTTPException(404, "The page has no such file.")
        # Revalidated each time, so that a new version of the page never meets an old script.
        return FileResponse(path, media_type=ASSETS[name], headers={"Cache-Control": "no-cache"})

    return router


def video_router(find_job: FindJob) -> APIRouter:
    """`/video/<job>.mp4` with ranges, `?download=1` to save it under a readable name; `/thumbnail/<job>.jpg`;
    `/preview/<job>.webp`, the newest."""
    router = APIRouter()

    @router.get("/video/{job}.mp4")
    def video(job: str, download: bool = False) -> FileResponse:
        state = _find(find_job, job)
        disposition = "attachment" if download else "inline"
        return _file(own_file(state, state.video), "video/mp4", words.file_name(state.request), disposition)

    @router.get("/thumbnail/{job}.jpg")
    def thumbnail(job: str) -> FileResponse:
        state = _find(find_job, job)
        return _file(own_file(state, state.folder / "thumbnail.jpg"), "image/jpeg", f"{job}.jpg", "inline")

    @router.get("/preview/{job}.webp")
    def preview(job: str) -> Response:
        state = _find(find_job, job)
        try:
            # Read at once, since a newer one may take its place at any moment.
            return Response(own_file(state, state.preview).read_bytes(), media_type="image/webp")
        except OSError as error:
            raise HTTPException(404, NO_FILE) from error

    return router


def _find(find_job: FindJob, job: str) -> JobState:
    # The id is only ever a key among the jobs that are known; paths come from the job's own state.
    state = find_job(job)
    if state is None:
        raise HTTPException(404, NO_JOB)
    return state


def own_file(job: Job, path: Path | None, missing: str = NO_FILE) -> Path:
    """The path of a file that lies in the job's folder. Raises HTTPException 404, with what is missing in words, where
    there is none, and for a link that leads out of the folder."""
    if path is None or not path.is_file() or not is_inside(job.folder, path):
        raise HTTPException(404, missing)
    return path


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path, with every link followed, leads to what lies below the folder."""
    return path.resolve().is_relative_to(folder.resolve())


def _file(path: Path, kind: str, name: str, disposition: str) -> FileResponse:
    return FileResponse(path, media_type=kind, filename=name, content_disposition_type=disposition)
