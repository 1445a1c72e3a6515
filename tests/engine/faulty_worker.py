"""A worker of a group that misbehaves where its environment says so: FAULT="rank stage-of-fault".

die, stop, raise, oom: in the middle of a decode pass or a denoising step, between two exchanges, of that rank. path: it
says that it has no decoder called plain. start: it ends before it answers. The fault happens once: a file remembers it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from engine.decode_plan import Choice
from engine.link import Link
from engine.rank import Rank
from engine.worker import serve

AFTER = 12  # exchanges before it happens


def happen(kind: str) -> None:
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    else:
        raise KeyError("a fault of ours")


class FaultyRank(Rank):
    def __init__(self, **place):
        super().__init__(**place)
        rank, self.kind, mark = os.environ.get("FAULT", "-1 none /").split()
        self.mark = Path(mark)
        self.faulty = place["rank"] == int(rank)
        if self.faulty and self.kind == "start" and self._once():
            sys.exit(3)
        if self.faulty and self.kind in ("die", "stop", "raise", "oom"):
            self._interrupt_exchanges()

    def _once(self) -> bool:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _interrupt_exchanges(self) -> None:
        swap, count = Link.swap, [0]

        def faulty_swap(link, outgoing, incoming):
            count[0] += 1
            if count[0] == AFTER and self._once():
                happen(self.kind)
            return swap(link, outgoing, incoming)

        Link.swap = faulty_swap

    def hello(self):
        facts = super().hello()
        if self.kind != "path":
            return facts
        # Everybody has a faster decoder and knows it as "auto"; the faulty one lacks it.
        fast = Choice("plain", "bf16", "a faster one") if not self.faulty else facts.choices["plain", "fp32"]
        facts.choices["auto", "auto"] = fast
        if self.faulty:
            facts.choices["plain", "bf16"] = "its compiler is missing"
        return facts


if __name__ == "__main__":
    serve(FaultyRank)
