"""`python -m kernels.quantise_rows.bench`: share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.modulate import bench as modulate_bench
from kernels.modulate.op import gated_modulate
from kernels.quantise_rows.op import gelu_quantise_rows, quantise_rows
from kernels.timing import Pass, nbytes


def passes(tokens: int, width: int, dtype: torch.dtype, device: torch.device, inner: int | None = None) -> list[Pass]:
    """What an fp8 block quantises: its attention's output, its MLP's inner values behind GELU, and what its gated
    residuals hand to products. inner: of the MLP, default: 8 widths."""
    x, y, gate, shift, scale = modulate_bench.inputs(tokens, width, dtype, device)
    wide = torch.empty(tokens, inner or 8 * width, dtype=dtype, device=device).normal_()
    rows, scales = x[0], 4 * tokens
    gated = 3 * x.nbytes + rows.numel() + scales + nbytes(gate, shift, scale)
    return [
        Pass("quantise_rows", lambda: quantise_rows(rows), rows.nbytes + rows.numel() + scales),
        Pass("gelu_quantise_rows", lambda: gelu_quantise_rows(wide), wide.nbytes + wide.numel() + scales),
        Pass("gated_modulate_fp8", lambda: gated_modulate(x, y, gate, shift, scale, quantise=True), gated),
    ]


def sweep(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    """Launch sizes of GELU and quantisation, whose rows are the widest."""
    from kernels.quantise_rows import kernel
    from kernels.quantise_rows.op import empty

    wide = torch.empty(tokens, 8 * width, dtype=dtype, device=device).normal_()
    out = empty(wide)
    for chunk in (4096, 8192, 16384):
        for warps in (4, 8, 16):
            size = kernel.Size(chunk, warps)

            def call(size=size):
                kernel.run_gelu(wide, *out, size)

            yield Pass(f"gelu_quantise_rows chunk={chunk} warps={warps}", call, wide.nbytes + nbytes(*out))


if __name__ == "__main__":
    from kernels.kernel_bench import main

    main("quantise_rows", passes, sweep)
