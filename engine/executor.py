"""Who owns the weights and the device. The engine asks an executor and does not know how many devices there are."""

from __future__ import annotations

import dataclasses
import logging
import platform
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import engine.checkpoint as files
from engine import fp8
from engine.attention import SMALL_TOKENS, TRUE_TOKENS, Shape, choose_attention
from engine.condition import encode_image, prepare_image
from engine.decode import decode, explain, float_frames
from engine.decode_paths import compile_kernels
from engine.decode_plan import Choice as DecodeChoice
from engine.decode_plan import FrameChunk
from engine.denoise import Step, denoise
from engine.errors import RequestError, ResourceError
from engine.fused import choose_fused
from engine.latents import folder_hash
from engine.memory import in_use
from engine.mmdit import MMDiTConfig, PAN2Transformer3DModel
from engine.offload import visit
from engine.placement import Machine, Placement, place
from engine.preview import LinearMap, map_for
from engine.prompt import TextEmbedding
from engine.request import Request
from engine.schedule import build_scheduler
from engine.settings import DecodeSettings, DenoiseSettings
from engine.telemetry import Memory, memory_now
from kernels import launch
from kernels.choose import Choice

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
TEXTS_KEPT = 8  # at most 12 MiB each; the negative prompt is mostly the same
Report = Callable[[str, int, int], None]


