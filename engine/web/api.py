"""The one public endpoint, `/generate`: the page's fields as parameters, an mp4 and its figures as the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import gradio as gr

from engine.errors import EngineError, RequestError
from engine.job import JobState
from engine.jobs import Jobs
from engine.preset import Preset
from engine.web import words
from engine.web.files import describe, first_frame, job_file, refuse_in_words, sent_file
from engine.web.form import build_request, checked

# More calls than this wait in Gradio's queue, where they hold no thread.
CALLS_AT_ONCE = 8
FOLLOW_SECONDS = 1.0

Answer = tuple[Any, dict[str, Any]]


def add_api(preset: Preset, jobs: Jobs) -> None:
    """Declare the endpoint inside the current gr.Blocks. Parameters that a caller leaves out are the preset's."""

    def generate(
        prompt: str,
        negative_prompt: Any = None,
        image: Any = None,
        seconds: Any = None,
        height: Any = None,
        width: Any = None,
        steps: Any = None,
        guidance: Any = None,
        shift: Any = None,
        seed: Any = None,
        decoder: Any = None,
        quality: Any = None,
        precision: Any = None,
    ) -> Iterator[Answer]:
        """Make one video from a prompt, or from a prompt and its first frame.

        Answers while it works with what happens, at the end with the mp4 and its figures as JSON (job, status, seconds,
        frames, request, ...). What is left out, or null, is the preset's default. A value outside of the limits is
        refused in a sentence that names the nearest one. Making a video takes from seconds to many minutes; one is made
        at a time, others wait in a queue.

        Args:
            prompt: what happens, where, and how the camera moves; at most 20000 characters
            negative_prompt: what should not be seen
            image: an uploaded picture (PNG, JPEG, WebP), the first frame; no address of another server
            seconds: length; rounded to the nearest 4n + 1 frames, 0 for a single frame
            height: of the picture in pixels, a multiple of 32
            width: of the picture in pixels, a multiple of 32
            steps: of denoising; more take longer
            guidance: how closely to follow the prompt; 1 or less leaves the negative prompt out
            shift: of the noise schedule, above 0
            seed: a whole number that is not negative gives the same video again; -1 draws one
            decoder: auto, or a path of the System tab
            quality: full computes every step in full, balanced and draft skip what changes little
            precision: of denoising: auto, fp32, bf16 or fp8
        """
        values = {
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "image": sent_file(image),
            "seconds": seconds,
            "height": height,
            "width": width,
            "steps": steps,
            "guidance": guidance,
            "shift": shift,
            "seed": seed,
            "decoder": decoder,
            "quality": quality,
            "precision": precision,
        }
        yield from run(preset, jobs, values)

    refuse_in_words()
    button = gr.Button(visible=False)
    button.click(
        generate,
        inputs=_inputs(),
        outputs=[job_file(label="video", visible=False), gr.JSON(label="stats", visible=False)],
        api_name="generate",
        # The engine checks plain JSON values itself and says what it would take.
        preprocess=False,
        postprocess=False,
        concurrency_limit=CALLS_AT_ONCE,
        show_progress="hidden",
    )


def _inputs() -> list[gr.components.Component]:
    numbers = ("seconds", "height", "width", "steps", "guidance", "shift", "seed")
    return [
        gr.Textbox(label="prompt", visible=False),
        gr.Textbox(label="negative_prompt", value=None, visible=False),
        first_frame(label="image", visible=False),
        *(gr.Number(label=name, value=None, visible=False) for name in numbers),
        *(gr.Textbox(label=name, value=None, visible=False) for name in ("decoder", "quality", "precision")),
    ]


def run(preset: Preset, jobs: Jobs, values: dict[str, Any]) -> Iterator[Answer]:
    """Submit, follow and answer. Raises gr.Error with the engine's words."""
    try:
        # What this machine does not have or can't read is refused before it waits.
        job = jobs.submit(checked(jobs.engine, build_request(preset, **values)))
    except EngineError as error:
        raise gr.Error(str(error), print_exception=False) from error
    yield from follow(jobs, job)


def follow(jobs: Jobs, job: str) -> Iterator[Answer]:
    """How far a job is, then its answer. Errors as of `watch`."""
    with closing(watch(jobs, job)) as states:
        for state in states:
            yield answer(state) if state.over else (None, progress(state))


def watch(jobs: Jobs, job: str) -> Iterator[Any]:
    """Snapshots of a job until it is over. A caller that goes away stops it: nobody else knows its id. Raises gr.Error
    if it is deleted meanwhile."""
    try:
        yield from jobs.follow(job, FOLLOW_SECONDS)
    except GeneratorExit:
        # A job that was deleted needs no stop.
        with suppress(RequestError):
            jobs.cancel(job)
        raise
    except EngineError as error:
        raise gr.Error(str(error), print_exception=False) from error


def progress(state: JobState) -> dict[str, Any]:
    """How far a job is, in figures."""
    stage = state.stage
    now = {"stage": stage.name, "done": stage.done, "total": stage.total} if stage else {}
    return {"job": state.id, "status": state.status, "position": state.position, **now}


def answer(state: JobState) -> Answer:
    """The video and its figures. Raises gr.Error if there is none."""
    if state.video is None:
        raise gr.Error(state.error or "The job was stopped before there were frames.", print_exception=False)
    if not state.video.is_file():
        raise gr.Error("This video was deleted before it could be fetched.", print_exception=False)
    file = describe(state.video, words.file_name(state.request))
    return file, no_paths({"job": state.id, "status": state.status, "warnings": state.warnings, **state.stats})


def no_paths(value: Any) -> Any:
    """The same JSON without any key "path": it is "decoder" beside a precision, else "choice". Gradio's clients take an
    object with a path for a file, and ask the server for it."""
    if isinstance(value, dict):
        path = "decoder" if "precision" in value else "choice"
        return {path if key == "path" else key: no_paths(item) for key, item in value.items()}
    return [no_paths(item) for item in value] if isinstance(value, list) else value
