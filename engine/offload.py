"""Weights that live on the host and visit the device: a whole part for the time of a call, or the transformer's blocks
one after the other, the next one on its way while this one computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from engine.errors import ResourceError
from engine.memory import in_words

SLOTS = 2
ALIGNED = 256  # bytes; what the allocator gives, and more than any product asks for
STREAMED = ("attn.", "ff.", "ff_context.")
"""What of a block streams. Its modulations are needed once a schedule and stay on the host; the rest is small."""


@contextmanager
def visit(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A model whose weights are on the host, on `device` inside. What is on the host stays there and is not copied
    back."""
    tensors = [*model.parameters(), *model.buffers()]
    home = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, copy=True)
        yield model
    finally:
        for tensor, data in zip(tensors, home, strict=True):
            tensor.data = data


def streamed(block: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of a block that stream, by name: matrices first, in the order of the layers, so that those which
    share a product lie side by side; then the biases, then what else there is."""
    named = [*block.named_parameters(), *block.named_buffers()]
    named = [(name, tensor) for name, tensor in named if name.startswith(STREAMED)]
    return sorted(named, key=lambda pair: (not pair[0].endswith("weight"), not pair[0].endswith("bias")))


def nbytes(tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Bytes of the tensors, each begun at a multiple of `ALIGNED`."""
    return sum(_padded(tensor.nbytes) for _, tensor in tensors)


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _lock_pages(memory: Tensor, device: torch.device) -> None:
    """Page-lock plain memory until its tensor is gone, so that copies from it to a device run beside other work.

    PyTorch's own page-locked tensors take powers of two: a block of PAN2, 177 KiB over one GiB, would take two.
    """
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    try:
        # For the current device, which is the first one in every thread, and would be opened for it.
        with torch.cuda.device(device):
            torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    except RuntimeError as error:
        raise ResourceError(
            f"The host would not page-lock {in_words(memory.nbytes)} for streamed blocks ({error}). Raise its limit on "
            "locked memory, or choose offload none."
        ) from error
    weakref.finalize(memory, runtime.cudaHostUnregister, address)


class BlockStream:
    """Gives every block of a list its weights on `device` for as long as it computes.

    blocks: on the host; each must have an attribute `visit`, which becomes a context that holds its weights there.
    Their weights move into one piece of page-locked memory a block (plain memory without CUDA), their parameters become
    views of one of two buffers on the device. Outside its context a block's weights are another block's, or nothing.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device, self.count = device, len(blocks)
        self._cuda = device.type == "cuda"
        largest = max(nbytes(streamed(block)) for block in blocks)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(SLOTS, self.count))]
        self._held: list[int | None] = [None] * len(self._slots)
        self._home = [self._move(i, block) for i, block in enumerate(blocks)]
        self._copies = torch.cuda.Stream(device) if self._cuda else None
        self._arrived, self._left = ([self._event() for _ in self._slots] for _ in range(2))

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._cuda else None

    def _move(self, i: int, block: nn.Module) -> Tensor:
        """A block's weights into one piece on the host; its parameters point into its slot from now on."""
        tensors = streamed(block)
        home = torch.empty(nbytes(tensors), dtype=torch.uint8)
        if self._cuda:
            _lock_pages(home, self.device)
        slot, start = self._slots[i % len(self._slots)], 0
        for _, tensor in tensors:
            end = start + tensor.nbytes
            shape, dtype = tensor.shape, tensor.dtype
            home[start:end].view(dtype).view(shape).copy_(tensor.data)
            tensor.data = slot[start:end].view(dtype).view(shape)
            start += _padded(tensor.nbytes)
        block.visit = partial(self.visit, i)
        return home

    @contextmanager
    def visit(self, i: int) -> Iterator[None]:
        """Block i has its weights inside; the block after it is on its way meanwhile."""
        self._fetch(i)
        s = i % len(self._slots)
        if self._cuda:
            torch.cuda.current_stream(self.device).wait_event(self._arrived[s])
        self._fetch((i + 1) % self.count, unless=s)
        try:
            yield
        finally:
            if self._cuda:
                self._left[s].record(torch.cuda.current_stream(self.device))

    def _fetch(self, i: int, unless: int | None = None) -> None:
        """Start to copy block i into its slot, unless it is there or the slot is `unless`, which computes."""
        s = i % len(self._slots)
        if self._held[s] == i or s == unless:
            return
        self._held[s] = i
        home = self._home[i]
        if not self._cuda:
            self._slots[s][: len(home)].copy_(home)
            return
        # Behind the last work that read the slot, beside all other work.
        self._copies.wait_event(self._left[s])
        with torch.cuda.stream(self._copies):
            self._slots[s][: len(home)].copy_(home, non_blocking=True)
            self._arrived[s].record(self._copies)
