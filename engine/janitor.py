"""What goes when there is too much: limits on the outputs folder, and what crashes left behind.

Everything that is removed is named in the log. A job that waits, runs or has just ended is never touched.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from engine import disk
from engine.errors import RequestError
from engine.guardrail import HIDDEN
from engine.job import CompareState, DecodeState, Job, JobState
from engine.job_id import JOB_ID
from engine.latents import saved_shape
from engine.sides import FLOAT_NAME, RAW_NAME, SIDES, RandomLatents, drop_raw
from engine.store import DELETED, RECORD_NAME
from engine.video import FINAL_NAME, LIVE_NAME

log = logging.getLogger(__name__)

# Pages still play what ended a moment ago.
GRACE_SECONDS = 60.0
DAY = 86_400.0
# Raw frames are large (3 bytes a pixel and side): only the newest comparisons keep them.
RAW_KEPT = 4


@dataclass(frozen=True)
class Keep:
    """How much the outputs folder holds before the oldest goes; 0 means no limit. jobs: videos and comparisons; days:
    since they were asked for, by `calendar`; gib: of all their files, latents included."""

    jobs: float = 200
    days: float = 30
    gib: float = 20

    @classmethod
    def from_environment(cls) -> Keep:
        """ENGINE_KEEP_JOBS, ENGINE_KEEP_DAYS and ENGINE_KEEP_GIB where they are set. Raises RequestError for what is no
        number from 0 on."""
        names = {field.name: f"ENGINE_KEEP_{field.name.upper()}" for field in fields(cls)}
        return cls(**{name: _number(key, os.environ[key]) for name, key in names.items() if os.environ.get(key)})


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise RequestError(f"{name} = {text!r} must be a number from 0 on; 0 means no limit.")
    return value


def calendar(jobs: Iterable[Job]) -> Callable[[], float]:
    """A clock for the age of jobs, in seconds since 1970. It starts with the machine's, but at most a day after the
    newest job was asked for, and goes on by itself: a clock that is set far ahead by mistake makes nothing old, and
    the days for which a server was off count as one."""
    now, began = time.time(), time.monotonic()
    start = min(now, max((job.created + DAY for job in jobs), default=now))
    return lambda: start + time.monotonic() - began


def too_many(
    jobs: Sequence[Job], sizes: Mapping[str, int], keep: Keep, safe: Iterable[str] = (), now: float | None = None
) -> dict[str, str]:
    """Ids of the jobs that go, the oldest first, with the reason. sizes: bytes by id; safe: ids that stay; now: of
    `calendar`, None for the machine's clock."""
    safe, now = set(safe), time.time() if now is None else now
    count, total, doomed = len(jobs), sum(sizes.values()), {}
    for job in sorted(jobs, key=lambda job: job.created):
        age = (now - job.created) / DAY
        if keep.days and age > keep.days:
            reason = f"it is {age:.0f} days old, and {keep.days:g} are kept"
        elif keep.jobs and count > keep.jobs:
            reason = f"there are {count} jobs, and {keep.jobs:g} are kept"
        elif keep.gib and total > keep.gib * 2**30:
            reason = f"all jobs have {total / 2**30:.1f} GiB, and {keep.gib:g} are kept"
        else:
            break
        if job.id not in safe:
            doomed[job.id] = reason
            count, total = count - 1, total - sizes.get(job.id, 0)
    return doomed


def is_fresh(job: Job) -> bool:
    """Whether somebody may still be looking at what was just made."""
    return not job.over or (job.ended is not None and time.time() - job.ended < GRACE_SECONDS)


def needs(jobs: Iterable[Job]) -> set[str]:
    """Ids of the jobs whose files are still to be read by others that wait or run."""
    found = set()
    for job in jobs:
        if not job.over and isinstance(job, DecodeState) and job.source:
            found.add(job.source)
        if not job.over and isinstance(job, CompareState) and isinstance(job.request.latents, Path):
            found.add(job.request.latents.parent.name)
    return found


def room(job: Job) -> int:
    """Bytes of disk that a job may need. Raises RequestError for latents that can't be read."""
    if isinstance(job, CompareState):
        return disk.comparison(*_compared(job))
    size = job.request.frames, job.request.height, job.request.width
    again = isinstance(job, DecodeState) and job.source
    return disk.video(*size) + (0 if again else disk.latents(*size))


def _compared(job: CompareState) -> tuple[int, int, int]:
    """Frames, height and width of a comparison."""
    latents, frames = job.request.latents, job.request.frames
    if isinstance(latents, RandomLatents):
        return latents.frames, latents.height, latents.width
    whole, height, width = saved_shape(latents)
    return frames or whole, height, width


def clear(outputs: Path, known: Iterable[str]) -> None:
    """Remove what a server that was killed left behind: halves of deletions, what the guardrail had not passed, and
    files of unfinished work in folders without a job. known: ids of the jobs. Only by the server that has the folder's
    lock, and before it takes jobs: the folder of a new one is empty at first."""
    halves = [half for half in outputs.glob(f"*{DELETED}") if JOB_ID.fullmatch(half.name.removesuffix(DELETED))]
    for left in (*halves, *outputs.glob(f"{HIDDEN}*")):
        log.info("removing %s, which was at work when the server ended", left)
        shutil.rmtree(left, ignore_errors=True)
    _remove(_orphans(outputs, set(known)))


def sweep(jobs: Sequence[Job]) -> None:
    """Remove what is of no use in the folders of jobs that are over: temporary files, live files of whole videos, raw
    frames of comparisons that are old or broke off."""
    over = [job for job in jobs if job.over]
    _remove(path for job in over for path in _leftovers(job))
    compared = [job for job in over if isinstance(job, CompareState)]
    for job in sorted(compared, key=lambda job: job.created)[:-RAW_KEPT]:
        drop_raw(job.folder)


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        log.info("removing %s, which is of no use any more", path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s can't be removed: %s", path, error)


def _leftovers(job: Job) -> Iterator[Path]:
    # Pages may be writing under such names: chains of videos are joined when they are asked for.
    yield from (path for path in job.folder.rglob("*.part") if time.time() - path.stat().st_mtime > GRACE_SECONDS)
    if isinstance(job, JobState) and (job.folder / FINAL_NAME).is_file() and not is_fresh(job):
        yield from job.folder.glob(LIVE_NAME)
    if isinstance(job, CompareState):
        yield from job.folder.glob(FLOAT_NAME)
    if isinstance(job, CompareState) and job.result is None:
        yield from (path for side in SIDES for path in (job.folder / side).glob(RAW_NAME))


def _orphans(outputs: Path, known: set[str]) -> Iterator[Path]:
    for folder in outputs.iterdir():
        strange = not JOB_ID.fullmatch(folder.name) or folder.name in known or folder.is_symlink()
        if not strange and not (folder / RECORD_NAME).exists():
            for name in ("*.part", LIVE_NAME, FLOAT_NAME, *(f"{side}/{RAW_NAME}" for side in SIDES)):
                yield from folder.glob(name)
