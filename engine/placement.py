"""Where everything goes on this machine, decided from numbers before anything is loaded.

The stages of a video need different things at once: the prompt the text encoder, denoising the transformer and what a
pass holds, decoding the decoder and what a chunk holds. A placement fits if every stage does. Those that are tried, the
best first, are `CANDIDATES`; what none of them can do is said with the shortfall.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from engine import fp8
from engine.compare import Decoder
from engine.decode_cost import DecodeCosts
from engine.errors import RequestError, ResourceError
from engine.estimate import denoise_bytes
from engine.memory import TOO_LARGE, free_memory, in_words
from engine.mmdit import MMDiTConfig, PAN2Transformer3DModel
from engine.offload import SLOTS, nbytes, streamed
from engine.parts import Description
from engine.request import Request
from engine.settings import DenoiseSettings
from engine.shapes import latent_shape, video_tokens

TextPlace = Literal["resident", "visiting", "host"]
ITEM = {"fp32": 4, "bf16": 2, "fp8": 2}
# Of a GPU, for its libraries' workspaces and what the allocator can't use; of the host, for the process itself.
DEVICE_RESERVE, HOST_RESERVE = 2**30, 2 * 2**30
# Blocks resident or streamed, and where the text encoder is. A stream costs nothing where its copies hide behind the
# blocks' work; a visit costs a copy of the text encoder for every new prompt; on a CPU it is slowest.
CANDIDATES: tuple[tuple[bool, TextPlace], ...] = (
    (False, "resident"),
    (False, "visiting"),
    (True, "resident"),
    (True, "visiting"),
    (False, "host"),
    (True, "host"),
)
ABOUT_TEXT = {
    "resident": "on the device",
    "visiting": "on the device while it reads a prompt, else in host memory",
    "host": "on the host, where it runs",
}


@dataclass(frozen=True)
class Machine:
    """device: "cpu" or "cuda"; free: bytes of it before anything is loaded, host: of the host, None: not known;
    without_fp8: why it has no fp8 products, None if it has."""

    device: str
    free: int | None
    host: int | None
    without_fp8: str | None = None

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """The machine as it is now."""
        return cls(device.type, free_memory(device), free_memory(torch.device("cpu")), fp8.lack(device))


@dataclass(frozen=True)
class Weights:
    """Bytes of the parts. blocks: of the transformer's blocks as they stream, block: the largest of them; rest: of the
    transformer beside them; mapped: what stays in its file."""

    blocks: int
    block: int
    rest: int
    mapped: int
    text: int
    vae: int


@dataclass(frozen=True)
class Placement:
    """What goes where. stages: bytes of the device at each stage; host: bytes of the host that must be free."""

    precision: str
    stream: bool
    text: TextPlace
    weights: Weights
    stages: Mapping[str, int]
    host: int
    machine: Machine
    reason: str

    @property
    def fits(self) -> bool:
        return self.lack_device <= 0 and self.lack_host <= 0

    @property
    def lack_device(self) -> int:
        """Bytes of the device that are missing; negative: left over."""
        return max(self.stages.values()) - self.machine.free if self.machine.free is not None else 0

    @property
    def lack_host(self) -> int:
        return self.host - self.machine.host if self.machine.host is not None else 0

    def same_transformer(self, other: Placement) -> bool:
        """Whether both have the transformer's weights in the same form and place."""
        return (self.precision, self.stream) == (other.precision, other.stream)

    def lines(self) -> dict[str, str]:
        """The plan with its numbers, for people to read."""
        w, machine = self.weights, self.machine
        blocks = f"{in_words(w.blocks)} of blocks"
        if self.stream:
            blocks += f" in host memory, {SLOTS} at a time on the device ({in_words(SLOTS * w.block)})"
        free, host = (in_words(n) if n is not None else "an unknown amount" for n in (machine.free, machine.host))
        stages = ", ".join(f"{in_words(size)} for {name}" for name, size in self.stages.items())
        on_host = "" if machine.device == "cpu" else f"; {in_words(self.host)} of the host, which has {host} free"
        return {
            "Denoising": f"{self.precision}: {self.reason}",
            "Weights": f"{blocks}, {in_words(w.rest)} of the transformer beside them, {in_words(w.mapped)} in their "
            f"file; text encoder {in_words(w.text)}, {ABOUT_TEXT[self.text]}; decoder {in_words(w.vae)}",
            "Memory planned": f"{stages}, of {free} that were free{on_host}",
        }


def place(info: Description, request: Request, machine: Machine) -> Placement:
    """The best placement of a checkpoint that fits a machine, for requests like this one and smaller ones.

    Raises RequestError for fp8 where the machine has none, ResourceError with the shortfall if nothing fits.
    """
    refused: list[Placement] = []
    for precision, why in _precisions(request.denoise, machine):
        weights = weigh(info, precision, machine.device)
        work = working(info, request, precision, machine)
        for stream, text in _candidates(request.denoise, machine):
            stages, host = needed(weights, work, stream, text, machine)
            found = Placement(precision, stream, text, weights, stages, host, machine, why)
            if found.fits:
                return dataclasses.replace(found, reason=_because(found, refused))
            refused.append(found)
    raise ResourceError(shortfall(refused, request, machine))


def size_of(request: Request) -> str:
    """Of its video, in words."""
    return f"{request.frames} frames of {request.width} x {request.height}"


