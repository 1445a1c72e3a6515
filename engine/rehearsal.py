"""The full-size model with random weights, from building to frames; `engine.rehearse` is its command line."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import Tensor, nn

from engine import fp8
from engine.attention import Shape, choose_attention
from engine.condition import make_condition
from engine.decode import decode
from engine.decode_paths import explain
from engine.denoise import denoise
from engine.devices import choose_device
from engine.errors import EngineError, MediaError, RequestError, ResourceError
from engine.executor import DTYPES, choose_precision
from engine.fused import choose_fused
from engine.memory import free_memory, in_words
from engine.mmdit import MMDiTConfig, PAN2Transformer3DModel
from engine.noise import draw_noise
from engine.offload import SLOTS, BlockStream
from engine.parts import released, transformer_plan
from engine.placement import weigh
from engine.schedule import build_scheduler
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import latent_shape, video_tokens
from engine.telemetry import Telemetry, synchronize
from engine.video import VideoWriter
from engine.weights import fill, list_tensors, placement
from kernels.timing import origin
from kernels.vae_decode import bench_setup

FPS, SHIFT, GUIDANCE, SEED = 24, 9.0, 2.5, 123
PROJECTED_STEPS = 50
RESIDENT_BYTES = 46.1 * 2**30  # of the released transformer; 16.5 GiB more stay in their files
LAYER_GAIN = 0.5  # of what attention and MLP put out, against their input: 44 blocks then neither vanish nor blow up
MODULATION = 0.2  # deviation of shifts, scales and gates


@dataclass(frozen=True)
class Scene:
    """What is rehearsed. text: tokens of the prompt and of the negative prompt."""

    config: MMDiTConfig = field(default_factory=MMDiTConfig)
    vae: dict[str, Any] = field(default_factory=lambda: bench_setup.LAYOUT | bench_setup.FULL)
    frames: int = 121
    height: int = 704
    width: int = 1248
    steps: int = 3
    text: tuple[int, int] = (512, 128)
    shards: int = 2

    def changed(self, **values: int | None) -> Scene:
        """With other values; None leaves what is there. Raises RequestError for a size that can't be."""
        scene = dataclasses.replace(self, **{name: value for name, value in values.items() if value is not None})
        sides = (scene.height, scene.width)
        if (
            scene.frames < 1
            or scene.frames % 4 != 1
            or any(side < 32 or side % 32 for side in sides)
            or scene.steps < 1
        ):
            raise RequestError(
                f"{scene.frames} frames of {scene.width} x {scene.height}, {scene.steps} steps: frames must be 4n + 1, "
                "height and width multiples of 32 from 32 on, steps at least 1."
            )
        if not 0 <= scene.shards <= scene.config.num_layers:
            raise RequestError(f"shards = {scene.shards} must lie between 0 and {scene.config.num_layers}.")
        return scene

    @property
    def latents(self) -> tuple[int, int, int, int]:
        return latent_shape(self.frames, self.height, self.width)


FULL = Scene()
SMALL = Scene(
    config=MMDiTConfig(
        num_attention_heads=2,
        attention_head_dim=16,
        num_refiner_layers=1,
        text_embed_dim=32,
        rope_axes_dim=(4, 6, 6),
    ),
    vae=bench_setup.LAYOUT | bench_setup.SMALL,
    frames=9,
    height=64,
    width=96,
    text=(12, 5),
)


def random_transformer(config: MMDiTConfig, device: torch.device, dtype: torch.dtype) -> PAN2Transformer3DModel:
    """Random weights, made on the device, as the release has them: `dtype`, but `norm1.linear` in float32 on the host.

    Those 16.5 GiB are one layer's 0.4 GiB that all blocks share, so that any host can hold them; each block still moves
    its own copy to the device. Every gate is open: a model of fresh weights would be the identity and hide everything.
    """
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**vars(config))
    generators = {where: torch.Generator(where).manual_seed(SEED) for where in {device, torch.device("cpu")}}
    shared = {leaf: None for leaf in ("weight", "bias")}
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        island = ".norm1.linear." in name
        where = torch.device("cpu") if island else device
        value = shared[leaf] if island else None
        if value is None:
            value = torch.empty(parameter.shape, dtype=torch.float32 if island else dtype, device=where)
            value.normal_(generator=generators[where])
            _scale(name, value, config)
        if island:
            shared[leaf] = value
        model.get_submodule(path)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    for block in model.transformer_blocks:
        block.attn.pack()
    return model.eval()


