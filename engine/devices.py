"""Device lists as people write them: auto, cpu, cuda:0, 0,1,2, cpu:4, 0*2."""

from __future__ import annotations

import os

import torch

from engine.errors import RequestError, shown

VARIABLE = "ENGINE_DEVICES"
MOST = 8
# Whether "auto" takes every GPU. Off until two GPUs have run together over NCCL: every figure and every test of a group
# is of processes on a CPU, or of processes that share one GPU by way of the host (engine/benchmarks.md).
AUTO_SPREADS = False
RULE = "write auto, cpu, GPU numbers such as 0 or 0,1, or cpu:4 for four processes on the CPU"


def devices_from_environment() -> str:
    """What ENGINE_DEVICES says, else auto."""
    return os.environ.get(VARIABLE) or "auto"


def parse_devices(text: str = "auto") -> tuple[torch.device, ...]:
    """The devices of a list. Several entries of one device are several processes on it: of the CPU with cpu:4, of one
    GPU with 0*2, which gains nothing and is for trying out what several GPUs do. Never opens a GPU.

    auto is the first GPU, or the CPU where there is none. Raises RequestError for absent, doubled or mixed devices.
    """
    text = text.strip().lower()
    if text == "auto":
        return _auto()
    kind, _, count = text.partition(":")
    if kind == "cpu":
        return (torch.device("cpu"),) * (1 if not count and text == "cpu" else _count(text, count))
    name, star, count = text.partition("*")
    if star and "," not in name:
        return _gpus(name, text) * _count(text, count)
    return _gpus(text, text)


def _auto() -> tuple[torch.device, ...]:
    gpus = torch.cuda.device_count()
    if not gpus:
        return (torch.device("cpu"),)
    return tuple(torch.device("cuda", index) for index in range(min(gpus, MOST) if AUTO_SPREADS else 1))


def _count(text: str, count: str) -> int:
    if not count.isdecimal() or not 1 <= int(count) <= MOST:
        raise RequestError(f"devices = {shown(text)}: cpu:N and GPU*N start N processes, from 1 to {MOST}; {RULE}.")
    return int(count)


def _gpus(listed: str, text: str) -> tuple[torch.device, ...]:
    """listed: the GPUs that `text` names; messages quote the whole of it."""
    names = [name.strip().removeprefix("cuda:") for name in listed.split(",")]
    names = ["0" if name == "cuda" else name for name in names]
    if any(name.split(":")[0] == "cpu" for name in names):
        raise RequestError(f"devices = {shown(text)} takes the CPU as one GPU among others; {RULE}.")
    if not all(name.isdecimal() for name in names):
        raise RequestError(f"devices = {shown(text)} is not known; {RULE}.")
    numbers = [int(name) for name in names]
    if doubled := sorted({number for number in numbers if numbers.count(number) > 1}):
        raise RequestError(
            f"devices = {shown(text)} names GPU {doubled[0]} more than once; name each one once ({doubled[0]}*2 has "
            "two processes share it, which gains nothing and is for trying it out)."
        )
    there = torch.cuda.device_count()
    if not there:
        raise RequestError(
            f"devices = {shown(text)} needs an NVIDIA GPU and a CUDA build of PyTorch; choose auto or cpu."
        )
    if absent := [number for number in numbers if number >= there]:
        raise RequestError(
            f"devices = {shown(text)}: there is no GPU {absent[0]}; this machine has {there}, counted from 0."
        )
    if len(numbers) > MOST:
        raise RequestError(f"devices = {shown(text)} names {len(numbers)} GPUs; a video is spread over {MOST} at most.")
    return tuple(torch.device("cuda", number) for number in numbers)


def choose_device(text: str = "auto") -> torch.device:
    """The first device of a list, for what runs on one alone. Errors as of `parse_devices`."""
    return parse_devices(text)[0]
