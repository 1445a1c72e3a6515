"""Jobs on disk: what each one is, in its own folder, so that a server that starts finds what an earlier one left."""

from __future__ import annotations

import fcntl
import logging
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from engine.errors import EngineError, MediaError, ResourceError
from engine.job import KINDS, Job, JobState
from engine.job_id import JOB_ID
from engine.record import read_json, write_json
from engine.video import rescue

log = logging.getLogger(__name__)

RECORD_NAME = "job.json"
# Deleting takes time and may be cut short; what is half gone must not look like a job.
DELETED = ".part"
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, EngineError)


def lock(outputs: Path) -> BinaryIO | None:
    """Make the outputs folder this server's own until the file that is returned is closed.

    None where the file system knows no locks. Raises ResourceError if another server has it: each would take the jobs
    of the other for interrupted ones.
    """
    try:
        outputs.mkdir(parents=True, exist_ok=True)
        file = (outputs / ".lock").open("wb")
    except OSError as error:
        raise ResourceError(
            f"The outputs folder {outputs} can't be written to ({error}). Choose another one."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ResourceError(
            f"Another server uses the outputs folder {outputs}. End it, or give each its own folder (--outputs)."
        ) from error
    except OSError as error:
        log.warning("%s can't be locked (%s); start no second server on it", outputs, error)
        file.close()
        return None
    return file


def save(job: Job) -> None:
    """Write down what a job is now. Raises ResourceError if that can't be done."""
    write_json(job.folder / RECORD_NAME, job.to_json())


def load_all(outputs: Path) -> list[Job]:
    """Every job in the outputs folder, the oldest first. What was not over is marked interrupted. Folders that hold no
    job, and those whose record is damaged, are left alone with one line in the log."""
    found, strange = [], []
    for folder in sorted(path for path in outputs.iterdir() if path.is_dir() and not path.is_symlink()):
        try:
            found.append(_load(folder))
        except BROKEN as error:
            strange.append(f"{folder.name} ({type(error).__name__}: {error})")
    if strange:
        log.warning("%s holds folders that are left alone, as they are no jobs: %s", outputs, ", ".join(strange))
    return found


def _load(folder: Path) -> Job:
    if not JOB_ID.fullmatch(folder.name):
        raise ValueError("not named as a job")
    values = read_json(folder / RECORD_NAME)
    if values is None:
        raise ValueError(f"no {RECORD_NAME}")
    job = KINDS[values["kind"]].from_json(folder, values)
    if not job.over:
        _interrupt(job)
    return job


def _interrupt(job: Job) -> None:
    """The server ended before this job did: save what there is and say so."""
    began = job.started is not None
    if isinstance(job, JobState) and began and job.video is None:
        try:
            job.video = rescue(job.folder)
        except (MediaError, OSError) as error:
            log.warning("job %s: nothing of its video can be played: %s", job.id, error)
    job.partial = isinstance(job, JobState) and job.video is not None
    when = "while this was made" if began else "before this began"
    job.end("interrupted", f"The server ended {when}. {job.rest()}")
    # Nobody knows when that was.
    job.ended = job.started
    log.info("job %s was interrupted", job.id)
    try:
        save(job)
    except ResourceError as error:
        # What can be read is shown, even where nothing can be written: on a disk that is full, or may not be changed.
        log.error("job %s: %s", job.id, error)
        job.warnings.append(f"What became of this job could not be written down. {error}")


def remove(job: Job) -> None:
    """Delete a job's folder with all that is in it, and nothing else. Raises ResourceError if that can't be done."""
    doomed = job.folder.with_name(job.folder.name + DELETED)
    try:
        job.folder.replace(doomed)
        shutil.rmtree(doomed)
    except FileNotFoundError:
        log.info("the folder of job %s was gone already", job.id)
    except OSError as error:
        raise ResourceError(f"{job.folder} could not be deleted ({error}). Check its permissions.") from error


def folder_bytes(folder: Path) -> int:
    """Bytes of all files of a job."""
    return sum(_bytes(path) for path in folder.rglob("*"))


def _bytes(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        # Temporary names come and go while others look.
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
