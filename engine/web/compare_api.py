"""The public endpoint `/compare`: two decodes of the same latents, their figures as JSON and both videos."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gradio as gr

from engine.engine import Engine
from engine.errors import EngineError
from engine.job import CompareState
from engine.jobs import Jobs
from engine.web.api import CALLS_AT_ONCE, no_paths, watch
from engine.web.compare_form import CompareForm, start_form
from engine.web.files import describe, job_file, refused, sent_file, upload

# Which parameters belong to which kind of latents.
KINDS = {"file": {"file"}, "job": {"job"}, "random": {"seed", "height", "width"}}
Answer = tuple[dict[str, Any], Any, Any]


def latents_upload(**options: Any) -> gr.File:
    """An upload field for a safetensors file whose value is its path; the engine checks what is in it. No output of an
    event, see `engine.web.files`."""
    return upload([".safetensors"], **options)


def add_compare_api(engine: Engine, jobs: Jobs) -> None:
    """Declare the endpoint inside the current gr.Blocks. What a caller leaves out is what the tab begins with."""

    def compare(
        latents: Any = None,
        job: Any = None,
        seed: Any = None,
        height: Any = None,
        width: Any = None,
        frames: Any = None,
        a: Any = None,
        b: Any = None,
    ) -> Iterator[Answer]:
        """Decode the same latents in two ways and measure how far the results are apart.

        Answers while it works with what happens, at the end with the figures as JSON (PSNR, largest difference, seconds
        and bytes of each side, a verdict) and both videos. Name one kind of latents: a file, or a job, or random ones.

        Args:
            latents: an uploaded safetensors file with one tensor "latents" [1, 48, frames, height, width]
            job: the id of a video that was made here
            seed: of random latents
            height: of random latents, in pixels of their video, a multiple of 32
            width: of random latents, in pixels of their video, a multiple of 32
            frames: so many from the start, 4n + 1
            a: the first decoder, "path" or "path:precision", such as auto or plain:fp32
            b: the second decoder, such as reference:fp32
        """
        noise = {"seed": seed, "height": height, "width": width}
        form = call_form(start_form(engine), file=sent_file(latents), job=job, frames=frames, a=a, b=b, **noise)
        yield from run(engine, jobs, form)

    numbers = ("seed", "height", "width", "frames")
    gr.Button(visible=False).click(
        compare,
        inputs=[
            latents_upload(label="latents", visible=False),
            gr.Textbox(label="job", value=None, visible=False),
            *(gr.Number(label=name, value=None, visible=False) for name in numbers),
            gr.Textbox(label="a", value=None, visible=False),
            gr.Textbox(label="b", value=None, visible=False),
        ],
        outputs=[
            gr.JSON(label="figures", visible=False),
            job_file(label="video a", visible=False),
            job_file(label="video b", visible=False),
        ],
        api_name="compare",
        preprocess=False,
        postprocess=False,
        concurrency_limit=CALLS_AT_ONCE,
        show_progress="hidden",
    )


def call_form(start: CompareForm, **values: Any) -> CompareForm:
    """What a call says, as a form; `start` where it says None. Raises gr.Error if it names two kinds of latents, since
    one of them would be left out in silence."""
    given = {name: value for name, value in values.items() if value is not None}
    kinds = [source for source, names in KINDS.items() if names & given.keys()]
    if len(kinds) > 1:
        raise refused("Give one kind of latents: a file, or a job, or seed, height and width of random ones.")
    height, width = start.size.split("x")
    size = f"{given.pop('height', height)}x{given.pop('width', width)}"
    return dataclasses.replace(start, source=kinds[0] if kinds else start.source, size=size, **given)


def run(engine: Engine, jobs: Jobs, form: CompareForm) -> Iterator[Answer]:
    """Submit, follow and answer; a caller that goes away stops the job. Raises gr.Error with the engine's words."""
    try:
        job = jobs.submit(form.request(engine, jobs.outputs)[0])
    except EngineError as error:
        raise gr.Error(str(error), print_exception=False) from error
    with closing(watch(jobs, job)) as states:
        for state in states:
            yield answer(state) if state.over else (_progress(state), None, None)


def _progress(state: CompareState) -> dict[str, Any]:
    stage = state.stage
    now = {"stage": stage.name, "done": stage.done, "total": stage.total} if stage else {}
    return {"job": state.id, "status": state.status, "position": state.position, "side": state.side, **now}


def answer(state: CompareState) -> Answer:
    """Figures and videos. Raises gr.Error if there are none."""
    if state.result is None:
        raise gr.Error(state.error or "The comparison was stopped.", print_exception=False)
    videos = {name: state.folder / side["video"] for name, side in state.result["sides"].items() if side["video"]}
    files = [describe(videos[name], f"{name}.mp4") if name in videos else None for name in ("a", "b")]
    return no_paths({"job": state.id, "status": state.status, **state.result}), *files
