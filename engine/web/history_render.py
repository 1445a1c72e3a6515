"""The list of videos and comparisons as HTML: a page of entries, newest first, each with what can be done with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from engine.job import CompareState, DecodeState, Job, JobState
from engine.memory import in_words
from engine.settings import DecodeSettings
from engine.sides import SIDES
from engine.web import words
from engine.web.compare_render import decoder

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
BEFORE = "Stopped before it began"


@dataclass(frozen=True)
class Entry:
    """A job of the list. size: bytes of its folder."""

    state: Job
    size: int


def listing(entries: Sequence[Entry], page: int, total: int, fps: int) -> str:
    """One page of the list. page: from 0; total: entries on all pages; fps: at which videos play."""
    if not total:
        return EMPTY
    items = "".join(
        _comparison(entry, page) if isinstance(entry.state, CompareState) else _video(entry, page, fps)
        for entry in entries
    )
    return f'<ul class="entries">{items}</ul>{_pager(page, len(entries), total)}'


def _video(entry: Entry, page: int, fps: int) -> str:
    state = entry.state
    title = state.request.prompt.strip() or "Without words"
    return _item(state, "select", title, _still(state), _facts(entry, fps), _actions(state, page))


def _comparison(entry: Entry, page: int) -> str:
    """What was compared, what came of it, and its buttons. Raw frames are most of its size."""
    state = entry.state
    title = " against ".join(_side(state, name) for name in SIDES)
    verdict = ((state.result or {}).get("verdict") or {}).get("text", "")
    took = f"took {words.duration(state.elapsed)}" if state.over and state.elapsed else ""
    facts = ["comparison", state.request.source, verdict, took, *_size_and_date(entry)]
    buttons = _button("Open", "expand", state, page) + _end_button(state, page)
    actions = f'<p class="actions">{buttons}</p>'
    return _item(state, "expand", title, '<span class="no-still">Comparison</span>', facts, actions)


def _side(state: CompareState, name: str) -> str:
    """The decoder of a side: what it turned out to be, or what was asked for."""
    asked: DecodeSettings = getattr(state.request, name)
    found = state.sides.get(name) or {}
    return decoder(found.get("path") or asked.path, found.get("precision") or asked.precision)


def _item(state: Job, event: str, title: str, still: str, facts: Sequence[str], actions: str) -> str:
    """event: what a click on the picture asks for; still, actions: HTML."""
    text = BEFORE if state.status == "stopped" and state.started is None else STATES[state.status]
    label = f'<b class="{state.status}">{text}</b>' if text else ""
    told = "".join(f"<span>{escape(fact)}</span>" for fact in facts if fact)
    return (
        f'<li class="entry"><button type="button" class="still" data-event="{event}" data-job="{state.id}" '
        f'aria-label="Open: {escape(title)}">{still}</button><div>'
        f'<p class="prompt" title="{escape(title)}">{escape(title)}</p>'
        f'<p class="meta">{label}{told}</p>{actions}</div></li>'
    )


def _size_and_date(entry: Entry) -> list[str]:
    # The size of one at work grows all the time, and nothing else of its entry would change.
    size = [in_words(entry.size)] if entry.state.over else []
    return [*size, time.strftime("%-d %b %Y, %H:%M", time.localtime(entry.state.created))]


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
    # One that was stopped before it began has no length.
    length = [] if state.status == "stopped" and state.started is None else [f"{frames / fps:.1f} s"]
    return [
        ", ".join([*length, words.pixels(request.height, request.width)]),
        f"seed {request.seed}",
        words.counted(request.steps, "step"),
        *again,
        *made,
        *_size_and_date(entry),
    ]


def _actions(state: JobState, page: int) -> str:
    actions = [_button("Open", "select", state, page), _button("Use these settings", "edit", state, page)]
    if state.video:
        name = escape(words.file_name(state.request))
        actions.append(f'<a href="video/{state.id}.mp4?download=1" download="{name}">Download</a>')
    return f'<p class="actions">{"".join(actions)}{_end_button(state, page)}</p>'


def _end_button(state: Job, page: int) -> str:
    if state.over:
        return _button("Delete", "delete", state, page, 'data-sure="Delete for good"')
    return _button("Stop", "stop", state, page)


def _button(text: str, event: str, state: Job, page: int, more: str = "") -> str:
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
