"""The World tab: look at what is there, try what could happen next, choose, go on. It is what a world model is for.

A video goes on from the last frame of another (a chain), and up to four begin with the same frame (branches).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import gradio as gr

from engine.chain import MAX_BRANCHES, lineage
from engine.engine import Engine
from engine.errors import EngineError
from engine.job import JobState
from engine.jobs import Jobs
from engine.record import LAST_FRAME
from engine.web import render, words, zero
from engine.web import world_render as show
from engine.web.files import NO_CHOICE, as_sent, first_frame
from engine.web.form import unknown_words
from engine.web.generate_tab import ASKS, PLAIN, QUIET, TICK_SECONDS
from engine.web.world_form import WorldForm

# The place that the address named when the page was opened; without one there, where this browser was last. Scripts of
# the page may not be there yet.
FIND_PLACE = """(place) => {
    const asked = new URL(performance.getEntriesByType("navigation")[0].name).searchParams;
    const [from, group] = ["from", "group"].map((name) => asked.get(name) ?? "");
    return [from || group ? { from, group } : place];
}"""
SHOW_PLACE = "(place) => window.page?.stand('world', place)"
LISTED = 40
NOTHING = {"from": "", "group": ""}

Values = Mapping[Any, Any]


class WorldTab:
    """Made inside a gr.Blocks, before its tabs; `build` then adds the tab.

    Nothing of a visitor is kept here: where he is stands in the address and in his browser, {"from": the video whose
    last frame is seen, "group": the candidates that were asked for last}. engine: checks, estimates; jobs: does the
    work; listed: whether visitors see what others made.
    """

    def __init__(self, engine: Engine, jobs: Jobs, listed: bool = True) -> None:
        self.engine, self.jobs, self.preset, self.listed = engine, jobs, engine.preset, listed
        self.place = gr.BrowserState(NOTHING, storage_key="world", secret="world")
        self.timer = gr.Timer(TICK_SECONDS, active=False)

    def build(self, demo: gr.Blocks) -> None:
        """Add the tab. demo: the Blocks, for its load event."""
        with gr.Tab("World", id="world") as self.tab, gr.Row(elem_id="world"):
            with gr.Column(scale=4, min_width=320, elem_id="world-form"):
                self._form()
            with gr.Column(scale=9, min_width=320, elem_id="world-watch"):
                self._watch()
        self._wire(demo)

    # Widgets.

    def _form(self) -> None:
        self.seen = gr.HTML(show.seen(None, 0), elem_id="world-seen", **PLAIN)
        with gr.Row():
            self.back = gr.Button("Step back", visible=False, size="sm", min_width=110)
            self.fresh = gr.Button("Begin anew", visible=False, size="sm", min_width=110)
        with gr.Accordion("Begin with", open=True) as self.begin:
            self.video = as_sent(gr.Dropdown([], label="The end of a video made here", visible=self.listed))
            self.image = first_frame(label="A picture", height=150, elem_id="world-picture")
        self.actions = [
            gr.Textbox(
                label=f"Action {letter}",
                placeholder="What happens next" if letter == "A" else "Something else that could happen",
                lines=1,
                max_lines=4,
            )
            for letter in show.LETTERS[:MAX_BRANCHES]
        ]
        with gr.Row():
            longest = (self.preset.limits.frames - 1) / self.preset.fps
            start = self.preset.defaults
            seconds = (start.frames - 1) / self.preset.fps
            self.seconds = gr.Slider(0.5, longest, seconds, step=0.5, label="Seconds", scale=4, min_width=150)
            self.seed = gr.Number(start.seed, label="Seed of all", precision=0, min_width=110)
        self.plan = gr.HTML(elem_id="world-plan", **PLAIN)
        with gr.Row(elem_id="world-go"):
            self.go = gr.Button("See what happens", variant="primary", scale=3)
            self.stop = gr.Button("Stop", interactive=False, min_width=96)

    def _watch(self) -> None:
        self.story = gr.HTML(show.START, elem_id="world-story", **PLAIN)
        self.candidates = gr.HTML(elem_id="world-candidates", **PLAIN)
        with gr.Row(elem_id="world-choose"):
            self.choices = [
                gr.Button(f"Go on from {letter}", visible=False, min_width=130)
                for letter in show.LETTERS[:MAX_BRANCHES]
            ]
        self.messages = gr.HTML(elem_id="world-messages", **PLAIN)

    def _wire(self, demo: gr.Blocks) -> None:
        form = {self.image, self.seconds, self.seed, *self.actions}
        shown = self._shown()
        moved = self._moved()
        found = demo.load(None, self.place, self.place, js=FIND_PLACE)
        found.then(self.look, {self.place, *shown}, moved, **QUIET)
        gr.on([self.timer.tick, self.tab.select], self.look, {self.place, *shown}, moved, **QUIET)
        gr.on([self.place.change, self.tab.select], None, self.place, js=SHOW_PLACE)
        if self.listed:
            gr.on([demo.load, self.tab.select], self.list_videos, None, self.video, **QUIET)
        self.go.click(self.start, {self.place, *form, *shown}, {*moved, self.plan}, **ASKS)
        self.stop.click(self.cancel, self.place, self.stop, **QUIET)
        self.video.input(self.begin_with, {self.video, self.place, *shown}, {*moved, *self.actions}, **QUIET)
        for k, button in enumerate(self.choices):
            button.click(self.chooser(k), {self.place, *shown}, {*moved, *self.actions}, **QUIET)
        self.back.click(self.step_back, {self.place, *shown}, moved, **QUIET)
        self.fresh.click(self.begin_anew, {self.place, *shown}, moved, **QUIET)
        changes = [field.change for field in (*form, self.seen)]
        gr.on(
            [self.tab.select, *changes],
            self.tell_plan,
            {self.place, *form},
            self.plan,
            trigger_mode="always_last",
            **QUIET,
        )

    def _shown(self) -> set[gr.components.Component]:
        return {self.seen, self.story, self.candidates, self.messages}

    def _moved(self) -> set[Any]:
        buttons = {self.go, self.stop, self.timer, self.back, self.fresh, self.begin, *self.choices}
        return {self.place, *self._shown(), *buttons}

    def come_from(self, button: gr.Button, job: gr.BrowserState, tabs: gr.Tabs) -> None:
        """Let a button of another tab bring the visitor here, to go on from that tab's job."""

        def come(values: Values) -> dict[Any, Any]:
            return self._go_on(values, words.sent_text(values[job])) | {tabs: gr.Tabs(selected="world")}

        button.click(come, {job, self.place, *self._shown()}, {tabs, *self.actions, *self._moved()}, **QUIET)

    # What happens.

    def look(self, values: Values) -> dict[Any, Any]:
        """What a page has to change."""
        place = self._place(values)
        states, chain = self._group(place), self._chain(place)
        begun, busy = bool(chain or states), any(not state.over for state in states)
        fresh = {
            self.seen: show.seen(chain[-1] if chain else None, len(chain)),
            self.story: show.story(chain, self.preset.fps) if chain or not states else "",
            self.candidates: show.candidates(states, self.preset.fps, not zero.while_running(self.engine)),
            self.messages: show.messages(states, self._is_lost(place, states)),
        }
        ready = [not busy and (state.folder / LAST_FRAME).is_file() for state in states]
        ready += [False] * (MAX_BRANCHES - len(ready))
        return {part: html for part, html in fresh.items() if html != values[part]} | {
            **{button: gr.Button(visible=there) for button, there in zip(self.choices, ready, strict=True)},
            self.go: gr.Button(interactive=not busy),
            self.stop: gr.Button(interactive=busy and not all(state.stopping for state in states if not state.over)),
            self.back: gr.Button(visible=bool(chain) and not busy),
            self.fresh: gr.Button(visible=begun and not busy),
            self.begin: gr.Accordion(label="Begin elsewhere" if begun else "Begin with", open=not begun),
            self.timer: gr.Timer(active=busy),
        }

    def _place(self, values: Values) -> dict[str, str]:
        """Where this browser is; what it sends is not trusted."""
        place = values[self.place]
        sent = place if isinstance(place, dict) else {}
        return {key: words.sent_text(sent.get(key)) for key in NOTHING}

    def _group(self, place: Mapping[str, str]) -> list[JobState]:
        return self.jobs.of_group(place["group"]) if place["group"] else []

    def _chain(self, place: Mapping[str, str]) -> list[JobState]:
        return lineage(self.jobs.snapshot, place["from"]) if place["from"] else []

    def _is_lost(self, place: Mapping[str, str], states: list[JobState]) -> bool:
        """Whether a place names what this server doesn't know."""
        return bool((place["from"] and not self._seen(place)) or (place["group"] and not states))

    def _move(self, values: Values, **place: str) -> dict[Any, Any]:
        moved = NOTHING | place
        return {self.place: moved} | self.look({**values, self.place: moved})

    def _go_on(self, values: Values, job: str | None) -> dict[Any, Any]:
        """See the end of this video. Its prompt is a start for the next, which tells the whole scene too."""
        state = self.jobs.snapshot(job) if job else None
        first = state.request.prompt if state else ""
        texts = dict.fromkeys(self.actions, "") | {self.actions[0]: first}
        return self._move(values, **{"from": job or ""}) | texts

    def list_videos(self) -> gr.Dropdown:
        """The videos to go on from, the newest first."""
        ended = [state for state in self.jobs.recent() if (state.folder / LAST_FRAME).is_file()][:LISTED]
        return gr.Dropdown(
            [(f"{words.beginning(s.request.prompt, 50)} ({s.id[9:15]})", s.id) for s in ended], value=None
        )

    def start(self, values: Values) -> dict[Any, Any]:
        """Check every candidate, then queue all or none. What is refused is said at once, and nothing else changes."""
        place = self._place(values)
        try:
            seen = self._seen(place)
            requests = self._read(values).requests(self.engine, seen)
            group = secrets.token_hex(8)
            self.jobs.submit_all(requests, parent=seen and seen.id, group=group)
        except EngineError as error:
            return {self.plan: render.refusal(str(error))}
        return self._move(values, **{"from": place["from"], "group": group})

    def _seen(self, place: Mapping[str, str]) -> JobState | None:
        return self.jobs.snapshot(place["from"]) if place["from"] else None

    def _read(self, values: Values) -> WorldForm:
        return WorldForm(
            image=values[self.image],
            seconds=values[self.seconds],
            seed=values[self.seed],
            actions=[values[field] for field in self.actions],
        )

    def cancel(self, place: Any) -> gr.Button:
        """Stop the candidate that is made and those that wait; what is decoded by then stays."""
        for state in self._group(self._place({self.place: place})):
            if not state.over:
                self.jobs.cancel(state.id)
        return gr.Button(interactive=False)

    def begin_with(self, values: Values) -> dict[Any, Any]:
        """Go on from the end of a video of the list."""
        job = values[self.video]
        # The list may be older than this server.
        if job is not None and self.jobs.snapshot(job) is None:
            return {self.messages: render.refusal(NO_CHOICE)}
        return self._go_on(values, job)

    def chooser(self, k: int) -> Any:
        """What a click on "Go on from ..." does."""

        def choose(values: Values) -> dict[Any, Any]:
            states = self._group(self._place(values))
            if k >= len(states):
                return self.look(values)
            return self._go_on(values, states[k].id)

        return choose

    def step_back(self, values: Values) -> dict[Any, Any]:
        """Back to the frame that the last video of the chain began with."""
        chain = self._chain(self._place(values))
        return self._move(values, **{"from": chain[-2].id if len(chain) > 1 else ""})

    def begin_anew(self, values: Values) -> dict[Any, Any]:
        """Forget where we are; the videos stay."""
        return self._move(values)

    def tell_plan(self, values: Values) -> str:
        """What a click would start and how long it would take, or why it would be refused."""
        try:
            requests = self._read(values).requests(self.engine, self._seen(self._place(values)))
        except EngineError as error:
            return render.refusal(str(error)) if any(values[field] for field in self.actions) else ""
        unknown = unknown_words(self.preset, " ".join(request.prompt for request in requests))
        return show.plan(requests, self.preset.fps, self.engine.estimate(requests[0])) + render.hint(unknown)
