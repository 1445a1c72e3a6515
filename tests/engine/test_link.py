"""How ranks exchange data: the way for a list of devices, messages by way of the host, and what is counted when."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from engine import link as module
from engine.link import LEASH, Link, way
from engine.rank import Usage
from engine.spread import GroupExecutor
from engine.telemetry import DeviceMemory

CPU = torch.device("cpu")


def gpu(index):
    return torch.device("cuda", index)


@pytest.mark.parametrize(
    "devices, backend, staged, words",
    [
        ([CPU] * 3, "gloo", False, "CPU"),
        ([gpu(0), gpu(1)], "nccl", False, "NCCL"),
        ([gpu(0)], "nccl", False, "NCCL"),
        ([gpu(0), gpu(0)], "gloo", True, "ranks share cuda:0, .* nothing is gained"),
        ([gpu(0), gpu(1), gpu(1)], "gloo", True, "ranks share cuda:1,"),
    ],
)
def test_the_way_follows_from_the_devices(devices, backend, staged, words):
    found = way(devices)
    assert found[:2] == (backend, staged)
    assert re.search(words, found.about)


@pytest.fixture
def staged(monkeypatch):
    """A link by way of the host, whose messages come back to it: what is sent to a rank is received from it."""
    link = Link(0, 1, CPU, 0, way([gpu(0), gpu(0)]), lambda: None)
    sent = {}

    class Back:
        def __init__(self, kind, tensor, rank):
            self.kind, self.tensor, self.rank = kind, tensor, rank

        def wait(self):
            if self.kind == "in":
                self.tensor.copy_(sent[self.rank])

    def post(operations):
        sent.update((op.rank, op.tensor) for op in operations if op.kind == "out")
        return operations

    fake = SimpleNamespace(isend="out", irecv="in", P2POp=Back, batch_isend_irecv=post)
    monkeypatch.setattr(module, "dist", fake)
    return link


def test_messages_by_way_of_the_host_are_copies_and_arrive_when_they_are_waited_for(staged):
    ours, place, nothing = torch.arange(6.0).view(2, 3), torch.zeros(2, 3), torch.empty(0, 3)
    wait = staged.swap([(1, ours), (2, nothing)], [(1, place), (2, nothing)])
    ours.zero_()  # what computes may go on with its memory
    assert not place.any()
    wait()
    assert place.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert staged.traffic().sent == 24 and staged.traffic().sent == 0


class Event:
    """A moment on a GPU, in milliseconds, that has come or not."""

    def __init__(self, moment, came=True):
        self.moment, self.came = moment, came

    def query(self):
        return self.came

    def elapsed_time(self, other):
        assert self.came and other.came, "CUDA refuses to tell the time between events that have not come"
        return other.moment - self.moment

    def synchronize(self):
        self.came = True


def test_waits_that_a_gpu_has_still_before_it_are_told_later():
    link = Link(0, 1, CPU, 0, way([CPU]), lambda: None)
    late = Event(300, came=False), Event(400, came=False)
    link._stalls.extend([(Event(0), Event(100)), (Event(150), Event(200)), late])
    assert link.traffic().seconds == pytest.approx(0.15)
    assert link.traffic().seconds == 0
    late[0].came = late[1].came = True
    assert link.traffic().seconds == pytest.approx(0.1)


def test_the_host_is_never_far_ahead_of_a_gpu(monkeypatch):
    link = Link(0, 1, gpu(0), 0, way([gpu(0)]), lambda: None)
    made = []
    monkeypatch.setattr(link, "_mark", lambda: made.append(Event(len(made), came=False)) or made[-1])
    for _ in range(3 * LEASH):
        link.swap([], [])()
    ended = made[1::2]
    assert [event.came for event in ended] == [True] * 2 * LEASH + [False] * LEASH


def test_processes_that_share_a_gpu_are_told_apart():
    group = GroupExecutor("nothing", [gpu(0), gpu(0)])
    held = DeviceMemory("cuda:0", 1, 2, 3, 4, 5)
    group._usage = {rank: Usage(0, 1, 0, 0, 0, held) for rank in (1, 0)}
    assert [device.name for device in group.memory().devices] == ["rank 0 (cuda:0)", "rank 1 (cuda:0)"]
    group = GroupExecutor("nothing", [gpu(0), gpu(1)])
    group._usage = {0: Usage(0, 1, 0, 0, 0, held)}
    assert [device.name for device in group.memory().devices] == ["cuda:0"]
