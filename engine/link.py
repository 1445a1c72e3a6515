"""What one rank of a group sends to and gets from others, with the time and bytes that it took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine.bands import Message
from engine.errors import EngineError

LAST_RESORT = timedelta(seconds=60)  # the parent notices a silent rank long before
LEASH = 8  # exchanges that the host may be ahead of a GPU, so that its pulse tells how far the GPU is


class PeerLost(EngineError):  # noqa: N818 - not our own fault, and said only beside the rank whose fault it is
    """An exchange failed, because another rank is gone."""


class Way(NamedTuple):
    """How the ranks of a group exchange data. backend: of torch.distributed; staged: whether tensors go by way of the
    host, since gloo sends no CUDA tensors; about: the same in words."""

    backend: str
    staged: bool
    about: str


def way(devices: Sequence[torch.device]) -> Way:
    """NCCL between GPUs, which it takes one rank each of; gloo everywhere else."""
    if any(device.type != "cuda" for device in devices):
        return Way("gloo", False, "gloo, between processes of one machine's CPU")
    if len(set(devices)) == len(devices):
        return Way("nccl", False, "NCCL, between GPUs")
    names = ", ".join(sorted({str(device) for device in devices if devices.count(device) > 1}))
    why = f"ranks share {names}, which NCCL does not take, so nothing is gained: this is for trying it out"
    return Way("gloo", True, f"gloo, by way of the host: {why}")


@dataclass
class Traffic:
    """Since the last time that it was asked for. seconds: that computing waited for others; sent: bytes."""

    seconds: float = 0.0
    sent: int = 0


class Link:
    """Exchanges of one rank. pulse: called at every exchange, so that the parent sees that the rank is alive."""

    def __init__(
        self, rank: int, ranks: int, device: torch.device, port: int, way: Way, pulse: Callable[[], None]
    ) -> None:
        self.rank, self.device, self.staged, self.pulse = rank, device, way.staged, pulse
        self._traffic = Traffic()
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._leash: deque[torch.cuda.Event] = deque()
        if ranks > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LAST_RESORT)
            where = {"device_id": device} if way.backend == "nccl" else {}
            dist.init_process_group(way.backend, store=store, rank=rank, world_size=ranks, timeout=LAST_RESORT, **where)

    def swap(self, outgoing: list[Message], incoming: list[Message]) -> Callable[[], None]:
        """As of `engine.bands.Link`. Tensors are contiguous; those without elements are not sent."""
        self.pulse()
        outgoing, incoming = _filled(outgoing), _filled(incoming)
        self._traffic.sent += sum(tensor.nbytes for _, tensor in outgoing)
        ours, theirs = (self._leave(outgoing), self._room(incoming)) if self.staged else (outgoing, incoming)
        sends = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in ours]
        receives = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in theirs]
        try:
            works = dist.batch_isend_irecv(sends + receives) if sends or receives else []
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

        def wait() -> None:
            began = self._mark()
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
            if self.staged:
                _arrive(incoming, theirs)
            self._note(began)
            # Sent tensors live until here: gloo reads them from its own threads.
            sends.clear()

        return wait

    def _leave(self, messages: list[Message]) -> list[Message]:
        """Copies of messages on the host, complete when this returns: gloo reads them at once."""
        copies = self._room(messages)
        for (_, copy), (_, tensor) in zip(copies, messages, strict=True):
            copy.copy_(tensor, non_blocking=True)
        # The copies queued behind what computes the tensors, on the same stream.
        if messages and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return copies

    def _room(self, messages: list[Message]) -> list[Message]:
        """Host memory for messages; page-locked for a GPU, whose copies then need no wait."""
        pinned = self.device.type == "cuda"
        return [(rank, torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned)) for rank, x in messages]

    def _note(self, began: torch.cuda.Event | float) -> None:
        """Take in a wait that is over; on CUDA it is over on the host, and queued on the device."""
        ended = self._mark()
        if self.device.type == "cuda":
            self._stalls.append((began, ended))
            self._leash.append(ended)
            if len(self._leash) > LEASH:
                self._leash.popleft().synchronize()
        else:
            self._traffic.seconds += ended - began
        self.pulse()

    def _mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def traffic(self) -> Traffic:
        """What there was since the last call; waits that a GPU has still before it are told by a later one."""
        while self._stalls and self._stalls[0][1].query():
            began, ended = self._stalls.popleft()
            self._traffic.seconds += began.elapsed_time(ended) / 1e3
        taken, self._traffic = self._traffic, Traffic()
        return taken


def _filled(messages: list[Message]) -> list[Message]:
    return [(rank, tensor) for rank, tensor in messages if tensor.numel()]


def _arrive(places: list[Message], received: list[Message]) -> None:
    """From the host to where it is read. What reads it queues behind the copy; PyTorch keeps page-locked memory from
    being used again before a copy out of it is over."""
    for (_, place), (_, tensor) in zip(places, received, strict=True):
        place.copy_(tensor, non_blocking=True)
