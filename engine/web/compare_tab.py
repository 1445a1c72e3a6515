"""The Compare tab: widgets, and short handlers over snapshots of comparisons. The work belongs to the job's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gradio as gr

from engine.engine import Engine
from engine.errors import EngineError
from engine.job import CompareState
from engine.jobs import Jobs
from engine.web import compare_render as render
from engine.web import lent
from engine.web.compare_api import latents_upload
from engine.web.compare_form import (
    SOURCES,
    CompareForm,
    decoder_menu,
    fields_of,
    random_sizes,
    saved_videos,
    start_form,
)
from engine.web.files import as_sent

# The comparison that the address named when the page was opened; without one there, the one that this browser saw last.
FIND_JOB = """(job) => [
    new URL(performance.getEntriesByType("navigation")[0].name).searchParams.get("compare") || job
]"""
SHOW_JOB = "(job) => window.page?.stand('compare', { compare: job })"
TICK_SECONDS = 0.7
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
ASKS: dict[str, Any] = QUIET | lent.ASKING
PLAIN: dict[str, Any] = {"apply_default_css": False}

Values = Mapping[Any, Any]


class CompareTab:
    """Made inside a gr.Blocks, before its tabs: anything between two tabs would part them. `build` then adds the tab.

    Nothing of a visitor is kept here: a page sends what it shows and gets what differs. engine: its decoders and
    costs; jobs: does the work.
    """

    def __init__(self, engine: Engine, jobs: Jobs, listed: bool = True) -> None:
        self.engine, self.jobs, self.listed = engine, jobs, listed
        self.fields: dict[str, gr.components.Component] = {}
        self.job = gr.BrowserState("", storage_key="compare", secret="compare")
        self.timer = gr.Timer(TICK_SECONDS, active=False)

    def build(self, demo: gr.Blocks) -> None:
        """Add the tab. demo: the Blocks, for its load event."""
        with gr.Tab("Compare", id="compare") as self.tab, gr.Row(elem_id="compare"):
            with gr.Column(scale=4, min_width=320, elem_id="compare-form"):
                self._form(start_form(self.engine))
            with gr.Column(scale=9, min_width=320, elem_id="compare-watch"):
                self._watch()
        self._wire(demo)

    # Widgets.

    def _form(self, start: CompareForm) -> None:
        fields, preset = self.fields, self.engine.preset
        decoders = decoder_menu(self.engine)
        gr.HTML(render.about(self.engine.decoders()), **PLAIN)
        sources = [(label, name) for label, name in SOURCES.items() if self.listed or name != "job"]
        fields["source"] = gr.Dropdown(sources, value=start.source, label="Latents")
        with gr.Column(visible=False) as self.of_job:
            fields["job"] = as_sent(gr.Dropdown([], label="Video", allow_custom_value=False))
        with gr.Column(visible=False) as self.of_file:
            fields["file"] = latents_upload(label="latents.safetensors of a job, here or elsewhere", height=130)
        with gr.Row(elem_id="compare-random") as self.of_noise:
            fields["seed"] = gr.Number(start.seed, label="Seed", precision=0, min_width=120)
            fields["size"] = gr.Dropdown(random_sizes(self.engine), value=start.size, label="Size", min_width=140)
        longest = preset.limits.frames
        fields["frames"] = gr.Slider(1, longest, start.frames, step=4, label="Frames from the start")
        with gr.Row():
            fields["a"] = gr.Dropdown(decoders, value=start.a, label="Side A", min_width=140)
            fields["b"] = gr.Dropdown(decoders, value=start.b, label="Side B", min_width=140)
        with gr.Row(elem_id="compare-go"):
            self.go = gr.Button("Compare", variant="primary", scale=3)
            self.stop = gr.Button("Stop", variant="secondary", interactive=False, min_width=96)
        self.plan = gr.HTML(elem_id="compare-plan", **PLAIN)
        self.model = gr.HTML(render.readiness(self.engine.readiness()), elem_id="compare-model", **PLAIN)

    def _watch(self) -> None:
        self.strip = gr.HTML(elem_id="compare-progress", **PLAIN)
        self.messages = gr.HTML(elem_id="compare-messages", **PLAIN)
        self.view = gr.HTML(render.EMPTY, elem_id="compare-view", **PLAIN)
        self.result = gr.HTML(elem_id="compare-result", **PLAIN)

    def _wire(self, demo: gr.Blocks) -> None:
        form, shown = set(self.fields.values()), {self.model, self.strip, self.messages, self.view, self.result}
        buttons = {self.go, self.stop, self.timer}
        self._follow = {"inputs": {self.job, *shown}, "outputs": {*shown, *buttons}, **QUIET}
        kept = {field for name, field in self.fields.items() if name != "file"}
        found = demo.load(None, self.job, self.job, js=FIND_JOB)
        found.then(self.reopen, {self.job, *kept, *shown}, {self.job, *kept, *shown, *buttons}, **QUIET)
        gr.on([self.job.change, self.tab.select], None, self.job, js=SHOW_JOB)
        self.timer.tick(self.look, **self._follow)
        self.go.click(self.start, {self.job, *form, *shown}, {self.job, self.plan, *shown, *buttons}, **ASKS)
        self.stop.click(self.cancel, self.job, self.stop, **QUIET)
        source = self.fields["source"]
        groups = [self.of_job, self.of_file, self.of_noise]
        source.change(self.choose, [source, self.fields["job"]], [*groups, self.fields["job"]], **QUIET)
        # The time is known once the model is loaded, and better once a comparison is over.
        changes = [field.change for field in (*form, self.model, self.result)]
        gr.on([self.tab.select, *changes], self.tell_plan, form, self.plan, trigger_mode="always_last", **QUIET)

    def show_after(self, event: Any) -> None:
        """Let the page follow the comparison that an event of another tab has put into `job`."""
        event.then(self.look, **self._follow)

    # What happens.

    def choose(self, source: str, job: str | None) -> list[Any]:
        """Show what belongs to a kind of latents. job: the video that is chosen, if one is."""
        videos = self._videos(source)
        known = [value for _, value in videos]
        shown = [gr.update(visible=source == name) for name in ("job", "file", "random")]
        chosen = job if job in known else next(iter(known), None)
        return [*shown, gr.update(choices=videos, value=chosen)]

    def _videos(self, source: str) -> list[tuple[str, str]]:
        return saved_videos(self.jobs.outputs) if source == "job" and self.listed else []

    def reopen(self, values: Values) -> dict[Any, Any]:
        """A page was opened: follow the comparison that it knows, and put what that was asked for into the form."""
        job = values[self.job]
        state = self.jobs.comparison(job) if job else None
        form = {field: values[field] for name, field in self.fields.items() if name != "file"}
        if state is None:
            lost = {self.messages: render.lost(str(job)), self.job: ""} if job else {}
            return self.look(values) | form | lost
        asked = fields_of(self.engine, state.request, self.jobs.outputs)
        videos = self._videos(asked.get("source", ""))
        if "job" in asked and asked["job"] not in [value for _, value in videos]:
            del asked["source"], asked["job"]
        form |= {self.fields[name]: value for name, value in asked.items()}
        if "job" in asked:
            form[self.fields["job"]] = gr.update(choices=videos, value=asked["job"])
        return self.look(values) | form

    def tell_plan(self, values: Values) -> str:
        """What a click would start and cost, or why it would be refused."""
        try:
            request, shape = self._read(values).request(self.engine, self.jobs.outputs)
            return render.plan(self.engine.estimate_comparison(request.a, request.b, shape), shape)
        except EngineError as error:
            return render.refusal(str(error))

    def start(self, values: Values) -> dict[Any, Any]:
        """Check the form and queue it. What is refused is said at once, and nothing else changes."""
        try:
            request, _ = self._read(values).request(self.engine, self.jobs.outputs)
            job = self.jobs.submit(request)
        except EngineError as error:
            return {self.plan: render.refusal(str(error))}
        return {self.job: job} | self.look({**values, self.job: job})

    def _read(self, values: Values) -> CompareForm:
        form = CompareForm(**{name: values[field] for name, field in self.fields.items()})
        return form if form.file is None else dataclasses.replace(form, file=str(form.file))

    def look(self, values: Values) -> dict[Any, Any]:
        """What a page that follows a comparison has to change."""
        state = self.jobs.comparison(values[self.job]) if values[self.job] else None
        busy = state is not None and not state.over
        stopping = busy and state.stopping
        fresh = self._fragments(state)
        return {part: html for part, html in fresh.items() if html != values[part]} | {
            self.go: gr.Button(interactive=not busy),
            self.stop: gr.Button("Stopping ..." if stopping else "Stop", interactive=busy and not stopping),
            self.timer: gr.Timer(active=busy or self.engine.readiness().state in ("idle", "loading")),
        }

    def _fragments(self, state: CompareState | None) -> dict[Any, str]:
        model = {self.model: render.readiness(self.engine.readiness())}
        if state is None:
            return model
        return model | {
            self.strip: render.progress(state),
            self.messages: render.messages(state),
            self.view: render.view(state) or render.EMPTY,
            self.result: render.result(state),
        }

    def cancel(self, job: str) -> gr.Button:
        """Stop within one chunk; a side that is whole by then stays."""
        state = self.jobs.comparison(job) if job else None
        if state is None or state.over:
            return gr.Button("Stop", interactive=False)
        self.jobs.cancel(job)
        return gr.Button("Stopping ...", interactive=False)
