"""Who may queue how much: the place where a server says no before it has any work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.errors import BusyError

HOUR = 3600.0
# Addresses that were not seen for an hour are forgotten once so many are known.
REMEMBERED = 10_000


@dataclass(frozen=True)
class QueueLimits:
    """waiting: jobs in the queue; at_once: jobs of one client that wait or run; per_hour: jobs of one client that were
    taken within an hour. 0 means no limit."""

    waiting: int = 100
    at_once: int = 0
    per_hour: int = 0


class Admission:
    """Counts what each client has asked for. Not thread-safe: `Jobs` calls it under its lock. clock: in seconds."""

    def __init__(self, limits: QueueLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits or QueueLimits(), clock
        self._owners: dict[str, str] = {}
        self._taken: dict[str, deque[float]] = {}

    def check(self, client: str | None, active: Collection[str], waiting: int, more: int = 1) -> None:
        """Raise BusyError, in words, if a client may not queue so many more jobs.

        client: its address, None for the owner of the machine, whom only the length of the queue stops; active: ids of
        all jobs that wait or run; waiting: how many of them wait.
        """
        limits = self.limits
        if limits.waiting and waiting + more > limits.waiting:
            raise BusyError(
                f"{_jobs(waiting)} in the queue, and no more are taken. Try again when some have finished."
                if more == 1
                else f"{_jobs(waiting)} in the queue, which takes {limits.waiting}; {more} more are too many. "
                "Ask for fewer, or try again when some have finished."
            )
        if client is None:
            return
        self._owners = {job: owner for job, owner in self._owners.items() if job in active}
        at_once = list(self._owners.values()).count(client)
        if limits.at_once and at_once + more > limits.at_once:
            raise BusyError(
                f"{_jobs(at_once)} of yours waiting or running, the most that one visitor may have here at once. "
                "Wait until one has finished, or stop one."
                if more == 1
                else f"{_jobs(at_once)} of yours waiting or running, and one visitor may have {limits.at_once} here at "
                f"once; {more} more are too many. Ask for fewer, or wait until some have finished."
            )
        self._check_hour(client, more)

    def _check_hour(self, client: str, more: int) -> None:
        taken, now = self._taken.get(client, deque()), self._clock()
        while taken and taken[0] <= now - HOUR:
            taken.popleft()
        limit = self.limits.per_hour
        if not limit or len(taken) + more <= limit:
            return
        if more > limit:
            raise BusyError(f"{more} jobs are too many: one visitor may start {limit} within an hour. Ask for fewer.")
        minutes = int((taken[len(taken) + more - limit - 1] + HOUR - now) // 60) + 1
        raise BusyError(
            f"You have started {len(taken)} jobs within an hour, the most that one visitor may here. "
            f"Try again in {minutes} min."
            if more == 1
            else f"You have started {len(taken)} jobs within an hour, and one visitor may start {limit}; {more} more "
            f"are too many. Ask for fewer, or try again in {minutes} min."
        )

    def take(self, client: str | None, job: str) -> None:
        """Note that a client's job was queued."""
        if client is None:
            return
        self._owners[job] = client
        self._taken.setdefault(client, deque()).append(self._clock())
        if len(self._taken) > REMEMBERED:
            recent = self._clock() - HOUR
            self._taken = {name: times for name, times in self._taken.items() if times[-1] > recent}


def _jobs(count: int) -> str:
    return "There is 1 job" if count == 1 else f"There are {count} jobs"
