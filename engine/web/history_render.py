"""The list of videos as HTML: a page of entries, newest first, each with what can be done with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from engine.job import DecodeState, JobState
from engine.memory import in_words
from engine.web import words

PAGE = 12
EMPTY = (
    '<div class="history-empty"><p class="big">No videos yet</p><p>Make one on the Generate tab: it will be listed '
    "here with its settings, also after the server was started again.</p></div>"
)
STATES = {
    "queued": "Waiting",
    "running": "At work",
    "finished": "",
    "stopped": "Stopped early",
    "failed": "Failed",
    "interrupted": "Interrupted",
}


@dataclass(frozen=True)
class Entry:
    """A video of the list. size: bytes of its folder."""

    state: JobState
    size: int


def listing(entries: Sequence[Entry], page: int, total: int, fps: int) -> str:
    """One page of the list. page: from 0; total: videos on all pages; fps: at which they play."""
    if not total:
        return EMPTY
    items = "".join(_entry(entry, page, fps) for entry in entries)
    return f'<ul class="entries">{items}</ul>{_pager(page, len(entries), total)}'


def _entry(entry: Entry, page: int, fps: int) -> str:
    state = entry.state
    prompt = state.request.prompt.strip() or "Without words"
    label = f'<b class="{state.status}">{STATES[state.status]}</b>' if STATES[state.status] else ""
    facts = "".join(f"<span>{escape(fact)}</span>" for fact in _facts(entry, fps))
    return (
        f'<li class="entry"><button type="button" class="still" data-event="select" data-job="{state.id}" '
        f'aria-label="Open: {escape(prompt)}">{_still(state)}</button><div>'
        f'<p class="prompt" title="{escape(prompt)}">{escape(prompt)}</p>'
        f'<p class="meta">{label}{facts}</p>{_actions(state, page)}</div></li>'
    )


def _still(state: JobState) -> str:
    if not (state.folder / "thumbnail.jpg").is_file():
        return '<span class="no-still">No picture</span>'
    size = f'width="{state.request.width}" height="{state.request.height}"'
    return f'<img src="thumbnail/{state.id}.jpg" {size} loading="lazy" alt="">'


def _facts(entry: Entry, fps: int) -> list[str]:
    state, request = entry.state, entry.state.request
    frames = state.stats.get("frames") or request.frames
    made = [f"made in {words.duration(state.elapsed)}"] if state.over and state.video and state.elapsed else []
    again = ["decoded again"] if isinstance(state, DecodeState) else []
    return [
        f"{frames / fps:.1f} s, {words.pixels(request.height, request.width)}",
        f"seed {request.seed}",
        words.counted(request.steps, "step"),
        *again,
        *made,
        in_words(entry.size),
        time.strftime("%-d %b %Y, %H:%M", time.localtime(state.created)),
    ]


def _actions(state: JobState, page: int) -> str:
    actions = [_button("Open", "select", state, page), _button("Use these settings", "edit", state, page)]
    if state.video:
        name = escape(words.file_name(state.request))
        actions.append(f'<a href="video/{state.id}.mp4?download=1" download="{name}">Download</a>')
    if state.over:
        actions.append(_button("Delete", "delete", state, page, 'data-sure="Delete for good"'))
    else:
        actions.append(_button("Stop", "stop", state, page))
    return f'<p class="actions">{"".join(actions)}</p>'


def _button(text: str, event: str, state: JobState, page: int, more: str = "") -> str:
    return f'<button type="button" data-event="{event}" data-job="{state.id}" data-page="{page}" {more}>{text}</button>'


def _pager(page: int, shown: int, total: int) -> str:
    if total <= PAGE:
        return ""
    first = page * PAGE
    newer = (
        f'<button type="button" data-event="input" data-page="{page - 1}"{"" if page else " disabled"}>Newer</button>'
    )
    last = first + shown >= total
    older = (
        f'<button type="button" data-event="input" data-page="{page + 1}"{" disabled" if last else ""}>Older</button>'
    )
    place = f'<span role="status">{first + 1} to {first + shown} of {total}</span>'
    return f'<nav class="pager" aria-label="Pages">{newer}{place}{older}</nav>'