def _scale(name: str, value: Tensor, config: MMDiTConfig) -> None:
    """Turn standard normal values into weights of this name, in place."""
    fan_in = math.prod(value.shape[1:]) if value.dim() > 1 else 1
    if ("norm" in name and value.dim() == 1 and "linear" not in name) or name == "context_embedder.0.weight":
        value.mul_(0.1).add_(1)
    elif "scale_shift_table" in name or name.endswith("norm1.linear.bias"):
        value.mul_(MODULATION)
    elif ".norm1.linear." in name or name.startswith("norm_out"):
        value.mul_(MODULATION / fan_in**0.5)
    elif name.endswith(("to_out.0.weight", "to_add_out.weight", "net.2.weight")):
        value.mul_(LAYER_GAIN / fan_in**0.5)
    else:
        value.mul_(1 / fan_in**0.5 if value.dim() > 1 else 0.02)


def random_vae(config: dict[str, Any], device: torch.device) -> AutoencoderKLWan:
    """In float32, as released; gains near one, matrices scaled by what goes in."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
    vae = vae.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in vae.named_parameters():
        parameter.normal_(generator=generator)
        if name.endswith("gamma"):
            parameter.mul_(0.2).add_(1)
        else:
            parameter.mul_(1 / math.prod(parameter.shape[1:]) ** 0.5 if parameter.dim() > 1 else 0.05)
    return vae


class Rehearsal:
    """One run: the parts, what was measured. settings: how to denoise."""

    def __init__(self, scene: Scene, device: torch.device, settings: DenoiseSettings, folder: Path) -> None:
        self.scene, self.device, self.settings, self.folder = scene, device, settings, folder
        self.precision = choose_precision(settings, device)
        self.dtype = DTYPES[self.precision]
        self.found: dict[str, Any] = {"stages": {}}
        self.telemetry = Telemetry(device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and say its peak of memory: of live tensors, and what the allocator held of a GPU for them."""
        with self.telemetry.stage(name) as record:
            yield
        found = self.found["stages"][name] = {"seconds": record.seconds, "peak_bytes": record.peaks}
        words = f"{in_words(record.peaks['host'])} of the host"
        if self.device.type == "cuda":
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
            peak = in_words(record.peaks[str(self.device)])
            words = f"{peak} of {self.device}, {in_words(found['reserved_bytes'])} reserved"
        print(f"{name:12} {record.seconds:8.2f} s   at most {words}", flush=True)

    def build(self) -> None:
        """The transformer in the precision and place of the settings, and what runs its attention and its passes."""
        with self.stage("build"):
            self.model = random_transformer(self.scene.config, self.device, self.dtype)
            if self.precision == "fp8":
                fp8.convert(self.model)
            if self.settings.offload == "blocks":
                BlockStream(self.model.transformer_blocks, self.device)
            synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what building held for a moment would count as reserved from here on
        c = self.scene.config
        tokens = video_tokens(self.scene.frames, self.scene.height, self.scene.width) + self.scene.text[0]
        shape = Shape(self.dtype, c.num_attention_heads, c.attention_head_dim, tokens)
        attention = choose_attention(self.settings.attention, self.device, shape)
        fused = choose_fused(self.settings.fused_kernels, self.device, shape)
        self.model.set_attention(attention.path)
        self.model.set_fused_kernels(fused.path == "on")
        self.found |= {"tokens": tokens, "attention": attention.path, "fused_kernels": fused.path}
        print(f"attention {attention.path} ({attention.reason}); fused kernels {fused.path} ({fused.reason})")

    def denoise(self) -> Tensor:
        """A few steps with both branches, from latents of the right shape to latents of the right shape."""
        scene, c = self.scene, self.scene.config
        draw = torch.Generator(self.device).manual_seed(SEED)
        texts = [
            torch.empty(1, n, c.text_embed_dim, dtype=self.dtype, device=self.device).normal_(generator=draw)
            for n in scene.text
        ]
        condition, noise = make_condition(scene.latents), draw_noise(SEED, (1, *scene.latents))
        scheduler = build_scheduler(FlowMatchEulerDiscreteScheduler(shift=SHIFT), scene.steps)
        sigmas = scheduler.sigmas.tolist()
        with self.stage("modulations"):
            prepared = [self.model.prepare(text, condition, sigmas) for text in texts]
            synchronize(self.device)
        self._check_alive(noise, prepared)
        del prepared
        seconds = []
        with self.stage("denoise"):
            for step in denoise(
                self.model, *texts, condition, noise, scheduler, GUIDANCE, quality=self.settings.quality
            ):
                seconds.append(step.seconds)
        each = statistics.median(seconds[1:] or seconds)
        self.found |= {"steps": seconds, "seconds_per_step": each, "seconds_50_steps": PROJECTED_STEPS * each}
        self.found["skipped"] = step.recalled / step.passes
        if self.device.type == "cuda":
            self._say_memory()
        print(f"{each:.3f} s a step, both branches: {PROJECTED_STEPS * each:.0f} s for {PROJECTED_STEPS} steps")
        _require(step.latents.shape == noise.shape, f"latents of shape {list(step.latents.shape)}")
        return step.latents

    def _say_memory(self) -> None:
        """The peak of denoising: here, where nothing but the transformer is on the device, and as a large device has
        it, where text encoder and decoder stay because fetching them again would cost seconds a request."""
        precision = "fp8" if self.precision == "fp8" else "bf16"
        weights = weigh(released(), precision, "cuda")
        alone = self.found["stages"]["denoise"]["peak_bytes"][str(self.device)]
        beside = weights.text + weights.vae
        own = weights.rest + (SLOTS * weights.block if self.settings.offload == "blocks" else weights.blocks)
        self.found["denoise_bytes"] = {"transformer_alone": alone, "with_text_encoder_and_decoder": alone + beside}
        print(
            f"denoising: {in_words(alone)} at most, {in_words(own)} of them weights; "
            f"{in_words(alone + beside)} where text encoder and decoder stay on the device"
        )

    def _check_alive(self, noise: Tensor, prepared: list[Any]) -> None:
        """Velocities of a sane size that depend on the text: else the blocks were not in the way of anything."""
        a, b = (self.model.velocity(noise.to(self.device), 0, branch).float() for branch in prepared)
        size, apart = float(a.std()), float((a - b).norm() / a.norm())
        self.found |= {"velocity_rms": size, "branches_apart": apart}
        _require(0.05 < size < 20, f"velocities with a deviation of {size:.3g}")
        _require(apart > 1e-4, f"velocities that differ by {apart:.1e} between two texts")

    def decode(self, latents: Tensor, path: str) -> None:
        """All frames to the host, and into a file where there is an ffmpeg."""
        with self.stage("build vae"):
            vae = random_vae(self.scene.vae, self.device)
        settings, frames, chunks = DecodeSettings(path=path), 0, []
        with self.stage("warm decoder"):  # as the engine does when it has loaded: kernels and weights get ready
            for _ in decode(vae, latents[:, :, :5], settings):
                pass
        with self.stage("decode"):
            for chunk in decode(vae, latents, settings, threading.Event()):
                _require(chunk.frames.shape[1:] == (self.scene.height, self.scene.width, 3), "frames of another size")
                frames += len(chunk.frames)
                chunks.append(chunk.frames.copy())
        _require(frames == self.scene.frames, f"{frames} frames of {self.scene.frames}")
        self.found["decode_frames_per_second"] = frames / self.found["stages"]["decode"]["seconds"]
        self.found["decoder"] = chunk.stats.path, chunk.stats.precision
        spread = float(np.concatenate([part[:, ::16, ::16].ravel() for part in chunks]).std())
        _require(spread > 1, f"frames that hardly vary (deviation {spread:.2f} of 255)")
        with self.stage("file"):
            self.found["file"] = self._write(chunks)
        print(f"file: {self.found['file']}")

    def _write(self, chunks: list[np.ndarray]) -> str:
        scene = self.scene
        try:
            with VideoWriter(self.folder, scene.height, scene.width, FPS, scene.frames, {}) as writer:
                for chunk in chunks:
                    writer.write(chunk)
                return in_words(writer.close().stat().st_size)
        except MediaError as error:  # a rehearsal is worth having without a file
            return f"none: {error}"

    def load(self) -> None:
        """Write a few blocks as shards of true shape and dtype, drop them from the page cache, load them back as the
        engine does: modulations stay in the file, the rest goes to the device."""
        if not self.scene.shards:
            return
        chosen = [str(i) for i in range(1, 1 + self.scene.shards)]
        with torch.device("meta"):
            like = PAN2Transformer3DModel(**vars(self.scene.config) | {"num_layers": 1}).transformer_blocks[0]
        blocks = nn.ModuleDict({name: copy.deepcopy(like) for name in chosen})
        with self.stage("write shards"):
            for name in chosen:
                self._write_shard(name, like)
        entries, plan = list_tensors(self.folder), transformer_plan(self.device, torch.bfloat16)
        size = sum(entry.nbytes for name, entry in entries.items() if not placement(plan, name).mapped)
        with self.stage("load shards"):
            fill(nn.ModuleDict({"transformer_blocks": blocks}), entries, plan, "shards")
            synchronize(self.device)
        rate = size / self.found["stages"]["load shards"]["seconds"]
        seconds = RESIDENT_BYTES / rate
        self.found |= {"shard_bytes": size, "load_bytes_per_second": rate, "load_release_seconds": seconds}
        print(f"{in_words(rate)}/s: {seconds:.0f} s for the release's {in_words(RESIDENT_BYTES)} on the device")

    def _write_shard(self, name: str, like: nn.Module) -> None:
        tensors, draw = {}, torch.Generator(self.device).manual_seed(int(name))
        for key, parameter in like.named_parameters():
            dtype = torch.float32 if key.startswith("norm1") else torch.bfloat16
            value = torch.empty(parameter.shape, dtype=dtype, device=self.device).normal_(generator=draw)
            tensors[f"transformer_blocks.{name}.{key}"] = value.cpu()
        path = self.folder / f"shard-{name}.safetensors"
        save_file(tensors, path)
        with path.open("rb+") as file:  # else memory is measured, not the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _require(right: bool, what: str) -> None:
    if not right:
        raise EngineError(f"The rehearsal failed: it gave {what}.")


