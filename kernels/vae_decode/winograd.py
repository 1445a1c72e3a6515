"""Convolutions of three taps with fewer multiplications: Cook-Toom F(4, 3) along time, F(2, 3) along width.

F(m, r) makes m outputs of r taps from m + r - 1 products (Winograd 1980; points 0, 1, -1, 2, -2 and infinity for
F(4, 3), 0, 1, -1 and infinity for F(2, 3)): outputs = A ((G taps) * (B inputs)). Along time alone a 3 x 3 x 3
convolution is six 3 x 3 ones on a quarter of the frames, half of the multiplications; with width too it is 24 of
3 x 1 on an eighth, a third of them.

Where tiles lie. What a tile rounds to depends on all six of its frames, also for an output that needs three of them. So
a tile is tied to absolute frames and never cut, and any plan gives the same bytes:

* The video's first frame is alone, at every level (it is never doubled in time), with two frames of zeros before it.
  Then only the last tap of each kernel counts, and G's last row is just that tap: the first frame is one convolution
  with the last of the six weights, no tile at all. With width too it is a tile of its own that lacks three frames.
* Tile k >= 1 makes frames 4k - 3 to 4k of a level from frames 4k - 5 to 4k. Four latent frames are 4, 8, 16 and 16
  frames of the four levels, so passes that end after 1, 5, 9, ... latent frames cut no tile of any level, and neither
  do slices of 4, 8, ... frames inside a pass. `PortableDecoder.run` refuses a pass after one that ended elsewhere.
* The video may end anywhere. What its last tile lacks is zero, in every plan alike, and not written.
* Column tiles begin at column 0; the column beyond an odd width is zero like the ones outside of the picture. Rows are
  not tiled. Bands of rows and shares of a device may begin anywhere.

History holds activations as rounded for storage, and a tile rounds its own frames so before it uses them: whether a
frame came from this pass or the one before does not show.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Way = Literal["direct", "time", "time_width"]
FRAMES, COLUMNS = 4, 2  # outputs of a tile
PHASES = {"time": 6, "time_width": 24}

TIME_TAPS = ((1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6))
TIME_TAPS += ((1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1))
TIME_INPUTS = ((4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0))
TIME_INPUTS += ((0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1))
TIME_OUTPUTS = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
WIDTH_TAPS = ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1))
WIDTH_INPUTS = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
WIDTH_OUTPUTS = ((1, 1, 1, 0), (0, 1, -1, -1))
FOLD = (((1, 0, 0), (0, 1, 1)), ((1, 1, 0), (0, 0, 1)))  # of three rows onto two, for an even and an odd output row


def matrix(rows: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    """One of the matrices above, in fp64 beside `like`."""
    return torch.tensor(rows, dtype=torch.float64, device=like.device)


def transform_weight(weight: Tensor, way: Way, dtype: torch.dtype) -> Tensor:
    """[o, c, 3, 3, 3] in fp32 -> what `Convolver.direct` or `Convolver.phases` takes, computed in fp64, rounded once.

    direct: [o, 3, 3, 3, c]; time: [6, o, 3, 3, c]; time_width: [24, o, 3, 1, c], phase 4 i + j of time i and width j.
    """
    if way == "direct":
        return weight.permute(0, 2, 3, 4, 1).to(dtype).contiguous()
    phases = torch.einsum("it,octhw->iohwc", matrix(TIME_TAPS, weight), weight.double())
    if way == "time_width":
        phases = torch.einsum("jw,iohwc->ijohc", matrix(WIDTH_TAPS, weight), phases).flatten(0, 1).unsqueeze(3)
    return phases.to(dtype).contiguous()


def four_phases(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[o, c, 3, 3] after nearest doubling -> [4 o, 2, 2, c] on the small image, phases in the order (p, q).

    An even output row sees the small rows i-1, i, i, an odd one i, i, i+1: the weights of a row seen twice add up,
    which leaves 4/9 of the multiplications. Summed in fp64, rounded once.
    """
    fold = torch.tensor(FOLD, dtype=torch.float64, device=weight.device)
    return torch.einsum("pua,qvb,ocab->pqouvc", fold, fold, weight.double()).flatten(0, 2).to(dtype).contiguous()


def nine_planes(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[12, c, 3, 3, 3] -> [112, 3, 1, 1, c]: channel 12 (3 a + b) + k is what tap (a, b) gives to output k, four are 0.

    A convolution to 12 channels reads far more than it computes; one of 3 x 1 x 1 to 108 reads each input once, and
    `stencil` adds up the nine shifted planes.
    """
    planes = weight.permute(3, 4, 0, 2, 1).flatten(0, 2)
    planes = torch.nn.functional.pad(planes, (0, 0, 0, 0, 0, -len(planes) % 16))
    return planes[:, :, None, None].to(dtype).contiguous()


def tiles(length: int, size: int) -> int:
    """How many tiles of `size` outputs cover a length."""
    return -(-length // size)
