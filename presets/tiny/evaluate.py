"""How well the shipped checkpoint obeys: `python -m presets.tiny.evaluate [--count 300] [--device auto] [--out FILE]`.

Held-out prompts go through the engine's own loader, text encoder, noise, schedule and denoising loop; the checker reads
the videos. On a GPU several prompts of equal length share a batch; each keeps its own seed, so its noise is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.arguments import in_one_line
from engine.checkpoint import load_scheduler, load_text_encoder, load_transformer, load_vae
from engine.condition import denormalise, encode_image, make_condition
from engine.decode import decode as decode_in_chunks
from engine.denoise import denoise
from engine.noise import draw_noise
from engine.schedule import build_scheduler
from engine.settings import DecodeSettings
from engine.shapes import latent_shape
from presets.tiny import world
from presets.tiny.autoencoder import decode, encode
from presets.tiny.batches import contact_sheet
from presets.tiny.checker import Seen, look, score
from presets.tiny.export import CHECKPOINT, HERE
from presets.tiny.vocabulary import COLOURS, SHAPES, caption, varied_caption

LANDSCAPE, PORTRAIT, SQUARE = (256, 448), (448, 256), (320, 320)
SEED = 123
SHORT_FRAMES = 17


@dataclass(frozen=True)
class Sampling:
    steps: int = 12
    shift: float = 20.0
    guidance: float = 2.5


@dataclass(frozen=True)
class Trial:
    """A set of held-out scenes. share: of the count; words: "usual" or "varied" captions; edge: going on from a thing
    at the left or right edge, of any size; spins: things that spin alone."""

    name: str
    share: float
    size: tuple[int, int] = LANDSCAPE
    things: int = 1
    image: bool = False
    moving_camera: bool = False
    words: str = "usual"
    edge: bool = False
    spins: bool = False


TRIALS = (
    Trial("one", 1.0),
    Trial("going on", 0.3, image=True, edge=True),
    Trial("spin", 0.2, spins=True),
    Trial("two", 0.2, things=2),
    Trial("image", 0.2, image=True),
    Trial("camera", 0.15, moving_camera=True),
    Trial("portrait", 0.15, size=PORTRAIT),
    Trial("square", 0.15, size=SQUARE),
    Trial("varied words", 0.15, words="varied"),
)


class Parts:
    """The checkpoint's parts on one device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        precision = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device = device
        self.transformer = load_transformer(folder, device, precision)
        self.text = load_text_encoder(folder, device, precision)
        self.vae = load_vae(folder, device, torch.float32)
        self.scheduler = load_scheduler(folder)
        self.batch = 20 if device.type == "cuda" else 1

    def videos(
        self,
        prompts: list[str],
        size: tuple[int, int],
        sampling: Sampling,
        first: Tensor | None,
        negatives: Sequence[str] | None = None,
        frames: int = world.CLIP_FRAMES,
    ) -> Tensor:
        """[n, 3, frames, H, W] in [-1, 1], float16. first: [n, 3, 1, H, W]; prompt i is drawn with seed SEED + i.

        negatives: one for each prompt, of equal length in tokens; None: empty ones.
        """
        videos: list[Tensor | None] = [None] * len(prompts)
        for rows, text in self._batches(prompts):
            condition = self._condition(rows, latent_shape(frames, *size), first)
            away = torch.cat([self.text.encode(negatives[row] if negatives else " ").embedding for row in rows])
            latents = self._latents(rows, text, away, condition, sampling)
            for row, video in zip(rows, self._decode(latents), strict=True):
                videos[row] = video
        return torch.stack([video for video in videos if video is not None])

    def _batches(self, prompts: list[str]) -> Iterator[tuple[list[int], Tensor]]:
        groups: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for row, prompt in enumerate(prompts):
            embedding = self.text.encode(prompt).embedding
            groups[embedding.shape[1]].append((row, embedding))
        for group in groups.values():
            for i in range(0, len(group), self.batch):
                rows, embeddings = zip(*group[i : i + self.batch], strict=True)
                yield list(rows), torch.cat(embeddings)

    def _condition(self, rows: list[int], shape: tuple[int, ...], first: Tensor | None) -> Tensor:
        images = [None if first is None else encode_image(self.vae, first[row : row + 1]) for row in rows]
        return torch.cat([make_condition(shape, image) for image in images]).to(self.device)

    def _latents(self, rows: list[int], text: Tensor, away: Tensor, condition: Tensor, sampling: Sampling) -> Tensor:
        channels = self.transformer.config.out_channels
        noise = torch.cat([draw_noise(SEED + row, (1, channels, *condition.shape[2:])) for row in rows])
        scheduler = build_scheduler(self.scheduler, sampling.steps, sampling.shift)
        *_, last = denoise(self.transformer, text, away, condition, noise, scheduler, sampling.guidance)
        return last.latents

    def _decode(self, latents: Tensor) -> list[Tensor]:
        if self.device.type == "cpu":
            chunks = decode_in_chunks(self.vae, latents, DecodeSettings())
            frames = torch.cat([torch.as_tensor(chunk.frames).clone() for chunk in chunks])
            return [(frames.permute(3, 0, 1, 2).float() / 127.5 - 1).half()]
        # The same arithmetic on whole videos, a few at a time.
        videos = [decode(self.vae, denormalise(part, self.vae.config)) for part in latents.split(5)]
        return list(torch.cat(videos).clamp(-1, 1).half())