def rehearse(
    scene: Scene, device: str, settings: DenoiseSettings, decoder: str | None = "auto", folder: Path | None = None
) -> dict[str, Any]:
    """Run everything, print it, return the figures. decoder: None leaves decoding out.

    Raises EngineError where something is not finite or not shaped as it must be, RequestError for settings that can't
    be had here.
    """
    where = choose_device(device)
    if settings.precision == "fp8" and where.type == "cuda" and (lack := fp8.lack(where)):
        raise RequestError(f"precision = 'fp8': {lack}. Choose auto or bf16.")
    if decoder:
        explain(DecodeSettings(path=decoder), where)  # which refuses one that is not here, before minutes of work
    free, streamed = free_memory(where), where.type == "cuda" and settings.offload == "blocks"
    if scene.config == FULL.config and not streamed and free is not None and free < RESIDENT_BYTES:
        raise ResourceError(
            f"The full-size model takes {in_words(RESIDENT_BYTES)} on {where}, and {in_words(free)} are free there. "
            "Rehearse on a larger GPU, with --offload blocks, or a toy with --small."
        )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        run = Rehearsal(scene, where, settings, Path(inside))
        size = f"{scene.frames} frames of {scene.width} x {scene.height}, {scene.steps} steps"
        print(f"{size}, {run.precision}, quality {settings.quality}, offload {settings.offload}, on {where}")
        with run.telemetry:
            run.build()
            latents = run.denoise()
            run.load()
            if decoder:
                run.decode(latents, decoder)
    facts = {"bench": "rehearsal", **origin(where), "precision": run.precision, "quality": settings.quality}
    facts |= {"offload": settings.offload, "frames": scene.frames, "height": scene.height, "width": scene.width}
    found = facts | run.found | {"seconds": time.perf_counter() - started}
    print(json.dumps(found))
    return found
