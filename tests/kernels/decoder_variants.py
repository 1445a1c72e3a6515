"""Which kernels Triton would compile for the decoder, by video: no GPU, no memory, nothing runs.

A program of its own, because it needs Triton without its interpreter. Prints JSON: of each video, in turn, how many
kernels it needs that none before it needed.
"""

import json

import torch

from kernels.vae_decode import passes, tile_passes
from kernels.vae_decode.plan import PLANS
from tests.kernels.released import Products, latents, released_decoder

VIDEOS = {  # latent frames, rows and columns; which of the smaller plans
    "704 x 1248, 33 frames": (9, 44, 78, 0),
    "704 x 1248, 14 latent frames": (14, 44, 78, 0),
    "the same in smaller pieces": (9, 44, 78, len(PLANS) - 1),
    "480 x 832": (9, 30, 52, 0),
    "720 x 1280": (9, 45, 80, 0),
    "208 x 176": (5, 13, 11, 0),
}
known: set[tuple] = set()


def kind(value, number: int, free: set[int]) -> str:
    """What Triton tells two arguments apart by."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    width = "i64" if abs(value) >= 2**31 else "i32"
    if number in free:
        return width
    return "1" if value == 1 else f"{width}{' of 16' * (value % 16 == 0)}"


def record(kernel, grid, device, *arguments, **constants):
    free = {parameter.num for parameter in kernel.params if parameter.do_not_specialize}
    kinds = (kind(value, number, free) for number, value in enumerate(arguments))
    known.add((kernel.fn.__name__, *kinds, *sorted(constants.items())))


def main() -> None:
    passes.launch = tile_passes.launch = record
    passes.check_beside = tile_passes.check_beside = lambda *tensors: None  # it looks at addresses; these have none
    decoder, found = released_decoder(Products(), passes), {}
    for name, (count, height, width, plan) in VIDEOS.items():
        before, state = len(known), decoder.start(PLANS[plan])
        z = latents(count, height, width)
        for span in (slice(0, 1), *(slice(i, i + 4) for i in range(1, count, 4))):
            for _ in decoder.frames(z[:, span], state):
                pass
        found[name] = len(known) - before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
