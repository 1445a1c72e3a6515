"""Where everything would go on this machine for one request, as text: what `python -m engine --plan` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from engine.decode_plan import Choice
from engine.errors import CheckpointError, ResourceError
from engine.executor import choose_precision
from engine.hub import local
from engine.memory import free_memory
from engine.mmdit import MMDiTConfig
from engine.parts import Description, describe, released
from engine.placement import (
    HOST_RESERVE,
    Machine,
    Placement,
    decoder_copy,
    needed,
    place,
    shortfall,
    size_of,
    weigh,
    working,
)
from engine.request import Request
from engine.shapes import video_tokens
from engine.ulysses import form_team


def survey(checkpoint: str, request: Request, devices: Sequence[torch.device], decoder: Choice) -> dict[str, str]:
    """The plan for a request, without loading or downloading anything. decoder: what decodes it on these devices.

    Errors as of `engine.placement.place`; CheckpointError for a checkpoint that is not here and whose sizes are not
    known.
    """
    folder = local(checkpoint)
    if folder is None and checkpoint != str(released().folder):
        raise CheckpointError(
            f"{checkpoint} is not on this machine yet, so its sizes are not known. Download it first."
        )
    info = released() if folder is None else describe(folder)
    one = len(devices) == 1
    lines = place(info, request, Machine.here(devices[0])).lines() if one else _group(info, request, devices, decoder)
    decoding = {"Decoding": f"{decoder.path}, {decoder.precision}: {decoder.reason}"}
    note = {"Note": f"{checkpoint} is not on this machine yet; its sizes are the published ones"} if not folder else {}
    return {"Request": size_of(request)} | lines | decoding | note


def _group(info: Description, request: Request, devices: Sequence[torch.device], decoder: Choice) -> dict[str, str]:
    """The plan of a group (`engine.spread`): every process holds transformer and decoder, the first one the text
    encoder too. ResourceError where that does not fit."""
    machine = Machine.here(devices[0])
    precision, stream = choose_precision(request.denoise, devices[0]), request.denoise.offload == "blocks"
    weights = weigh(info, precision, machine.device)
    shares = _shares(info, request, len(devices), decoder, precision, machine)
    host = len(devices) * weights.blocks * stream + (HOST_RESERVE if machine.device == "cuda" else 0)
    lines: dict[str, str] = {}
    for device in dict.fromkeys(devices):
        stages: dict[str, int] = {}
        for rank in (rank for rank, other in enumerate(devices) if other == device):
            held = weights if rank == 0 else dataclasses.replace(weights, text=0)
            for name, size in needed(held, shares, stream, "resident", machine)[0].items():
                stages[name] = stages.get(name, 0) + size
        there = dataclasses.replace(machine, free=free_memory(device))
        why = f"spread over {len(devices)} processes"
        found = Placement(precision, stream, "resident", weights, stages, host, there, why)
        if not found.fits:
            raise ResourceError(f"{device}: {shortfall([found], request, there)}")
        said = found.lines()
        each = f"{said['Weights']}; in each of {len(devices)} processes, the text encoder in the first alone"
        lines |= {"Denoising": said["Denoising"], "Weights": each, f"Memory planned, {device}": said["Memory planned"]}
    return lines


def _shares(
    info: Description, request: Request, ranks: int, decoder: Choice, precision: str, machine: Machine
) -> dict[str, int]:
    """What a process of a group holds at most beside the weights. Tokens are cut by the ranks that share a pass, frames
    into bands of rows."""
    tokens = video_tokens(request.frames, request.height, request.width)
    heads = MMDiTConfig.read(info.transformer.config).num_attention_heads
    team = form_team(1 if request.denoise.devices == "one" else ranks, heads, request.guidance > 1, tokens)
    whole, copy = working(info, request, precision, machine), decoder_copy(info, machine)
    return whole | {
        "denoising": whole["denoising"] // len(team.halves[0]),
        "decoding": (whole["decoding"] - copy) // decoder.devices + copy,
    }
