"""What one worker of a group can do: the same work as `LocalExecutor`, on its device and its share of it.

The parent calls the methods of all ranks at once, one call at a time; whatever is sent from rank to rank is sent inside
of such a call, so that a stop between two calls leaves nobody waiting.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import torch

import engine.checkpoint as files
from engine.bands import Band, Rows, split
from engine.condition import encode_image, prepare_image
from engine.decode import RING, DecodeRun, HostCopy, Pending, explain
from engine.decode_paths import FAST, compile_kernels, fast_decoder, fit
from engine.decode_plan import Choice, Plan
from engine.denoise import denoise
from engine.errors import EngineError, ResourceError
from engine.executor import denoise_paths, switch, threads
from engine.link import Link, way
from engine.memory import memory_in_words
from engine.settings import Attention, AutoSwitch, DecodePath, DecodePrecision, DecodeSettings, DenoiseSettings
from engine.shared import Shared
from engine.telemetry import DeviceMemory, device_memory
from engine.ulysses import SpreadModel, Team
from engine.vae_stream import check_supported
from kernels import launch
from kernels.choose import Choice as KernelChoice

ADVICE = "Choose a smaller size or fewer frames, or end other programs that use it."


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a call took on one rank. began, ended: by `time.perf_counter`, which all processes of a machine share;
    waiting: seconds of that for other ranks; sent: bytes to them; host: bytes of the process; memory: of its GPU."""

    began: float
    ended: float
    waiting: float
    sent: int
    host: int
    memory: DeviceMemory | None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a rank says of itself. choices: by path and precision of the settings, what decodes or why nothing does;
    denoise: likewise by attention and fused kernels."""

    name: str
    kind: str
    choices: dict[tuple[str, str], Choice | str]
    denoise: dict[tuple[str, str], tuple[KernelChoice, KernelChoice] | str]


class Rank:
    """One device. devices: of all ranks; report: part, bytes done, bytes in all; pulse: that it is alive."""

    def __init__(
        self,
        rank: int,
        devices: list[str],
        port: int,
        connection: Connection,
        pulse: Callable[[], None],
        report: Callable[[str, int, int], None],
    ) -> None:
        everywhere = [torch.device(device) for device in devices]
        self.rank, self.device = rank, everywhere[rank]
        self.sharing = everywhere.count(self.device)
        self.connection, self.report = connection, report
        self.vae: Any = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.link = Link(rank, len(devices), self.device, port, way(everywhere), pulse)

    def call(self, method: str, arguments: tuple) -> tuple[Any, Usage]:
        """Do one call of the parent."""
        began = time.perf_counter()
        with memory_in_words("Its share of the work", None, self.device, ADVICE):
            result = getattr(self, method)(*arguments)
        traffic = self.link.traffic()
        memory = device_memory(self.device.index) if self.device.type == "cuda" else None
        host = psutil.Process().memory_info().rss
        return result, Usage(began, time.perf_counter(), traffic.seconds, traffic.sent, host, memory)

    def hello(self) -> Facts:
        """What this device is and which decoders it has."""
        launch.try_out(self.device)
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else f"CPU, {threads()}"
        switches = [(attention, fused) for attention in get_args(Attention) for fused in get_args(AutoSwitch)]
        denoise = {pair: _or_why(self._paths, pair) for pair in switches}
        return Facts(name, self.device.type, self.decoders(), denoise)

    def decoders(self) -> dict[tuple[str, str], Choice | str]:
        """Which decoders this device has, of the VAE once that is loaded."""
        return {pair: _or_why(self._decoder, pair) for pair in decode_pairs()}

    def _decoder(self, path: Any, precision: Any) -> Choice:
        return explain(DecodeSettings(path, precision), self.device, self.vae)

    def _paths(self, attention: Any, fused: Any) -> tuple[KernelChoice, KernelChoice]:
        return denoise_paths(DenoiseSettings(attention=attention, fused_kernels=fused), self.device, None)

    # Weights.

    def load_parts(self, folder: Path, text_dtype: torch.dtype) -> None:
        """The video autoencoder, in fp32, and on rank 0, which alone needs them, tokenizer and text model."""
        if self.rank == 0:
            self.text = files.load_text_encoder(folder, self.device, text_dtype, self.report)
        self.vae = files.load_vae(folder, self.device, torch.float32, self.report)

    def load_transformer(self, folder: Path, dtype: torch.dtype, fp8: bool, stream: bool) -> None:
        """The transformer, in place of one that is there."""
        self.transformer = None
        self.transformer = files.load_transformer(folder, self.device, dtype, self.report, fp8, stream)

    def switch(self, settings: DenoiseSettings) -> tuple[KernelChoice, KernelChoice]:
        """Have the transformer take the paths of these settings; which ones they are here."""
        paths = denoise_paths(settings, self.device, self.transformer)
        switch(self.transformer, paths)
        return paths

    def compile_kernels(self) -> None:
        """As `LocalExecutor` does once everything is loaded. One rank compiles, the others wait for it."""
        compile_kernels(self.device, lambda words: self.report(words, 0, 0), self.vae)

    def encode_prompt(self, prompt: str) -> Any:
        """As of `LocalExecutor`, on the host."""
        text = self.text.encode(prompt)
        return dataclasses.replace(text, embedding=text.embedding.cpu())

    def encode_image(self, image: Any, height: int, width: int) -> np.ndarray:
        """As of `LocalExecutor`, on the host."""
        return encode_image(self.vae, prepare_image(image, height, width).to(self.device)).cpu().numpy()

    def preview_map(self, vae_hash: str) -> Any:
        """As of `LocalExecutor`."""
        from engine.preview import LinearMap, map_for

        found = map_for(self.vae, vae_hash)
        return LinearMap(found.weight.cpu(), found.bias.cpu())

    # Denoising.

    def denoise_begin(
        self,
        texts: tuple[torch.Tensor, torch.Tensor | None],
        condition: torch.Tensor,
        noise: torch.Tensor,
        sigmas: torch.Tensor,
        guidance: float,
        quality: str,
        team: Team,
    ) -> None:
        """Get ready for the steps of one run. All tensors on the host; texts: with and without the prompt."""
        scheduler = EulerSteps(sigmas)
        condition, noise = condition.to(self.device), noise.to(self.device)
        how, model = (condition, noise, scheduler, guidance, None, quality), self.transformer
        if team.ranks == 1:
            self.steps = denoise(model, *texts, *how)
        else:
            model = SpreadModel(model, team, self.rank, self.link)
            self.steps = denoise(model, *texts, *how, model.velocities)

    def denoise_step(self) -> Any:
        """The next step; on rank 0 as `engine.denoise.Step` on the host, elsewhere None."""
        step = next(self.steps)
        if self.rank:
            return None
        return dataclasses.replace(step, latents=step.latents.cpu(), clean=step.clean.cpu())

    def denoise_end(self) -> None:
        """Let go of the run."""
        self.steps = None

    # Decoding.

    def decode_prepare(self, choice: Choice) -> str | None:
        """Have a decoder's weights ready; why this rank can't, if it can't."""
        try:
            check_supported(self.vae)
            if choice.path in FAST:
                fast_decoder(self.vae, choice)
        except EngineError as error:
            return str(error)
        return None

    def decode_fit(
        self, choice: Choice, size: tuple[int, int], memory_gib: float | None, ranks: int, smaller: int
    ) -> int | str:
        """How to cut the work on the first `ranks` ranks so that it fits here (see `engine.decode_paths.fit`), asked
        when all have their weights ready; why it can't fit, if it can't. size: rows and columns of the latents."""
        if choice.path not in FAST:
            return smaller
        rows, decoder = split(size[0], ranks)[self.rank], fast_decoder(self.vae, choice)
        try:
            return fit(decoder, rows.stop - rows.start, size[1], memory_gib, smaller, ranks, min(self.sharing, ranks))
        except ResourceError as error:
            return str(error)

    def decode_begin(
        self,
        latents: np.ndarray,
        choice: Choice,
        memory_gib: float | None,
        ranks: int,
        cut: int,
        nbytes: int,
        floats: bool,
    ) -> None:
        """Get ready for a video's passes on the first `ranks` ranks, which all cut the work alike. A block of memory
        follows the call: a ring of chunks uint8 [longest, H, W, 3], or one fp32 [longest, 3, H, W]."""
        block = Shared(recv_handle(self.connection), nbytes)
        plan = Plan(torch.from_numpy(latents).to(self.device), choice, memory_gib=memory_gib)
        rows = Band(latents.shape[3], self.rank, ranks, self.link) if ranks > 1 else Rows()
        self.started: deque[tuple[int, Pending]] = deque()
        shape = (plan.longest, plan.height, plan.width, 3)
        self.run = DecodeRun(self.vae, plan, rows, cut)
        if floats:
            self.floats = block.array((shape[0], 3, *shape[1:3]), np.float32)
        else:
            self.copy = HostCopy(self.run, _SharedRing(block.array((RING, *shape), np.uint8), self.device))
        block.close()

    def decode_pass(self, index: int) -> list[tuple[int, bool]]:
        """Start a pass. Returns the passes whose rows are now in the ring, and whether their values were finite."""
        self.started.append((index, self.copy.start(self.run.plan.passes[index])))
        return self._finished(self.copy.ahead)

    def decode_drain(self) -> list[tuple[int, bool]]:
        """The passes that were started and not yet told of."""
        return self._finished(0)

    def _finished(self, ahead: int) -> list[tuple[int, bool]]:
        over = []
        while len(self.started) > ahead:
            index, pending = self.started.popleft()
            over.append((index, pending.wait()))
        return over

    def float_pass(self, index: int) -> bool:
        """A pass before rounding, into the block; whether its values were finite."""
        frames, finite = self.run.floats(self.run.plan.passes[index])
        self.floats[: len(frames), :, self.run.rows.pixels] = frames.cpu().numpy()
        return finite

    def decode_end(self) -> None:
        """Let go of the video."""
        for pending in (pending for _, pending in self.started):
            pending.wait()
        if getattr(self, "copy", None):
            self.copy.ring.close()
        self.run = self.copy = self.floats = None
        self.started.clear()


