"""A stand-in for Hugging Face's `spaces`: generators run in a forked process, what goes in and out is pickled.

`asked` holds what each call was scheduled with, `refuse` an error to raise instead of lending.
"""

import multiprocessing
import sys
import threading
from multiprocessing.queues import SimpleQueue

FIRST = "torch" not in sys.modules
FORK = multiprocessing.get_context("fork")

asked = []
refuse = []


def GPU(task=None, *, duration=None, size=None):  # noqa: N802 - the name is theirs
    if task is None:
        return lambda task: GPU(task, duration=duration, size=size)

    def call(*args):
        from gradio.context import LocalContext

        asked.append((LocalContext.request.get(None), duration(*args)))
        if refuse:
            raise refuse[0]
        given, made = SimpleQueue(ctx=FORK), SimpleQueue(ctx=FORK)
        process = FORK.Process(target=_serve, args=(task, given, made), daemon=True)
        process.start()
        threading.Thread(target=lambda: (process.join(), made.put(("aborted", None))), daemon=True).start()
        given.put(args)
        yield from _taken(made)

    return call


def _taken(made):
    import gradio as gr

    while True:
        kind, value = made.get()
        if kind == "end":
            return
        if kind != "value":
            raise gr.Error(value or "GPU task aborted", title="ZeroGPU worker error")
        yield value


def _serve(task, given, made):
    try:
        for value in task(*given.get()):
            made.put(("value", value))
    except Exception as error:
        made.put(("error", type(error).__name__))
    made.put(("end", None))
