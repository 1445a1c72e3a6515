"""GPUs that have kernels of their own, and what nvcc calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.errors import RequestError


class Target(NamedTuple):
    """name: nvcc's, with the letter that turns on what only this architecture has; family: which tiles it gets; gpus:
    for people; cuda: the first toolkit that is taken (earlier ones know sm_90a, not all that CUTLASS 4 asks for)."""

    name: str
    capability: tuple[int, int]
    family: str
    gpus: str
    cuda: tuple[int, int]

    @property
    def flags(self) -> list[str]:
        """nvcc's flags: machine code for this architecture, no PTX (another one could not run it)."""
        number = self.name.removeprefix("sm_")
        return ["-gencode", f"arch=compute_{number},code=sm_{number}"]


TARGETS = (
    Target("sm_90a", (9, 0), "hopper", "H100, H200, GH200", (12, 8)),
    Target("sm_100a", (10, 0), "blackwell", "B200, GB200", (12, 8)),
    Target("sm_103a", (10, 3), "blackwell", "B300, GB300", (12, 9)),
)
NAMES = ", ".join(target.name for target in TARGETS)


def of_capability(capability: tuple[int, int]) -> Target | None:
    """The target whose code runs on a GPU of this compute capability. Code of an "a" target runs on no other."""
    return next((target for target in TARGETS if target.capability == tuple(capability)), None)


def named(names: str) -> list[Target]:
    """Targets of a list such as "sm_90a,sm_100a". RequestError names one that is not known."""
    known = {target.name: target for target in TARGETS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        what = f"{unknown[0]!r} is not an architecture that has kernels" if unknown else "no architecture is named"
        raise RequestError(f"{what}; there are {NAMES}.")
    return _unique(known[name] for name in asked)


def present() -> list[Target]:
    """Targets of the visible GPUs, each once; GPUs without kernels of their own are left out."""
    import torch

    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return _unique(target for target in map(of_capability, capabilities) if target)


def _unique(targets: Iterable[Target]) -> list[Target]:
    return sorted(set(targets), key=TARGETS.index)
