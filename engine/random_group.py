"""Devices with random weights of the released sizes, for measuring where the release can't be had.

Every rank draws the same weights from the same seed. `python -m engine.random_group` is what its workers run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from engine.executor import DTYPES, LocalExecutor, Report, choose_precision, denoise_paths, switch
from engine.mmdit import MMDiTConfig
from engine.noise import draw_noise
from engine.prompt import TextEmbedding
from engine.rank import Rank
from engine.rehearsal import FULL, Scene, random_transformer, random_vae
from engine.settings import DenoiseSettings
from engine.spread import GroupExecutor
from engine.worker import serve

BLOCKS = 5  # of a transformer that is only timed


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
        """Noise in its place."""
        return random_text(self.scene, prompt)


class RandomLocal(LocalExecutor):
    """One device without a checkpoint: the decoder, and the transformer's first blocks, for timing them."""

    def __init__(self, device: torch.device, scene: Scene = FULL) -> None:
        super().__init__("random weights", device)
        self.scene = scene

    def load(self, settings: DenoiseSettings, report: Report) -> None:
        """Draws the weights."""
        self.vae = random_vae(self.scene.vae, self.device)
        config = dataclasses.replace(self.scene.config, num_layers=min(BLOCKS, self.scene.config.num_layers))
        self._take(random_transformer(config, self.device, DTYPES[choose_precision(settings, self.device)]))
        self.paths = denoise_paths(settings, self.device, self.transformer)
        switch(self.transformer, self.paths)

    @property
    def transformer_config(self) -> MMDiTConfig:
        """Of all blocks."""
        return self.scene.config

    def encode_prompt(self, prompt: str) -> TextEmbedding:
        """As of `RandomGroup`."""
        return random_text(self.scene, prompt)


def random_text(scene: Scene, prompt: str) -> TextEmbedding:
    """Noise of a usual length: a longer one for a prompt than for none."""
    tokens = scene.text[0 if prompt.strip() else 1]
    return TextEmbedding(draw_noise(tokens, (1, tokens, scene.config.text_embed_dim)), tokens, 0)


if __name__ == "__main__":
    serve(RandomRank)
