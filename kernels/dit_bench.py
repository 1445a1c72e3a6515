"""`python -m kernels.dit_bench`: one block and one whole step of the 29B transformer, plain, compiled and ours, against
the floor that its products and attention alone make.

Everything in one run, warm. Weights and inputs are random. A block is one in the middle of the model, timed twice: one
at a time on a GPU that has rested, which is how the floor is made, and many in a row, when the GPU is at the limit of
its power and all clocks sink. A step is both guidance branches, 88 blocks, one row after the other. `ours-without-x`
is ours with the PyTorch operations of `engine.layers` in place of x. Rows are printed as they come; whole steps that
the budget of seconds leaves no time for are left out and named. kernels/benchmarks.md keeps the records.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from engine import fp8, fused, layers
from engine.arguments import positive
from engine.attention import Shape, choose_attention
from engine.mmdit import MMDiTConfig
from engine.rope import rope_tables
from kernels import launch
from kernels.dit_floor import floor, fp8_products
from kernels.dit_steps import Budget, affordable, for_the_compiler, randomised, steps
from kernels.modulate import bench as modulate_bench
from kernels.qk_norm_rope import bench as qk_norm_rope_bench
from kernels.quantise_rows import bench as quantise_rows_bench
from kernels.timing import Call, copy_bandwidth, copy_share, medians, milliseconds, origin, table


class Size(NamedTuple):
    """grid: patches in time, height and width; text: its tokens; config: of the model, where it isn't the release."""

    grid: tuple[int, int, int]
    text: int
    config: dict[str, Any]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


FULL = Size((31, 22, 39), 512, {})  # 121 frames at 704 x 1248
LONG = Size((61, 22, 39), 512, {})  # 241 frames
SMALL_CONFIG = {"num_attention_heads": 2, "attention_head_dim": 16, "rope_axes_dim": [4, 6, 6], "num_layers": 2}
SMALL = Size((3, 3, 5), 7, SMALL_CONFIG | {"num_refiner_layers": 1, "text_embed_dim": 24})


