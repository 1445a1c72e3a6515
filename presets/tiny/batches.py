"""Many videos at once: sampling held-out scenes, decoding them, scoring them, and contact sheets to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from presets.tiny import world
from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS, decode
from presets.tiny.checker import look, score
from presets.tiny.flow import sample
from presets.tiny.text import equal_lengths
from presets.tiny.vocabulary import caption

if TYPE_CHECKING:
    from presets.tiny.train_dit import Trainer

CHUNK = 20


@torch.no_grad()
def generate(
    trainer: Trainer,
    scenes: world.Scenes,
    size: tuple[int, int],
    steps: int,
    shift: float,
    guidance: float,
    *,
    first: Tensor | None = None,
    seed: int = 123,
) -> Tensor:
    """Videos [n, 3, T, H, W] for the scenes' usual captions; first: first frames' normalised latents [n, 24, h, w]."""
    plan, student = trainer.plan, trainer.student
    height, width = (side // plan.shrink // 16 for side in size)
    frames = (plan.frames - 1) // 4 + 1
    generator = torch.Generator(trainer.device).manual_seed(seed)
    noise = torch.randn(len(scenes), USED_CHANNELS, frames, height, width, generator=generator, device=trainer.device)
    latents = torch.empty_like(noise)
    captions = [caption(scenes.words(i)) for i in range(len(scenes))]
    for rows, ids in equal_lengths(trainer.ids(captions), trainer.device).values():
        for part, part_ids in zip(rows.split(CHUNK), ids.split(CHUNK), strict=True):
            with trainer.autocast():
                latents[part] = sample(
                    student.transformer,
                    student.text(part_ids),
                    student.text(trainer.empty),
                    noise[part],
                    steps=steps,
                    shift=shift,
                    guidance=guidance,
                    first=None if first is None else first[part],
                )
    return to_pixels(trainer, latents)


@torch.no_grad()
def to_pixels(trainer: Trainer, latents: Tensor, chunk: int = 5) -> Tensor:
    """Normalised latents [n, 24, F, h, w] to fp16 videos in [-1, 1]."""
    encoder, videos = trainer.encoder, []
    for part in latents.split(chunk):
        whole = part.new_zeros(len(part), LATENT_CHANNELS, *part.shape[2:])
        whole[:, :USED_CHANNELS] = part * encoder.std + encoder.mean
        with trainer.autocast():
            videos.append(decode(encoder.vae, whole).float().clamp(-1, 1).half())
    return torch.cat(videos)


def scores_of(videos: Tensor, scenes: world.Scenes) -> list[dict[str, bool]]:
    return [score(look(video), scenes.words(i)) for i, video in enumerate(videos)]


def accuracy_of(videos: Tensor, scenes: world.Scenes) -> dict[str, float]:
    """The share of videos that obey each part of their caption."""
    return mean_scores(scores_of(videos, scenes))


def mean_scores(scores: list[dict[str, bool]]) -> dict[str, float]:
    return {key: float(np.mean([row[key] for row in scores])) for key in scores[0]}


def contact_sheet(videos: Tensor, titles: list[str], path: Path, columns: int = 6, height: int = 96) -> None:
    """One row a video: its title and `columns` frames from first to last."""
    rows = []
    for video, title in zip(videos, titles, strict=True):
        chosen = np.linspace(0, video.shape[1] - 1, columns).round().astype(int)
        pixels = ((video[:, chosen].float() + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0).cpu().numpy()
        width = round(video.shape[3] * height / video.shape[2])
        strip = np.concatenate([np.asarray(Image.fromarray(frame).resize((width, height))) for frame in pixels], axis=1)
        row = Image.new("RGB", (strip.shape[1], height + 16), "white")
        row.paste(Image.fromarray(strip), (0, 16))
        ImageDraw.Draw(row).text((4, 2), title, fill="black")
        rows.append(np.asarray(row))
    widest = max(row.shape[1] for row in rows)
    rows = [np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    Image.fromarray(np.concatenate(rows)).save(path, quality=82)
