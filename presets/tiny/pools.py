"""What the transformer is trained on: latents of drawn videos, encoded once and kept on the GPU, and captions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from presets.tiny import world
from presets.tiny.autoencoder import USED_CHANNELS, encode
from presets.tiny.text import PromptIds, equal_lengths
from presets.tiny.vocabulary import varied_caption

CAPTIONS = 3  # per video
SPINS = 0.15  # a turning outline is the hardest to keep


@dataclass(frozen=True)
class Kind:
    """A kind of video. share: of the batches. image: trained as image-to-video; things begin anywhere only there."""

    size: tuple[int, int]
    things: int = 1
    moving_camera: bool = False
    image: bool = False
    share: float = 1.0


LANDSCAPE, PORTRAIT, SQUARE = (256, 448), (448, 256), (320, 320)
KINDS = (
    Kind(LANDSCAPE, share=0.31),
    Kind(LANDSCAPE, things=2, share=0.11),
    Kind(LANDSCAPE, moving_camera=True, share=0.08),
    Kind(LANDSCAPE, image=True, share=0.21),
    Kind(LANDSCAPE, things=2, image=True, share=0.05),
    Kind(PORTRAIT, share=0.07),
    Kind(PORTRAIT, things=2, share=0.03),
    Kind(PORTRAIT, image=True, share=0.04),
    Kind(SQUARE, share=0.05),
    Kind(SQUARE, things=2, share=0.02),
    Kind(SQUARE, image=True, share=0.03),
)


@dataclass
class Pool:
    """latents: bf16 [n, 24, 13, h, w], normalised; ids: CAPTIONS token lists a video; groups: by length."""

    kind: Kind
    latents: Tensor
    ids: list[list[int]]
    groups: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def regroup(self) -> None:
        """Sort the captions by length and drop lengths too rare for a batch of different videos."""
        groups = equal_lengths(self.ids, self.latents.device)
        least = max(1, len(self.ids) // 60)
        self.groups = {length: group for length, group in groups.items() if len(group[0]) >= least}

    def draw(self, count: int, frames: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Latents float32 [count, 24, frames, h, w], the videos' beginnings, and ids [count, L] of one caption each."""
        sizes = np.array([len(rows) for rows, _ in self.groups.values()], dtype=float)
        rows, ids = list(self.groups.values())[rng.choice(len(sizes), p=sizes / sizes.sum())]
        chosen = torch.randint(0, len(rows), (count,), device=rows.device)
        return self.latents[rows[chosen] // CAPTIONS][:, :, :frames].float(), ids[chosen]


class Encoder:
    """Scenes to normalised latents, bf16 [n, 24, F, h, w], a few videos at a time."""

    def __init__(self, vae: AutoencoderKLWan, mean: Tensor, std: Tensor, device: str, chunk: int = 12) -> None:
        self.vae, self.device, self.chunk = vae, device, chunk
        self.mean, self.std = mean[:, :USED_CHANNELS], std[:, :USED_CHANNELS]

    @torch.no_grad()
    def __call__(self, scenes: world.Scenes, size: tuple[int, int], frames: int = world.CLIP_FRAMES) -> Tensor:
        parts = []
        for i in range(0, len(scenes), self.chunk):
            video = world.render(scenes.take(slice(i, i + self.chunk)), *size, frames, device=self.device)
            parts.append(self.pixels(video).bfloat16())
        return torch.cat(parts)

    def pixels(self, video: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            mean = encode(self.vae, video)[0][:, :USED_CHANNELS].float()
        return (mean - self.mean) / self.std


def make_pool(
    kind: Kind, count: int, encoder: Encoder, ids: PromptIds, rng: np.random.Generator, frames: int, shrink: int = 1
) -> Pool:
    """shrink: divides the size, for a quick trial."""
    scenes = world.sample(count, kind.things, rng, moving_camera=kind.moving_camera, anywhere=kind.image, spins=SPINS)
    words = [scenes.words(i) for i in range(count)]
    captions = [varied_caption(one, rng, 0.55, shown=kind.image) for one in words for _ in range(CAPTIONS)]
    size = (kind.size[0] // shrink, kind.size[1] // shrink)
    pool = Pool(kind, encoder(scenes, size, frames), ids(captions))
    pool.regroup()
    return pool


def replace_in_pool(pool: Pool, fresh: Pool, first: int) -> None:
    """Put new videos in place of those from `first` on."""
    count = len(fresh.latents)
    pool.latents[first : first + count] = fresh.latents
    pool.ids[first * CAPTIONS : (first + count) * CAPTIONS] = fresh.ids
    pool.regroup()


def extend_pool(pool: Pool, fresh: Pool) -> None:
    pool.latents = torch.cat((pool.latents, fresh.latents))
    pool.ids += fresh.ids
    pool.regroup()