class Bench:
    """A block with its inputs, and the ways to run it."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.size, self.device, self.dtype = size, device, dtype
        self.config = c = MMDiTConfig.read(size.config)
        inner = (int(c.dim * ratio) for ratio in (c.mlp_ratio, c.context_mlp_ratio))
        with torch.device("meta"):
            block = layers.TransformerBlock(c.dim, c.num_attention_heads, *inner)
        self.block = randomised(block, device, dtype)
        self.x, self.c = (self.random(1, n, c.dim) for n in (size.tokens, size.text))
        self.modulation = self.random(6 * c.dim).float()
        self.rope = rope_tables(size.grid, c.rope_axes_dim, c.rope_theta, c.rope_temporal_scale, device)
        self.video, self.text = fused.shifts(self.modulation), fused.shifts(self.block.scale_shift_table_context)
        self.streams = self.started(self.block)
        self.shape = Shape(dtype, c.num_attention_heads, c.attention_head_dim, size.tokens + size.text)
        self.choice = choose_attention("auto", device, self.shape)
        self.compiled = torch.compile(self.block)

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def plain(self, backend: str | None) -> tuple[Tensor, Tensor]:
        self.block.attn.backend = backend
        return self.block(self.x, self.c, self.modulation, self.rope)

    def compiled_plain(self) -> tuple[Tensor, Tensor]:
        """With the best attention."""
        self.block.attn.backend, around = for_the_compiler(self.choice.path)
        with around:
            return self.compiled(self.x, self.c, self.modulation, self.rope)

    def started(self, block: layers.TransformerBlock) -> fused.Streams:
        """The streams as the block before this one would leave them."""
        return fused.start(self.x, self.c, *(fused.attention_of(block, m) for m in (self.video, self.text)))

    def ours(self, backend: str | None = "") -> fused.Streams:
        """backend: "" for the best."""
        return self.fused(self.block, self.streams, self.choice.path if backend == "" else backend)

    def fused(self, block: layers.TransformerBlock, streams: fused.Streams, backend: str | None) -> fused.Streams:
        """A block that is followed by another of its kind."""
        block.attn.backend = backend
        after = tuple(fused.attention_of(block, m) for m in (self.video, self.text))
        return fused.run_block(block, streams, self.video, self.text, after, self.rope)

    def in_fp8(self) -> Call:
        """The same block with fp8 weights."""
        block = copy.deepcopy(self.block)
        holder = torch.nn.Module()
        holder.transformer_blocks = torch.nn.ModuleList([torch.nn.Identity(), block, torch.nn.Identity()])
        fp8.convert(holder)
        streams = self.started(block)
        return lambda: self.fused(block, streams, self.choice.path)


# ---- ours with single kernels off


def plain_qk_norm_rope(video, text, norms, rope, eps, out, text_queries):
    """In the place of `qk_norm_rope`: PyTorch operations, each result copied to where it belongs."""
    n, video, text = video.shape[1], video.clone(), text.clone()
    for part, (norm, added) in enumerate(((norms.q, norms.added_q), (norms.k, norms.added_k))):
        out[:, :n, part] = layers.qk_norm_rope(video[:, :, part], norm, rope, eps)
        if part == 1 or text_queries:
            out[:, n:, part] = layers.qk_norm_rope(text[:, :, part], added, None, eps)
    return out


def plain_gated_modulate(x, y, gate, shift, scale, eps, quantise):
    residual = layers.add_gated(x, y, gate)
    return residual, layers.modulate(residual, shift, scale, eps)


WITHOUT = {
    "qk_norm_rope": {"qk_norm_rope": plain_qk_norm_rope},
    "modulate": {"gated_modulate": plain_gated_modulate},
    "gelu_in_product": {"gelu_in_product": lambda device, dtype: False},
}


def without(call: Call, replaced: dict[str, Callable]) -> Call:
    def run() -> Any:
        with ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(patch.object(fused, name, function))
            return call()

    return run


def as_graph(call: Call, device: torch.device) -> Call:
    """The same work as one CUDA graph, captured at the first call."""

    @functools.cache
    def captured() -> tuple[torch.cuda.CUDAGraph, Any]:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return graph, result

    def run() -> Any:
        graph, result = captured()
        graph.replay()
        return result

    return run


def variants(bench: Bench, compiled: bool) -> dict[str, Call]:
    """Every row: its name, and the call that is one block."""
    calls: dict[str, Call] = {
        "plain": lambda: bench.plain(None),
        "plain-flash": lambda: bench.plain("flash"),
        "plain-best-attention": lambda: bench.plain(bench.choice.path),
        "ours": bench.ours,
    }
    calls["ours-without-best-attention"] = lambda: bench.ours(None)
    calls |= {f"ours-without-{name}": without(bench.ours, replaced) for name, replaced in WITHOUT.items()}
    if bench.device.type != "cuda" or not fp8.lack(bench.device):
        calls["ours-fp8"] = bench.in_fp8()
    if bench.device.type == "cuda":
        calls["ours-as-graph"] = as_graph(bench.ours, bench.device)
    if compiled:  # last, because it takes a while to get ready
        calls["compiled"] = bench.compiled_plain
    return calls


class Times(NamedTuple):
    """Milliseconds of a block: alone on a device that has rested, and as one of many in a row."""

    alone: float
    in_a_row: float


REST = 0.3  # seconds; more than 0.2 changed nothing on an H200
WARM_UP = 0.4  # of a row: what it takes until clocks and power have settled


def blocks(bench: Bench, calls: dict[str, Call], small: bool) -> dict[str, Times]:
    """Every row. One that fails is printed with the reason and leaves `calls`: the others are worth having."""
    for name, call in list(calls.items()):
        started = time.perf_counter()
        try:
            milliseconds(call, bench.device, 2)
        except Exception as error:  # the compiler and the capture of a graph refuse in their own ways
            print(f"{name}: failed: {type(error).__name__}: {error}".splitlines()[0])
            del calls[name]
            continue
        print(f"{name}: ready after {time.perf_counter() - started:.1f} s")
    rounds, rest, length = (1, 0.0, 2) if small else (5, REST, 50)
    alone = medians(list(calls.values()), bench.device, rounds, 1, rest)
    found = {}
    for (name, call), took in zip(calls.items(), alone, strict=True):
        row = milliseconds(call, bench.device, length)
        found[name] = Times(took, statistics.median(row[int(WARM_UP * length) :]))
        print(f"{name}: {took:.3f} ms alone, {found[name].in_a_row:.3f} in a row")
    return found


def distance(found: Any, truth: Any) -> float:
    """Relative L2 of the video stream; it is the first of a block's results."""
    return float((found[0].float() - truth[0].float()).norm() / truth[0].float().norm())


