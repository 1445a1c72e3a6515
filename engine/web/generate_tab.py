"""The Generate tab: widgets, and short handlers over snapshots of videos. The work belongs to the job's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import gradio as gr

from engine.description import fault
from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.job import JobState
from engine.jobs import Jobs
from engine.record import LAST_FRAME
from engine.request import Request
from engine.settings import BUDGETED, Precision
from engine.sides import parse_side
from engine.web import details, lent, render, words, zero
from engine.web.compare_form import decoder_menu, decoder_paths
from engine.web.compose import add_builder
from engine.web.files import as_sent, first_frame
from engine.web.form import (
    Form,
    checked,
    fitting_size,
    parse_gib,
    quality_menu,
    size_menu,
    size_value,
    unknown_words,
)

TICK_SECONDS = 0.7
# The address of this tab first; without a job there, the one that this browser saw last.
FIND_JOB = "(job) => [new URLSearchParams(window.location.search).get('job') || job]"
SHOW_JOB = "(job) => window.page?.follow(job)"
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
ASKS: dict[str, Any] = QUIET | lent.ASKING
PLAIN: dict[str, Any] = {"apply_default_css": False}

Values = Mapping[Any, Any]


class GenerateTab:
    """Made inside a gr.Blocks, before its tabs: anything between two tabs would part them. `build` then adds the tab.

    Nothing of a visitor is kept here: a page sends what it shows and gets what differs. engine: its readiness and
    estimates; jobs: does the work.
    """

    def __init__(self, engine: Engine, jobs: Jobs) -> None:
        self.engine, self.jobs, self.preset = engine, jobs, engine.preset
        self.fields: dict[str, gr.components.Component] = {}
        self.job = gr.BrowserState("", storage_key="job", secret="job")
        self.timer = gr.Timer(TICK_SECONDS)

    def build(self, demo: gr.Blocks) -> None:
        """Add the tab. demo: the Blocks, for its load event."""
        with gr.Tab("Generate", id="generate"), gr.Row(elem_id="generate"):
            with gr.Column(scale=4, min_width=320, elem_id="form"):
                self._form()
            with gr.Column(scale=9, min_width=320, elem_id="watch"):
                self._view()
        self._wire(demo)

    # Widgets.

    def _form(self) -> None:
        preset, start, fields = self.preset, Form.of(self.preset), self.fields
        self.model = gr.HTML(
            render.model(preset.title, preset.about, self.engine.readiness()), elem_id="model", **PLAIN
        )
        fields["prompt"] = gr.Textbox(
            start.prompt, label="Prompt", lines=3, max_lines=12, placeholder="What happens, where, how the camera moves"
        )
        self.hint = gr.HTML(elem_id="hint", **PLAIN)
        add_builder(preset, fields["prompt"])
        gr.Examples(
            [[text] for text in preset.examples],
            fields["prompt"],
            label="Examples",
            example_labels=[words.beginning(text) for text in preset.examples],
            api_visibility="private",
        )
        with gr.Row():
            longest = (preset.limits.frames - 1) / preset.fps
            seconds = gr.Slider(0, longest, start.seconds, step=0.5, label="Seconds", scale=4, min_width=150)
            fields["seconds"] = as_sent(seconds)
            fields["size"] = gr.Dropdown(size_menu(preset), value=start.size, label="Size", scale=5, min_width=170)
        with gr.Row(elem_id="seed"):
            fields["seed"] = as_sent(gr.Number(start.seed, label="Seed", precision=0, min_width=120))
            fields["randomise"] = gr.Checkbox(start.randomise, label="New seed each time", min_width=120)
        with gr.Accordion("First frame", open=False):
            fields["image"] = first_frame(label="The video starts with this picture", height=180, elem_id="picture")
        with gr.Accordion("Advanced", open=False):
            self._advanced(start)
        # Above the buttons, where a refusal is seen by who has just clicked.
        # Where the settings came from, until they are sent.
        with gr.Column(elem_id="send", min_width=0):
            self.note = gr.HTML(elem_id="note", **PLAIN)
            self.plan = gr.HTML(elem_id="plan", **PLAIN)
            with gr.Row(elem_id="go"):
                self.generate = gr.Button("Generate", variant="primary", scale=3)
                self.stop = gr.Button("Stop", variant="secondary", interactive=False, min_width=96)

    def _advanced(self, start: Form) -> None:
        fields, limits = self.fields, self.preset.limits
        fields["negative_prompt"] = gr.Textbox(start.negative_prompt, label="Negative prompt", lines=2, max_lines=8)
        fields["steps"] = as_sent(gr.Slider(1, limits.steps, start.steps, step=1, label="Steps"))
        fields["guidance"] = as_sent(gr.Slider(0, limits.guidance, start.guidance, step=0.1, label="Guidance"))
        fields["shift"] = as_sent(gr.Number(start.shift, label="Shift of the noise schedule", step=0.5))
        fields["quality"] = gr.Dropdown(quality_menu(self.preset), value=start.quality, label="Quality of denoising")
        fields["precision"] = gr.Dropdown(list(get_args(Precision)), value=start.precision, label="Precision")
        fields["decoder"] = gr.Dropdown(decoder_paths(self.engine), value=start.decoder, label="Decoder")

    def _view(self) -> None:
        defaults = self.preset.defaults
        self.player = gr.HTML(render.empty(defaults.height, defaults.width), elem_id="player", **PLAIN)
        self.strip = gr.HTML(elem_id="progress", **PLAIN)
        self.messages = gr.HTML(elem_id="messages", **PLAIN)
        self.onward = gr.Button("Go on from its last frame", visible=False, size="sm", elem_id="onward")
        self.details = gr.HTML(elem_id="details", **PLAIN)
        menu = decoder_menu(self.engine)
        with gr.Row(elem_id="again", visible=False) as self.again:
            self.decoder = gr.Dropdown(menu, value=menu[0][1], label="Decode these latents once more", min_width=260)
            budgeted = any(option.settings.path in BUDGETED for option in self.engine.decoders())
            self.budget = gr.Textbox(
                label="At most ... GiB of GPU memory",
                placeholder="what is free",
                visible=budgeted,
                min_width=240,
                elem_id="budget",
            )
            self.decode = gr.Button("Decode again", min_width=120)

    def _wire(self, demo: gr.Blocks) -> None:
        form, view = set(self.fields.values()), {self.model, self.player, self.strip, self.messages, self.details}
        buttons = {self.generate, self.stop, self.timer, self.onward, self.again}
        self._follow = {"inputs": {self.job, *view}, "outputs": {*view, *buttons}, **QUIET}
        found = demo.load(None, self.job, self.job, js=FIND_JOB)
        found.then(self.reopen, {self.job, *view, *form}, {self.job, *view, *buttons, *form}, **QUIET)
        self.timer.tick(self.look, **self._follow)
        start = [self.generate.click, self.fields["prompt"].submit]
        after = {self.job, self.note, self.plan, self.fields["seed"], *view, *buttons}
        begun = gr.on(start, self.start, {self.job, *form, *view}, after, **ASKS)
        begun.then(None, self.job, js=SHOW_JOB)
        once_more = self.decode.click(self.decode_again, {self.job, self.decoder, self.budget, *view}, after, **ASKS)
        once_more.then(None, self.job, js=SHOW_JOB)
        self.stop.click(self.cancel, self.job, self.stop, **QUIET)
        self._wire_form(demo, form)

    def _wire_form(self, demo: gr.Blocks, form: set[gr.components.Component]) -> None:
        fields, latest = self.fields, {**QUIET, "trigger_mode": "always_last"}
        decides = [fields[name] for name in ("seconds", "size", "steps", "guidance", "shift", "seed", "quality")]
        # The line about the model changes once it is loaded, and only then is the time known; the player changes when a
        # video is whole, and then it is known better.
        changes = [field.change for field in (*decides, self.model, self.player)]
        gr.on([demo.load, *changes], self.tell_plan, form, self.plan, **latest)
        known = [demo.load, fields["prompt"].change, self.model.change]
        gr.on(known, self.tell_hint, fields["prompt"], self.hint, **latest)
        fields["image"].upload(self.fit_size, [fields["image"], fields["size"]], fields["size"], **QUIET)

    # What happens.

    def look(self, values: Values) -> dict[Any, Any]:
        """What a page that follows a job has to change."""
        job = words.sent_text(values[self.job])
        state = self._find(job)
        fresh = self._fragments(state) | ({} if state or not job else self._lost(job))
        busy = state is not None and not state.over
        stopping = busy and state.stopping
        return {part: html for part, html in fresh.items() if html != values[part]} | {
            self.generate: gr.Button("Queue another" if busy else "Generate"),
            self.stop: gr.Button("Stopping ..." if stopping else "Stop", interactive=busy and not stopping),
            self.onward: gr.Button(visible=bool(state) and not busy and (state.folder / LAST_FRAME).is_file()),
            self.timer: gr.Timer(active=busy or self.engine.readiness().state in ("idle", "loading")),
            self.again: gr.Row(visible=state is not None and state.over and state.latents.is_file()),
        }

    def _find(self, job: str | None) -> JobState | None:
        return self.jobs.snapshot(job) if job else None

    def _fragments(self, state: JobState | None) -> dict[Any, str]:
        preset = self.preset
        model = {self.model: render.model(preset.title, preset.about, self.engine.readiness())}
        if state is None:
            return model
        unsure = zero.while_running(self.engine)
        return model | {
            # One frame can be seen before a second one makes it a video.
            self.player: render.player(
                state,
                preset.fps,
                poster=(state.folder / "thumbnail.jpg").is_file(),
                found_again=not unsure,
            ),
            self.strip: render.strip(state, preset.fps),
            self.messages: render.of_job(state) + (render.note(unsure) if unsure and not state.over else ""),
            self.details: details.details(state, self.engine.memory(), self.engine.figures()),
        }

    def _lost(self, job: str) -> dict[Any, str]:
        defaults = self.preset.defaults
        place = render.empty(defaults.height, defaults.width)
        return {self.player: place, self.strip: "", self.details: "", self.messages: render.lost(job)}

    def reopen(self, values: Values) -> dict[Any, Any]:
        """A page was opened: follow the job that it knows, and put what that job was asked for into the form."""
        job = values[self.job]
        state = self._find(job)
        if state is None:
            # The fields stay as they are by now, which is no longer as they were sent: somebody may be writing already.
            picture = self.fields["image"]
            return self.look(values) | {picture: values[picture]} | ({self.job: ""} if job else {})
        return self.look(values) | self.filling(values, state.request)

    def filling(self, values: Values, request: Request | None = None) -> dict[Any, Any]:
        """Every field of the form as a request says it, or as it stands.

        The picture's always, here and elsewhere: Gradio would make an output that a handler leaves out anew, and that
        field would lose its guards (`engine.web.files`).
        """
        form = {name: values[field] for name, field in self.fields.items()}
        if request is not None:
            asked = dataclasses.asdict(Form.of(self.preset, request))
            form |= asked if self.offers(request) else asked | {"size": form["size"]}
        return {self.fields[name]: form[name] for name in form}

    def offers(self, request: Request) -> bool:
        """Whether the menu has a request's size."""
        return size_value(request) in [value for _, value in size_menu(self.preset)]

    def show_after(self, event: Any) -> None:
        """Let the page follow the job that an event of another tab has put into `job`."""
        shown = event.then(self.look, **self._follow)
        shown.then(None, self.job, js=SHOW_JOB)

    def start(self, values: Values) -> dict[Any, Any]:
        """Check the form and queue it. What is refused is said at once, and nothing else changes."""
        try:
            request = checked(self.engine, self._read(values).request(self.preset))
            self._new(request, self._find(values[self.job]))
            job = self.jobs.submit(request)
        except EngineError as error:
            return {self.plan: render.refusal(str(error))}
        sent = {self.job: job, self.note: "", self.fields["seed"]: request.seed}
        return sent | self.look({**values, self.job: job})

    @staticmethod
    def _new(request: Request, shown: JobState | None) -> None:
        """Refuse what is being made already: the second half of a double click."""
        if shown is not None and not shown.over and shown.request == request:
            raise RequestError("This very video is being made. Change something, such as the seed, to queue another.")

    def decode_again(self, values: Values) -> dict[Any, Any]:
        """Queue a second decode of the latents of the job that is shown."""
        try:
            gib = parse_gib(values[self.budget])
            settings = dataclasses.replace(parse_side(values[self.decoder]), memory_gib=gib)
            self.engine.decoder(settings)
            job = self.jobs.decode_again(values[self.job], settings)
        except EngineError as error:
            return {self.messages: render.refusal(str(error))}
        return {self.job: job} | self.look({**values, self.job: job})

    def _read(self, values: Values) -> Form:
        return Form(**{name: values[field] for name, field in self.fields.items()})

    def cancel(self, job: str) -> gr.Button:
        """Stop within one step or chunk; what is decoded by then stays."""
        state = self._find(job)
        if state is None or state.over:
            return gr.Button("Stop", interactive=False)
        self.jobs.cancel(job)
        return gr.Button("Stopping ...", interactive=False)

    def tell_plan(self, values: Values) -> str:
        """What a click would start and how long it would take, or why it would be refused."""
        try:
            request = self._read(values).sketch(self.preset)
        except EngineError as error:
            return render.refusal(str(error))
        beyond = self.preset.beyond_training(request)
        warning = render.messages([beyond]) if beyond else ""
        return render.plan(request, self.preset.fps, self.engine.estimate(request)) + warning

    def tell_hint(self, prompt: str) -> str:
        """Words that the model does not know, slips in a JSON description, how many tokens it is."""
        prompt = words.sent_text(prompt)
        try:
            tokens = self.engine.count_tokens(prompt)
        except EngineError as error:
            return render.refusal(str(error))
        return render.below_prompt(unknown_words(self.preset, prompt), fault(prompt), tokens)

    def fit_size(self, image: str | None, size: str) -> str:
        """The size of the menu that suits an uploaded picture."""
        return fitting_size(self.preset, image) or size
