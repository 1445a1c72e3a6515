"""Which decoders a machine has, which one settings mean and why, and the fast ones with their weights prepared."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from engine.bands import Rows
from engine.decode_plan import Choice, Plan
from engine.errors import EngineError, ExhaustedError, RequestError, ResourceError
from engine.memory import free_memory
from engine.settings import DecodeSettings
from kernels.choose import AUTO, Path, choose
from kernels.launch import lack as triton_lack

if TYPE_CHECKING:
    from kernels.vae_decode.plan import Plan as Cut
    from kernels.vae_decode.portable import PortableDecoder
    from kernels.vae_decode.state import State

log = logging.getLogger(__name__)
T = TypeVar("T")

FAST = ("built", "portable")  # decoders whose passes end where tiles do
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What takes over where a precision overflows: the same range as fp32.
WIDER = {"fp16": "bf16"}
# What takes less memory: bf16 has neither numbers of four bytes nor the transformed weights of fp16.
LEANER = {"fp16": "bf16", "fp32": "bf16"}


def paths(device: torch.device, precision: str = AUTO, vae: nn.Module | None = None) -> tuple[Path, ...]:
    """Every decoder, the most wanted first, with what it lacks on a device, for a precision and for a VAE."""
    about = "our decoder with fewer multiplications: cuDNN's convolutions, passes of our own"
    lack = _built_lack(device, precision) or _width_lack(vae)
    compiled = "our decoder with fewer multiplications: convolutions compiled for this GPU, at their first use"
    return (
        Path("built", compiled, lack, None if lack else _unmeasured(device)),
        Path("portable", about, _portable_lack(device)),
        Path("plain", "our decoder in PyTorch operations"),
        Path("reference", "the decoder of diffusers", held_back="it is what the others are measured against"),
    )


def _portable_lack(device: torch.device) -> str | None:
    missing = triton_lack(device)
    if missing is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an NVIDIA GPU of 2020 or later"
    return missing


def _built_lack(device: torch.device, precision: str) -> str | None:
    missing = _portable_lack(device)
    if missing or precision == "fp32":
        return missing or "its convolutions take 16-bit numbers, not fp32"
    from kernels.vae_decode import built

    return built.lack(device)


def _width_lack(vae: nn.Module | None) -> str | None:
    from kernels.vae_decode import built

    return built.width_lack(vae.decoder) if vae is not None else None


def _unmeasured(device: torch.device) -> str | None:
    """Why "auto" passes compiled kernels over: nobody knows that they are faster on this GPU."""
    from kernels.vae_decode.table import is_measured

    if device.type != "cuda" or is_measured(name := torch.cuda.get_device_name(device), "fp16", "built"):
        return None
    return f"it was not measured on {name} (python -m kernels.vae_decode.bench --layers --out kernels/vae_decode does)"


def explain(settings: DecodeSettings, device: torch.device | str, vae: nn.Module | None = None) -> Choice:
    """Which path and precision these settings mean on a device, and why. RequestError where there is no such path.

    vae: what is to be decoded with, None before it is loaded: not every path takes every width.
    """
    device = torch.device(device)
    chosen = choose("decode path", paths(device, settings.precision, vae), settings.path)
    why = chosen.reason if settings.path == AUTO else "asked for"
    if chosen.path == "reference":
        return _explain_reference(settings.precision, device)
    if settings.precision == "tf32":
        raise RequestError("Only the reference decodes in tf32; choose path reference, or bf16, fp16 or fp32.")
    if settings.precision != AUTO:
        return Choice(chosen.path, settings.precision, f"{why}; {settings.precision} was asked for")
    return Choice(chosen.path, *_auto_precision(chosen.path, device, why))


def _explain_reference(precision: str, device: torch.device) -> Choice:
    if precision in ("auto", "fp32"):
        return Choice("reference", "fp32", "asked for: the decoder of diffusers in strict fp32")
    if precision != "tf32":
        raise RequestError(f"The reference decodes in fp32 only, not in {precision}; choose fp32 or path plain.")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise RequestError(f"{device} has no tf32: that needs an NVIDIA GPU of 2020 or later; choose precision fp32.")
    return Choice("reference", "tf32", "asked for: the decoder of diffusers as PyTorch runs it, tf32 in convolutions")


def _auto_precision(path: str, device: torch.device, why: str) -> tuple[str, str]:
    if device.type != "cuda":
        return "fp32", f"{why}; fp32 because 16 bits gain nothing on {device.type}"
    if path in FAST:
        return "fp16", f"{why}; fp16 because it takes fewer multiplications and is nearer to fp32 than bf16 is"
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return "bf16", f"{why}; bf16 because it cannot overflow and this GPU multiplies it at full speed"
    return "fp16", f"{why}; fp16 because this GPU has no bf16 (every chunk is checked for overflow)"


def compile_kernels(device: torch.device, say: Callable[[str], None], vae: nn.Module | None = None) -> None:
    """Whatever "auto" decodes with on a device is compiled now, if it has to be, so that no video waits for it."""
    if explain(DecodeSettings(), device, vae).path != "built":
        return
    from kernels.vae_decode.built import Built

    try:
        Built.on(device, say)
    except EngineError as error:
        # From now on the path lacks what this says, wherever paths are explained.
        log.warning("Decoding goes on without compiled kernels: %s", error)


_prepared: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], PortableDecoder]] = weakref.WeakKeyDictionary()


def fast_decoder(vae: nn.Module, choice: Choice) -> PortableDecoder:
    """The decoder of a choice with its weights transformed; the last one of each VAE is kept for the next video."""
    from kernels.vae_decode.portable import PortableDecoder
    from kernels.vae_decode.table import ways

    device = vae.post_quant_conv.weight.device
    key = (choice.path, choice.precision, str(device))
    kept = _prepared.get(vae)
    if kept is None or kept[0] != key:
        _prepared.pop(vae, None)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        rows, parts = ways(name, choice.precision, choice.path), _parts(vae, choice.path, device)
        kept = (key, PortableDecoder(vae, DTYPES[choice.precision], rows, **parts))
        _prepared[vae] = kept
    return kept[1]


def _parts(vae: nn.Module, path: str, device: torch.device) -> dict[str, Any]:
    """What a decoder computes with, where that is not cuDNN and Triton. Compiles where it must."""
    if path != "built":
        return {}
    from kernels.vae_decode.built import Built

    kernels = Built.on(device)
    return {"convolver": kernels, "passes": kernels.passes()}


def forget(vae: nn.Module) -> None:
    """Give back what was prepared of a VAE; nothing happens where nothing was."""
    _prepared.pop(vae, None)


def start(
    decoder: PortableDecoder, height: int, width: int, memory_gib: float | None, rows: Rows, smaller: int = 0
) -> State:
    """A request's state, cut to fit as by `fit`. Devices that share a frame must cut alike: each has been asked for its
    `fit` before, and `smaller` is the cut that suits all of them."""
    from kernels.vae_decode.plan import GIB

    cut = smaller if rows.parts > 1 else fit(decoder, height, width, memory_gib, smaller)
    chosen = cuts(rows.parts)[cut]
    log.info("decode: %s, at most %.1f GiB", chosen, decoder.peak(chosen, height, width) / GIB)
    return decoder.start(chosen, rows)


def cuts(parts: int) -> list[Cut]:
    """The ways to cut the work, from the usual one down, on a device that has one of so many parts of the rows. If it
    can, it takes as many times the frames at once and bands of twice the bytes, for which it has room since its part of
    the histories is small: kernels of few rows and few frames end before the host has started the next ones."""
    from kernels.vae_decode.plan import PLANS

    usual = PLANS[0]
    longer = dataclasses.replace(usual, slices=tuple(parts * frames for frames in usual.slices), work=2 * usual.work)
    return [longer, *PLANS] if parts > 1 else list(PLANS)


def fit(
    decoder: PortableDecoder,
    height: int,
    width: int,
    memory_gib: float | None,
    smaller: int = 0,
    parts: int = 1,
    sharing: int = 1,
) -> int:
    """Which of `cuts` to take: the first after `smaller` of them that takes no more than `memory_gib` and what is free
    on the GPU, of which each of `sharing` processes gets its part.

    height, width: of our rows of the latents. ResourceError where nothing fits.
    """
    from kernels.vae_decode.plan import GIB, choose

    peaks = [decoder.peak(cut, height, width) for cut in cuts(parts)[smaller:]]
    limit = None if memory_gib is None else int(memory_gib * GIB)
    free = None if decoder.device.type != "cuda" else free_memory(decoder.device, sharing) + decoder.weight_bytes
    precision = next(name for name, dtype in DTYPES.items() if dtype == decoder.dtype)
    return smaller + choose(peaks, limit, free, precision)


def leaner(plan: Plan, failure: Exception, begin: Callable[[Plan], T]) -> T:
    """Begin in the precision that takes the least memory, since nothing of the plan's own fits. begin: as it failed.

    Raises ResourceError that names this precision if it fits and another was asked for by name, what it lacks if it
    does not fit either, and the failure where there is none.
    """
    less = LEANER.get(plan.choice.precision)
    if less is None or plan.choice.path not in FAST:
        raise failure
    why, _, _ = str(failure).partition(". ")
    note = f"{why}; {f'{less} is tried' if plan.asked else f'decoding goes on in {less}'}."
    choice = plan.choice._replace(precision=less, reason=f"{plan.choice.reason}; {note}")
    begun = begin(plan.noted(note, choice))
    if plan.asked:
        raise ResourceError(f"{failure} In {less} it fits: choose decode precision {less} (--decode-precision {less}).")
    return begun


def instead(
    plan: Plan, state: State | None, failure: Exception, where: str = "The GPU", parts: int = 1
) -> tuple[Plan, int]:
    """What to try after a failure: the plan with a note, and how many ways to cut the work to pass over.

    where: it happened; parts: as of `cuts`. Raises the failure where nothing is left to try.
    """
    wider = WIDER.get(plan.choice.precision)
    if state is None:
        raise failure
    if isinstance(failure, torch.OutOfMemoryError | ExhaustedError):
        smaller = cuts(parts).index(state.plan) + 1
        if smaller == len(cuts(parts)):
            raise failure
        torch.cuda.empty_cache()
        return plan.noted(f"{where} ran out of memory in {state.plan}; decoding goes on in smaller pieces."), smaller
    if wider is None:
        raise failure
    note = f"{plan.choice.precision} overflowed at frame {failure.start}; decoding goes on in {wider}."
    choice = plan.choice._replace(precision=wider, reason=f"{plan.choice.reason}; {note}")
    return plan.noted(note, choice), 0
