"""One process of a group: does what its parent asks, one call at a time, and ends with it.

`python -m engine.worker FD LIFE PULSE`: descriptors of the connection, of a pipe whose other end only the parent
holds, and of the shared pulses. Everything heavy is imported after the watch over the parent has begun.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any


def die_with_parent(life: int) -> None:
    """Ends this process, whatever it is doing, when the other end of the pipe is gone."""
    os.read(life, 1)
    os._exit(1)


def serve(rank_class: Any = None) -> None:
    """Answer calls until the parent hangs up. rank_class: for tests; `engine.rank.Rank` if it is None."""
    descriptor, life, pulses = (int(word) for word in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    threading.Thread(target=die_with_parent, args=(life,), daemon=True).start()
    connection = Connection(descriptor)
    place = pickle.loads(connection.recv_bytes())
    beats = memoryview(mmap.mmap(pulses, 8 * len(place["devices"]))).cast("q")

    def pulse() -> None:
        beats[place["rank"]] += 1

    def report(*progress: Any) -> None:
        pulse()
        connection.send_bytes(pickle.dumps(("report", progress)))

    worker = None
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        pulse()
        try:
            if worker is None:
                make = rank_class or _rank_class()
                worker = make(**place, connection=connection, pulse=pulse, report=report)
            answer = ("done", worker.call(method, arguments))
        except BaseException as error:
            answer = ("failed", error_of(error))
        connection.send_bytes(pickle.dumps(answer))


def _rank_class() -> Any:
    from engine.rank import Rank

    return Rank


def error_of(error: BaseException) -> tuple[str, str, str]:
    """Class, message and traceback as text: exceptions themselves need not survive the way."""
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


if __name__ == "__main__":
    serve()
