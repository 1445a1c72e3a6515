"""Videos that go on from one another: the last frame of one is where the next begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from engine import ffmpeg
from engine.errors import MediaError, RequestError
from engine.job import JobState
from engine.record import LAST_FRAME
from engine.video import FINAL, TO_BT709_TAGS, X264, probe

LONGEST = 32
MAX_BRANCHES = 4
# A chain is encoded again as a whole: a minute, and a second for every two million pixels, is far more than it takes.
PIXELS_A_SECOND = 2e6


def observation(state: JobState | None) -> Path:
    """The picture to go on from: the last frame of a video, as it was decoded. RequestError where there is none."""
    if state is None:
        raise RequestError("The video to go on from is not known here any more. Choose another one, or a picture.")
    path = state.folder / LAST_FRAME
    if not state.over or not path.is_file():
        raise RequestError(f"The video {state.id} has no last frame yet. Wait for its end, or choose another one.")
    return path


def lineage(find: Callable[[str], JobState | None], job: str) -> list[JobState]:
    """The videos that led to this one, the oldest first and this one last; it begins later where one was deleted."""
    found: list[JobState] = []
    name: str | None = job
    while name and len(found) < LONGEST and name not in [state.id for state in found]:
        state = find(name)
        if state is None or state.video is None:
            break
        found.append(state)
        name = state.parent
    return found[::-1]


def chain_file(states: Sequence[JobState]) -> Path:
    """Where the video of a lineage is kept. The name depends on every part, since one may be deleted any time."""
    parts = hashlib.sha256("\n".join(state.id for state in states).encode())
    return states[-1].folder / f"chain-{parts.hexdigest()[:16]}.mp4"


def forget_chains(states: Sequence[JobState]) -> None:
    """Remove what was joined of another lineage than the one that leads to this video now."""
    now = chain_file(states) if len(states) > 1 else None
    for path in states[-1].folder.glob("chain*.mp4"):
        if path != now:
            path.unlink(missing_ok=True)


def join(videos: Sequence[Path], target: Path) -> Path:
    """One mp4 of several that go on from one another; the first frame of each but the first is left out, since it is
    the last of the one before. Returns target, which appears when it is whole and checked; MediaError otherwise."""
    infos = [probe(video) for video in videos]
    # Of a later video with a single frame nothing is left.
    videos = [video for k, video in enumerate(videos) if k == 0 or infos[k].frames > 1]
    sizes = {(info.height, info.width, info.fps) for info in infos}
    if len(sizes) != 1:
        raise MediaError("These videos differ in size or speed, so they can't be played as one. Download them singly.")
    frames = sum(info.frames for info in infos) - len(infos) + 1
    part = target.with_name(target.name + ".part")
    try:
        pixels = frames * infos[0].height * infos[0].width
        done = ffmpeg.run([*_arguments(videos), f"file:{part}"], seconds=60 + pixels / PIXELS_A_SECOND)
        if done.returncode:
            raise MediaError(f"The videos could not be joined: {ffmpeg.last_lines(done.stderr)}. {ffmpeg.FIX}")
        if (found := probe(part).frames) != frames:
            raise MediaError(f"The joined video has {found} frames instead of {frames}. Download the videos singly.")
        return part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _arguments(videos: Sequence[Path]) -> list[str]:
    # Only the mp4 reader, so that a file can't name other files or addresses.
    sources = [argument for video in videos for argument in ("-f", "mov", "-i", f"file:{video}")]
    first, *later = range(len(videos))
    cuts = "".join(f"[{k}:v:0]trim=start_frame=1,setpts=PTS-STARTPTS[v{k}];" for k in later)
    parts = f"[{first}:v:0]" + "".join(f"[v{k}]" for k in later)
    whole = f"{cuts}{parts}concat=n={len(videos)}:v=1,{TO_BT709_TAGS}[out]"
    return [
        "-y",
        "-loglevel",
        "warning",
        *sources,
        "-filter_complex",
        whole,
        "-map",
        "[out]",
        *X264,
        *FINAL,
        "-f",
        "mp4",
    ]
