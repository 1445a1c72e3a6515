"""What the engine asks of an executor, and which one it gets: one for one device, another for several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from engine.decode_plan import Choice, FrameChunk
from engine.denoise import Step
from engine.devices import parse_devices
from engine.executor import LocalExecutor, Report
from engine.mmdit import MMDiTConfig
from engine.parts import Description
from engine.placement import Placement
from engine.preview import LinearMap
from engine.prompt import TextEmbedding
from engine.request import Request
from engine.settings import DecodeSettings, DenoiseSettings
from engine.telemetry import Memory
from kernels.choose import Choice as KernelChoice


class Executor(Protocol):
    """Who owns the weights. `LocalExecutor` says what each method does.

    device: what this process itself computes on; devices: those that do the work; folder, info, vae_hash: of the
    checkpoint, folder is None before it is loaded; typical: a request of the size that memory is planned for; lanes:
    what each of several devices did, None of one.
    """

    device: torch.device
    devices: tuple[torch.device, ...]
    folder: Path | None
    info: Description
    vae_hash: str
    typical: Request
    placement: Placement | None
    paths: tuple[KernelChoice, ...]

    @property
    def precision(self) -> str | None: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def transformer_config(self) -> MMDiTConfig: ...
    @property
    def vae_config(self) -> Any: ...
    def begin_request(self) -> None: ...
    def stats(self) -> list[dict[str, Any]]: ...
    def load(self, settings: DenoiseSettings, report: Report) -> None: ...
    def holds(self, settings: DenoiseSettings) -> bool: ...
    def encode_prompt(self, prompt: str) -> TextEmbedding: ...
    def count_tokens(self, prompt: str) -> int: ...
    def encode_image(self, image: Image.Image, height: int, width: int) -> torch.Tensor: ...
    def denoise_paths(self, settings: DenoiseSettings) -> tuple[KernelChoice, KernelChoice]: ...
    def denoise(
        self,
        request: Request,
        texts: tuple[TextEmbedding, TextEmbedding | None],
        condition: torch.Tensor,
        noise: torch.Tensor,
        cancel: threading.Event,
    ) -> Iterator[Step]: ...
    def decode(
        self, latents: torch.Tensor, settings: DecodeSettings, cancel: threading.Event
    ) -> Iterator[FrameChunk]: ...
    def float_frames(
        self, latents: torch.Tensor, settings: DecodeSettings, cancel: threading.Event
    ) -> Iterator[torch.Tensor]: ...
    def preview_map(self) -> LinearMap: ...
    def explain_decode(self, settings: DecodeSettings) -> Choice: ...
    def device_name(self) -> str: ...
    def versions(self) -> dict[str, Any]: ...
    def memory(self) -> Memory: ...
    def close(self) -> None: ...


def build_executor(checkpoint: str, devices: str) -> Executor:
    """One for these devices (see `engine.devices`): in this process for one of them, a group of processes for several.
    Loads nothing. Raises RequestError for devices that are not there."""
    chosen = parse_devices(devices)
    if len(chosen) == 1:
        return LocalExecutor(checkpoint, chosen[0])
    from engine.spread import GroupExecutor

    return GroupExecutor(checkpoint, chosen)
