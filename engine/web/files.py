"""Files between page and server: uploads come in, videos go out, and nothing else of the disk or the network does.

Two components behave differently from Gradio's own. Their methods are replaced on the instance, because Gradio writes
a stub file beside the source of every subclass of a component. Such an instance must be no output of an event: Gradio
would make a fresh one for the session.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

REFUSED = "Upload the picture itself: this server takes no addresses and no files of its own."


def first_frame(**options: Any) -> gr.Image:
    """An upload field whose value is the path of the file exactly as it came; the engine checks what is in it.

    Gradio would open it with every decoder that Pillow has, and download what an address points to.
    """
    picture = gr.Image(type="filepath", sources=["upload"], **options)
    move = picture.async_move_resource_to_block_cache

    async def move_upload(source: str | Path | None) -> str | None:
        if "://" in str(source):
            raise gr.Error(REFUSED, print_exception=False)
        return await move(source)

    picture.async_move_resource_to_block_cache = move_upload
    picture.preprocess = lambda payload: uploaded(payload.path if payload else None)
    return picture


def uploaded(source: Any) -> str | None:
    """The path of an upload. Raises gr.Error for any other file: Gradio checks only what a caller marks as a file."""
    if not source:
        return None
    path = Path(str(source)).resolve()
    if not path.is_relative_to(Path(get_upload_folder()).resolve()):
        raise gr.Error(REFUSED, print_exception=False)
    return str(path)


def job_file(**options: Any) -> gr.File:
    """An output for files of jobs, served from where they lie. Gradio would copy each of them into its cache."""
    file = gr.File(**options)

    async def stay(source: str | Path | None) -> str | None:
        return None if source is None else str(source)

    file.async_move_resource_to_block_cache = stay
    return file


def describe(path: Path, name: str) -> dict[str, Any]:
    """What Gradio's clients need to fetch a file. name: what to save it as."""
    return {
        "path": str(path.resolve()),
        "orig_name": name,
        "size": path.stat().st_size,
        "mime_type": "video/mp4",
        "meta": {"_type": "gradio.FileData"},
    }
