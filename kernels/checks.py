"""What every operation checks before it starts a kernel. Each refusal is a ValueError with the value and the rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)
REMEMBERED = 10_000  # forms of arguments that one check has passed; a decode has some hundred


def once(check: Callable[..., None]) -> Callable[..., None]:
    """The same check, made once for arguments of one form: it may read a tensor's shape, strides, dtype and device and
    nothing else. In words it takes the host three times as long as a launch."""
    passed: set[tuple[Hashable, ...]] = set()

    @functools.wraps(check)
    def checked(*arguments: Any) -> None:
        forms = tuple([_form(argument) for argument in arguments])
        if forms in passed:
            return
        check(*arguments)
        if len(passed) >= REMEMBERED:
            passed.clear()
        passed.add(forms)

    return checked


def _form(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return argument


def check_shape(name: str, tensor: Tensor, *allowed: Sequence[int]) -> None:
    """The tensor has one of the `allowed` shapes; -1 stands for any length but 0."""
    if not any(_fits(tensor.shape, shape) for shape in allowed):
        wanted = " or ".join(str(["any" if n == -1 else n for n in shape]) for shape in allowed)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, it must be {wanted}")


def _fits(shape: Sequence[int], pattern: Sequence[int]) -> bool:
    return len(shape) == len(pattern) and all(
        n == m or (m == -1 and n > 0) for n, m in zip(shape, pattern, strict=True)
    )


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, it must be {' or '.join(map(str, allowed))}")


def check_device(device: torch.device, **tensors: Tensor | None) -> None:
    """All tensors lie on one device: a kernel started on one GPU reads another's memory wrongly or slowly."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, it must be on {device}")


def check_inner_stride(**tensors: Tensor | None) -> None:
    """The last dimension is contiguous; the others may have any stride."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, it must be 1")
