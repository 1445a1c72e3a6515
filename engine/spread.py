"""One decode and one denoise spread over several devices: `GroupExecutor`, with the methods of `LocalExecutor`.

This process holds no weights and opens no GPU; each worker of the group holds the model on its device. Frames and
latents come back through memory that all of them share: nothing is gathered on a device.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

import engine.checkpoint as files
from engine.agree import agree, lack
from engine.condition import prepare_image
from engine.decode import RING, stopper
from engine.decode_paths import FAST, cuts, instead, leaner
from engine.decode_plan import Arrivals, Choice, FrameChunk, Plan
from engine.denoise import Step
from engine.errors import Cancelled, ExhaustedError, NotFiniteError, RequestError, ResourceError
from engine.executor import DTYPES, Report, choose_precision, versions
from engine.group import SILENCE, START, WorkerGroup
from engine.lanes import Lanes
from engine.latents import folder_hash
from engine.link import way
from engine.mmdit import MMDiTConfig
from engine.parts import read_config
from engine.preview import LinearMap
from engine.prompt import TextEmbedding, count_tokens
from engine.rank import Facts, Usage
from engine.request import Request
from engine.schedule import build_scheduler
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import video_tokens
from engine.shared import Shared
from engine.telemetry import DeviceMemory, Memory, memory_now
from engine.ulysses import Team, form_team
from kernels.choose import Choice as KernelChoice
from kernels.vae_decode.state import State

log = logging.getLogger(__name__)

ALONE = 3600.0  # seconds for what one rank does by itself, where nobody waits for it
PREPARE = 900.0  # for weights to be transformed and kernels compiled, which have no pulse


class GroupExecutor:
    """All parts of a checkpoint on several devices, one worker process each.

    checkpoint: a folder or the name of a repository on the Hub; program, silence: see `engine.group.WorkerGroup`.
    The workers start when something is asked of them first, and again after a fault.
    """

    device = torch.device("cpu")  # of this process, which computes nothing on a GPU
    placement = None  # every rank holds everything

    def __init__(
        self,
        checkpoint: str,
        devices: Sequence[torch.device],
        program: str = "engine.worker",
        silence: float = SILENCE,
    ) -> None:
        self.checkpoint, self.devices = checkpoint, tuple(devices)
        self.cuda, self.way = devices[0].type == "cuda", way(devices)
        if self.way.staged:
            log.warning("%s", self.way.about)
        self.folder: Path | None = None
        self.group = WorkerGroup(devices, program, silence)
        self.most = len(devices)  # of the devices, the first so many are used
        self.names = [f"rank {rank} ({device})" for rank, device in enumerate(devices)]
        self._loaded: tuple[str, bool] | None = None
        self._switches: tuple[str, str] | None = None
        self.paths: tuple[KernelChoice, ...] = ()
        self._facts: list[Facts] = []
        self._usage: dict[int, Usage] = {}
        self._lock = threading.Lock()
        self.begin_request()

    def begin_request(self) -> None:
        """Count what the devices do from now on."""
        self.lanes = Lanes(self.names, time.perf_counter())

    def stats(self) -> list[dict[str, Any]]:
        """What each device did since `begin_request`, as in stats.json."""
        return self.lanes.to_json()

    # Weights.

    def load(self, settings: DenoiseSettings, report: Report) -> None:
        """As of `LocalExecutor`: every rank reads the model from its files; the text model is on rank 0 alone."""
        with self._lock:
            if self.holds(settings):
                return
            form = self._form(settings)
            folder = self.folder or self._describe(report)
            fresh = self._start()
            if fresh or self.folder is None:
                text_dtype = torch.bfloat16 if self.cuda else torch.float32
                self._call("load", "load_parts", folder, text_dtype, report=report, silence=START)
                found = self._call("load", "decoders")
                self._facts = [replace(facts, choices=new) for facts, new in zip(self._facts, found, strict=True)]
            if self._loaded != form:
                self._loaded = None
                precision, stream = form
                how = (folder, DTYPES[precision], precision == "fp8", stream)
                self._call("load", "load_transformer", *how, report=report, silence=START)
                self.itemsize = how[1].itemsize
            self.paths = self._call("load", "switch", settings, silence=START)[0]
            self._switches = (settings.attention, settings.fused_kernels)
            self._call("load", "compile_kernels", report=report, silence=PREPARE)
            self.folder, self._loaded, self._settings = folder, form, settings

    def _describe(self, report: Report) -> Path:
        folder = files.resolve(self.checkpoint, report)
        self.info = files.describe(folder)
        self.transformer_config = MMDiTConfig.read(read_config(folder, "transformer"))
        self.vae_config = read_config(folder, "vae")
        self.scheduler = files.load_scheduler(folder)
        self.tokenizer = files.load_tokenizer(folder)
        self.vae_hash = folder_hash(folder / "vae")
        return folder

    def _start(self) -> bool:
        """Start the workers if they are not there; whether they had to be."""
        if self.group.alive:
            return False
        self._loaded = None
        answers = self.group.start()
        self._facts = [facts for facts, _ in answers]
        self._note("start", [usage for _, usage in answers])
        return True

    def holds(self, settings: DenoiseSettings) -> bool:
        """As of `LocalExecutor`."""
        switches = (settings.attention, settings.fused_kernels)
        return self.group.alive and self._loaded == self._form(settings) and self._switches == switches

    def _form(self, settings: DenoiseSettings) -> tuple[str, bool]:
        """Precision of the transformer, and whether its blocks stay on the host."""
        return choose_precision(settings, self.devices[0]), settings.offload == "blocks"

    def denoise_paths(self, settings: DenoiseSettings) -> tuple[KernelChoice, KernelChoice]:
        """As of `LocalExecutor`, on rank 0; every other one must have something for these settings too."""
        if self.holds(settings):
            return self.paths
        answers = [facts.denoise[settings.attention, settings.fused_kernels] for facts in self._known()]
        for name, answer in zip(self.names, answers, strict=True):
            if isinstance(answer, str):
                raise RequestError(f"{name}: {answer}")
        return answers[0]

    @property
    def precision(self) -> str | None:
        """As of `LocalExecutor`."""
        return self._loaded and self._loaded[0]

    # The stages.

    def encode_prompt(self, prompt: str) -> TextEmbedding:
        """As of `LocalExecutor`, on the host."""
        return self._call("text", "encode_prompt", prompt, ranks=1, silence=ALONE)[0]

    def count_tokens(self, prompt: str) -> int:
        """As of `LocalExecutor`."""
        return count_tokens(self.tokenizer, prompt)

    def encode_image(self, image: Image.Image, height: int, width: int) -> torch.Tensor:
        """As of `LocalExecutor`, on the host."""
        pixels = prepare_image(image, height, width)
        return torch.from_numpy(self._call("image", "encode_image", pixels, ranks=1, silence=ALONE)[0])

    def preview_map(self) -> LinearMap:
        """As of `LocalExecutor`, on the host."""
        return self._call("load", "preview_map", self.vae_hash, ranks=1, silence=ALONE)[0]

    def denoise(
        self,
        request: Request,
        texts: tuple[TextEmbedding, TextEmbedding | None],
        condition: torch.Tensor,
        noise: torch.Tensor,
        cancel: threading.Event,
    ) -> Iterator[Step]:
        """As of `LocalExecutor`; latents on the host."""
        embeddings = tuple(text and text.embedding for text in texts)
        team = self._team(request, guided=request.guidance > 1)
        call = partial(self._call, "denoise", ranks=team.ranks, silence=_patience(team.ranks))
        sigmas = build_scheduler(self.scheduler, request.steps, request.shift).sigmas
        begin = (embeddings, condition, noise, sigmas, request.guidance, request.denoise.quality, team)
        call("denoise_begin", *begin, silence=START)
        try:
            for k in range(request.steps):
                if cancel.is_set():
                    raise Cancelled(f"Stopped after {k} of {request.steps} denoising steps.")
                yield call("denoise_step")[0]
        finally:
            if self.group.alive:
                call("denoise_end")

    def _team(self, request: Request, guided: bool) -> Team:
        config = self.transformer_config
        tokens = video_tokens(request.frames, request.height, request.width)
        ranks = 1 if request.denoise.devices == "one" else self.most
        return form_team(ranks, config.num_attention_heads, guided, tokens)

    def decode(self, latents: torch.Tensor, settings: DecodeSettings, cancel: threading.Event) -> Iterator[FrameChunk]:
        """As of `LocalExecutor`: every rank writes its rows of each frame into one ring that it shares with us. Where
        memory is short or fp16 overflows on one of them, all begin again alike."""
        plan, cut, done = self._agreed(latents, settings), 0, 0
        while True:
            plan, cut = self._fitting(plan, cut)
            try:
                for chunk in self._attempt(plan, cut, stopper(cancel), done):
                    done += 1
                    yield chunk
                return
            except (NotFiniteError, ExhaustedError) as error:
                failure = error
            plan, cut = self._instead(plan, cut, failure)

    def _attempt(self, plan: Plan, cut: int, stop: Callable[[], bool], done: int) -> Iterator[FrameChunk]:
        """The chunks after the first `done`; those are computed too, for the state that they leave."""
        with self._decoding(plan, cut, floats=False) as block:
            ring = block.array((RING, plan.longest, plan.height, plan.width, 3), np.uint8)
            arrivals, ask = Arrivals(plan, ring, done), partial(self._ask, plan)
            for index, span in enumerate(plan.passes):
                if stop():
                    yield from arrivals.of(ask("decode_drain"))
                    raise plan.cancelled(span)
                yield from arrivals.of(ask("decode_pass", index))
            yield from arrivals.of(ask("decode_drain"))

    def _instead(self, plan: Plan, cut: int, failure: Exception) -> tuple[Plan, int]:
        """As `engine.decode_paths.instead`, with all ranks ready for it."""
        parts = _ranks(plan)
        state = State(cuts(parts)[cut]) if plan.choice.path in FAST else None
        where = str(failure).partition(",")[0]  # the rank and its device, see `engine.group`
        plan, cut = instead(plan, state, failure, where, parts)
        if not self.group.alive:  # the others waited for what the one could not send, and were ended with it
            self.load(self._settings, lambda *_: None)
        if any(self._prepared(plan)):
            raise failure
        return plan, cut

    def float_frames(
        self, latents: torch.Tensor, settings: DecodeSettings, cancel: threading.Event
    ) -> Iterator[torch.Tensor]:
        """As of `LocalExecutor`."""
        stop, plan = stopper(cancel), self._agreed(latents, settings)
        plan, cut = self._fitting(plan, 0)
        with self._decoding(plan, cut, floats=True) as block:
            frames = block.array((plan.longest, 3, plan.height, plan.width), np.float32)
            for index, span in enumerate(plan.passes):
                if stop():
                    raise plan.cancelled(span)
                if not all(self._ask(plan, "float_pass", index)):
                    raise plan.not_finite(span)
                yield torch.from_numpy(frames[: plan.chunk(span)[1]].copy())

    def _agreed(self, latents: torch.Tensor, settings: DecodeSettings) -> Plan:
        """The plan with a decoder that every rank has ready. Ranks that turn out to lack one make all take another."""
        while True:
            choice = self.explain_decode(settings)
            plan = Plan(latents.cpu(), choice, memory_gib=settings.memory_gib, asked=settings.precision != "auto")
            lacks = self._prepared(plan)
            if not any(lacks):
                return plan
            for rank, why in enumerate(lacks):
                if why:
                    lack(choice, self._facts[rank], why)

    def _prepared(self, plan: Plan) -> list[str | None]:
        return self._ask(plan, "decode_prepare", plan.choice, silence=PREPARE)

    def _fit(self, plan: Plan, smaller: int) -> int:
        """The way to cut the work, after `smaller` of them, that fits on every rank. ResourceError if none does."""
        arguments = (plan.choice, tuple(plan.latents.shape[3:]), plan.memory_gib, _ranks(plan), smaller)
        cuts = self._ask(plan, "decode_fit", *arguments, silence=PREPARE)
        for name, cut in zip(self.names, cuts, strict=False):
            if isinstance(cut, str):
                raise ResourceError(f"{name}: {cut}")
        return max(cuts)

    def _fitting(self, plan: Plan, smaller: int) -> tuple[Plan, int]:
        """The same with its plan: where none fits, in the precision that takes less memory."""
        try:
            return plan, self._fit(plan, smaller)
        except ResourceError as error:
            return leaner(plan, error, lambda other: (other, self._fit(other, 0)))

    @contextmanager
    def _decoding(self, plan: Plan, cut: int, floats: bool) -> Iterator[Shared]:
        """The memory that the ranks write to, while they are ready for the plan's passes."""
        size = plan.longest * plan.height * plan.width * 3
        block = Shared.make("frames", size * (np.float32().nbytes if floats else RING))
        begin = (plan.latents.numpy(), plan.choice, plan.memory_gib, _ranks(plan), cut, block.nbytes, floats)
        self._ask(plan, "decode_begin", *begin, share=block)
        block.close()
        try:
            yield block
        finally:
            if self.group.alive:
                self._ask(plan, "decode_end")

    def _ask(self, plan: Plan, method: str, *arguments: Any, **how: Any) -> list[Any]:
        """Have the ranks that take part in a decode do something."""
        ranks = _ranks(plan)
        return self._call("decode", method, *arguments, ranks=ranks, **{"silence": _patience(ranks)} | how)

    # What is known of the devices.

    def explain_decode(self, settings: DecodeSettings) -> Choice:
        """As of `LocalExecutor`; what all devices can do."""
        names = self.names[: self.most]
        choice = agree(settings, self._known()[: self.most], names)
        return choice if choice.devices == 1 else choice._replace(reason=f"{choice.reason} ({self.way.about})")

    def _known(self) -> list[Facts]:
        if not self._facts:
            with self._lock:
                self._start()
        return self._facts

    def device_name(self) -> str:
        """As of `LocalExecutor`."""
        known = [facts.name for facts in self._known()]
        if not self.cuda:
            return f"{len(known)} processes on the {known[0]} each ({platform.machine()})"
        names = ", ".join(f"{name} ({device})" for name, device in zip(known, self.devices, strict=True))
        return f"{names}; {self.way.about}" if self.way.staged else names

    def versions(self) -> dict[str, Any]:
        """As of `LocalExecutor`."""
        return versions(self.devices[0])

    def memory(self) -> Memory:
        """As of `LocalExecutor`: of this process and the workers on the host; of GPUs, as of their last call."""
        ours = memory_now()
        if self.cuda:
            devices = [
                replace(usage.memory, name=self.names[rank]) if self.way.staged else usage.memory
                for rank, usage in sorted(self._usage.items())
                if usage.memory
            ]
            return Memory(ours.host, ours.host_available, ours.host_total, tuple(devices))
        sizes = [_size(member.process.pid) for member in self.group.members]
        lanes = tuple(
            DeviceMemory(name, size, size, size, size, ours.host_total)
            for name, size in zip(self.names, sizes, strict=False)
        )
        return Memory(ours.host + sum(sizes), ours.host_available, ours.host_total, lanes)

    def close(self) -> None:
        """End the workers, and with them everything that they hold."""
        self.group.close()
        self.folder = self._loaded = None

    def _call(self, stage: str, method: str, *arguments: Any, **how: Any) -> list[Any]:
        answers = self.group.call(stage, method, *arguments, **how)
        self._note(stage, [usage for _, usage in answers])
        return [result for result, _ in answers]

    def _note(self, stage: str, usages: list[Usage]) -> None:
        self._usage |= dict(enumerate(usages))
        self.lanes.add(stage, usages)


def _ranks(plan: Plan) -> int:
    """How many take part in a decode: no band is without rows."""
    return min(plan.choice.devices, plan.latents.shape[3])


def _patience(ranks: int) -> float | None:
    """Seconds without a pulse, None for what is usual: one rank alone has none and keeps nobody waiting."""
    return ALONE if ranks == 1 else None


def _size(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
