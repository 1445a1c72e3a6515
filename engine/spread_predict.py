"""What several devices would gain, from the work that each of them would do, timed on the one that is here.

Bytes are counted, not sent: they take their time at a stated speed of the link, and none of it is hidden behind work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.bands import Band, Message
from engine.condition import make_condition
from engine.decode import DecodeRun, HostCopy
from engine.decode_plan import Plan
from engine.executor import LocalExecutor
from engine.mmdit import PAN2Transformer3DModel
from engine.noise import draw_noise
from engine.request import Request
from engine.shapes import latent_shape, video_tokens
from engine.telemetry import synchronize
from engine.ulysses import SpreadModel, Team, form_team

COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Assumed:
    """link: bytes a second from one device to another; delay: seconds of an exchange beside them; repeats: of each
    timing, whose median counts."""

    link: float
    delay: float
    repeats: int

    def figures(self, work: float, moved: int, exchanges: int) -> dict[str, Any]:
        """Of one rank, with seconds of its own work and on the way."""
        way = moved / self.link + exchanges * self.delay
        return {"seconds": work + way, "work": work, "on_the_way": way, "bytes": moved, "exchanges": exchanges}


class CountingLink:
    """Sends nothing: counts what a rank would send and how often, and hands out zeros."""

    def __init__(self) -> None:
        self.bytes = self.exchanges = 0

    def swap(self, outgoing: list[Message], incoming: list[Message]) -> Callable[[], Any]:
        """As of `engine.bands.Link`."""
        self.exchanges += bool(outgoing or incoming)
        self.bytes += sum(tensor.nbytes for _, tensor in outgoing)
        return lambda: [tensor.zero_() for _, tensor in incoming]


def predict(executor: LocalExecutor, request: Request, assumed: Assumed) -> dict[str, Any]:
    """A decode and a step by 1, 2, 4 and 8 devices. The executor may have the transformer's first few blocks alone."""
    return {
        **_decodes(executor, request, assumed),
        "denoise_step_predicted": _steps(executor, request, assumed),
        "assumptions": "a prediction, not a measurement of several devices: the slowest rank's own work, timed alone "
        f"on {executor.device_name()}, plus its bytes at {assumed.link / 1e9:g} GB/s and {assumed.delay * 1e6:g} us an "
        "exchange, none of it hidden behind work; every device is as fast as this one",
    }


def _gains(figures: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    one = figures[1]["seconds"]
    return {count: found | {"speedup": one / found["seconds"]} for count, found in figures.items()}


def _median(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds, warm."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# A decode: each rank has a band of the rows.


def _decodes(executor: LocalExecutor, request: Request, assumed: Assumed) -> dict[str, Any]:
    latents = draw_noise(request.seed, (1, *latent_shape(request.frames, request.height, request.width)))
    plan = Plan(latents, executor.explain_decode(request.decode))
    counts = [count for count in COUNTS if count <= latents.shape[3]]
    figures = {count: _slowest(executor, plan, count, assumed) for count in counts}
    return {"decoder": plan.choice._asdict(), "decode_predicted": _gains(figures)}


def _slowest(executor: LocalExecutor, plan: Plan, count: int, assumed: Assumed) -> dict[str, Any]:
    """Bands of the same height and with as many neighbours are timed once."""
    total = plan.latents.shape[3]
    kinds = {_kind(Band(total, rank, count, CountingLink())): rank for rank in range(count)}
    ranks = [_rank(executor, plan, rank, count, assumed) for rank in kinds.values()]
    return max(ranks, key=lambda found: found["seconds"])


def _kind(band: Band) -> tuple[int, bool, bool]:
    return band.count, band.above is None, band.below is None


def _rank(executor: LocalExecutor, plan: Plan, rank: int, count: int, assumed: Assumed) -> dict[str, Any]:
    links: list[CountingLink] = []

    def work() -> None:
        links.append(CountingLink())
        rows = Band(plan.latents.shape[3], rank, count, links[-1]) if count > 1 else None
        copy = HostCopy(DecodeRun(executor.vae, plan, rows))
        for span in plan.passes:
            copy.start(span)

    seconds = _median(work, executor.device, assumed.repeats)
    return assumed.figures(seconds, links[-1].bytes, links[-1].exchanges)


# A step: each half of the ranks has a guidance branch, each rank of it a part of the tokens.


def _steps(executor: LocalExecutor, request: Request, assumed: Assumed) -> dict[str, Any]:
    heads = executor.transformer_config.num_attention_heads
    tokens = video_tokens(request.frames, request.height, request.width)
    velocity = executor.itemsize * math.prod(latent_shape(request.frames, request.height, request.width))
    branch = {size: _branch(executor, request, size, assumed) for size in COUNTS if heads % size == 0}
    found: dict[str, Any] = {}
    for name, guided in (("guided", True), ("one branch", False)):
        figures = {}
        for count in COUNTS:
            team = form_team(count, heads, guided, tokens)
            if team.ranks == count:
                figures[count] = _step(branch[len(team.halves[0])], len(team.halves), guided, velocity, assumed)
        found[name] = _gains(figures)
    return found


def _step(branch: dict[str, Any], halves: int, guided: bool, velocity: int, assumed: Assumed) -> dict[str, Any]:
    """All branches: at once on two halves, which then exchange their velocities of so many bytes, else in turn."""
    if halves == 2:
        return assumed.figures(branch["work"], branch["bytes"] + velocity, branch["exchanges"] + 1)
    turns = 2 if guided else 1
    return assumed.figures(*(turns * branch[name] for name in ("work", "bytes", "exchanges")))


def _branch(executor: LocalExecutor, request: Request, size: int, assumed: Assumed) -> dict[str, Any]:
    """One branch on the last of `size` ranks. The whole transformer's lies on the line through those of its first block
    and of all blocks that are here."""
    here, whole = len(executor.transformer.transformer_blocks), executor.transformer_config.num_layers
    one, every = (_velocity(executor, request, size, blocks, assumed) for blocks in (1, here))
    scale = (whole - 1) / max(1, here - 1)
    figures = {name: one[name] + scale * (every[name] - one[name]) for name in one}
    return figures | {name: round(figures[name]) for name in ("bytes", "exchanges")}


def _velocity(executor: LocalExecutor, request: Request, size: int, blocks: int, assumed: Assumed) -> dict[str, Any]:
    shape = latent_shape(request.frames, request.height, request.width)
    link, text = CountingLink(), executor.encode_prompt(request.prompt).embedding
    latents = draw_noise(request.seed, (1, *shape)).to(executor.device)
    with _shortened(executor.transformer, blocks), torch.no_grad():
        model = SpreadModel(executor.transformer, Team((tuple(range(size)),)), size - 1, link)
        branch = model.prepare(text, make_condition(shape), [1.0])
        work = _median(lambda: model.velocities(model, latents, 0, [branch], [None]), executor.device, assumed.repeats)
    passes = assumed.repeats + 1
    return {"work": work, "bytes": link.bytes // passes, "exchanges": link.exchanges // passes}


@contextmanager
def _shortened(model: PAN2Transformer3DModel, blocks: int) -> Iterator[None]:
    """The model with its first blocks alone."""
    every = model.transformer_blocks
    model.transformer_blocks = every[:blocks]
    try:
        yield
    finally:
        model.transformer_blocks = every
