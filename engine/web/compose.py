"""A small builder for prompts: what happens when, who does it, how the camera moves, written as plain text.

PAN 2's captions say these things in a structured form whose field names are not known here, so the result is prose and
claims no more. A preset with a vocabulary of its own gets menus of its words instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import gradio as gr

from engine.errors import RequestError, shown
from engine.preset import Preset
from engine.request import MAX_SECONDS
from engine.web import render

EVENTS = 3
# Camera words of a published example; at most two at once in it.
CAMERA = {
    "static": "stands still",
    "tilt up": "tilts up",
    "tilt down": "tilts down",
    "pan right": "pans to the right",
    "track right": "tracks to the right",
    "dolly forward": "dollies forward",
    "dolly backward": "dollies backward",
    "dolly up": "dollies up",
    "unstable": "shakes",
}
AT_ONCE = 2
NOTHING = "none"
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

# From, to (seconds), who, what.
Event = tuple[float | None, float | None, str, str]


def vocabulary(preset: Preset) -> ModuleType | None:
    """The words that a preset's model was trained on, None for one that has no such list."""
    try:
        return importlib.import_module(f"presets.{preset.name}.vocabulary")
    except ModuleNotFoundError:
        return None


def describe(place: str, actors: str, events: Sequence[Event], camera: Sequence[str]) -> str:
    """Plain text from its parts, in the order of time. events: from, to (seconds), who, what; parts may be empty.

    Raises RequestError for a time that runs backwards, and if nothing was filled in.
    """
    sentences = [_sentence(place), *(_sentence(line) for line in (actors or "").splitlines())]
    told = [event for event in events if (event[2] or "").strip() or (event[3] or "").strip()]
    for number, event in enumerate(events, 1):
        _check_time(number, event)
    told.sort(key=lambda event: event[0] if event[0] is not None else 0.0)
    sentences += [_event(event) for event in told]
    moves = [CAMERA[word] for word in (camera or [])[:AT_ONCE]]
    if moves:
        sentences.append(f"The camera {' and '.join(moves)}.")
    text = " ".join(sentence for sentence in sentences if sentence)
    if not text:
        raise RequestError("Nothing is filled in yet. Say at least what happens.")
    return text


def _check_time(number: int, event: Event) -> None:
    start, end = event[:2]
    if start is not None and end is not None and end < start:
        raise RequestError(f"Event {number} ends at {end:g} s, before it begins at {start:g} s. Swap the two.")


def _event(event: Event) -> str:
    start, end, who, what = event
    words = " ".join(part for part in ((who or "").strip(), (what or "").strip()) if part)
    if start is not None and end is not None:
        return f"{start:g}-{end:g} s: {_ended(words)}"
    if start is not None or end is not None:
        return f"{f'From {start:g} s' if end is None else f'Until {end:g} s'}: {_ended(words)}"
    return _sentence(words)


def _sentence(text: str) -> str:
    text = _ended((text or "").strip())
    return text[:1].upper() + text[1:]


def _ended(text: str) -> str:
    return text if not text or text[-1] in ".!?" else f"{text}."


def caption(words: ModuleType, first: Sequence[str], second: Sequence[str], ground: Sequence[str]) -> str:
    """The usual sentence of a vocabulary. first, second: colour, shape, motion, the second one's colour NOTHING for a
    single thing; ground: kind, colour, camera."""
    things = [words.Thing(*thing) for thing in (first, second) if thing[0] != NOTHING]
    return words.caption(words.Words(tuple(things), *ground))


def add_builder(preset: Preset, prompt: gr.Textbox) -> None:
    """The accordion below the prompt; its button writes into the prompt box, where the text can be changed."""
    words = vocabulary(preset)
    with gr.Accordion("Compose", open=False, elem_id="compose"):
        fields = _words_form(words) if words else _free_form()
        said = gr.HTML(elem_id="composed", apply_default_css=False)
        button = gr.Button("Write it into the prompt", size="sm")
    if words:
        button.click(lambda *parts: caption(words, parts[:3], parts[3:6], parts[6:]), fields, prompt, **QUIET)
        return

    def write(place: str, actors: str, *rest: Any) -> dict[gr.components.Component, str]:
        try:
            return {prompt: describe(place, actors, _events(rest[:-1]), rest[-1]), said: ""}
        except RequestError as error:
            return {said: render.refusal(str(error))}

    button.click(write, fields, [prompt, said], **QUIET)


def _events(cells: Sequence[str]) -> list[Event]:
    rows = [cells[start : start + 4] for start in range(0, 4 * EVENTS, 4)]
    return [
        (_time(number, start), _time(number, end), who, what) for number, (start, end, who, what) in enumerate(rows, 1)
    ]


def _time(number: int, text: str | None) -> float | None:
    """Seconds as somebody writes them; None for nothing. Raises RequestError for what is no time."""
    written = (text or "").strip().removesuffix("s").strip()
    if not written:
        return None
    try:
        seconds = float(written.replace(",", "."))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < MAX_SECONDS:
        raise RequestError(f"Event {number}: {shown(text)} is no time. Write seconds, such as 2.5, or leave it empty.")
    return seconds


def _words_form(words: ModuleType) -> list[gr.components.Component]:
    fields: list[gr.components.Component] = []
    for title, colours in (("What", list(words.COLOURS)), ("And", [NOTHING, *words.COLOURS])):
        with gr.Row():
            fields += [
                gr.Dropdown(colours, value=colours[0], label=title, min_width=96),
                gr.Dropdown(list(words.SHAPES), value=words.SHAPES[0], label="Shape", min_width=96),
                gr.Dropdown(_phrases(words.MOTIONS), value="right", label="Motion", min_width=120),
            ]
    with gr.Row():
        fields += [
            gr.Dropdown(list(words.KINDS), value=words.KINDS[0], label="Background", min_width=96),
            gr.Dropdown(list(words.GROUNDS), value="navy", label="Its colour", min_width=96),
            gr.Dropdown(_phrases(words.CAMERAS), value="static", label="Camera", min_width=120),
        ]
    return fields


def _phrases(table: dict[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(phrases[0], name) for name, phrases in table.items()]


def _free_form() -> list[gr.components.Component]:
    fields: list[gr.components.Component] = [
        gr.Textbox(label="Where", placeholder="A lighthouse on a cliff at dusk"),
        gr.Textbox(label="Who is there, one a line", lines=2, placeholder="An old keeper in a yellow coat"),
    ]
    for number in range(1, EVENTS + 1):
        with gr.Row():
            fields += [
                gr.Textbox(label="From (s)", min_width=70, scale=1),
                gr.Textbox(label="To (s)", min_width=70, scale=1),
                gr.Textbox(label="Who", min_width=90, scale=2),
                gr.Textbox(label=f"Does what ({number})", min_width=160, scale=4),
            ]
    fields.append(gr.Dropdown(list(CAMERA), value=[], multiselect=True, max_choices=AT_ONCE, label="Camera"))
    return fields
