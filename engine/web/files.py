"""Files between page and server: uploads come in, videos go out, and nothing else of the disk or the network does.

Some components behave differently from Gradio's own. Their methods are replaced on the instance, because Gradio writes
a stub file beside the source of every subclass of a component. Such an instance must be no output of an event: Gradio
would make a fresh one for the session.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import BlockFunction
from gradio.context import Context, LocalContext
from gradio.exceptions import ComponentProcessingError
from gradio.state_holder import SessionState
from gradio.utils import get_upload_folder

REFUSED = "Upload the file itself: this server takes no addresses and no files of its own."
NO_CHOICE = "This choice is not known here any more. Reload the page."


def refused(words: str = REFUSED) -> gr.Error:
    """What a caller is told, without a traceback in the log."""
    return gr.Error(words, print_exception=False)


def visitor() -> str | None:
    """The address for which this thread handles a page's event or a call, as the gate has found it; None elsewhere."""
    request = LocalContext.request.get(None)
    return request.client.host if request is not None else None


def refuse_in_words() -> None:
    """Give callers of the current gr.Blocks a sentence where Gradio itself refuses what they sent: it would log a
    traceback and answer nothing, for a file that was not uploaded, and for text in a field of numbers."""
    demo = Context.root_block
    preprocess = demo.preprocess_data

    async def preprocess_data(block_fn: BlockFunction, inputs: list[Any], *rest: Any, **options: Any) -> list[Any]:
        if len(inputs) < len(block_fn.inputs):
            raise refused(
                f"The call has {len(inputs)} values and needs {len(block_fn.inputs)}; null means the default."
            )
        try:
            _stay_as_sent(block_fn, rest[0] if rest else None)
            return await preprocess(block_fn, inputs, *rest, **options)
        except gr.Error as error:
            raise refused(NO_CHOICE if "list of choices" in error.message else error.message) from error
        except ComponentProcessingError as error:
            raise refused("A field holds a value that it does not take. Fill it in again.") from error
        except (ValueError, OSError) as error:
            # Paths outside of the uploads, and what is no path: lists, zero bytes, names that are too long.
            raise refused() from error

    demo.preprocess_data = preprocess_data


def as_sent(field: gr.components.Component) -> gr.components.Component:
    """A field whose value reaches its handler as the page sent it, for the engine to check.

    What Gradio refuses by itself before a handler that doesn't wait in its queue, the page never shows.
    """
    field.preprocess = lambda payload: payload
    return field


def _stay_as_sent(block_fn: BlockFunction, state: SessionState | None) -> None:
    """What `as_sent` did holds for the component, too, that Gradio made anew for a session."""
    for field in block_fn.inputs:
        if state is not None and "preprocess" in vars(field) and field._id in state:
            state[field._id].preprocess = field.preprocess


def first_frame(**options: Any) -> gr.Image:
    """An upload field whose value is the path of the file exactly as it came; the engine checks what is in it.

    Gradio would open it with every decoder that Pillow has, and download what an address points to.
    """
    picture = gr.Image(type="filepath", sources=["upload"], **options)
    move = picture.async_move_resource_to_block_cache

    async def move_upload(source: str | Path | None) -> str | None:
        if "://" in str(source):
            raise refused()
        return await move(source)

    picture.async_move_resource_to_block_cache = move_upload
    picture.preprocess = lambda payload: uploaded(payload.path if payload else None)
    return picture


def upload(kinds: list[str], **options: Any) -> gr.File:
    """An upload field for files of these kinds whose value is a path; who reads them checks what is in them."""
    field = gr.File(file_types=kinds, type="filepath", **options)
    move = field.async_move_resource_to_block_cache

    async def move_upload(source: str | Path | None) -> str | None:
        if "://" in str(source):
            raise refused()
        return await move(source)

    field.async_move_resource_to_block_cache = move_upload
    field.preprocess = lambda payload: uploaded(payload.path if payload else None)
    return field


def uploaded(source: Any) -> str | None:
    """The path of an upload. Raises gr.Error for any other file: Gradio checks only what a caller marks as a file."""
    if not source:
        return None
    try:
        path = Path(str(source)).resolve()
    except (ValueError, OSError) as error:
        raise refused() from error
    if not path.is_relative_to(Path(get_upload_folder()).resolve()):
        raise refused()
    return str(path)


def sent_file(value: Any) -> str | None:
    """The path of an upload as an API call names it, {"path": ...}; None where none is given. Raises gr.Error for
    everything else, so that nothing that was meant is left out in silence."""
    if value is None:
        return None
    path = value.get("path") if isinstance(value, dict) else None
    if not isinstance(path, str) or not path:
        raise refused()
    return uploaded(path)


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
