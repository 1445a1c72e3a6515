"""Linear layers whose weights lie one after the other in one tensor, so that one product serves them all.

The layers keep their parameters, as views of it: names, state dict, gradients and optimizers are as they always were.
Where something gave a parameter memory of its own (a copy of the model, say) every use costs a copy, nothing else.
`nn.Linear` can be joined, and a class that names in `joined` its tensors of one row an output, with their dtypes (None:
the model's). Other layers are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Layers = Sequence[nn.Module]
LINEAR = {"weight": None, "bias": None}


def leaves(layer: nn.Module) -> Mapping[str, torch.dtype | None]:
    """What of a layer can lie beside that of others; nothing if it can't be joined."""
    return LINEAR if type(layer) is nn.Linear else getattr(layer, "joined", {})


def reserve(layers: Layers, device: torch.device, dtype: torch.dtype) -> None:
    """Give layers on meta memory in one tensor; a loader fills it through their parameters."""
    if not packable(layers):
        return
    for name, own in leaves(layers[0]).items():
        tensors = [getattr(layer, name) for layer in layers]
        for layer, tensor, part in zip(layers, tensors, _memory(tensors, device, own or dtype), strict=True):
            whole = nn.Parameter(part, requires_grad=False) if isinstance(tensor, nn.Parameter) else part
            setattr(layer, name, whole)


def pack(layers: Layers) -> None:
    """Bring the weights, and the biases, together. What is on meta or differs in dtype or device stays as it is."""
    if not packable(layers):
        return
    for name in leaves(layers[0]):
        tensors = [getattr(layer, name) for layer in layers]
        alike = len({(t.dtype, t.device) for t in tensors}) == 1
        if alike and not tensors[0].is_meta and not _adjacent(tensors):
            for t, part in zip(tensors, _together(tensors), strict=True):
                t.data = part


def packable(layers: Layers) -> bool:
    """Whether one product can serve the layers."""
    return len({type(layer) for layer in layers}) == 1 and bool(leaves(layers[0]))


def joint(layers: Layers) -> tuple[Tensor, ...]:
    """What `leaves` names, in its order: weight [outputs of all layers, inputs], bias [outputs of all layers], ...;
    without gradients; views if they can."""
    return tuple(_joint([getattr(layer, name) for layer in layers]) for name in leaves(layers[0]))


def _joint(tensors: Sequence[Tensor]) -> Tensor:
    first = (tensors if _adjacent(tensors) else _together(tensors))[0].data
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies that lie one after the other."""
    parts = _memory(tensors, tensors[0].device, tensors[0].dtype)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor.data)
    return parts


def _memory(tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Sequence[Tensor]:
    """Tensors of these shapes that lie one after the other."""
    rows = [len(t) for t in tensors]
    return torch.empty(sum(rows), *tensors[0].shape[1:], device=device, dtype=dtype).split(rows)


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one storage."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for t in tensors:
        if t.dtype != first.dtype or t.untyped_storage().data_ptr() != storage or not t.is_contiguous():
            return False
        if t.data_ptr() != address:
            return False
        address += t.numel() * t.element_size()
    return True
