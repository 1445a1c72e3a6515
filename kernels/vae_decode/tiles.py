"""Which tile a convolution takes: a table by GPU family and by what a layer is, never by how its work is cut.

The width of a frame, the channels and the filters are a layer's own; frames and rows depend on the plan, and with them
the tile must not change. Hopper's rows won on the decoder's 3 x 3 x 3 convolutions, on one H200 at 704 x 1248;
Blackwell's are compiled, not run.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A tile for layers of at least so many filters in frames of at least this width. taps_first: every tap of 64
    channels before the next 64, which keeps the input in L2; else all channels of a tap before the next tap."""

    filters: int
    width: int
    tile: str
    taps_first: bool = False


TABLE: dict[str, tuple[Row, ...]] = {
    "hopper": (
        Row(1024, 100, "cooperative_128x256_2x1", taps_first=True),
        Row(1024, 0, "pingpong_128x128_2x1"),
        Row(512, 0, "cooperative_128x256"),
        Row(256, 0, "cooperative_256x128_1x2"),
        Row(0, 0, "pingpong_128x128_2x1"),
    ),
    "blackwell": (
        Row(256, 0, "two_sm_256x256", taps_first=True),
        Row(0, 0, "one_sm_128x128", taps_first=True),
    ),
}
# Half the work of 512 -> 256 is loading weights, so two blocks share them.
NARROWING = Row(256, 0, "cooperative_128x256_2x1")
# Products of three taps have short sums: what counts is that one block's output is written while another multiplies.
SHORT = Row(0, 0, "pingpong_128x128_2x1")


def choose_tile(family: str, width: int, channels: int, filters: int, taps: int = 27) -> Row:
    """The table's row for a layer."""
    if family == "hopper" and taps <= 3:
        return SHORT
    if family == "hopper" and filters == 256 and channels > filters:
        return NARROWING
    return next(row for row in TABLE[family] if filters >= row.filters and width >= row.width)