def scenes_of(trial: Trial, count: int) -> world.Scenes:
    rng = np.random.default_rng(20_000 + sum(map(ord, trial.name)))
    options = {"moving_camera": trial.moving_camera, "spins": float(trial.spins), "held_out": True}
    if not trial.edge:
        return world.sample(count, trial.things, rng, wide=trial.image, **options)
    scenes = world.sample(count, trial.things, rng, anywhere=True, **options)
    x, y, size, angle = np.moveaxis(scenes.pose, 2, 0)
    # Whole and upright, for the checker compares what does not spin with upright shapes.
    pose = np.stack([np.sign(x), y.clip(-1, 1), size, 0 * angle], axis=2)
    return dataclasses.replace(scenes, pose=pose)


def captions_of(trial: Trial, scenes: world.Scenes) -> list[str]:
    rng = np.random.default_rng(5)
    write = caption if trial.words == "usual" else lambda words: varied_caption(words, rng, 0.0)
    return [write(scenes.words(i)) for i in range(len(scenes))]


@dataclass(frozen=True)
class Outcome:
    captions: list[str]
    videos: Tensor
    seen: list[Seen]
    scores: list[dict[str, bool]]

    def accuracy(self) -> dict[str, float]:
        keys = self.scores[0]
        return {key: round(float(np.mean([row[key] for row in self.scores])), 4) for key in keys}

    def overlap(self, kind: Literal["match", "kept"]) -> float:
        """Mean overlap of the outlines with the shapes that were recognised, as of `ThingSeen`."""
        return round(float(np.mean([getattr(thing, kind) for seen in self.seen for thing in seen.things] or [0.0])), 4)


def run_trial(parts: Parts, trial: Trial, count: int, sampling: Sampling) -> Outcome:
    scenes = scenes_of(trial, count)
    prompts = captions_of(trial, scenes)
    first = world.render(scenes, *trial.size, 1, device=parts.device) if trial.image else None
    videos = parts.videos(prompts, trial.size, sampling, first)
    seen = [look(video) for video in videos]
    return Outcome(prompts, videos, seen, [score(s, scenes.words(i)) for i, s in enumerate(seen)])


def negative_prompts(parts: Parts, count: int, sampling: Sampling) -> dict[str, object]:
    """Prompts that leave the colour open, then the same with the colour drawn as the negative prompt: how often it is
    gone."""
    prompts = [f"a {SHAPES[i % len(SHAPES)]}" for i in range(count)]
    plain = parts.videos(prompts, LANDSCAPE, sampling, None, None, SHORT_FRAMES)
    drawn = [seen.things[0].colour if seen.things else "none" for seen in map(look, plain)]
    named = [colour if colour in COLOURS else "red" for colour in drawn]
    other = parts.videos(prompts, LANDSCAPE, sampling, None, named, SHORT_FRAMES)
    gone = [
        all(thing.colour != colour for thing in look(video).things)
        for video, colour in zip(other, drawn, strict=True)
        if colour in COLOURS
    ]
    return {"prompts": len(gone), "frames": SHORT_FRAMES, "named_colour_gone": round(float(np.mean(gone)), 4)}


def check_checker(device: torch.device, count: int) -> dict[str, object]:
    """The checker on true videos, and with every video scored against another one's prompt (what chance gives)."""
    result: dict[str, object] = {"videos": 2 * count}
    for name, shift in (("true", 0), ("shuffled", 1)):
        scores = []
        for things in (1, 2):
            scenes = world.sample(count, things, np.random.default_rng(88), held_out=True)
            for i in range(count):
                video = world.render(scenes.take(slice(i, i + 1)), *LANDSCAPE, device=device)[0]
                scores.append(score(look(video), scenes.words((i + shift) % count)))
        result[name] = {key: round(float(np.mean([row[key] for row in scores])), 4) for key in scores[0]}
    return result


@torch.no_grad()
def measure_vae_files(parts: Parts, count: int) -> dict[str, float]:
    """PSNR in dB over [-1, 1] of held-out videos through the stored VAE."""
    psnr = []
    for options in ({}, {"moving_camera": True}, {"things": 2}):
        things = options.pop("things", 1)
        scenes = world.sample(count, things, np.random.default_rng(77), held_out=True, **options)
        for i in range(count):
            video = world.render(scenes.take(slice(i, i + 1)), *LANDSCAPE, device=parts.device)
            error = decode(parts.vae, encode(parts.vae, video)[0]).clamp(-1, 1) - video
            psnr.append(float(10 * torch.log10(4 / error.square().mean())))
    return {"mean": round(float(np.mean(psnr)), 2), "worst": round(min(psnr), 2), "videos": len(psnr)}


