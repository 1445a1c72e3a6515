"""Linear layers whose weights lie one after the other in one tensor, so that one product serves them all.

The layers keep their parameters, as views of it: names, state dict, gradients and optimizers are as they always were.
Where something gave a parameter memory of its own (a copy of the model, say) every use costs a copy, nothing else.
Layers of another class (fp8) are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Layers = Sequence[nn.Linear]


def reserve(layers: Layers, device: torch.device, dtype: torch.dtype) -> None:
    """Give layers on meta memory in one tensor; a loader fills it through their parameters."""
    if not packable(layers):
        return
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        rows = [len(p) for p in parameters]
        joint = torch.empty(sum(rows), *parameters[0].shape[1:], device=device, dtype=dtype)
        for layer, part in zip(layers, joint.split(rows), strict=True):
            setattr(layer, name, nn.Parameter(part, requires_grad=False))


def pack(layers: Layers) -> None:
    """Bring the weights, and the biases, together. What is on meta or differs in dtype or device stays as it is."""
    if not packable(layers):
        return
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        alike = len({(p.dtype, p.device) for p in parameters}) == 1
        if alike and not parameters[0].is_meta and not _adjacent(parameters):
            joint = torch.cat([p.data for p in parameters])
            for p, part in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
                p.data = part


def packable(layers: Layers) -> bool:
    return all(type(layer) is nn.Linear for layer in layers)


def joint(layers: Layers) -> tuple[Tensor, Tensor]:
    """Weight [outputs of all layers, inputs] and bias [outputs of all layers], without gradients; views if they can."""
    return _joint([layer.weight for layer in layers]), _joint([layer.bias for layer in layers])


def _joint(parameters: Sequence[nn.Parameter]) -> Tensor:
    if not _adjacent(parameters):
        return torch.cat([p.data for p in parameters])
    first = parameters[0].data
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether each begins where the one before it ends, in one storage."""
    first = parameters[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for p in parameters:
        if p.dtype != first.dtype or p.untyped_storage().data_ptr() != storage or not p.is_contiguous():
            return False
        if p.data_ptr() != address:
            return False
        address += p.numel() * p.element_size()
    return True
