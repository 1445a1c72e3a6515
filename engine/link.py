"""What one rank of a group sends to and gets from others, with the time and bytes that it took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.bands import Message
from engine.errors import EngineError

LAST_RESORT = timedelta(seconds=60)  # the parent notices a silent rank long before
LEASH = 8  # exchanges that the host may be ahead of a GPU, so that its pulse tells how far the GPU is


class PeerLost(EngineError):  # noqa: N818 - not our own fault, and said only beside the rank whose fault it is
    """An exchange failed, because another rank is gone."""


@dataclass
class Traffic:
    """Since the last time that it was asked for. seconds: that computing waited for others; sent: bytes."""

    seconds: float = 0.0
    sent: int = 0


class Link:
    """Exchanges of one rank. pulse: called at every exchange, so that the parent sees that the rank is alive."""

    def __init__(self, rank: int, ranks: int, device: torch.device, port: int, pulse: Callable[[], None]) -> None:
        self.rank, self.device, self.pulse = rank, device, pulse
        self._traffic = Traffic()
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._leash: deque[torch.cuda.Event] = deque()
        if ranks > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LAST_RESORT)
            backend, where = ("nccl", {"device_id": device}) if device.type == "cuda" else ("gloo", {})
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=LAST_RESORT, **where)

    def swap(self, outgoing: list[Message], incoming: list[Message]) -> Callable[[], None]:
        """As of `engine.bands.Link`. Tensors are contiguous; those without elements are not sent."""
        self.pulse()
        sends = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in outgoing if tensor.numel()]
        receives = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in incoming if tensor.numel()]
        self._traffic.sent += sum(op.tensor.nbytes for op in sends)
        try:
            works = dist.batch_isend_irecv(sends + receives) if sends or receives else []
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

        def wait() -> None:
            try:
                self._timed(works)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
            # Sent tensors live until here: gloo reads them from its own threads.
            sends.clear()

        return wait

    def _timed(self, works: list[dist.Work]) -> None:
        began = self._mark()
        for work in works:
            work.wait()
        ended = self._mark()
        if self.device.type == "cuda":
            self._stalls.append((began, ended))
            self._leash.append(ended)
            if len(self._leash) > LEASH:
                self._leash.popleft().synchronize()
        else:
            self._traffic.seconds += ended - began
        self.pulse()

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def traffic(self) -> Traffic:
        """What there was since the last call; on CUDA, after the device has been waited for."""
        for began, ended in self._stalls:
            self._traffic.seconds += began.elapsed_time(ended) / 1e3
        taken, self._traffic = self._traffic, Traffic()
        self._stalls.clear()
        return taken
