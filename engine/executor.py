"""Who owns the weights and the device. The engine asks an executor and does not know how many devices there are."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import engine.checkpoint as files
from engine.attention import SMALL_TOKENS, TRUE_TOKENS, Shape, choose_attention
from engine.condition import encode_image, prepare_image
from engine.decode import FrameChunk, decode, explain, float_frames
from engine.denoise import Step, denoise
from engine.errors import RequestError
from engine.fused import choose_fused
from engine.latents import folder_hash
from engine.preview import LinearMap, map_for
from engine.prompt import TextEmbedding
from engine.request import Request
from engine.schedule import build_scheduler
from engine.settings import DecodeSettings, DenoiseSettings
from kernels.choose import Choice

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Report = Callable[[str, int, int], None]


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name; "auto" is the first CUDA device, else the CPU. Raises RequestError for an absent one."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"device = {name!r} is not known; choose auto, cpu or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device = {name!r} needs an NVIDIA GPU and a CUDA build of PyTorch; choose auto or cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices, from 0.")
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"device = {name!r} is not supported; choose auto, cpu or cuda:0.")
    return device


def choose_precision(settings: DenoiseSettings, device: torch.device) -> str:
    """What "auto" means here: fp32 on a CPU, which is faster at it than at bf16, and bf16, as released, on a GPU."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if device.type == "cuda" else "fp32"


class LocalExecutor:
    """All parts of a checkpoint on one device, in this process.

    checkpoint: a folder or the name of a repository on the Hub; device: see `choose_device`.
    """

    def __init__(self, checkpoint: str, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.folder: Path | None = None
        self._precision: str | None = None
        self._switches: tuple[str, str] | None = None
        self.paths: tuple[Choice, ...] = ()
        self._lock = threading.Lock()

    def load(self, settings: DenoiseSettings, report: Report) -> None:
        """Bring every part onto the device; what is there already stays. report: part, bytes done, bytes in all."""
        with self._lock:
            if self.holds(settings):
                return
            precision = choose_precision(settings, self.device)
            if self.folder is None:
                self._load_folder(DTYPES[precision], report)
            if self._precision != precision:
                self.transformer = None
                self._precision = None
                self.transformer = files.load_transformer(self.folder, self.device, DTYPES[precision], report)
                self._precision = precision
            self._switch(settings)

    def _switch(self, settings: DenoiseSettings) -> None:
        self._switches = None
        attention, fused = self.paths = self.denoise_paths(settings)
        self.transformer.set_attention(attention.path)
        self.transformer.set_fused_kernels(fused.path == "on")
        self._switches = (settings.attention, settings.fused_kernels)

    def _load_folder(self, transformer_dtype: torch.dtype, report: Report) -> None:
        folder = files.resolve(self.checkpoint, report)
        text_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        dtypes = {"transformer": transformer_dtype, "text_encoder": text_dtype, "vae": torch.float32}
        self.info = files.describe(folder)
        files.require_room(self.info, self.device, dtypes)
        self.scheduler = files.load_scheduler(folder)
        self.text = files.load_text_encoder(folder, self.device, text_dtype, report)
        self.vae = files.load_vae(folder, self.device, torch.float32, report)
        self.vae_hash = folder_hash(folder / "vae")
        self.folder = folder

    def holds(self, settings: DenoiseSettings) -> bool:
        """Whether a request with these settings could start at once."""
        switches = (settings.attention, settings.fused_kernels)
        return self._precision == choose_precision(settings, self.device) and self._switches == switches

    def denoise_paths(self, settings: DenoiseSettings) -> tuple[Choice, Choice]:
        """Attention and fused kernels for these settings. Before the model is loaded nothing is tried out on the
        device. Raises RequestError for what can't run here."""
        shape = None
        if self._precision == choose_precision(settings, self.device):
            config, tokens = self.transformer.config, TRUE_TOKENS if self.device.type == "cuda" else SMALL_TOKENS
            shape = Shape(DTYPES[self._precision], config.num_attention_heads, config.attention_head_dim, tokens)
        attention = choose_attention(settings.attention, self.device, shape)
        return attention, choose_fused(settings.fused_kernels, self.device)

    def explain_denoise(self, settings: DenoiseSettings) -> dict[str, str]:
        """Precision, attention and fused kernels, for people to read."""
        attention, fused = self.denoise_paths(settings)
        return {
            "Denoising": choose_precision(settings, self.device),
            "Attention": f"{attention.path}: {attention.reason}",
            "Fused kernels": f"{fused.path}: {fused.reason}",
        }

    @property
    def precision(self) -> str | None:
        """Of the transformer, None before it is loaded."""
        return self._precision

    def encode_prompt(self, prompt: str) -> TextEmbedding:
        """[1, L, D], see `engine.prompt`."""
        return self.text.encode(prompt)

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

    def explain_decode(self, settings: DecodeSettings) -> tuple[str, str, str]:
        """Path, precision and the reason for them, for these settings on this device."""
        return explain(settings, self.device)

    def device_name(self) -> str:
        """The device in words."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)} ({self.device})"
        return f"CPU, {torch.get_num_threads()} threads ({platform.machine()})"

    def versions(self) -> dict[str, Any]:
        """What a report needs to be reproduced."""
        cuda = (
            {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} if self.device.type == "cuda" else {}
        )
        return {"python": platform.python_version(), "torch": torch.__version__, **cuda}

    def close(self) -> None:
        """Let go of every weight."""
        with self._lock:
            self.transformer = self.text = self.vae = self.folder = self._precision = self._switches = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
