"""A group of worker processes, one a device: started, asked, watched and ended by the parent, which has no device.

Every wait has a limit. A worker that dies, stands still or raises ends the call with an error that names its rank, its
device and the stage; the whole group is ended with it, and the next start makes a new one. Workers end with the parent,
however that ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from engine import errors
from engine.errors import EngineError, GroupError
from engine.shared import Shared

log = logging.getLogger(__name__)

SILENCE = 15.0  # seconds without a pulse, or without work on a CPU, after which a rank counts as hung
STOPPED = 4.0  # likewise where its process is stopped
START = 180.0  # for imports and for opening the devices, which have no pulse
GRACE = 1.5  # between the first sign of a fault and the choice of the rank that is named
POLL = 0.2
# NVLink multicast stays off: it hangs on machines whose fabric manager does not run.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass
class Member:
    """One worker."""

    rank: int
    device: torch.device
    process: subprocess.Popen
    connection: Connection

    def __str__(self) -> str:
        return f"Rank {self.rank} ({self.device})"


@dataclass(frozen=True)
class Sign:
    """Of a fault: whose, what class of exception (None: the process is gone) and what it said."""

    member: Member
    kind: str | None
    text: str = ""


class WorkerGroup:
    """devices: one worker each; program: the module that a worker runs; silence: see `SILENCE`. Starts nothing yet."""

    def __init__(
        self, devices: Sequence[torch.device], program: str = "engine.worker", silence: float = SILENCE
    ) -> None:
        self.devices, self.program, self.silence = tuple(devices), program, silence
        self.members: list[Member] = []
        self._lock, self._life = threading.RLock(), -1

    @property
    def alive(self) -> bool:
        """Whether the workers are there."""
        return bool(self.members)

    def start(self) -> list[Any]:
        """Start the workers, unless they are there. Returns what each says of itself (`Rank.hello`).

        Raises GroupError, with nothing left behind, if one of them does not come.
        """
        with self._lock:
            self.close()
            try:
                self._spawn()
                return self.call("start", "hello", silence=START)
            except BaseException:
                self.close()
                raise

    def _spawn(self) -> None:
        # The store gets a socket that is bound already: no port can be taken by another program in between.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        pulses = Shared.make("pulses", 8 * len(self.devices))
        self._pulses = pulses.array((len(self.devices),), np.int64)
        read_end, self._life = os.pipe()
        try:
            for rank, device in enumerate(self.devices):
                self.members.append(self._worker(rank, device, read_end, pulses.fd))
                place = {"rank": rank, "devices": [str(device) for device in self.devices], "port": port}
                self.members[-1].connection.send_bytes(pickle.dumps(place))
        finally:
            os.close(read_end)
            pulses.close()

    def _worker(self, rank: int, device: torch.device, life: int, pulses: int) -> Member:
        ours, theirs = Pipe()
        fds = (theirs.fileno(), life, pulses)
        command = [sys.executable, "-m", self.program, *map(str, fds)]
        environment = os.environ | ENVIRONMENT
        if device.type == "cpu":
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(self.devices))))
        # What a worker prints goes to standard error: standard output may be a program's figures.
        process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL, stdout=2)
        theirs.close()
        return Member(rank, device, process, ours)

    def call(
        self,
        stage: str,
        method: str,
        *arguments: Any,
        ranks: int | None = None,
        share: Shared | None = None,
        report: Callable[[str, int, int], None] | None = None,
        silence: float | None = None,
    ) -> list[Any]:
        """Have the first `ranks` ranks (None: all) do the same at once; their results in order.

        stage: for errors; share: memory that is sent after the call; report: gets the progress that rank 0 tells.
        Raises GroupError or what a rank raised, with rank, device and stage in front, and then the group is gone.
        """
        with self._lock:
            asked = self.members[:ranks]
            if not asked:
                raise GroupError(f"The devices {self.names()} were let go of before stage {stage}.")
            try:
                self._send(asked, pickle.dumps((method, arguments)), share)
                return self._collect(stage, asked, report, silence or self.silence)
            except BaseException:
                self.close()
                raise

    def _send(self, asked: list[Member], message: bytes, share: Shared | None) -> None:
        for member in asked:
            # A worker that is gone is noticed, with its reason, when the answers are collected.
            with suppress(OSError):
                member.connection.send_bytes(message)
                if share is not None:
                    send_handle(member.connection, share.fd, member.process.pid)

    def _collect(self, stage: str, asked: list[Member], report: Any, silence: float) -> list[Any]:
        answers: dict[int, Any] = {}
        watch = _Watch(asked, self._pulses, silence)
        while len(answers) < len(asked):
            left = [member for member in asked if member.rank not in answers]
            for member in _ready(left, POLL):
                kind, content = _receive(member)
                if kind == "done":
                    answers[member.rank] = content
                elif kind == "report":
                    if report is not None and member.rank == 0:
                        report(*content)
                else:
                    raise self._fault(stage, Sign(member, *content), left)
            if quiet := watch.quiet([member for member in asked if member.rank not in answers]):
                raise GroupError(_hung(watch.to_blame(quiet), stage))
        return [answers[member.rank] for member in asked]

    def _fault(self, stage: str, first: Sign, left: list[Member]) -> EngineError:
        """The error to raise: of the first rank that failed by itself, not of one that missed another."""
        signs, until = [first], time.monotonic() + GRACE
        while signs[-1].kind == "PeerLost" and time.monotonic() < until:
            seen = {sign.member.rank for sign in signs}
            for member in _ready([member for member in left if member.rank not in seen], POLL):
                kind, content = _receive(member)
                if kind == "failed":
                    signs.append(Sign(member, *content))
        sign = next((sign for sign in signs if sign.kind != "PeerLost"), first)
        if sign.kind is None:
            return GroupError(f"{sign.member} ended in stage {stage}: {_end_of(sign.member.process)}.")
        log.error("%s failed in stage %s:\n%s", sign.member, stage, sign.text)
        return _as_error(sign, stage)

    def names(self) -> str:
        """The devices in words."""
        return ", ".join(str(device) for device in self.devices)

    def close(self) -> None:
        """End the workers at once, also those that stand still. May be called from any thread, and again."""
        members, self.members = self.members, []
        for member in members:
            member.process.kill()
        for member in members:
            member.process.wait()
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)
        self._store = None


class _Watch:
    """How long each rank has had no pulse. One that computes on a CPU is alive without it: exchanges may be far apart
    there. On a GPU they are not, and waiting for it looks like work."""

    def __init__(self, members: list[Member], pulses: np.ndarray, silence: float) -> None:
        self.pulses, self.silence = pulses, silence
        self.seen = {member.rank: -1 for member in members}
        self.since: dict[int, tuple[float, float]] = {}

    def quiet(self, members: list[Member]) -> list[Member]:
        """Those of `members` that have been silent for too long."""
        return [member for member in members if self._is_quiet(member)]

    def _is_quiet(self, member: Member) -> bool:
        now, current = time.monotonic(), int(self.pulses[member.rank])
        if current != self.seen[member.rank]:
            self.seen[member.rank] = current
            self.since[member.rank] = now, _worked(member.process)
            return False
        began, worked = self.since[member.rank]
        if now - began > STOPPED and _is_stopped(member.process):
            return True
        if now - began < self.silence:
            return False
        if member.device.type == "cpu" and _worked(member.process) - worked > 0.1 * self.silence:
            self.since[member.rank] = now, _worked(member.process)
            return False
        return True

    def to_blame(self, quiet: list[Member]) -> Member:
        """A process that is stopped, else the one that has come least far: the others wait for it."""
        stopped = [member for member in quiet if _is_stopped(member.process)]
        return min(stopped or quiet, key=lambda member: self.seen[member.rank])


def _ready(members: list[Member], seconds: float) -> list[Member]:
    ready = wait([member.connection for member in members], seconds)
    return [member for member in members if member.connection in ready]


def _receive(member: Member) -> tuple[str, Any]:
    """The next message; that a worker is gone reads like a failure of class None."""
    try:
        kind, content = pickle.loads(member.connection.recv_bytes())
    except (EOFError, OSError):
        return "failed", (None, "")
    return (kind, content) if kind != "failed" else (kind, (content[0], "\n".join(content[1:])))


def _as_error(sign: Sign, stage: str) -> EngineError:
    text = sign.text.partition("\n")[0]
    known = getattr(errors, sign.kind, None)
    if isinstance(known, type) and issubclass(known, EngineError):
        return known(f"{sign.member}, stage {stage}: {text}")
    return GroupError(f"{sign.member} failed in stage {stage}: {sign.kind}: {text}")


def _is_stopped(process: subprocess.Popen) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return False


def _worked(process: subprocess.Popen) -> float:
    """Seconds of CPU time."""
    with suppress(psutil.Error):
        times = psutil.Process(process.pid).cpu_times()
        return times.user + times.system
    return 0.0


def _hung(member: Member, stage: str) -> str:
    state = "its process is stopped" if _is_stopped(member.process) else "it gives no sign of life"
    return f"{member} hung in stage {stage}: {state}. The group was ended; it starts anew with the next request."


def _end_of(process: subprocess.Popen) -> str:
    try:
        code = process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return "it closed its connection"
    if code >= 0:
        return f"exit code {code}, the log says why"
    name = signal.Signals(-code).name
    hint = "; the system does so where memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
