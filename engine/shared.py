"""Memory that several processes see. It has no name and is not in /dev/shm, which is 64 MB in a container."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np


class Shared:
    """A block of zeros that other processes can map from its file descriptor. Freed when nobody maps it any more."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._map = mmap.mmap(fd, nbytes)

    @classmethod
    def make(cls, name: str, nbytes: int) -> Shared:
        """A new block. name: only for people who look at a process."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    def array(self, shape: Sequence[int], dtype: type) -> np.ndarray:
        """The block's beginning as an array, which keeps the block alive."""
        count = int(np.prod(shape))
        return np.frombuffer(self._map, dtype, count).reshape(shape)

    def close(self) -> None:
        """Let go of the descriptor; arrays stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
