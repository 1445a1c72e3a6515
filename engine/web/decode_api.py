"""The public endpoint `/decode`: saved latents, of a job or a file, decoded again by other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from engine import again
from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.job import DecodeRequest
from engine.jobs import Jobs
from engine.settings import DecodeSettings
from engine.sides import parse_side
from engine.web.api import CALLS_AT_ONCE, Answer, follow
from engine.web.compare_api import latents_upload
from engine.web.files import job_file, sent_file


def add_decode_api(engine: Engine, jobs: Jobs) -> None:
    """Declare the endpoint inside the current gr.Blocks."""

    def decode(job: Any = None, latents: Any = None, decoder: Any = None, memory_gib: Any = None) -> Iterator[Answer]:
        """Decode saved latents again, without denoising: after a failure or a stop, or with another decoder.

        Answers while it works with what happens, at the end with the mp4 and its figures as JSON. Name either a job or
        a file.

        Args:
            job: the id of a video that was made here and is over
            latents: an uploaded safetensors file with one tensor "latents" [1, 48, frames, height, width]
            decoder: "path" or "path:precision", such as auto or reference:fp32; auto if left out
            memory_gib: the most that the decoders built and portable may take of each GPU; what is free if left out
        """
        try:
            settings = dataclasses.replace(parse_side("auto" if decoder is None else decoder), memory_gib=memory_gib)
            engine.decoder(settings)
            request = decode_request(engine, jobs, job, sent_file(latents), settings)
            name = jobs.submit(request)
        except EngineError as error:
            raise gr.Error(str(error), print_exception=False) from error
        yield from follow(jobs, name)

    gr.Button(visible=False).click(
        decode,
        inputs=[
            gr.Textbox(label="job", value=None, visible=False),
            latents_upload(label="latents", visible=False),
            gr.Textbox(label="decoder", value=None, visible=False),
            gr.Number(label="memory_gib", value=None, visible=False),
        ],
        outputs=[job_file(label="video", visible=False), gr.JSON(label="stats", visible=False)],
        api_name="decode",
        preprocess=False,
        postprocess=False,
        concurrency_limit=CALLS_AT_ONCE,
        show_progress="hidden",
    )


def decode_request(engine: Engine, jobs: Jobs, job: Any, file: str | None, settings: DecodeSettings) -> DecodeRequest:
    """The decode that is asked for. Raises RequestError unless there is exactly one source, and for a broken one."""
    if (job is None) == (file is None):
        raise RequestError("Name either a job or a file of latents, and not both.")
    if file is None:
        return again.of_job(jobs.snapshot(job), settings)
    try:
        return again.of_file(Path(file), settings, engine.preset)
    except RequestError as error:
        # People know their file by its name; where it lies here is the server's affair.
        raise RequestError(str(error).replace(file, Path(file).name)) from error