class EulerSteps:
    """As much of diffusers' scheduler as `engine.denoise` asks for: that library takes a worker seconds to import.

    sigmas: float32 [steps + 1] of the scheduler that the parent built.
    """

    def __init__(self, sigmas: torch.Tensor) -> None:
        self.sigmas, self.timesteps = sigmas, 1000 * sigmas[:-1]
        self.step_index: int | None = None

    def step(self, velocity: torch.Tensor, timestep: Any, latents: torch.Tensor, return_dict: bool) -> tuple:
        """One step of Euler's method."""
        k = self.step_index or 0
        self.step_index = k + 1
        return (latents + (self.sigmas[k + 1] - self.sigmas[k]) * velocity,)


class _SharedRing:
    """A ring in memory of all ranks. frames: uint8 [RING, longest, H, W, 3]."""

    def __init__(self, frames: np.ndarray, device: torch.device) -> None:
        self.buffers, self.turn = torch.from_numpy(frames), 0
        self.pinned = device.type == "cuda"
        if self.pinned:
            error = torch.cuda.cudart().cudaHostRegister(self.buffers.data_ptr(), self.buffers.nbytes, 0)
            torch.cuda.check_error(int(error))

    def next(self) -> torch.Tensor:
        buffer = self.buffers[self.turn]
        self.turn = (self.turn + 1) % RING
        return buffer

    def close(self) -> None:
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.buffers.data_ptr())


def _or_why(choose: Callable[..., Any], pair: tuple[str, str]) -> Any:
    try:
        return choose(*pair)
    except EngineError as error:
        return str(error)


def decode_pairs() -> list[tuple[str, str]]:
    """Every path and precision that settings can name."""
    return [(path, precision) for path in get_args(DecodePath) for precision in get_args(DecodePrecision)]
