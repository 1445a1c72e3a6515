"""Bidirectional attention, and which implementation of it runs: tried on the device at start, not guessed.

A fixed order by GPU generation decides among those that gave the right answer, so that one machine always computes
alike; timings of the moment decide nothing.
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.choose import Choice, Path, choose

log = logging.getLogger(__name__)

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ABOUT = {
    "flash3": "FlashAttention-3",
    "cudnn": "cuDNN's attention",
    "flash": "PyTorch's flash attention",
    "efficient": "PyTorch's memory-efficient attention",
    "math": "plain products and softmax",
}
# The fastest first, by major compute capability.
ORDER = {
    9: ("flash3", "cudnn", "flash", "efficient", "math"),
    10: ("cudnn", "flash", "efficient", "math", "flash3"),
}
OTHER_GPUS = ("flash", "cudnn", "efficient", "math", "flash3")
CPU = ("flash", "math", "cudnn", "efficient", "flash3")

SMALL_TOKENS = 197
TRUE_TOKENS = 27_110  # 121 frames at 704 x 1248 and 512 tokens of text
GOLDEN_RATIO = 0.6180339887498949
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 5e-3}  # relative L2 against float32

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str | Attend | None = None) -> Tensor:
    """Scale 1 / sqrt(E) over [B, S, H, E], any strides but the last; returns [B, S, H * E].

    backend: a name of `ABOUT`, None for PyTorch's own choice, or what does it instead, on several devices.
    """
    if callable(backend):
        return backend(q, k, v)
    if backend == "flash3":
        return _flash3()(q, k, v).flatten(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@functools.cache
def _flash3() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    function = importlib.import_module("flash_attn_interface").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v)
        return result[0] if isinstance(result, tuple) else result  # older releases also return the softmax's sums

    return call


class Shape(NamedTuple):
    """What attention is probed for; tokens: of a true problem, besides a small one, which is enough for a CPU."""

    dtype: torch.dtype
    heads: int
    head_size: int
    tokens: int = SMALL_TOKENS


def choose_attention(wanted: str, device: torch.device, shape: Shape | None) -> Choice:
    """The backend of `DenoiseSettings.attention` on a device. shape: None looks only at what needs no trial.

    Raises RequestError for one that can't run here.
    """
    return choose("attention", probe(device, shape), wanted)


@functools.cache
def probe(device: torch.device, shape: Shape | None) -> tuple[Path, ...]:
    """Every backend, the most wanted first, with what it lacks on this device."""
    order = CPU if device.type != "cuda" else ORDER.get(torch.cuda.get_device_capability(device)[0], OTHER_GPUS)
    return tuple(Path(name, ABOUT[name], lack=_lack(name, device, shape)) for name in order)


def _lack(name: str, device: torch.device, shape: Shape | None) -> str | None:
    if device.type != "cuda" and name not in ("flash", "math"):
        return "it needs an NVIDIA GPU"
    if name == "flash3" and (absent := _without_flash3()):
        return absent
    if shape is None:
        return None
    # Plain products need memory for every pair of tokens and are what the others are measured by: small is enough.
    for tokens in (SMALL_TOKENS,) if name == "math" or shape.tokens <= SMALL_TOKENS else (SMALL_TOKENS, shape.tokens):
        if fault := _fault(name, device, shape, tokens):
            log.info("attention %s on %s: %s", name, device, fault)
            return fault
    return None


def _without_flash3() -> str | None:
    try:
        _flash3()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed" if error.name == "flash_attn_interface" else str(error)
    except Exception as error:  # a package built for another PyTorch fails in its own ways
        return f"flash_attn_interface can't be imported: {error}"
    return None


def _fault(name: str, device: torch.device, shape: Shape, tokens: int) -> str | None:
    """Try a backend on queries, keys and values as the model has them: cut from one tensor, fewer queries than keys."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            q, k, v = waves(device, shape, tokens).unbind(2)
            q = q[:, : tokens - tokens // 8]
            error = _relative_error(attend(q, k, v, name), q, k, v)
        except torch.OutOfMemoryError as full:  # which says nothing about the backend
            log.warning("attention %s was not tried with %d tokens: %s", name, tokens, full)
            return None
        except Exception as refusal:  # each backend refuses in its own words, and some only once they run
            return _words(name, refusal, [str(warning.message) for warning in caught])
    limit = TOLERANCE[shape.dtype]
    return None if error <= limit else f"wrong by {error:.1e} with {tokens} tokens, allowed is {limit:.0e}"


def waves(device: torch.device, shape: Shape, tokens: int) -> Tensor:
    """[1, tokens, 3, H, E]: waves whose frequencies differ as much in a head as they can. Scores then have a deviation
    of 2 and a query has some keys that count: right kernels are off by 2e-3 in bf16 at any number of tokens."""
    channels = torch.arange(3 * shape.heads * shape.head_size, dtype=torch.float64, device=device)
    frequencies = (0.01 + 3 * (channels * GOLDEN_RATIO % 1)).float()
    waves = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), frequencies).sin_().mul_(2)
    return waves.to(shape.dtype).view(1, tokens, 3, shape.heads, shape.head_size)


def _relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: int = 16, heads: int = 2) -> float:
    """Of some queries of some heads against float32: the whole would not fit into memory. NaN stays NaN."""
    chosen = torch.linspace(0, q.shape[1] - 1, rows, device=q.device).long()
    out = out.view(q.shape)[:, chosen, :heads].float()
    q, k, v = q[:, chosen, :heads].float(), k[:, :, :heads].float(), v[:, :, :heads].float()
    truth = attend(q, k, v, "math").view(out.shape)
    return float((out - truth).norm() / truth.norm())


HEADERS = {"cudnn": "cuDNN attention kernel", "flash": "Flash attention kernel", "efficient": "Memory efficient kernel"}


def _words(name: str, error: Exception, warned: list[str]) -> str:
    """PyTorch says why it refuses in a warning, after a heading for each backend."""
    heading = next((i for i, text in enumerate(warned) if text.startswith(HEADERS.get(name, "-"))), None)
    found = warned[heading + 1 : heading + 2] if heading is not None else []
    text = found[0].split(" (Triggered")[0] if found else f"{type(error).__name__}: {error}".splitlines()[0]
    return text.rstrip(". ")
