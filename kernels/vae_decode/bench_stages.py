"""Where the time of our decoder goes: by part of the decoder, and by kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.decode import DecodeRun
from engine.decode_paths import DTYPES, explain, forget
from engine.decode_plan import Plan
from engine.settings import DecodeSettings
from kernels.vae_decode.bench_setup import synchronize

KERNELS = 25
WARM = 3  # passes before the clock counts, and passes that are profiled


class Watch:
    """Sums up the seconds of calls by name: by events on a GPU, which do not make it wait, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, watched."""

        def watched(*arguments: Any) -> Any:
            start = self._mark()
            result = call(*arguments)
            self.marks[name].append((start, self._mark()))
            return result

        return watched

    def seconds(self) -> dict[str, float]:
        """Of every name. Wait for the device before."""
        return {
            name: sum(a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs)
            for name, pairs in self.marks.items()
        }


def run(
    name: str, vae: nn.Module, latents: Tensor, settings: DecodeSettings, device: torch.device, profile: bool
) -> Iterator[str]:
    """Lines of stages, and of kernels if asked for, of one decode of the latents."""
    choice = explain(settings, device, vae)
    plan = Plan(latents, choice, memory_gib=settings.memory_gib)
    spans = plan.passes
    _passes(DecodeRun(vae.to(device), plan), spans[:WARM])
    work, watch = DecodeRun(vae, plan), Watch(device)
    decoder = work.fast
    begin, levels, head = decoder._begin, decoder.levels, decoder.head
    try:
        decoder._begin = watch.wrap("first convolution and middle", begin)
        decoder.levels = [watch.wrap(f"level {i}", level) for i, level in enumerate(levels)]
        decoder.head = watch.wrap("head", head)
        _passes(work, spans)
        synchronize(device)
        seconds = watch.seconds()
        total = sum(seconds.values())
        yield f"{name}, {len(spans)} passes, {DTYPES[choice.precision]}, {work.state.plan}:"
        yield from (f"  {part:30s} {value:8.3f} s {value / max(total, 1e-9):6.1%}" for part, value in seconds.items())
    finally:
        decoder._begin, decoder.levels, decoder.head = begin, levels, head
    if profile:
        yield from _kernels(DecodeRun(vae, plan), spans[:WARM])
    forget(vae)
    vae.cpu()


def _passes(work: DecodeRun, spans: list[slice]) -> None:
    for span in spans:
        for _ in work.frames(span):
            pass


def _kernels(work: DecodeRun, spans: list[slice]) -> Iterator[str]:
    """The kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    cuda = work.device.type == "cuda"
    kinds = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=kinds) as found:
        _passes(work, spans)
        synchronize(work.device)
    by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    yield found.key_averages().table(sort_by=by, row_limit=KERNELS, max_name_column_width=80)
