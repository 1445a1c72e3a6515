"""How to compute, as opposed to what: two frozen dataclasses that presets, command line, page and API share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from engine.errors import RequestError, listed, shown

Offload = Literal["auto", "none", "blocks"]
Quality = Literal["full", "balanced", "draft"]
Precision = Literal["auto", "fp32", "bf16", "fp8"]
DecodePrecision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
Switch = Literal["on", "off"]
AutoSwitch = Literal["auto", "on", "off"]
Attention = Literal["auto", "cudnn", "flash", "flash3", "efficient", "math"]
Devices = Literal["all", "one"]
DecodePath = Literal["auto", "built", "portable", "plain", "reference"]

MOST_GIB = 10_000
# Paths that cut their work to keep within `memory_gib`.
BUDGETED = ("built", "portable")


class _Checked:
    """Refuses a value that its annotation does not list, with the values that it does. user_name: what messages call
    it, as people write it in a preset or a request."""

    user_name: ClassVar[str]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            hint, value = hints[field.name], getattr(self, field.name)
            allowed = get_args(hint) if get_origin(hint) is Literal else ()
            if allowed and value not in allowed:
                raise RequestError(
                    f"{self.user_name} {field.name} = {shown(value)} is not known; choose one of {', '.join(allowed)}."
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """Build from a table; an unknown key is refused with the list of known ones."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if not isinstance(values, Mapping):
            raise RequestError(f"{cls.user_name} = {shown(values)} must be a table of {', '.join(known)}.")
        unknown = set(values) - set(known)
        if unknown:
            raise RequestError(f"{cls.user_name} has no setting {listed(unknown)}; it has {', '.join(known)}.")
        return cls(**values)


@dataclass(frozen=True)
class DenoiseSettings(_Checked):
    """precision: "bf16" as released, "fp32", "fp8" products (engine/fp8.py), or "auto" (fp32 on a CPU, bf16 on a GPU,
    fp8 on one that is too small for more); quality: "full" computes every
    step, "balanced" and "draft" skip blocks where the result hardly changes (engine/step_cache.py); offload: "blocks"
    keeps the blocks on the host and streams them, "auto" does so where they do not fit (engine/placement.py); preview:
    small pictures of where the video goes, every few steps; attention: which implementation, "auto" for the fastest
    that gave the right answer on this device; fused_kernels: the blocks in few passes, "auto" where the kernels run and
    are proven; devices: whether the steps are spread over all devices that the engine was given, or one does them."""

    user_name: ClassVar[str] = "denoise"
    precision: Precision = "auto"
    quality: Quality = "full"
    offload: Offload = "auto"
    preview: Switch = "on"
    attention: Attention = "auto"
    fused_kernels: AutoSwitch = "auto"
    devices: Devices = "all"


@dataclass(frozen=True)
class DecodeSettings(_Checked):
    """path: which implementation decodes ("auto": the fastest that this machine has); precision: of its convolutions
    ("auto": fp32 on a CPU, 16 bit on a GPU; the reference takes fp32, and tf32 where a GPU has it); memory_gib: the
    most that paths built and portable may take on each GPU, weights included (None: what is free). Frames don't depend
    on it, but where "auto" has to take bf16 to keep to it, which is said; devices: whether the rows are spread over all
    devices that the engine was given, or one decodes alone."""

    user_name: ClassVar[str] = "decode"
    path: DecodePath = "auto"
    precision: DecodePrecision = "auto"
    devices: Devices = "all"
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.memory_gib
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < MOST_GIB):
            raise RequestError(
                f"{self.user_name} memory_gib = {shown(value)} must be a number of GiB above 0 and below {MOST_GIB}, "
                "or be left out."
            )

    def check_budget(self, path: str) -> None:
        """Raises RequestError for a budget of memory that a path would not keep to."""
        if self.memory_gib is not None and path not in BUDGETED:
            raise RequestError(
                f"{self.user_name} memory_gib = {self.memory_gib:g} is kept to by the paths {' and '.join(BUDGETED)} "
                f"alone; this one would be {path}. Leave it out, or choose one of those."
            )
