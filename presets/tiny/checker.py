"""Reads a video back into words: background, camera, number of things, and of each its colour, shape, motion, solidity.

It knows the drawn world but not the prompt. The background is the one of all possible ones that fits best; what differs
from it is things; connected parts are counted; outlines are compared with the shapes' own; tracks decide the motion.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from presets.tiny import world
from presets.tiny.going_on import no_poses
from presets.tiny.vocabulary import COLOURS, GROUNDS, KINDS, SHAPES, Words

STRIDE = 4  # every fourth frame is read
CONTRAST = 0.2  # RGB distance from the background, of at most sqrt(3), from which a pixel belongs to a thing
SMALLEST = 0.0012  # a thing's least share of the picture
OUTLINE = 40  # outlines are compared on a grid of this many points a side
TURNS = 24
TURNED = 0.88  # outlines that overlap less than this with the first frame's have turned


@dataclass(frozen=True)
class ThingSeen:
    """solid: one part of one colour; match: overlap (intersection over union) of the outline with the named shape's;
    shape_at_end: what the last frame alone shows; kept: mean overlap over all frames with that shape at any angle."""

    colour: str
    shape: str
    motion: str
    solid: bool
    match: float
    shape_at_end: str
    kept: float = 0.0


@dataclass(frozen=True)
class Seen:
    kind: str
    ground: str
    camera: str
    things: tuple[ThingSeen, ...]


@torch.no_grad()
def look(video: Tensor) -> Seen:
    """What a video [3, T, H, W] in [-1, 1] shows; T = 49 or the first part of it."""
    frames = torch.arange(0, video.shape[1], STRIDE, device=video.device)
    pixels = F.avg_pool2d(video.float()[:, frames].transpose(0, 1), 2) / 2 + 0.5  # [t, 3, h, w] in [0, 1]
    time = frames / (world.CLIP_FRAMES - 1)
    scene = _find_background(pixels, frames)
    mask = _foreground(pixels, scene, frames)
    masks, counts, shares = _separate(mask)
    steady = counts.count(len(masks)) >= 0.8 * len(counts)
    things = tuple(
        _look_at(pixels, part, scene, time, steady and share > 0.85) for part, share in zip(masks, shares, strict=True)
    )
    words = scene.words(0)
    return Seen(words.kind, words.ground, words.camera, things)


def score(seen: Seen, words: Words) -> dict[str, bool]:
    """Which parts of a caption the video obeys. For two things each key means both of them."""
    pairs = list(zip(seen.things, words.things, strict=False))
    counted = len(seen.things) == len(words.things)
    marks = {
        "background": (seen.kind, seen.ground) == (words.kind, words.ground),
        "kind": seen.kind == words.kind,
        "ground": seen.ground == words.ground,
        "camera": seen.camera == words.camera,
        "objects": counted,
        "solid": counted and all(thing.solid for thing in seen.things),
    }
    for key in ("colour", "shape", "motion"):
        marks[key] = counted and all(getattr(thing, key) == getattr(wanted, key) for thing, wanted in pairs)
    marks["all_three"] = marks["colour"] and marks["shape"] and marks["motion"]
    ends_well = counted and all(thing.shape_at_end == wanted.shape for thing, wanted in pairs)
    marks["recognisable"] = marks["colour"] and ends_well
    return marks


# Background


def _all_grounds(device: torch.device) -> world.Scenes:
    """Every background with every camera, without things."""
    kind, ground, camera = (
        axis.flatten() for axis in np.meshgrid(range(len(KINDS)), range(len(GROUNDS)), range(5), indexing="ij")
    )
    empty = np.zeros((len(kind), 0), dtype=np.int64)
    return world.Scenes(
        empty,
        empty,
        empty,
        kind,
        ground,
        camera,
        np.zeros((len(kind), 0, 3)),
        np.zeros(len(kind)),
        no_poses(len(kind), 0),
    )


def _render_frames(scenes: world.Scenes, height: int, width: int, frames: Tensor) -> Tensor:
    """[n, t, 3, height, width] in [0, 1] at the given frames."""
    count, device = len(scenes), frames.device
    drawn = [world.render(scenes, height, width, 1, start=frame.expand(count), device=device) for frame in frames]
    return torch.cat(drawn, dim=2).transpose(1, 2) / 2 + 0.5


@functools.lru_cache(maxsize=8)
def _candidates(height: int, width: int, frames: tuple[int, ...], device: torch.device) -> Tensor:
    return _render_frames(_all_grounds(device), height, width, torch.tensor(frames, device=device))


def _find_background(pixels: Tensor, frames: Tensor) -> world.Scenes:
    """The background that fits best, as a scene without things.

    Distances are capped, because things are far from all backgrounds.
    """
    small = F.avg_pool2d(pixels, 4)
    candidates = _candidates(*small.shape[-2:], tuple(frames.tolist()), pixels.device)
    misfit = (candidates - small).square().sum(2).sqrt().clamp(max=0.3).mean((1, 2, 3))
    # Plain grounds look the same with every camera; the static one comes first and wins ties.
    best = int((misfit > misfit.min() + 1e-6).int().argmin())
    return _all_grounds(pixels.device).take(slice(best, best + 1))


def _foreground(pixels: Tensor, scene: world.Scenes, frames: Tensor) -> Tensor:
    """What is not background: bool [t, h, w], without lines one pixel thin."""
    ground = _render_frames(scene, *pixels.shape[-2:], frames)[0]
    mask = ((pixels - ground).square().sum(1).sqrt() > CONTRAST).float()[:, None]
    eroded = -F.max_pool2d(-mask, 3, 1, 1)
    return (F.max_pool2d(eroded, 3, 1, 1) * mask)[:, 0] > 0.5


# Parts


def _label(mask: Tensor) -> Tensor:
    """Connected parts (8 neighbours) of [t, h, w]: a number each, 0 outside."""
    start = torch.arange(1, mask[0].numel() + 1, device=mask.device, dtype=torch.float32).view(mask.shape[1:]) * mask
    label, before = start, None
    while before is None or not torch.equal(label, before):
        before = label
        for _ in range(16):
            label = F.max_pool2d(label[:, None], 3, 1, 1)[:, 0] * mask
    return label.long()


def _separate(mask: Tensor) -> tuple[list[Tensor], list[int], list[float]]:
    """Masks of the one or two things [t, h, w], the parts in each frame, and the share of each thing's largest part.

    Two things live in two halves of the picture; that is the world's rule.
    """
    small = F.avg_pool2d(mask.float(), 2) > 0.5
    labels = _label(small)
    counts = [len(_part_sizes(frame, frame.numel())) for frame in labels]
    number = min(Counter(counts).most_common(1)[0][0], 2)
    if number < 2:
        regions = [torch.ones_like(mask[0])] * number
    else:
        height, width = mask.shape[-2:]
        first = torch.zeros_like(mask[0])
        first[: height // 2 if height > width else height, : width // 2 if width >= height else width] = True
        regions = [first, ~first]
    shares = [_largest_share(labels, F.avg_pool2d(region[None].float(), 2)[0] > 0.5) for region in regions]
    return [mask & region for region in regions], counts, shares


def _part_sizes(labels: Tensor, pixels: int) -> list[int]:
    sizes = torch.bincount(labels.flatten())[1:]
    large = sizes[sizes > SMALLEST * pixels]
    return large[large > 0.1 * large.max()].tolist() if len(large) else []


def _largest_share(labels: Tensor, region: Tensor) -> float:
    """The mean over frames of how much of a region's foreground its largest part holds."""
    shares = []
    for frame in labels:
        sizes = torch.bincount((frame * region).flatten())[1:]
        shares.append(float(sizes.max() / sizes.sum()) if len(sizes) and sizes.sum() else 0.0)
    return sum(shares) / len(shares)


