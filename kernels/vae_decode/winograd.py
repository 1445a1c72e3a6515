"""Convolutions of three taps with fewer multiplications: Cook-Toom F(4, 3) along time, and along width as well.

F(4, 3) makes four outputs of three taps from six products (Winograd 1980): outputs = A ((G taps) * (B inputs)), where
A, G and B follow from the points at which polynomials are multiplied. Along time alone a 3 x 3 x 3 convolution is six
3 x 3 ones on a quarter of the frames, half of the multiplications; with width too it is 36 of 3 x 1 on a sixteenth of
the positions, a quarter of them.

Points: 0, infinity, and two pairs, +-2/3 and +-3/2. What 16 bits lose depends on them; the usual +-1 and +-2 lose 1.4
times as much along time, and 2.2 times along both (benchmarks.md).

Where tiles lie. What a tile rounds to depends on all six of its frames, also for an output that needs three of them. So
a tile is tied to absolute frames and never cut, and any plan gives the same bytes:

* The video's first frame is alone, at every level (it is never doubled in time), with two frames of zeros before it.
  Then only the last tap of each kernel counts, and G's last row is just that tap: the first frame is one convolution
  with the last of the six weights, no tile at all. With width too it is a tile of its own that lacks three frames.
* Tile k >= 1 makes frames 4k - 3 to 4k of a level from frames 4k - 5 to 4k. Four latent frames are 4, 8, 16 and 16
  frames of the four levels, so passes that end after 1, 5, 9, ... latent frames cut no tile of any level, and neither
  do slices of 4, 8, ... frames inside a pass. `PortableDecoder.run` refuses a pass after one that ended elsewhere.
* The video may end anywhere. What its last tile lacks is zero, in every plan alike, and not written.
* Column tiles begin at column 0; columns outside of the picture are zero. Rows are not tiled. Bands of rows and shares
  of a device may begin anywhere.

Tiles are made of activations as rounded for storage, like those that history holds: whether a frame came from this pass
or the one before does not show.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Way = Literal["direct", "time", "time_width"]
SIZE = 4  # outputs of a tile along each of its dimensions
PHASES = {"time": 6, "time_width": 36}
NEAR, FAR = 2 / 3, 3 / 2  # the points, each with its negative; their product is 1

# Taken from the inputs at the far points and given to the taps there, which are left near 1: taps of 0.12 squared would
# put small weights where fp16 has few bits. A power of two, which rounds nothing.
SHIFT = 8

_near, _far, _both = NEAR**2, FAR**2, NEAR**2 + FAR**2
_at_near, _at_far = 1 / (2 * _near * (_near - _far)), SHIFT / (2 * _far * (_far - _near))
TAPS = ((1, 0, 0), (_at_near, _at_near * NEAR, _at_near * _near), (_at_near, -_at_near * NEAR, _at_near * _near))
TAPS += ((_at_far, _at_far * FAR, _at_far * _far), (_at_far, -_at_far * FAR, _at_far * _far), (0, 0, 1))
INPUTS = ((1, 0, -_both, 0, 1, 0), (0, -FAR, -_far, NEAR, 1, 0), (0, FAR, -_far, -NEAR, 1, 0))
INPUTS += (
    tuple(x / SHIFT for x in (0, -NEAR, -_near, FAR, 1, 0)),
    tuple(x / SHIFT for x in (0, NEAR, -_near, -FAR, 1, 0)),
)
INPUTS += ((0, 1, 0, -_both, 0, 1),)
OUTPUTS = tuple((k == 0, NEAR**k, (-NEAR) ** k, FAR**k, (-FAR) ** k, k == 3) for k in range(SIZE))
FOLD = (((1, 0, 0), (0, 1, 1)), ((1, 1, 0), (0, 0, 1)))  # of three rows onto two, for an even and an odd output row


def matrix(rows: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    """One of the matrices above, in fp64 beside `like`."""
    return torch.tensor(rows, dtype=torch.float64, device=like.device)


def transform_weight(weight: Tensor, way: Way, dtype: torch.dtype) -> Tensor:
    """[o, c, 3, 3, 3] in fp32 -> what `Convolver.direct` or `Convolver.phases` takes, computed in fp64, rounded once.

    direct: [o, 3, 3, 3, c]; time: [6, o, 3, 3, c]; time_width: [36, o, 3, 1, c], phase 6 i + j of time i and width j.
    """
    if way == "direct":
        return weight.permute(0, 2, 3, 4, 1).to(dtype).contiguous()
    phases = torch.einsum("it,octhw->iohwc", matrix(TAPS, weight), weight.double())
    if way == "time_width":
        phases = torch.einsum("jw,iohwc->ijohc", matrix(TAPS, weight), phases).flatten(0, 1).unsqueeze(3)
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


def tiles(length: int) -> int:
    """How many tiles cover a length."""
    return -(-length // SIZE)
