"""`python -m kernels.modulate.bench`: share of the copy bandwidth; `--sweep` tries other launch sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from engine import fp8
from kernels.modulate.op import gated_modulate, modulate
from kernels.quantise_rows.op import empty
from kernels.timing import Pass, nbytes

ROWS, WARPS = (1, 2, 4), (2, 4, 8, 16)


def inputs(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, y [1, S, D]; gate, shift, scale float32 [D]."""
    x, y = (torch.empty(1, tokens, width, dtype=dtype, device=device).normal_() for _ in range(2))
    return x, y, *torch.empty(3, width, device=device).normal_()


def passes(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Pass]:
    """The operations as the blocks use them."""
    x, y, gate, shift, scale = inputs(tokens, width, dtype, device)
    vectors = nbytes(shift, scale)
    return [
        Pass("modulate", lambda: modulate(x, shift, scale), 2 * x.nbytes + vectors),
        Pass("gated_modulate", lambda: gated_modulate(x, y, gate, shift, scale), 4 * x.nbytes + vectors + gate.nbytes),
    ]


def sweep(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    """Every launch size, those of `launch_size` among them."""
    from kernels.modulate import kernel

    x, y, gate, shift, scale = inputs(tokens, width, dtype, device)
    residual = torch.empty_like(x)
    outs = {"": (torch.empty_like(x), None)}
    if device.type != "cuda" or not fp8.lack(device):
        outs[" fp8"] = tuple(empty(x))
    for gated, rows, warps, dtype in itertools.product((None, (y, gate, residual)), ROWS, WARPS, outs):
        out, scales = outs[dtype]
        call = functools.partial(kernel.run, x, out, shift, scale, 1e-6, gated, kernel.Size(rows, warps), scales)
        name = f"{'gated_' if gated else ''}modulate{dtype} rows={rows} warps={warps}"
        yield Pass(name, call, x.nbytes * (3 if gated else 1) + nbytes(out))


if __name__ == "__main__":
    from kernels.kernel_bench import main

    main("modulate", passes, sweep)
