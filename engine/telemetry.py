"""Seconds and bytes: what the machine holds now, and what each stage of a request took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import psutil
import torch

from engine import broken
from engine.memory import in_use

SAMPLE_SECONDS = 0.2
# Of what is kept to be drawn: two a second, and at most so many; then every other one goes and the rest lie wider.
KEPT_SECONDS, MOST_KEPT = 0.5, 480


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one accelerator. allocated: by live tensors; reserved: by PyTorch's allocator; peak: highest allocated
    since the stage began; used, total: of the whole device, by every process."""

    name: str
    allocated: int
    reserved: int
    peak: int
    used: int
    total: int


@dataclass(frozen=True)
class Memory:
    """host: bytes of this process in RAM; host_available, host_total: of the machine."""

    host: int
    host_available: int
    host_total: int
    devices: tuple[DeviceMemory, ...] = ()


def memory_now() -> Memory:
    """What this process and its accelerators hold at this moment. Never touches CUDA unless it is in use already, and
    no GPU on which this process holds nothing: to ask how much of it is free would take half a GiB of it."""
    machine = psutil.virtual_memory()
    devices = ()
    if in_use(torch.device("cuda")):
        held = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
        devices = tuple(device_memory(index) for index in held)
    return Memory(psutil.Process().memory_info().rss, machine.available, machine.total, devices)


def device_memory(index: int) -> DeviceMemory:
    """What the CUDA device of this number holds at this moment; opens it if this process had not yet."""
    free, total = torch.cuda.mem_get_info(index)
    return DeviceMemory(
        name=f"cuda:{index}",
        allocated=torch.cuda.memory_allocated(index),
        reserved=torch.cuda.memory_reserved(index),
        peak=torch.cuda.max_memory_allocated(index),
        used=total - free,
        total=total,
    )


def synchronize(device: torch.device) -> None:
    """Wait for a device, so that a clock read afterwards is true."""
    if in_use(device):
        torch.cuda.synchronize(device)


@dataclass
class StageRecord:
    """What one stage took. peaks: bytes by "host" and device name, the highest seen while it ran."""

    name: str
    started: float
    seconds: float | None = None
    peaks: dict[str, int] = field(default_factory=dict)


class Series:
    """Bytes over time, by "host" and device name, in a bounded number of samples at about equal distances."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: list[dict[str, int]] = []
        self.apart = KEPT_SECONDS

    def add(self, moment: float, values: dict[str, int]) -> None:
        """Keep a sample unless the last one is too near."""
        if self.times and moment - self.times[-1] < self.apart:
            return
        if len(self.times) == MOST_KEPT:
            self.times, self.values, self.apart = self.times[::2], self.values[::2], 2 * self.apart
        self.values.append(values)
        self.times.append(moment)

    def to_json(self) -> dict[str, list]:
        """`seconds`, and one list of bytes a device; None where a device was not there yet."""
        times, values = list(self.times), self.values[: len(self.times)]
        names = sorted({name for sample in values for name in sample})
        return {
            "seconds": [round(moment, 2) for moment in times],
            **{name: [sample.get(name) for sample in values] for name in names},
        }


class Telemetry:
    """Follows one request: a sampler thread watches memory, `stage` times the stages.

    device: what this process computes on; look: tells what is held now. Seconds are counted from the moment it is
    entered. Not shared between requests.
    """

    def __init__(self, device: torch.device, look: Callable[[], Memory] = memory_now) -> None:
        self.device, self.memory_now = device, look
        self.stages: list[StageRecord] = []
        self.first_frame: float | None = None
        self.steps: list[float] = []
        self.memory = Series()
        self._zero = time.perf_counter()
        self._done, self._lock = threading.Event(), threading.Lock()
        self._sampler = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)

    def __enter__(self) -> Telemetry:
        self._zero = time.perf_counter()
        self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._sampler.join()

    @property
    def elapsed(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self._zero

    @contextmanager
    def stage(self, name: str) -> Iterator[StageRecord]:
        """Time a stage; its peaks hold what the sampler saw and, on CUDA, the allocator's own maximum."""
        if in_use(self.device):
            torch.cuda.reset_peak_memory_stats(self.device)
        record = StageRecord(name, self.elapsed)
        self.stages.append(record)
        self._look(record)
        try:
            yield record
        finally:
            # A fault is told by who met it: raised from here, it would cost the video what was made before.
            broken.look(self.device)
            record.seconds = self.elapsed - record.started
            self._look(record)

    def frame_arrived(self) -> None:
        """Note the first frame's arrival on the host; later calls change nothing."""
        if self.first_frame is None:
            self.first_frame = self.elapsed

    def step_took(self, seconds: float) -> None:
        """Note a denoising step."""
        self.steps.append(seconds)

    def summary(self) -> dict:
        """Everything as JSON values; may be asked for while the request runs. step_seconds: of every denoising step;
        memory: bytes over time, of this process on the host and of live tensors on each device."""
        return {
            "seconds": self.elapsed,
            "seconds_to_first_frame": self.first_frame,
            "stages": [asdict(stage) for stage in self.stages],
            "peak_bytes": self._peaks(),
            "step_seconds": [round(seconds, 4) for seconds in self.steps],
            "memory": self.memory.to_json(),
        }

    def _peaks(self) -> dict[str, int]:
        stages = list(self.stages)
        names = {name for stage in stages for name in stage.peaks}
        return {name: max(stage.peaks.get(name, 0) for stage in stages) for name in sorted(names)}

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            running = [stage for stage in self.stages if stage.seconds is None]
            if running:
                self._look(running[-1])

    def _look(self, record: StageRecord) -> None:
        memory = self.memory_now()
        peaks = {"host": memory.host} | {device.name: device.peak for device in memory.devices}
        now = {"host": memory.host} | {device.name: device.allocated for device in memory.devices}
        with self._lock:  # the sampler and the request's own thread both look
            record.peaks |= {name: max(record.peaks.get(name, 0), value) for name, value in peaks.items()}
            self.memory.add(self.elapsed, now)