def choose_precision(settings: DenoiseSettings, device: torch.device) -> str:
    """What "auto" means here: fp32 on a CPU, which is faster at it than at bf16, and bf16, as released, on a GPU."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if device.type == "cuda" else "fp32"


def usable(device: torch.device) -> bool:
    """Whether something can be computed on a device by now. Where a GPU is lent for single calls (engine/web/zero.py),
    weights are put on it before that, and CUDA begins within the call."""
    return device.type != "cuda" or in_use(device)


class LocalExecutor:
    """All parts of a checkpoint on one device, in this process.

    checkpoint: a folder or the name of a repository on the Hub.
    """

    def __init__(self, checkpoint: str, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.device, self.devices = device, (device,)
        self.folder: Path | None = None
        self.vae: Any = None
        # The size that the memory plan is for; larger requests may still fit.
        self.typical = Request("", "", height=64, width=64, frames=1, steps=1, shift=1.0, guidance=1.0, seed=0)
        self.placement: Placement | None = None
        self._texts: OrderedDict[str, TextEmbedding] = OrderedDict()
        self._switches: tuple[str, str, bool] | None = None
        self._known: tuple[MMDiTConfig, int] | None = None
        self._scattered = False
        self.paths: tuple[Choice, ...] = ()
        self._lock = threading.Lock()

    def load(self, settings: DenoiseSettings, report: Report) -> None:
        """Bring every part onto the device; what is there already stays. report: part, bytes done, bytes in all; or a
        sentence and zeros."""
        with self._lock:
            if self.holds(settings):
                return
            if self.folder is None:
                self._load_folder(settings, report)
            wanted = self.plan(settings)
            if usable(self.device):
                launch.try_out(self.device)
            if wanted.precision == "fp8" != settings.precision:
                log.warning("The transformer runs in fp8: %s.", wanted.reason)
            if wanted.stream and not usable(self.device):
                raise ResourceError(
                    f"The blocks would have to stream from host memory ({wanted.reason}), and a GPU that is lent for "
                    "single calls can't do that. Use a preset of a smaller size or fewer frames."
                )
            if self.placement is None or self.placement.text != wanted.text:
                self.text.model.to(self._text_device(wanted))
            if self.placement is None or not self.placement.same_transformer(wanted):
                self.transformer = self.placement = None
                how = DTYPES[wanted.precision], report, wanted.precision == "fp8", wanted.stream
                self._take(files.load_transformer(self.folder, self.device, *how))
                self._scattered = not usable(self.device)
            self.placement = wanted
            self._switch(settings)
            if usable(self.device):
                compile_kernels(self.device, lambda words: report(words, 0, 0), self.vae)

    def _take(self, transformer: PAN2Transformer3DModel) -> None:
        self.transformer = transformer
        self._known = transformer.config, transformer.dtype.itemsize

    def _switch(self, settings: DenoiseSettings) -> None:
        self._switches = None
        if self._scattered and usable(self.device):
            # A GPU that was not there yet got every tensor on its own, also those that shared one.
            for block in self.transformer.transformer_blocks:
                block.attn.pack()
            self._scattered = False
        self.paths = denoise_paths(settings, self.device, self.transformer if usable(self.device) else None)
        switch(self.transformer, self.paths)
        self._switches = self._wanted(settings)

    def _wanted(self, settings: DenoiseSettings) -> tuple[str, str, bool]:
        """What the paths were chosen by: choices that nothing could be tried for are made again."""
        return settings.attention, settings.fused_kernels, usable(self.device)

    def _load_folder(self, settings: DenoiseSettings, report: Report) -> None:
        folder = files.resolve(self.checkpoint, report)
        self.info = files.describe(folder)
        self._machine, self._plans = Machine.here(self.device), {}
        text_device = self._text_device(self.plan(settings))
        self.scheduler = files.load_scheduler(folder)
        text_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.text = files.load_text_encoder(folder, text_device, text_dtype, report)
        self.vae = files.load_vae(folder, self.device, torch.float32, report)
        self.vae_hash = folder_hash(folder / "vae")
        self.folder = folder

    def _text_device(self, placement: Placement) -> torch.device:
        return self.device if placement.text == "resident" else torch.device("cpu")

    def plan(self, settings: DenoiseSettings) -> Placement:
        """Where these settings put everything, by what was free before anything was loaded. Needs `info`.

        Raises RequestError and ResourceError as `engine.placement.place` does.
        """
        if settings not in self._plans:
            request = dataclasses.replace(self.typical, denoise=settings)
            self._plans[settings] = place(self.info, request, self._machine)
        return self._plans[settings]

    def holds(self, settings: DenoiseSettings) -> bool:
        """Whether a request with these settings could start at once."""
        if self.placement is None or self._switches != self._wanted(settings):
            return False
        return self.placement.same_transformer(wanted := self.plan(settings)) and self.placement.text == wanted.text

    def denoise_paths(self, settings: DenoiseSettings) -> tuple[Choice, Choice]:
        """Attention and fused kernels for these settings. Before the model is loaded, and while it is, nothing is tried
        out on the device: backends are tried by switches of the whole process, so two threads would disturb each
        other. Raises RequestError for what can't run here."""
        placement = self.placement if self._switches is not None else None
        loaded = placement is not None and placement.same_transformer(self.plan(settings))
        return denoise_paths(settings, self.device, self.transformer if loaded and usable(self.device) else None)

    @property
    def precision(self) -> str | None:
        """Of the transformer, None before it is loaded."""
        return self.placement.precision if self.placement else None

    @property
    def itemsize(self) -> int:
        """Bytes of one of the transformer's weights, once it is loaded; while others take their place, as before."""
        return self._known[1]

    @property
    def transformer_config(self) -> MMDiTConfig:
        """The transformer's configuration, once it is loaded, and while it is loaded in another form."""
        return self._known[0]

    @property
    def vae_config(self) -> Any:
        """The VAE's configuration, once it is loaded."""
        return self.vae.config

    def encode_prompt(self, prompt: str) -> TextEmbedding:
        """[1, L, D], see `engine.prompt`."""
        if prompt not in self._texts:
            away = self.placement.text == "visiting"
            with visit(self.text.model, self.device) if away else nullcontext():
                self._texts[prompt] = self.text.encode(prompt)
            if len(self._texts) > TEXTS_KEPT:
                self._texts.popitem(last=False)
        self._texts.move_to_end(prompt)
        return self._texts[prompt]

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a prompt, see `engine.prompt.count_tokens`."""
        return self.text.count(prompt)

    def encode_image(self, image: Image.Image, height: int, width: int) -> torch.Tensor:
        """Normalised latents of a first frame, fp32 [1, 48, 1, h, w]."""
        return encode_image(self.vae, prepare_image(image, height, width).to(self.device))

    def denoise(
        self,
        request: Request,
        texts: tuple[TextEmbedding, TextEmbedding | None],
        condition: torch.Tensor,
        noise: torch.Tensor,
        cancel: threading.Event,
    ) -> Iterator[Step]:
        """The sampling loop, a `Step` after each step; the last one's latents are the result."""
        positive, negative = texts
        return denoise(
            self.transformer,
            positive.embedding,
            negative.embedding if negative else None,
            condition.to(self.device),
            noise.to(self.device),
            build_scheduler(self.scheduler, request.steps, request.shift),
            request.guidance,
            cancel,
            request.denoise.quality,
        )

    def decode(self, latents: torch.Tensor, settings: DecodeSettings, cancel: threading.Event) -> Iterator[FrameChunk]:
        """Frames of normalised latents fp32 [1, 48, F, h, w], chunk by chunk on the host."""
        return decode(self.vae, latents.to(self.device), settings, cancel)

    def preview_map(self) -> LinearMap:
        """Latents to small pictures, fitted to the VAE the first time that these weights are seen."""
        return map_for(self.vae, self.vae_hash)

    def float_frames(
        self, latents: torch.Tensor, settings: DecodeSettings, cancel: threading.Event
    ) -> Iterator[torch.Tensor]:
        """The same frames before rounding, for measuring: fp32 [t, 3, H, W] in [-1, 1] on the host."""
        for frames in float_frames(self.vae, latents.to(self.device), settings, cancel):
            yield frames.cpu()

    def explain_decode(self, settings: DecodeSettings) -> DecodeChoice:
        """Path, precision and the reason for them, for these settings on this device, and for the VAE once it is
        loaded."""
        return explain(settings, self.device, self.vae)

    def device_name(self) -> str:
        """The device in words."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)} ({self.device})"
        return f"CPU, {threads()} ({platform.machine()})"

    def versions(self) -> dict[str, Any]:
        """What a report needs to be reproduced."""
        return versions(self.device)

    def memory(self) -> Memory:
        """What is held at this moment."""
        return memory_now()

    def begin_request(self) -> None:
        """Count what several devices do from now on; there is one."""

    def stats(self) -> list[dict[str, Any]]:
        """What each of several devices did since then: nothing."""
        return []

    def close(self) -> None:
        """Let go of every weight."""
        with self._lock:
            self.transformer = self.text = self.vae = self.folder = self.placement = self._switches = None
            self._texts.clear()
            if in_use(self.device):
                torch.cuda.empty_cache()


def denoise_paths(
    settings: DenoiseSettings, device: torch.device, model: PAN2Transformer3DModel | None
) -> tuple[Choice, Choice]:
    """Attention and fused kernels on a device. model: what they are tried with, None to try nothing out.

    Raises RequestError for what can't run there.
    """
    shape = None
    if settings.precision == "fp8" and (absent := fp8.lack(device)):
        raise RequestError(f"precision = 'fp8': {absent}. Choose auto, bf16 or fp32.")
    if model is not None:
        config, tokens = model.config, TRUE_TOKENS if device.type == "cuda" else SMALL_TOKENS
        shape = Shape(model.dtype, config.num_attention_heads, config.attention_head_dim, tokens)
    return choose_attention(settings.attention, device, shape), choose_fused(settings.fused_kernels, device, shape)


def switch(model: PAN2Transformer3DModel, paths: tuple[Choice, Choice]) -> None:
    """Have a transformer take these paths."""
    attention, fused = paths
    model.set_attention(attention.path)
    model.set_fused_kernels(fused.path == "on")


def threads() -> str:
    """How many threads PyTorch computes with, in words."""
    number = torch.get_num_threads()
    return f"{number} thread{'s' * (number != 1)}"


def versions(device: torch.device) -> dict[str, Any]:
    """Of Python, PyTorch and, for a GPU, its libraries."""
    cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} if device.type == "cuda" else {}
    return {"python": platform.python_version(), "torch": torch.__version__, **cuda}
