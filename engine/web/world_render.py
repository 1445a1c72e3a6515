"""The World tab as fragments of HTML: what was seen so far, and what may come. Every text is escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from engine.estimate import Estimate
from engine.job import JobState
from engine.request import Request
from engine.web import render, words

LETTERS = "ABCD"
START = (
    '<div class="world-empty"><p class="big">Look, act, look again</p><p>Begin with a picture or with the end of a '
    "video made here. Write down up to four things that could happen next, and see each of them. Then choose the one "
    "to go on from.</p></div>"
)
LOST = (
    '<p class="message">A video that this place names is not known here. It may have been deleted, by somebody or to '
    "make room.</p>"
)


def story(chain: Sequence[JobState], fps: int) -> str:
    """What was seen so far as one video, its last frame on the screen; chain: the oldest first."""
    if not chain:
        return START
    last = chain[-1]
    address = f"chain/{last.id}.mp4" if len(chain) > 1 else f"video/{last.id}.mp4"
    frames = sum(state.stats.get("frames") or state.request.frames for state in chain) - len(chain) + 1
    request = last.request
    told = "".join(f"<li>{escape(state.request.prompt or 'From a picture')}</li>" for state in chain)
    name = escape(words.file_name(request))
    return (
        f'<live-video final="{address}" width="{request.width}" height="{request.height}" frames="{frames}" '
        f'fps="{fps}" style="--ratio: {request.width} / {request.height}" poster="last/{last.id}.png" '
        f'label="What was seen so far"></live-video><ol class="told">{told}</ol>'
        f'<p class="actions"><a class="button" href="{address}?download=1" download="{name}">Download '
        f"{'the chain as one video' if len(chain) > 1 else 'the video'}</a></p>"
    )


def seen(state: JobState | None, steps: int) -> str:
    """The picture that the next video begins with. steps: videos so far."""
    if state is None:
        return '<p class="seen">Nothing is chosen yet: give a picture, or choose a video, also one made here.</p>'
    count = words.counted(steps, "video")
    return (
        f'<figure class="seen"><img src="last/{state.id}.png" alt="The last frame of the video so far">'
        f"<figcaption>This is seen now, after {count}. What happens next?</figcaption></figure>"
    )


def candidates(states: Sequence[JobState], fps: int, found_again: bool = True) -> str:
    """The videos that are being made, each in its place; in step with each other once all are over.

    found_again: as of `render.player`."""
    if not states:
        return ""
    videos = [state for state in states if state.video]
    if len(videos) > 1 and all(state.over for state in states):
        return _together(videos, fps)
    cells = "".join(_cell(state, letter, fps, found_again) for state, letter in zip(states, LETTERS, strict=False))
    return f'<div class="cells{" one" if len(states) == 1 else ""}">{cells}</div>'


def _cell(state: JobState, letter: str, fps: int, found_again: bool) -> str:
    poster = (state.folder / "thumbnail.jpg").is_file()
    return (
        f'<figure class="cell">{render.player(state, fps, poster, found_again)}<figcaption><b>{letter}</b> '
        f'{escape(state.request.prompt)}<span class="now {state.status}">{escape(render.sentence(state, fps))}</span>'
        "</figcaption></figure>"
    )


def _together(videos: Sequence[JobState], fps: int) -> str:
    request = videos[0].request
    frames = min(state.stats.get("frames") or state.request.frames for state in videos)
    sources = " ".join(f"video/{state.id}.mp4" for state in videos)
    labels = escape(json.dumps([state.request.prompt for state in videos]))
    return (
        f'<video-grid videos="{sources}" labels="{labels}" frames="{frames}" fps="{fps}" width="{request.width}" '
        f'height="{request.height}"></video-grid>'
    )


def messages(states: Sequence[JobState], lost: bool = False) -> str:
    """Warnings and errors of the candidates; one that several share is said once. lost: something is not known."""
    warnings = dict.fromkeys(text for state in states for text in state.warnings)
    errors = dict.fromkeys(state.error for state in states if state.status == "failed" and state.error)
    return (LOST if lost else "") + render.messages(warnings) + "".join(render.refusal(text) for text in errors)


def plan(requests: Sequence[Request], fps: int, estimate: Estimate | None) -> str:
    """What a click would start. estimate: of one of them."""
    count = f"{words.counted(len(requests), 'video')} of {words.counted(requests[0].frames, 'frame')}"
    if estimate is None:
        return f'<p class="plan">{count}. {render.UNMEASURED}</p>'
    each = " each, one after the other" if len(requests) > 1 else ""
    takes = f"<strong>Takes about {words.roughly(estimate.total)}</strong>{each}."
    return f'<p class="plan">{count}. {takes}{render.memory(estimate)}</p>'