# ---- the kernels


def shares(bench: Bench, repeats: int) -> list[tuple[str, float, float]]:
    """Of each kernel its name, milliseconds and share of the copy bandwidth."""
    bandwidth = copy_bandwidth(bench.device)
    c = bench.config
    shape = bench.size.tokens, c.dim, bench.dtype, bench.device
    works = [*modulate_bench.passes(*shape), *qk_norm_rope_bench.passes(*shape)]
    if bench.device.type != "cuda" or not fp8.lack(bench.device):
        works += quantise_rows_bench.passes(*shape, inner=int(c.dim * c.mlp_ratio))
    found = [(work.name, *copy_share(work, bench.device, bandwidth, repeats)) for work in works]
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    print(table(("kernel", "ms", "share of copy"), found), end="\n\n")
    return found


# ---- the command


BUILDING = 10  # seconds that the whole model takes to be built, about


def rows_table(block: dict[str, Times], least: float, errors: dict[str, float], step: dict[str, float]) -> str:
    head = "row", "alone ms", "of floor", "in a row ms", "of floor in a row", "plain over it", "distance", "step ms"
    floor, plain = block["floor"].in_a_row, block["plain"].in_a_row
    rows = [
        (name, alone, alone / least, row, row / floor, plain / row, errors.get(name), step.get(name))
        for name, (alone, row) in block.items()
    ]
    return table(head, rows)


def measure(size: Size, device: torch.device, given: argparse.Namespace) -> dict[str, Any]:
    budget = Budget(given.seconds)
    bench = Bench(size, device)
    print(f"attention: {bench.choice.path} ({bench.choice.reason}); kernels: {launch.lack(device) or 'Triton'}")
    print(f"GELU in its product: {fused.gelu_in_product(device, bench.dtype)}; {size.tokens} + {size.text} tokens\n")
    least, products_alone = floor(bench, 2 if given.small else 20)
    if device.type != "cuda" or not fp8.lack(device):
        fp8_products(bench, 2 if given.small else 10)
    kernels = shares(bench, 3 if given.small else 20)
    calls = {"floor": products_alone} | variants(bench, compiled=device.type == "cuda" and not given.no_compile)
    block = blocks(bench, calls, given.small)
    if lost := [name for name in ("floor", "plain") if name not in block]:
        raise SystemExit(f"Nothing can be compared without {' and '.join(lost)}; why is said above.")
    truth = calls["plain"]()
    errors = {name: distance(call(), truth) for name, call in calls.items() if name != "floor"}
    print(f"\n{rows_table(block, least, errors, {})}\n\n{budget.left:.0f} s of {given.seconds} s are left")
    choice, config = bench.choice.path, bench.config
    del bench, calls, truth, products_alone
    step = {}
    if not given.no_step:
        repeats = 1 if given.small else 2
        in_a_row = {name: times.in_a_row for name, times in block.items()}
        names = affordable(in_a_row, config, repeats, budget.left - BUILDING)
        step = steps(size.config, size.grid, size.text, device, names, choice, repeats) if names else {}
        print(f"\n{rows_table(block, least, errors, step)}")
    return {
        "tokens": size.tokens + size.text,
        "floor_ms": round(least, 3),
        "floor_in_a_row_ms": round(block.pop("floor").in_a_row, 3),
        "rows": [row(name, times, step.get(name)) for name, times in block.items()],
        "kernels": [{"name": name, "copy_share": round(share, 4)} for name, _, share in kernels],
    }


def row(name: str, times: Times, step: float | None) -> dict[str, Any]:
    found = {"name": name, "block_ms": round(times.alone, 3), "in_a_row_ms": round(times.in_a_row, 3)}
    return found if step is None else found | {"step_ms": round(step, 1)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m kernels.dit_bench", description="Measure a block and a step.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="a tiny model, for a CPU; its figures mean nothing")
    size.add_argument("--long", action="store_true", help="241 frames in place of 121")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-step", action="store_true", help="leave whole steps out, which need 60 GiB")
    parser.add_argument("--seconds", type=positive, default=180, help="whole steps that do not fit in are left out")
    given = parser.parse_args(arguments)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sys.stdout.reconfigure(line_buffering=True)
    with torch.no_grad():
        figures = measure(SMALL if given.small else LONG if given.long else FULL, device, given)
    print(json.dumps({"bench": "dit", **origin(device), **figures}))


if __name__ == "__main__":
    main()
