"""Devices with random weights of the released sizes, for measuring where the release can't be had.

Every rank draws the same weights from the same seed. `python -m engine.random_group` is what its workers run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from engine.executor import LocalExecutor, Report
from engine.noise import draw_noise
from engine.prompt import TextEmbedding
from engine.rank import Rank
from engine.rehearsal import FULL, Scene, random_transformer, random_vae
from engine.settings import DenoiseSettings
from engine.spread import GroupExecutor
from engine.worker import serve


class RandomRank(Rank):
    """A rank that makes its weights instead of reading them; `folder` of its calls is a `Scene`."""

    def load_parts(self, folder: Scene, text_dtype: torch.dtype) -> None:
        """Only the decoder's weights: there is no text model."""
        self.vae = random_vae(folder.vae, self.device)

    def load_transformer(self, folder: Scene, dtype: torch.dtype, fp8: bool, stream: bool) -> None:
        """As of `Rank`, in `dtype` and on the device alone."""
        self.transformer = random_transformer(folder.config, self.device, dtype)


class RandomGroup(GroupExecutor):
    """A group without a checkpoint."""

    def __init__(self, devices: Sequence[torch.device], scene: Scene = FULL) -> None:
        super().__init__("random weights", devices, program="engine.random_group")
        self.scene = scene

    def _describe(self, report: Report) -> Any:
        self.transformer_config, self.vae_config = self.scene.config, self.scene.vae
        self.scheduler = FlowMatchEulerDiscreteScheduler(shift=9.0)
        return self.scene

    def encode_prompt(self, prompt: str) -> TextEmbedding:
        """Noise of a usual length: a longer one for a prompt than for none."""
        tokens = self.scene.text[0 if prompt.strip() else 1]
        values = draw_noise(tokens, (tokens, self.scene.config.text_embed_dim))
        return TextEmbedding(values[None], tokens, 0)


class RandomDecoder(LocalExecutor):
    """One device that only decodes, without a checkpoint."""

    def __init__(self, device: torch.device, scene: Scene = FULL) -> None:
        super().__init__("random weights", device)
        self.scene = scene

    def load(self, settings: DenoiseSettings, report: Report) -> None:
        """The decoder's weights alone."""
        self.vae = random_vae(self.scene.vae, self.device)


if __name__ == "__main__":
    serve(RandomRank)