def _precisions(settings: DenoiseSettings, machine: Machine) -> Iterator[tuple[str, str]]:
    """Precisions to try, with a reason."""
    if settings.precision == "fp8" and machine.without_fp8:
        raise RequestError(f"precision = 'fp8': {machine.without_fp8}. Choose auto, bf16 or fp32.")
    if settings.precision != "auto":
        yield settings.precision, "asked for"
    elif machine.device == "cpu":
        yield "fp32", "a CPU is faster at it than at bf16"
    else:
        yield "bf16", "as released"
        if not machine.without_fp8:
            yield "fp8", "bf16 does not fit here"


def _candidates(settings: DenoiseSettings, machine: Machine) -> list[tuple[bool, TextPlace]]:
    wanted = {"auto": (False, True), "none": (False,), "blocks": (True,)}[settings.offload]
    if machine.device == "cpu":  # a stream from memory to memory saves nothing, but who asks for it gets it
        return [(settings.offload == "blocks", "resident")]
    return [(stream, text) for stream, text in CANDIDATES if stream in wanted]


def weigh(info: Description, precision: str, device: str) -> Weights:
    """What the parts weigh on a kind of device, by the transformer's configuration and the other parts' headers."""
    config = {name: value for name, value in info.transformer.config.items() if not name.startswith("_")}
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**config).to(torch.float32 if precision == "fp32" else torch.bfloat16)
        if precision == "fp8":
            fp8.convert(model)
    streaming = [streamed(block) for block in model.transformer_blocks]
    sizes = [nbytes(tensors) for tensors in streaming]
    everything = [*model.named_parameters(), *model.named_buffers()]
    whole = sum(tensor.nbytes for name, tensor in everything if ".norm1.linear." not in name)
    rest = whole - sum(tensor.nbytes for tensors in streaming for _, tensor in tensors)
    text = info.text_encoder.device_bytes(torch.float32 if device == "cpu" else torch.bfloat16)
    vae = info.vae.device_bytes(torch.float32)
    return Weights(sum(sizes), max(sizes), rest, info.transformer.mapped, text, vae)


def working(info: Description, request: Request, precision: str, machine: Machine) -> dict[str, int]:
    """Bytes that the stages hold beside the weights; reckoned, see `engine.estimate` and `engine.decode_cost`."""
    config = MMDiTConfig.read(info.transformer.config)
    witness = 0
    if request.denoise.quality != "full":
        witness = 2 * video_tokens(request.frames, request.height, request.width) * config.dim * ITEM[precision]
    _, *latents = latent_shape(request.frames, request.height, request.width)
    decoder = Decoder(request.decode.path, "fp32" if machine.device == "cpu" else "bf16")
    decoding = DecodeCosts(machine.device).predict(decoder, tuple(latents), info.vae.config).bytes
    return {
        "the prompt": 0,
        "denoising": denoise_bytes(config, request, ITEM[precision]) + witness,
        "decoding": decoding + decoder_copy(info, machine),
    }


def decoder_copy(info: Description, machine: Machine) -> int:
    """Bytes of the 16-bit copy of its weights that the decoder computes on, on a GPU."""
    return 0 if machine.device == "cpu" else info.vae.device_bytes(torch.bfloat16)


def needed(
    weights: Weights, work: Mapping[str, int], stream: bool, text: TextPlace, machine: Machine
) -> tuple[dict[str, int], int]:
    """Bytes of the device by stage, and of the host."""
    kept = weights.rest + (SLOTS * weights.block if stream else weights.blocks) + weights.vae
    kept += weights.text if text == "resident" else 0
    kept += DEVICE_RESERVE if machine.device == "cuda" else 0
    kept += weights.blocks if stream and machine.device == "cpu" else 0
    stages = {stage: kept + size for stage, size in work.items()}
    stages["the prompt"] += weights.text if text == "visiting" else 0
    host = (weights.blocks if stream else 0) + (weights.text if text != "resident" else 0)
    return stages, host + (HOST_RESERVE if machine.device == "cuda" else 0)


def _because(found: Placement, refused: list[Placement]) -> str:
    """Why this one: what was better did not fit, and by how much."""
    if not refused:
        return f"{found.reason}; everything fits on the device at once"
    best = refused[0]
    lack = in_words(max(best.lack_device, best.lack_host))
    where = "the device" if best.lack_device > 0 else "the host"
    return f"{found.reason}; with everything on the device {lack} of {where} would be missing"


def shortfall(refused: list[Placement], request: Request, machine: Machine) -> str:
    """One sentence, of the placement that comes nearest, and what to do."""
    near = min(refused, key=lambda p: max(p.lack_device, 0) + max(p.lack_host, 0))
    parts = []
    if near.lack_device > 0:
        parts.append(_missing(machine.device, max(near.stages.values()), machine.free, near.lack_device))
    if near.lack_host > 0:
        parts.append(_missing("host", near.host, machine.host, near.lack_host))
    stage = max(near.stages, key=lambda name: near.stages[name])
    how = f"{near.precision}{', blocks streamed' if near.stream else ''}, text encoder {near.text}"
    advice = TOO_LARGE.get(machine.device, "Use a device with more memory.")
    return (
        f"{size_of(request)} do not fit on this machine: {' and '.join(parts)} (the nearest to fitting: {how}; the "
        f"most is needed for {stage}). {advice} A preset of a smaller size or fewer frames needs less."
    )


def _missing(where: str, needed: int, free: int, lack: int) -> str:
    return f"{in_words(needed)} of {where} memory are needed, {in_words(free)} are free, {in_words(lack)} are missing"
