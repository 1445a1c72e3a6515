"""Which rows of a frame a device computes, and how its neighbours' rows come to it.

A decoder asks one object for everything that depends on it: `Rows` is the whole frame on one device, `Band` a part of
it on one of several. Rows are counted in latents; a level of the decoder has 2, 4 or 8 times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.shapes import SPATIAL_FACTOR

Write = Callable[[int, int], None]
Message = tuple[int, Tensor]
Neighbours = tuple[Tensor | None, Tensor | None]


class Link(Protocol):
    """What bands are exchanged through: `engine.link.Link` between processes."""

    def swap(self, outgoing: list[Message], incoming: list[Message]) -> Callable[[], None]:
        """Start to send tensors to ranks and to fill tensors from ranks; the returned call waits until all are there.
        Between two ranks, messages arrive in the order in which they were sent."""
        ...


def split(total: int, parts: int) -> list[slice]:
    """Cut 0 .. total - 1 into `parts` runs in order, whose lengths differ by one at most."""
    return [slice(part * total // parts, (part + 1) * total // parts) for part in range(parts)]


class Rows:
    """Every row of the frame. What lies outside of it is zero, which is the convolution's own padding."""

    halo = 0  # rows of others that stand above and below ours where a convolution is three rows high
    parts = 1  # devices that share the frame
    pad = 1  # rows of zeros that such a convolution has to add on each side
    mine = slice(None)
    above: int | None = None  # ranks of the neighbours, None at the edge of the picture
    below: int | None = None
    pixels = slice(None)  # of a frame's picture, those that come of `mine`

    def height(self, h: int) -> int:
        """Rows of the whole frame at a level where this device has `h` of them."""
        return h

    def fill(self, target: Tensor, write: Write) -> None:
        """Make target [t, halo + h + halo, w, c] whole. write(a, b): puts rows a to b of our h into place."""
        write(0, target.shape[1])

    def neighbours(self, x: Tensor) -> Callable[[], Neighbours]:
        """Start to send the outermost of our rows x [t, h, w, c] to the devices beside us. The returned call waits for
        theirs, above and below, each [t, 1, w, c], None beyond the picture."""
        return lambda: (None, None)

    def gather(self, x: Tensor) -> Tensor:
        """All rows [t, H, w, c] of which x [t, h, w, c] has ours, at the latents' level."""
        return x

    def take(self, whole: Tensor) -> Tensor:
        """Our rows of [t, H, w, c], at the latents' level."""
        return whole[:, self.mine]


class Band(Rows):
    """The rows of rank `rank` of `ranks`. Rows of the neighbours are asked for before a convolution and arrive while
    the rows inside the band are written.

    total: latent rows of the frame, `ranks` at least, so that no band is empty.
    """

    halo, pad = 1, 0

    def __init__(self, total: int, rank: int, ranks: int, link: Link) -> None:
        self.total, self.rank, self.parts, self.link = total, rank, ranks, link
        self.bands = split(total, ranks)
        self.mine = self.bands[rank]
        self.pixels = slice(SPATIAL_FACTOR * self.mine.start, SPATIAL_FACTOR * self.mine.stop)
        self.above = rank - 1 if rank > 0 else None
        self.below = rank + 1 if rank + 1 < ranks else None

    @property
    def count(self) -> int:
        """Latent rows of the band."""
        return self.mine.stop - self.mine.start

    def height(self, h: int) -> int:
        """As of `Rows`: the frame is cut in time as on one device, however few rows a band has."""
        return h // self.count * self.total

    def fill(self, target: Tensor, write: Write) -> None:
        """Our outermost rows first, then the rows inside while those of the neighbours are on their way."""
        rows = target.shape[1] - 2
        if rows > 2:
            write(0, 1)
            write(rows - 1, rows)
        else:
            write(0, rows)
        arrive = self.neighbours(target[:, 1:-1])
        if rows > 2:
            write(1, rows - 1)
        for place, row in zip((target[:, :1], target[:, -1:]), arrive(), strict=True):
            place.zero_() if row is None else place.copy_(row)

    def neighbours(self, x: Tensor) -> Callable[[], Neighbours]:
        """As of `Rows`."""
        sides = [(self.above, 0), (self.below, -1)]
        outgoing = [(rank, x[:, ours].contiguous()) for rank, ours in sides if rank is not None]
        incoming = [(rank, x.new_empty(x[:, 0].shape)) for rank, _ in sides if rank is not None]
        wait = self.link.swap(outgoing, incoming)
        came = dict(incoming)

        def arrive() -> Neighbours:
            wait()
            above, below = (None if rank is None else came[rank].unsqueeze(1) for rank, _ in sides)
            return above, below

        return arrive

    def gather(self, x: Tensor) -> Tensor:
        """As of `Rows`: every rank gets every row."""
        x = x.contiguous()
        t, _, w, c = x.shape
        others = [rank for rank in range(len(self.bands)) if rank != self.rank]
        sizes = [band.stop - band.start for band in self.bands]
        incoming = [(rank, x.new_empty(t, sizes[rank], w, c)) for rank in others]
        self.link.swap([(rank, x) for rank in others], incoming)()
        whole = x.new_empty(t, self.total, w, c)
        for rank, part in [*incoming, (self.rank, x)]:
            whole[:, self.bands[rank]] = part
        return whole
