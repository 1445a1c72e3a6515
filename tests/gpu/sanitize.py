"""A small case of every compiled kernel, for compute-sanitizer: see sanitize.sh."""

import torch

from kernels.vae_decode import built
from kernels.vae_decode.recipe import TILES
from kernels.vae_decode.tiles import Row


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = built.Built.on(device, say=print)
    for tile in TILES[kernels.target.family]:
        for dtype in built.NAMES:
            kernels.row = lambda *layer, tile=tile: Row(0, 0, tile, taps_first=True)
            convolutions(kernels, dtype)
            torch.cuda.synchronize()
            print(tile, dtype, flush=True)
    stencils(kernels)
    torch.cuda.synchronize()


def convolutions(kernels: built.Built, dtype: torch.dtype) -> None:
    """Partial tiles, frames apart, residual in place, and six phases."""
    buffer, weight = numbers(4, 9, 17, 72, dtype=dtype), numbers(264, 3, 3, 3, 72, dtype=dtype)
    frames, bias = numbers(2, 20, 17, 264, dtype=dtype), torch.randn(264, device="cuda")
    kernels.direct(buffer, weight, bias, frames[:, 3:12], frames[:, 3:12])
    inputs, weights = numbers(6, 2, 5, 17, 72, dtype=dtype), numbers(6, 264, 3, 3, 72, dtype=dtype)
    kernels.phases(inputs, weights, numbers(6, 2, 5, 17, 264, dtype=dtype))


def stencils(kernels: built.Built) -> None:
    bias, finite = torch.zeros(12, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    for dtype in built.NAMES:
        values = numbers(2, 7, 130, 112, dtype=dtype)
        kernels.stencil(torch.empty(2, 10, 260, 3, dtype=torch.uint8, device="cuda"), values, bias, finite)
        kernels.stencil(torch.empty(2, 5, 130, 12, device="cuda"), values, bias, finite)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


if __name__ == "__main__":
    main()
