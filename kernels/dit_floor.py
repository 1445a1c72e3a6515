"""What a block can't be faster than: its matrix products and its attention alone, each with the fastest library and
backend found. A part of `kernels.dit_bench`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from engine import fp8
from engine.attention import attend, probe
from kernels.timing import Call, best, table

if TYPE_CHECKING:
    from kernels.dit_bench import Bench


def products(bench: Bench) -> Iterator[tuple[str, int, int, int]]:
    """The block's matrix products: name, rows, inputs, outputs."""
    c = bench.config
    streams = ("video", bench.size.tokens, c.mlp_ratio), ("text", bench.size.text, c.context_mlp_ratio)
    for stream, rows, ratio in streams:
        inner = int(c.dim * ratio)
        yield f"{stream} qkv", rows, c.dim, 3 * c.dim
        yield f"{stream} out", rows, c.dim, c.dim
        yield f"{stream} up", rows, c.dim, inner
        yield f"{stream} down", rows, inner, c.dim


class Part(NamedTuple):
    """A piece of the floor. took: its best, in milliseconds."""

    name: str
    took: float
    call: Call


def product_floor(bench: Bench, name: str, rows: int, inputs: int, outputs: int, repeats: int) -> Part:
    """The best of both libraries, with the bias in the product and without one."""
    x, weight, bias = bench.random(rows, inputs), bench.random(outputs, inputs), bench.random(outputs)
    calls = [lambda: F.linear(x, weight, bias), lambda: torch.mm(x, weight.T)]
    if bench.device.type == "cuda":
        calls = [by_library(library, call) for library in ("cublas", "cublaslt") for call in calls]
    return min((Part(name, best(call, bench.device, repeats), call) for call in calls), key=lambda part: part.took)


def by_library(name: str, call: Call) -> Call:
    def run() -> Any:
        torch.backends.cuda.preferred_blas_library(name)
        try:
            return call()
        finally:
            torch.backends.cuda.preferred_blas_library("default")

    return run


def attention_floor(bench: Bench, repeats: int) -> Part:
    """The best backend that gave the right answer, on tensors as the blocks hand them over and on packed ones."""
    qkv = bench.random(1, bench.size.tokens + bench.size.text, 3, bench.shape.heads, bench.shape.head_size)
    packed = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for path in probe(bench.device, bench.shape):
        if path.lack or (path.name == "math" and bench.device.type == "cuda"):
            continue
        for layout, tensor in (("as in the block", qkv), ("packed", packed)):
            call = functools.partial(attend, *tensor.unbind(2), path.name)
            found.append(Part(f"attention, {path.name}, {layout}", best(call, bench.device, repeats), call))
    found.sort(key=lambda part: part.took)
    print(table(("attention", "best ms"), [part[:2] for part in found]), end="\n\n")
    return found[0]


def floor(bench: Bench, repeats: int) -> tuple[float, Call]:
    """Milliseconds of the block's products and attention alone, and the call that is all of them one after another."""
    parts = [product_floor(bench, *product, repeats) for product in products(bench)]
    parts.insert(1, attention_floor(bench, repeats))
    print(table(("floor", "best ms"), [part[:2] for part in parts]), end="\n\n")
    return sum(part.took for part in parts), lambda: [part.call() for part in parts]


def fp8_products(bench: Bench, repeats: int) -> None:
    """Print what the video's products take in fp8, of rows that are quantised already: no part of the floor."""
    rows = []
    for name, *shape in products(bench):
        if name.startswith("video"):
            count, inputs, outputs = shape
            x, bias = fp8.as_rows(bench.random(count, inputs)), bench.random(outputs)
            weight, scale = fp8.as_rows(bench.random(outputs, inputs))
            out = bench.random(count, outputs)
            took = best(lambda given=(x, weight, scale, bias, out): fp8.multiply(*given), bench.device, repeats)
            rows.append((f"{name} fp8", took, 2e-9 * count * inputs * outputs / took))
    print(table(("product", "best ms", "TFLOP/s"), rows), end="\n\n")