CHOICES = (
    *(Sampling(12, shift, 2.5) for shift in (5.0, 9.0, 20.0, 40.0)),
    Sampling(16, 9.0, 2.5),
    Sampling(12, 9.0, 1.5),
    Sampling(12, 9.0, 1.0),
    Sampling(12, 20.0, 1.0),
)


def sweep(parts: Parts, choices: Sequence[Sampling], count: int) -> list[dict[str, object]]:
    """A few settings on the same prompts."""
    rows = []
    for sampling in choices:
        outcome = run_trial(parts, TRIALS[0], count, sampling)
        accuracy = {key: outcome.accuracy()[key] for key in ("colour", "shape", "motion", "all_three", "solid")}
        rows.append(dataclasses.asdict(sampling) | accuracy | {"match": outcome.overlap("match")})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def evaluate(parts: Parts, count: int, sampling: Sampling, sheets: Path | None) -> dict[str, object]:
    """All trials; the summary under `accuracy`, every mark under `trials`."""
    trials: dict[str, dict[str, object]] = {}
    failures: list[tuple[Tensor, str]] = []
    for trial in TRIALS:
        outcome = run_trial(parts, trial, max(1, round(trial.share * count)), sampling)
        overlaps = {"match": outcome.overlap("match"), "kept": outcome.overlap("kept")}
        trials[trial.name] = {"prompts": len(outcome.captions), **overlaps, **outcome.accuracy()}
        print(json.dumps({trial.name: trials[trial.name]}), flush=True)
        if sheets:
            name = f"sheet_{trial.name.replace(' ', '_')}.jpg"
            contact_sheet(outcome.videos[:8], outcome.captions[:8], sheets / name, height=80)
            failures += [
                (video, f"{trial.name}: {text}")
                for video, text, marks in zip(outcome.videos, outcome.captions, outcome.scores, strict=True)
                if not (marks["all_three"] and marks["background"] and marks["solid"])
            ]
    if failures:
        videos, titles = zip(*failures[:12], strict=True)
        contact_sheet(list(videos), list(titles), sheets / "sheet_failures.jpg", height=80)
    return {"accuracy": _summary(trials), "trials": trials}


def _summary(trials: dict[str, dict[str, object]]) -> dict[str, object]:
    one = trials["one"]
    keys = ("colour", "background", "objects", "solid", "shape", "motion", "all_three")
    return {key: one[key] for key in keys} | {
        "two_objects": trials["two"]["all_three"],
        "two_objects_number": trials["two"]["objects"],
        "camera": trials["camera"]["camera"],
        "i2v_motion": trials["image"]["motion"],
        "i2v_recognisable": trials["image"]["recognisable"],
        "portrait": trials["portrait"]["all_three"],
        "square": trials["square"]["all_three"],
        "varied_words": trials["varied words"]["all_three"],
        "going_on_motion": trials["going on"]["motion"],
        "going_on_recognisable": trials["going on"]["recognisable"],
        "spin_recognisable": trials["spin"]["recognisable"],
    }


def main() -> None:
    options = _parse()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    begin = time.time()
    with in_one_line():
        parts = Parts(options.checkpoint, device)
    sampling = Sampling(options.steps, options.shift, options.guidance)
    if options.sweep:
        rows = sweep(parts, CHOICES, options.sweep)
        options.out.with_name("sweep.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        # The shift is chosen; steps and guidance are the preset's.
        alike = [row for row in rows if (row["steps"], row["guidance"]) == (sampling.steps, sampling.guidance)]
        best = max(alike, key=lambda row: row["all_three"] + row["match"])
        sampling = dataclasses.replace(sampling, shift=best["shift"])
    result = evaluate(parts, options.count, sampling, options.sheets)
    result |= {
        "sampling": dataclasses.asdict(sampling),
        "prompts": options.count,
        "seed": SEED,
        "size": dict(zip(("height", "width"), LANDSCAPE, strict=True)) | {"frames": world.CLIP_FRAMES},
        "negative_prompt": negative_prompts(parts, min(48, options.count), sampling),
        "checker": check_checker(device, min(60, options.count)),
        "vae_psnr": measure_vae_files(parts, min(12, options.count)),
        "seconds": round(time.time() - begin, 1),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    result["accuracy"]["negative_prompt"] = result["negative_prompt"]["named_colour_gone"]
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--device", default="")
    parser.add_argument("--count", type=int, default=300, help="prompts for one thing; the other trials have a share")
    parser.add_argument("--steps", type=int, default=Sampling.steps)
    parser.add_argument("--shift", type=float, default=Sampling.shift)
    parser.add_argument("--guidance", type=float, default=Sampling.guidance)
    parser.add_argument("--sweep", type=int, default=0, help="try other settings too, on this many prompts")
    parser.add_argument("--out", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--sheets", type=Path, help="a folder for contact sheets")
    return parser.parse_args()


if __name__ == "__main__":
    main()