# One thing


def _look_at(pixels: Tensor, mask: Tensor, scene: world.Scenes, time: Tensor, whole: bool) -> ThingSeen:
    area = mask.sum((1, 2)).float()
    present = torch.nonzero(area > SMALLEST * mask[0].numel())[:, 0]
    if len(present) < 3:
        return ThingSeen("none", "none", "none", False, 0.0, "none")
    colour, coherence = _colour(pixels, mask)
    motion = _motion(mask[present], scene, time[present])
    largest = present[area[present].argsort(descending=True)[:3]]
    shape, match = _shape(mask[largest], turned=motion == "spin")
    ends = bool(present[-1] == len(area) - 1)
    shape_at_end = _shape(mask[-1:], turned=motion == "spin")[0] if ends else "none"
    solid = whole and coherence > 0.75 and len(present) >= 0.9 * len(area)
    return ThingSeen(colour, shape, motion, solid, match, shape_at_end, _kept(mask, shape))


def _colour(pixels: Tensor, mask: Tensor) -> tuple[str, float]:
    """The nearest colour of most of the thing's pixels, and of what share of them. Shading is allowed for."""
    inner = -F.max_pool2d(-mask.float()[:, None], 3, 1, 1)[:, 0] > 0.5
    chosen = pixels.movedim(1, -1)[inner if inner.any() else mask]
    palette = torch.tensor(list(COLOURS.values()), device=pixels.device) / 255
    shades = torch.tensor([0.88, 1.0, 1.12], device=pixels.device)
    shaded = (palette[:, None] * shades[None, :, None]).clamp(max=1).flatten(0, 1)
    votes = torch.bincount(torch.cdist(chosen, shaded).argmin(1) // len(shades), minlength=len(COLOURS))
    return list(COLOURS)[int(votes.argmax())], float(votes.max() / votes.sum())


def _motion(mask: Tensor, scene: world.Scenes, time: Tensor) -> str:
    """From the track in the world's own coordinates, so that the camera's motion does not count."""
    x, y, area = _track(mask, scene, time)
    dx, dy = (float(axis[-2:].mean() - axis[:2].mean()) for axis in (x, y))
    span_x, span_y = (float(axis.max() - axis.min()) for axis in (x, y))
    growth = float(torch.log(area[-2:].mean() / area[:2].mean()))
    if abs(growth) > 0.8:
        return "grow" if growth > 0 else "shrink"
    returns = abs(dx) < 0.5 * span_x and abs(dy) < 0.5 * span_y
    if min(span_x, span_y) > 0.1 and returns:
        return "orbit"
    if span_y > 0.1 and abs(dy) < 0.5 * span_y and span_x < 0.6 * span_y:
        return "bounce"
    if max(abs(dx), abs(dy)) > 0.1:
        return ("right" if dx > 0 else "left") if abs(dx) > abs(dy) else ("down" if dy > 0 else "up")
    outlines = _outlines(mask)
    return "spin" if float(_overlap(outlines[1:], outlines[:1]).min()) < TURNED else "still"


def _track(mask: Tensor, scene: world.Scenes, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre x, y and area over time, in units of the world."""
    height, width = mask.shape[-2:]
    x, y, zoom = world.world_coordinates(scene, time[None], height, width, None, mask.device)
    weight = mask.float()
    total = weight.sum((1, 2))
    centre_x = (weight.sum(1) * x[0, :, 0]).sum(1) / total
    centre_y = (weight.sum(2) * y[0, :, :, 0]).sum(1) / total
    return centre_x, centre_y, total / zoom[0, :, 0, 0].square() / min(height, width) ** 2


def _outlines(mask: Tensor) -> Tensor:
    """Masks [t, h, w] moved to their centre and scaled to equal area: bool [t, OUTLINE, OUTLINE]."""
    height, width = mask.shape[-2:]
    weight = mask.float()
    total = weight.sum((1, 2)).clamp(min=1)
    rows, columns = (torch.arange(n, device=mask.device) + 0.5 for n in (height, width))
    centre_x, centre_y = (weight.sum(1) * columns).sum(1) / total, (weight.sum(2) * rows).sum(1) / total
    steps = ((torch.arange(OUTLINE, device=mask.device) + 0.5) / OUTLINE * 2 - 1) * 1.25
    spread = steps[None] * total.sqrt()[:, None]
    grid_x = ((centre_x[:, None] + spread) / width * 2 - 1)[:, None, :].expand(-1, OUTLINE, -1)
    grid_y = ((centre_y[:, None] + spread) / height * 2 - 1)[:, :, None].expand(-1, -1, OUTLINE)
    grid = torch.stack((grid_x, grid_y), dim=-1)
    return F.grid_sample(weight[:, None], grid, align_corners=False)[:, 0] > 0.5


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    return (a & b).sum((-2, -1)) / (a | b).sum((-2, -1)).clamp(min=1)


@functools.lru_cache(maxsize=4)
def _shape_outlines(device: torch.device) -> Tensor:
    """[shapes, TURNS, OUTLINE, OUTLINE]: every shape's outline at every angle, upright first."""
    steps = ((torch.arange(160, device=device) + 0.5) / 160 * 2 - 1) * 1.7
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    turned = []
    for shape in range(len(SHAPES)):
        for turn in range(TURNS):
            cos, sin = (f(2 * math.pi * turn / TURNS) for f in (math.cos, math.sin))
            turned.append(world.distance(shape, x * cos + y * sin, y * cos - x * sin) < 0)
    return _outlines(torch.stack(turned)).view(len(SHAPES), TURNS, OUTLINE, OUTLINE)


def _shape(mask: Tensor, turned: bool) -> tuple[str, float]:
    """The shape whose outline overlaps best over these frames [t, h, w], and the mean overlap."""
    known = _shape_outlines(mask.device)[:, : TURNS if turned else 1]
    overlap = _overlap(_outlines(mask)[:, None, None], known[None])  # [t, shapes, turns]
    means = overlap.amax(2).mean(0)
    return SHAPES[int(means.argmax())], float(means.max())


def _kept(mask: Tensor, shape: str) -> float:
    known = _shape_outlines(mask.device)[SHAPES.index(shape)]
    return float(_overlap(_outlines(mask)[:, None], known[None]).amax(1).mean())
