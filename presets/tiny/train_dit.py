"""Training of the small transformer, together with its text encoder, within a time budget.

It begins with single frames, goes on with short clips and ends with whole videos, keeping a share of the earlier. What
counts is not the loss but the gap: how much worse the loss is with one wrong word. It is measured as training runs.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import engine.layers
from engine.mmdit import PAN2Transformer3DModel
from presets.tiny import world
from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS
from presets.tiny.flow import NoiseMix, velocity_loss
from presets.tiny.gaps import Probe
from presets.tiny.log import TrainingLog
from presets.tiny.muon import Muon
from presets.tiny.pools import KINDS, LANDSCAPE, Encoder, Kind, Pool, extend_pool, make_pool, replace_in_pool
from presets.tiny.text import WIDTH, PromptIds, TrainableText, new_text_model

CONFIG = {
    "patch_size": [1, 2, 2],
    "in_channels": 2 * LATENT_CHANNELS + 1,
    "out_channels": LATENT_CHANNELS,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "num_layers": 6,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "context_mlp_ratio": 2.0,
    "refiner_mlp_ratio": 2.0,
    "text_embed_dim": WIDTH,
    "rope_axes_dim": [8, 28, 28],
    "rope_theta": 256.0,
    "rope_temporal_scale": 16 / 24,
}
CLIPS = (1, 5, 13)  # latent frames: a still, 17 frames, 49 frames
# (from this share of the whole training on, shares of the clips)
CURRICULUM = ((0.0, (0.8, 0.2, 0.0)), (0.12, (0.5, 0.3, 0.2)), (0.25, (0.2, 0.25, 0.55)), (0.5, (0.08, 0.12, 0.8)))
ALL_SIZES_FROM = 0.3
ROUNDS = 4  # in which the pools are filled, so that each has something early
MUON_FACTOR = 2.0


@dataclass(frozen=True)
class DitPlan:
    """seconds: of this run, until: when it ends at the latest (seconds since 1970). begin, end: its part of the whole
    training, 0 to 1; the rate falls from `decay` on. fill: seconds after which no more videos are made in advance."""

    seconds: float = 400.0
    until: float = math.inf
    fill: float = math.inf
    begin: float = 0.0
    end: float = 0.4
    decay: float = 0.6
    videos: int = 9000
    batches: tuple[int, int, int] = (1024, 224, 96)
    rate: float = 1.5e-3
    average: float = 0.998
    probe_every: int = 400
    check_every: float = 110.0
    refresh_every: float = 12.0
    frames: int = world.CLIP_FRAMES
    shrink: int = 1
    kinds: int = len(KINDS)
    measured: bool = True
    check_count: int = 40
    steps: int = 12
    shift: float = 20.0
    guidance: float = 2.5


class Student(nn.Module):
    """The transformer and the text encoder as one thing to train."""

    def __init__(self, vocabulary_size: int, start: int) -> None:
        super().__init__()
        self.transformer = PAN2Transformer3DModel(**CONFIG)
        self.text = TrainableText(new_text_model(vocabulary_size), start)
        start_weights(self.transformer)


@torch.no_grad()
def start_weights(model: PAN2Transformer3DModel) -> None:
    """Open gates, unread unused channels, and attention that knows places from the first step.

    Video queries are turned by their position and text keys are not, so a constant part in both makes the text's share
    in attention depend on the absolute place; equal constants in video queries and keys make near neighbours attend to
    each other.
    """
    dim, heads = model.config.dim, model.config.num_attention_heads
    for block in model.transformer_blocks:
        for gates in (block.norm1.linear.bias, block.scale_shift_table_context):
            gates[2 * dim : 3 * dim] = 0.5
            gates[5 * dim :] = 0.5
        attention = block.attn
        for layer in (attention.to_q, attention.to_k, attention.add_q_proj, attention.add_k_proj):
            nn.init.normal_(layer.bias, std=0.6)
        near = dim * (heads // 2) // heads
        attention.to_k.bias[:near] = attention.to_q.bias[:near]
    unused = [*range(USED_CHANNELS, LATENT_CHANNELS), *range(LATENT_CHANNELS + USED_CHANNELS, 2 * LATENT_CHANNELS)]
    model.x_embedder.weight[:, unused] = 0


def rotate_pairs_real(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`engine.rope.rotate_pairs` without complex numbers, which torch.compile can't fuse."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def make_fast(model: PAN2Transformer3DModel) -> None:
    engine.layers.rotate_pairs = rotate_pairs_real
    model.rope = functools.cache(model.rope)
    # Grids whose sides divide differently get a graph of their own; beyond the limit they would run uncompiled.
    torch._dynamo.config.recompile_limit = 24
    for block in model.transformer_blocks:
        block.compile(dynamic=True)


class Optimiser:
    """Muon for the blocks' and the refiner's matrices, AdamW for the rest."""

    def __init__(self, student: Student, fused: bool) -> None:
        inner = ("transformer.transformer_blocks.", "transformer.context_refiner.")
        # The last block's text goes nowhere, so these never get a gradient.
        last = f"transformer.transformer_blocks.{CONFIG['num_layers'] - 1}."
        unread = ("attn.add_q_proj.", "attn.to_add_out.", "attn.norm_added_q.", "ff_context.")
        idle = tuple(last + part for part in unread)
        matrices, rest = [], []
        for name, parameter in student.named_parameters():
            if name.startswith(idle):
                continue
            chosen = name.startswith(inner) and parameter.dim() == 2 and ".norm1." not in name
            (matrices if chosen else rest).append(parameter)
        self.parameters = matrices + rest
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)

    def step(self, rate: float) -> bool:
        """Whether the step was taken: gradients that are not finite are dropped, for one of them spoils everything."""
        sound = bool(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0).isfinite())
        if sound:
            self.muon.rate = MUON_FACTOR * rate
            self.adam.param_groups[0]["lr"] = rate
            self.muon.step()
            self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        return sound


class Trainer:
    def __init__(
        self, plan: DitPlan, student: Student, encoder: Encoder, ids: PromptIds, device: str, log: TrainingLog
    ) -> None:
        self.plan, self.student, self.encoder = plan, student, encoder
        self.ids, self.device, self.log = ids, device, log
        self.rng = np.random.default_rng(int(1000 * plan.begin) + 5)
        self.optimiser = Optimiser(student, fused=device == "cuda")
        self.average = [p.detach().clone() for p in self.optimiser.parameters]
        self.empty = torch.tensor(ids([" "]), device=device)
        self.mix = NoiseMix()
        self.step, self.progress, self.dropped = 0, plan.begin, 0

    # Data

    def fill_pools(self) -> None:
        begin = time.time()
        self.pools = [self._make(kind, self._share_of_videos(kind)) for kind in KINDS[: self.plan.kinds]]
        for _ in range(ROUNDS - 1):
            if self.device == "cuda":
                torch.cuda.synchronize()
            if time.time() - begin > self.plan.fill:
                break
            for pool in self.pools:
                extend_pool(pool, self._make(pool.kind, self._share_of_videos(pool.kind)))
        self.log.write("pools", took=time.time() - begin, videos=[len(pool.latents) for pool in self.pools])

    def _share_of_videos(self, kind: Kind) -> int:
        """Of one round; whole chunks, because every other batch size would make cuDNN choose its kernels again."""
        chunk = self.encoder.chunk
        return max(1, round(self.plan.videos * kind.share / chunk / ROUNDS)) * chunk if self.plan.shrink == 1 else 2

    def _make(self, kind: Kind, count: int) -> Pool:
        return make_pool(kind, count, self.encoder, self.ids, self.rng, self.plan.frames, self.plan.shrink)

    def refresh(self) -> None:
        """Replace a part of one pool by new videos."""
        pool = self.pools[self.rng.choice(len(self.pools), p=self._shares())]
        count = min(96, len(pool.latents))
        first = int(self.rng.integers(0, len(pool.latents) - count + 1))
        replace_in_pool(pool, self._make(pool.kind, count), first)

    def _shares(self) -> np.ndarray:
        early = self.progress < ALL_SIZES_FROM
        shares = np.array([p.kind.share if p.kind.size == LANDSCAPE or not early else 0.0 for p in self.pools])
        return shares / shares.sum()

    # One step

    def draw_batch(self) -> tuple[Tensor, Tensor, bool]:
        clips = [shares for since, shares in CURRICULUM if self.progress >= since][-1]
        pool = self.pools[self.rng.choice(len(self.pools), p=self._shares())]
        if pool.kind.image:  # the first frame says nothing about a still
            clips = (0.0, *clips[1:])
        clips = np.array(clips) if sum(clips) else np.array([0.0, 1.0, 0.0])
        index = self.rng.choice(3, p=clips / clips.sum())
        clean, ids = pool.draw(self.plan.batches[index], min(CLIPS[index], pool.latents.shape[2]), self.rng)
        if self.rng.random() < 0.1:
            ids = self.empty.expand(len(ids), -1)
        return clean, ids, pool.kind.image or (clean.shape[2] > 1 and self.rng.random() < 0.06)

    def train_step(self) -> Tensor:
        return self.train_on(*self.draw_batch())

    def train_on(self, clean: Tensor, ids: Tensor, image: bool) -> Tensor:
        sigma = self.mix.draw(len(clean), clean.shape[2], self.device)
        with self.autocast():
            text = self.student.text(ids)
            loss = velocity_loss(self.student.transformer, clean, text, sigma, torch.randn_like(clean), image).mean()
        loss.backward()
        self.dropped += not self.optimiser.step(self.rate())
        keep = min(self.plan.average, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.optimiser.parameters, 1 - keep)
        self.step += 1
        return loss.detach()

    def rate(self) -> float:
        fall = min(1.0, (1 - self.progress) / (1 - self.plan.decay))
        return self.plan.rate * min(1.0, (self.step + 1) / 150) * max(fall, 0.02)

    def autocast(self):
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    # The run

    def run(self, save: Callable[[], None]) -> None:
        self.measure_speed()
        begin = time.time()
        seconds = max(0.0, min(self.plan.seconds, self.plan.until - begin))
        last_log, last_check, last_fresh = begin, begin, begin
        losses, since = [], self.step
        while (now := time.time()) - begin < seconds:
            share = (now - begin) / seconds
            self.progress = self.plan.begin + share * (self.plan.end - self.plan.begin)
            losses.append(self.train_step())
            if now - last_fresh > self.plan.refresh_every:
                self.refresh()
                last_fresh = time.time()
            if self.step % self.plan.probe_every == 0:
                loss = torch.stack(losses).mean().item()
                speed = (self.step - since) / (time.time() - last_log)
                gap = self.gaps() if self.plan.measured else {}
                self.log.write(
                    "dit",
                    step=self.step,
                    progress=self.progress,
                    loss=loss,
                    rate=self.rate(),
                    steps_per_second=speed,
                    gap=gap,
                    dropped=self.dropped,
                )
                losses, last_log, since = [], time.time(), self.step
            if now - last_check > self.plan.check_every:
                with self.averaged():
                    if self.plan.measured:
                        self.log.write("check", step=self.step, **self.check())
                    save()
                last_check = time.time()

    def measure_speed(self, repeats: int = 4) -> None:
        """Warm up every kind of step and log its milliseconds: in all, and until everything was launched."""
        if self.device != "cuda":
            return
        for index, frames in enumerate(CLIPS):
            clean, ids = self.pools[0].draw(self.plan.batches[index], frames, self.rng)
            for _ in range(3):
                self.train_on(clean, ids, False)
            torch.cuda.synchronize()
            start = time.time()
            for _ in range(repeats):
                self.train_on(clean, ids, False)
            launched = time.time()
            torch.cuda.synchronize()
            took = 1000 * (time.time() - start) / repeats
            self.log.write("speed", latent_frames=frames, ms=took, launch_ms=1000 * (launched - start) / repeats)

    def averaged(self):
        return _Swapped(self.optimiser.parameters, self.average)

    # Measuring

    @torch.no_grad()
    def gaps(self) -> dict[str, dict[str, float]]:
        """By kind of word: how much one wrong word raises the loss, in percent of the loss, at three noise levels."""
        if not hasattr(self, "probe"):
            self.probe = Probe(self)
        longest = [n for n, share in zip(CLIPS, self._clip_shares(), strict=True) if share > 0.1][-1]
        return {f"{frames} frames": self.probe.measure(self, frames) for frames in (1, longest)}

    def _clip_shares(self) -> tuple[float, ...]:
        return [shares for since, shares in CURRICULUM if self.progress >= since][-1]

    @torch.no_grad()
    def check(self) -> dict[str, object]:
        """Samples held-out prompts and lets the checker read them."""
        from presets.tiny.batches import accuracy_of, generate

        begin = time.time()
        scenes = world.sample(self.plan.check_count, 1, np.random.default_rng(901), held_out=True)
        videos = generate(self, scenes, LANDSCAPE, self.plan.steps, self.plan.shift, self.plan.guidance)
        return {"accuracy": accuracy_of(videos, scenes), "took": time.time() - begin}


class _Swapped:
    """Uses the running mean of the weights for a while."""

    def __init__(self, parameters: list[Tensor], average: list[Tensor]) -> None:
        self.parameters, self.average = parameters, average

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, mean in zip(self.parameters, self.average, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(kept)

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()


def save_student(student: Student, folder: Path, parts: int = 2, dtype: torch.dtype = torch.float16) -> None:
    """The weights in `parts` files below 16 MiB each, to go on from."""
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in student.state_dict().items()}
    names, per_part = list(weights), sum(value.numel() for value in weights.values()) / parts
    shards: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    seen = 0
    for name in names:
        shards[min(parts - 1, int(seen / per_part))][name] = weights[name]
        seen += weights[name].numel()
    for i, shard in enumerate(shards):
        part = folder / f"student_{i}.safetensors.part"
        save_file(shard, part)
        part.rename(folder / f"student_{i}.safetensors")


def load_student(student: Student, folder: Path) -> None:
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("student_*.safetensors")):
        weights |= load_file(path)
    student.load_state_dict({name: value.float() for name, value in weights.items()})
