"""What a word is worth: how much one wrong word raises the loss, and at which noise levels it becomes visible.

A falling loss says little about obedience; these figures do.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from presets.tiny import world
from presets.tiny.flow import velocity_loss
from presets.tiny.pools import LANDSCAPE, Encoder
from presets.tiny.vocabulary import COLOURS, GROUNDS, KINDS, SHAPES, caption

if TYPE_CHECKING:
    from presets.tiny.train_dit import Trainer

# How many values of each kind of word are exchanged; of the motions only the first four have captions of equal length.
NUMBERS = {"colour": len(COLOURS), "shape": len(SHAPES), "motion": 4, "ground": len(GROUNDS), "kind": len(KINDS)}


def changed(scenes: world.Scenes, word: str) -> world.Scenes:
    """The same scenes with another value of one kind of word."""
    values, number = getattr(scenes, word), NUMBERS[word]
    turn = 1 + np.arange(len(scenes)) % (number - 1)
    return dataclasses.replace(scenes, **{word: (values + turn.reshape(-1, *[1] * (values.ndim - 1))) % number})


class Probe:
    """Fixed scenes with right captions, and with captions that have one wrong word, all of equal length."""

    LEVELS = (0.998, 0.95)

    def __init__(self, trainer: Trainer, count: int = 48) -> None:
        rng = np.random.default_rng(31)
        scenes = world.sample(count * 6, 1, rng)
        moving = np.flatnonzero(scenes.motion[:, 0] < 4)[:count]
        self.scenes = scenes.take(moving)
        plan = trainer.plan
        size = tuple(side // plan.shrink for side in LANDSCAPE)
        self.latents = trainer.encoder(self.scenes, size, plan.frames).float()
        texts = {"right": self.scenes} | {word: changed(self.scenes, word) for word in NUMBERS}
        self.ids = {
            word: torch.tensor(trainer.ids([caption(s.words(i)) for i in range(len(s))]), device=trainer.device)
            for word, s in texts.items()
        }

    def measure(self, trainer: Trainer, frames: int) -> dict[str, object]:
        clean = self.latents[:, :, :frames]
        noise = torch.randn(clean.shape, generator=torch.Generator(clean.device).manual_seed(3), device=clean.device)
        result: dict[str, object] = {}
        for level in self.LEVELS:
            sigma = torch.full((len(clean),), level, device=clean.device)
            losses = {}
            for word, ids in self.ids.items():
                with trainer.autocast():
                    text = trainer.student.text(ids)
                    loss = velocity_loss(trainer.student.transformer, clean, text, sigma, noise, False)
                losses[word] = loss.mean().item()
            right = losses.pop("right")
            result[str(level)] = {"loss": right} | {word: 100 * (loss / right - 1) for word, loss in losses.items()}
        return result


def decisive_levels(encoder: Encoder, count: int = 48) -> dict[str, list[float]]:
    """By word: the noise levels between which the word becomes visible in a noisy video, medians over scenes.

    A difference of two videos' latents of length d is hopeless where (1 - s) / s * d < 1 and plain where it is > 4.
    """
    rng = np.random.default_rng(4)
    scenes = world.sample(count, 1, rng)
    base = encoder(scenes, LANDSCAPE).float()
    table = {}
    for word in NUMBERS:
        other = encoder(changed(scenes, word), LANDSCAPE).float()
        for frames in (1, 13):
            gap = (base - other)[:, :, :frames].square().sum((1, 2, 3, 4)).sqrt()
            gap = gap[gap > 0]
            middle = torch.quantile(gap, 0.5).item()
            table[f"{word} {frames}"] = [middle, middle / (middle + 4), middle / (middle + 1)]
    return table
