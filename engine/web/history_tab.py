"""The History tab: what was made and compared here, to watch again, to begin from, to fetch, to delete."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.jobs import Jobs
from engine.request import Request
from engine.store import folder_bytes
from engine.web import render, words
from engine.web.compare_tab import CompareTab
from engine.web.files import upload
from engine.web.generate_tab import PLAIN, QUIET, GenerateTab
from engine.web.history_render import PAGE, Entry, listing
from engine.web.settings_file import KINDS, check_settings, read_settings_file

BUTTONS = (Path(__file__).with_name("history_list.js")).read_text(encoding="utf-8")

TICK_SECONDS = 2

Values = Mapping[Any, Any]
# The list, its page, its timer, and what went wrong.
Changed = tuple[str, int, gr.Timer, str]


class HistoryTab:
    """Made inside a gr.Blocks; `build` adds the tab. Nothing of a visitor is kept here. jobs: knows what was made;
    generate: the tab with the player and the form."""

    def __init__(self, engine: Engine, jobs: Jobs, generate: GenerateTab) -> None:
        self.jobs, self.preset, self.generate = jobs, engine.preset, generate

    def build(self, demo: gr.Blocks, tabs: gr.Tabs) -> None:
        """Add the tab, after the Generate tab. demo: the Blocks, for its load event; tabs: to turn to another one."""
        with gr.Tab("History", id="history") as self.tab, gr.Column(elem_id="history"):
            with gr.Accordion("Settings from a file", open=False):
                about = "A video that was made here, or its settings as JSON"
                self.file = upload(KINDS, label=about, height=130, elem_id="settings")
            self.note = gr.HTML(elem_id="history-note", **PLAIN)
            self.page, self.timer = gr.State(0), gr.Timer(TICK_SECONDS, active=False)
            self.list = gr.HTML(self.show(), elem_id="history-list", js_on_load=BUTTONS, **PLAIN)
        self.tabs = tabs
        self._wire(demo, tabs)

    def _wire(self, demo: gr.Blocks, tabs: gr.Tabs) -> None:
        changed = [self.list, self.page, self.timer, self.note]
        gr.on([demo.load, self.tab.select], self.refresh, None, changed, **QUIET)
        self.timer.tick(self.tick, [self.page, self.list], [self.list, self.page, self.timer], **QUIET)
        self.list.input(self.turn, None, changed, **QUIET)
        self.list.delete(self.delete, None, changed, **QUIET)
        self.list.stop(self.stop, None, changed, **QUIET)
        opened = self.list.select(self.open, None, [self.generate.job, tabs], **QUIET)
        self.generate.show_after(opened)
        form = set(self.generate.fields.values())
        after = {*form, self.note, self.generate.note, tabs}
        self.list.edit(self.use, form, after, **QUIET)
        self.file.upload(self.use_file, {*form, self.file}, after, **QUIET)

    def lead_to(self, compare: CompareTab) -> None:
        """Comparisons of the list open on their own tab, which is built by now."""
        opened = self.list.expand(self.open_comparison, None, [compare.job, self.tabs], **QUIET)
        compare.show_after(opened)

    def show(self, page: int = 0) -> str:
        """A page of the list, from 0; the last one if there are not so many."""
        return self._look(page)[0]

    def _look(self, page: int) -> tuple[str, int, gr.Timer]:
        """The list, the page of it that there is, and the timer, which runs while something on it may change."""
        states = self.jobs.everything()
        page = max(0, min(page, (len(states) - 1) // PAGE))
        entries = [Entry(state, folder_bytes(state.folder)) for state in states[page * PAGE : (page + 1) * PAGE]]
        busy = any(not entry.state.over for entry in entries)
        return listing(entries, page, len(states), self.preset.fps), page, gr.Timer(active=busy)

    # What happens.

    def refresh(self) -> Changed:
        """The newest of all."""
        return *self._look(0), ""

    def tick(self, page: int, shown: str) -> tuple[Any, int, gr.Timer]:
        """The same page as it is now. What did not change is not sent: a button may wait for its second click."""
        fresh, page, timer = self._look(page)
        return gr.skip() if fresh == shown else fresh, page, timer

    def turn(self, event: gr.EventData) -> Changed:
        """Another page."""
        return *self._look(_page(event)), ""

    def open(self, event: gr.EventData) -> tuple[str, gr.Tabs]:
        """Play a video in the page's player."""
        return words.sent_text(_sent(event, "job")), gr.Tabs(selected="generate")

    def open_comparison(self, event: gr.EventData) -> tuple[str, gr.Tabs]:
        """Show a comparison on its tab."""
        return words.sent_text(_sent(event, "job")), gr.Tabs(selected="compare")

    def delete(self, event: gr.EventData) -> Changed:
        """Remove a job that is over, with its folder."""
        return self._change(self.jobs.delete, event)

    def stop(self, event: gr.EventData) -> Changed:
        """Stop one that is not."""
        return self._change(self.jobs.cancel, event)

    def _change(self, change: Any, event: gr.EventData) -> Changed:
        note = ""
        try:
            change(_sent(event, "job"))
        except EngineError as error:
            note = render.refusal(str(error))
        return *self._look(_page(event)), note

    def use(self, values: Values, event: gr.EventData) -> dict[Any, Any]:
        """Put the settings of a video of the list into the form, its first frame too."""
        try:
            state = self.jobs.snapshot(_sent(event, "job"))
            if state is None:
                raise RequestError("This video is not here any more.")
            asked = check_settings(state.request, self.preset)
        except EngineError as error:
            return self._refuse(values, error)
        return self._fill(values, dataclasses.replace(asked, image=state.request.image))

    def use_file(self, values: Values) -> dict[Any, Any]:
        """Put the settings that a file holds into the form."""
        try:
            if not values[self.file]:
                raise RequestError("There is no file. Add one.")
            asked = read_settings_file(Path(values[self.file]), self.preset)
        except EngineError as error:
            return self._refuse(values, error)
        lacks = f"Its first frame, {asked.image.name}, is not in the file: add it again." if asked.image else ""
        return self._fill(values, dataclasses.replace(asked, image=None), lacks)

    def _fill(self, values: Values, request: Request, lacks: str = "") -> dict[Any, Any]:
        """lacks: what the visitor has to add."""
        notes = ["The form has these settings now.", lacks]
        if not self.generate.offers(request):
            notes.append(f"The menu has no size of {words.pixels(request.height, request.width)}: choose one.")
        told = {self.note: "", self.generate.note: render.note(" ".join(filter(None, notes)))}
        return self.generate.filling(values, request) | told | {self.tabs: gr.Tabs(selected="generate")}

    def _refuse(self, values: Values, error: EngineError) -> dict[Any, Any]:
        return self.generate.filling(values) | {self.note: render.refusal(str(error))}


def _page(event: gr.EventData) -> int:
    page = _sent(event, "page")
    return page if isinstance(page, int) else 0


def _sent(event: gr.EventData, name: str) -> Any:
    """What came with an event, None for what did not."""
    return event._data.get(name) if isinstance(event._data, dict) else None
