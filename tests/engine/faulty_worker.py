"""A worker that takes a VAE from a small file, since diffusers takes seconds to import, and that misbehaves where
FAULT="rank kind first file" says so.

die, stop, raise, oom: at exchange number `first` of that rank, which lies in the middle of a pass or step. path: it has
no compiler. build: it finds out late that it has none. start: it ends before it answers. `file` remembers that it
happened. staged: no fault, all ranks send by way of the host, as those that share a GPU do.

Else path portable can be asked for, with plain PyTorch in the place of its passes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from engine.decode_plan import Choice
from engine.link import Link
from engine.rank import Rank
from engine.worker import serve

BARE = "bare_vae.pt"


class Bare(SimpleNamespace):
    """A module's weights and numbers without its class; unlike its base it can be referred to weakly, and be a key."""

    __hash__ = object.__hash__


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
        rank, self.kind, first, mark = os.environ.get("FAULT", "-1 none 0 /").split()
        self.mark, self.faulty = Path(mark), place["rank"] == int(rank)
        self.link.staged = self.kind == "staged"
        if self.faulty and self.kind == "start" and self._once():
            sys.exit(3)
        if self.faulty and self.kind in ("die", "stop", "raise", "oom"):
            self._interrupt_exchanges(int(first))

    def _once(self) -> bool:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _interrupt_exchanges(self, first: int) -> None:
        swap, count = Link.swap, [0]

        def faulty_swap(link, outgoing, incoming):
            count[0] += 1
            if count[0] >= first and self._once():
                happen(self.kind)
            return swap(link, outgoing, incoming)

        Link.swap = faulty_swap

    def load_parts(self, folder, text_dtype):
        sys.modules["tests.engine.faulty_worker"] = sys.modules["__main__"]  # where the file says that Bare is
        self.vae = torch.load(folder / BARE, weights_only=False)

    def decoders(self):
        choices = super().decoders()
        for precision in ("fp32", "bf16", "fp16") if self.kind not in ("path", "build") else ():
            choices["portable", precision] = Choice("portable", precision, "asked for")
        if self.kind in ("path", "build"):
            choices["auto", "auto"] = choices["plain", "bf16"]._replace(reason="the fastest that is here")
        if self.kind == "path" and self.faulty:
            choices["auto", "auto"] = choices["plain", "fp32"]
            choices["plain", "bf16"] = "its compiler is missing"
        if self.kind == "widths" and self.vae is None:
            choices["auto", "auto"] = choices["plain", "bf16"]
        return choices

    def decode_prepare(self, choice):
        answer = super().decode_prepare(choice)
        return "nvcc ended with 1" if self.kind == "build" and self.faulty and choice.precision == "bf16" else answer


if __name__ == "__main__":
    serve(FaultyRank)
