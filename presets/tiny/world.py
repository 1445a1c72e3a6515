"""The drawn world: random scenes, their captions, and their videos.

Everything is computed from formulas, so a scene can be drawn at any size and any frame. Lengths are in units of the
picture's shorter side, x to the right and y down from the centre; time runs from 0 to 1 over 49 frames (two seconds).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from presets.tiny import going_on
from presets.tiny.vocabulary import CAMERAS, COLOURS, GROUNDS, KINDS, MOTIONS, SHAPES, Thing, Words

CLIP_FRAMES = 49
FPS = 24
RADIUS, RADIUS_OF_TWO = 0.2, 0.15
MARGIN = 1.2  # a star reaches 1.15 radii from its centre
CELL = 0.25  # stripes and checks; at 256 pixels their edges fall on the latent grid
SOFTNESS = 1.5  # pixels over which an edge fades
ROUND = tuple(SHAPES.index(name) for name in ("circle", "ring"))
MOTION_NAMES = tuple(MOTIONS)
CAMERA_NAMES = tuple(CAMERAS)
MOTION = {name: index for index, name in enumerate(MOTION_NAMES)}
CAMERA = {name: index for index, name in enumerate(CAMERA_NAMES)}
STEADY = tuple(MOTION[name] for name in ("spin", "still"))


@dataclass(frozen=True)
class Scenes:
    """n scenes of k things each. Integer arrays index the vocabulary's tables; jitter is in [-1, 1]."""

    colour: np.ndarray  # [n, k]
    shape: np.ndarray  # [n, k]
    motion: np.ndarray  # [n, k]
    kind: np.ndarray  # [n]
    ground: np.ndarray  # [n]
    camera: np.ndarray  # [n]
    jitter: np.ndarray  # [n, k, 3]: along x, along y, size
    reach: np.ndarray  # [n]: how far the jitter moves a thing, in units
    pose: np.ndarray  # [n, k, 4]: of the first frame, as of `going_on.draw_poses`; NaN where the motion decides

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def things(self) -> int:
        return self.colour.shape[1]

    def take(self, index: np.ndarray | slice) -> Scenes:
        return Scenes(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})

    def words(self, i: int) -> Words:
        """Scene i by its words."""
        names = list(COLOURS)
        things = tuple(
            Thing(names[self.colour[i, k]], SHAPES[self.shape[i, k]], MOTION_NAMES[self.motion[i, k]])
            for k in range(self.things)
        )
        return Words(things, KINDS[self.kind[i]], list(GROUNDS)[self.ground[i]], CAMERA_NAMES[self.camera[i]])


def join(parts: list[Scenes]) -> Scenes:
    return Scenes(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Scenes)}
    )


def is_held_out(colour: np.ndarray, shape: np.ndarray, motion: np.ndarray) -> np.ndarray:
    """Combinations that training never shows: one colour in eight for every shape and motion."""
    return (3 * colour + 5 * shape + 7 * motion) % 8 == 0


def sample(
    count: int,
    things: int,
    rng: np.random.Generator,
    *,
    moving_camera: bool = False,
    wide: bool = False,
    anywhere: bool = False,
    held_out: bool = False,
    spins: float = 0.0,
) -> Scenes:
    """Random scenes. moving_camera: a patterned ground and a thing that stays in place, so that the camera is seen.

    For image-to-video, where the first frame shows them, wide: places vary much; anywhere: places, sizes and angles are
    any that another video can end with. held_out: only unseen combinations. spins: this share of the motions is made
    spinning, besides those that are so anyway.
    """
    triples = np.stack([_triples(count, rng, moving_camera, held_out, spins) for _ in range(things)], axis=1)
    if things == 2:
        same = triples[:, 0, 0] == triples[:, 1, 0]
        while same.any():
            triples[same, 1] = _triples(int(same.sum()), rng, moving_camera, held_out, spins)
            same = triples[:, 0, 0] == triples[:, 1, 0]
    reach = 0.035 if not wide else 0.16 if things == 1 else 0.05
    return Scenes(
        *np.moveaxis(triples, 2, 0),
        kind=rng.integers(2, 4, count) if moving_camera else rng.integers(0, len(KINDS), count),
        ground=rng.integers(0, len(GROUNDS), count),
        camera=rng.integers(1, len(CAMERAS), count) if moving_camera else np.zeros(count, dtype=np.int64),
        jitter=rng.uniform(-1, 1, (count, things, 3)),
        reach=np.full(count, reach),
        pose=going_on.draw_poses(count, things, rng) if anywhere else going_on.no_poses(count, things),
    )


def _triples(count: int, rng: np.random.Generator, steady: bool, held_out: bool, spins: float) -> np.ndarray:
    """[count, 3] of colour, shape, motion, by rejection."""
    triples = np.zeros((count, 3), dtype=np.int64)
    left = np.arange(count)
    while len(left):
        motion = rng.choice(STEADY, len(left)) if steady else rng.integers(0, len(MOTIONS), len(left))
        if spins and not steady:
            motion = np.where(rng.random(len(left)) < spins, MOTION["spin"], motion)
        drawn = np.stack([rng.integers(0, len(COLOURS), len(left)), rng.integers(0, len(SHAPES), len(left)), motion], 1)
        triples[left] = drawn
        unseen_turn = (drawn[:, 2] == MOTION["spin"]) & np.isin(drawn[:, 1], ROUND)
        left = left[unseen_turn | (is_held_out(*drawn.T) != held_out)]
    return triples


@dataclass(frozen=True)
class Track:
    """Where things are: each tensor [n, k, T], float32. scale is the radius in units, angle in radians, clockwise."""

    x: torch.Tensor
    y: torch.Tensor
    scale: torch.Tensor
    angle: torch.Tensor


def trajectory(scenes: Scenes, time: torch.Tensor, height: int, width: int) -> Track:
    """The things' paths over `time` [T] or [n, T] in a picture of that shape, on time's device."""
    device = time.device
    motion = torch.as_tensor(scenes.motion, device=device)[..., None]
    jitter = torch.as_tensor(scenes.jitter, device=device, dtype=torch.float32)[..., None]
    reach = torch.as_tensor(scenes.reach, device=device, dtype=torch.float32)[:, None, None]
    pose = torch.as_tensor(scenes.pose, device=device, dtype=torch.float32)
    time = (time[:, None] if time.dim() == 2 else time[None, None]).float()
    cell_x, cell_y, centre_x, centre_y = _cells(scenes.things, height, width, device)
    radius = (RADIUS if scenes.things == 1 else RADIUS_OF_TWO) * (1 + 0.05 * jitter[:, :, 2])
    radius = radius * pose[:, :, 2:3].nan_to_num(1.0)
    if scenes.things == 2:
        radius = radius.clamp(max=0.6 * min(cell_x, cell_y))
    far_x, far_y = ((cell - MARGIN * radius - 0.03).clamp(min=0.08) for cell in (cell_x, cell_y))
    orbit = torch.minimum(torch.minimum(far_x, far_y), torch.full_like(far_x, 0.2))

    when = functools.partial(going_on.when, motion)
    run, turn = 1 - 2 * time, 2 * math.pi * time
    x = when("left", far_x * run) - when("right", far_x * run) + when("orbit", orbit * torch.sin(turn))
    y = when("up", far_y * run) - when("down", far_y * run) - when("orbit", orbit * torch.cos(turn))
    y = y + when("bounce", far_y * (1 - 2 * torch.sin(turn).abs()))
    growth = 1 + when("grow", 0.8 * time - 0.5) + when("shrink", 0.3 - 0.8 * time)
    # A place that varies much must not push a thing over the edge in the directions in which it does not move.
    shift_x, shift_y = (torch.minimum(reach, far) * jitter[:, :, i] for i, far in ((0, far_x), (1, far_y)))
    x, y, angle = x + shift_x, y + shift_y, when("spin", going_on.TURN * time).expand_as(x)
    if not np.isnan(scenes.pose).all():
        # One thing may leave the picture; of two each keeps to its part.
        edge_x, edge_y = (cell_x, cell_y) if scenes.things == 1 else (far_x, far_y)
        placed = going_on.track(motion, pose, going_on.Room(far_x, far_y, edge_x, edge_y, orbit), time)
        x, y, growth, angle = (
            torch.where(pose[:, :, :1].isnan(), usual, other)
            for usual, other in zip((x, y, growth, angle), placed, strict=True)
        )
    return Track(x + centre_x, y + centre_y, radius * growth, angle)


def _cells(
    things: int, height: int, width: int, device: torch.device
) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """Half the width and height of each thing's part of the picture, and the parts' centres [1, k, 1]."""
    unit = min(height, width)
    half_x, half_y = width / unit / 2, height / unit / 2
    zero = torch.zeros(1, things, 1, device=device)
    if things < 2:
        return half_x, half_y, zero, zero
    sides = torch.tensor([-1.0, 1.0], device=device).view(1, 2, 1)
    if height > width:
        return half_x, half_y / 2, zero, sides * half_y / 2
    return half_x / 2, half_y, sides * half_x / 2, zero


def distance(shape: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to the outline of a shape of radius 1, negative inside; y down."""
    return _DISTANCES[SHAPES[shape]](x, y)


def _circle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.hypot(x, y) - 1


def _square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.87


def _triangle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Equilateral, tip up: the nearest of three half planes, moved down so that the tip reaches 1.15.
    return torch.maximum(y - 0.65, x.abs() * 0.866 - (y + 1.15) * 0.5)


def _star(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Fold the plane into half a tip; there the outline is one straight line from the tip to the inner corner.
    sector = math.pi / 5
    angle = torch.atan2(x, -y)
    folded = (torch.remainder(angle + sector, 2 * sector) - sector).abs()
    length = torch.hypot(x, y)
    fx, fy = length * torch.sin(folded), length * torch.cos(folded)
    tip, inner = 1.15, 0.52
    ex, ey = inner * math.sin(sector), inner * math.cos(sector) - tip
    return (fx * -ey + (fy - tip) * ex) / math.hypot(ex, ey)


def _heart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Two discs on a square that stands on its corner (after Inigo Quilez' distance function).
    size = 0.58
    x, y = size * x.abs(), 0.56 - size * y
    discs = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    along = 0.5 * (x + y).clamp(min=0)
    corner = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - along, y - along)) * torch.sign(x - y)
    return torch.where(x + y > 1, discs, corner) / size


def _ring(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.hypot(x, y) - 0.73).abs() - 0.29


_DISTANCES = {
    "circle": _circle, "square": _square, "triangle": _triangle, "star": _star, "heart": _heart, "ring": _ring,
}  # fmt: skip


@dataclass(frozen=True)
class Window:
    """What part of the picture to draw: `top`, `left` [n] in pixels, and its size."""

    top: torch.Tensor
    left: torch.Tensor
    height: int
    width: int


@torch.no_grad()
def render(
    scenes: Scenes,
    height: int,
    width: int,
    frames: int = CLIP_FRAMES,
    *,
    start: torch.Tensor | None = None,
    window: Window | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Videos of n scenes: float32 [n, 3, frames, height, width] in [-1, 1].

    start: first frame of each [n], default 0. window: draw only that part, in the full picture's pixels.
    """
    unit, count = min(height, width), len(scenes)
    start = torch.zeros(count, device=device) if start is None else start.to(device)
    time = (start[:, None] + torch.arange(frames, device=device)) / (CLIP_FRAMES - 1)
    x, y, zoom = world_coordinates(scenes, time, height, width, window, device)
    soft = zoom * (unit / SOFTNESS)
    picture = _background(scenes, x, y, soft, device)
    track = trajectory(scenes, time, height, width)
    palette = _palette(COLOURS, device)
    for k in reversed(range(scenes.things)):
        cover, shade = _draw(scenes.shape[:, k], x, y, soft, *(part[:, k] for part in dataclasses.astuple(track)))
        paint = palette[torch.as_tensor(scenes.colour[:, k], device=device)].view(count, 3, 1, 1, 1) * shade[:, None]
        picture = torch.lerp(picture, paint, cover[:, None])
    return picture.clamp(0, 1) * 2 - 1


def _palette(table: dict[str, tuple[int, int, int]], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(list(table.values()), device=device, dtype=torch.float32) / 255


def world_coordinates(
    scenes: Scenes, time: torch.Tensor, height: int, width: int, window: Window | None, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, T, 1, w], y [n, T, h, 1] of every pixel's centre in the world, and the camera's zoom [n, T, 1, 1]."""
    unit = min(height, width)
    rows = torch.arange(window.height if window else height, device=device) + 0.5 - height / 2
    columns = torch.arange(window.width if window else width, device=device) + 0.5 - width / 2
    rows, columns = rows.expand(len(scenes), -1), columns.expand(len(scenes), -1)
    if window:
        rows, columns = rows + window.top[:, None].to(device), columns + window.left[:, None].to(device)
    camera = torch.as_tensor(scenes.camera, device=device)[:, None]
    zero = torch.zeros_like(time)
    pan = torch.where(camera == CAMERA["pan_left"], 0.25 - 0.5 * time, zero)
    pan = torch.where(camera == CAMERA["pan_right"], 0.5 * time - 0.25, pan)
    zoom = torch.where(camera == CAMERA["zoom_in"], 0.75 + 0.6 * time, zero + 1)
    zoom = torch.where(camera == CAMERA["zoom_out"], 1.35 - 0.6 * time, zoom)[:, :, None, None]
    x = columns[:, None, None, :] / unit / zoom + pan[:, :, None, None]
    return x, rows[:, None, :, None] / unit / zoom, zoom


def _background(
    scenes: Scenes, x: torch.Tensor, y: torch.Tensor, soft: torch.Tensor, device: torch.device | str
) -> torch.Tensor:
    kind = torch.as_tensor(scenes.kind, device=device).view(-1, 1, 1, 1)
    wave_x, wave_y = (
        (torch.sin(axis * (math.pi / CELL)) * (CELL / math.pi) * soft).clamp(-0.5, 0.5) * 2 for axis in (x, y)
    )
    flat = torch.zeros_like(wave_x * wave_y)
    light = torch.where(kind == KINDS.index("gradient"), (-0.62 * y).clamp(-0.45, 0.45), flat)
    light = torch.where(kind == KINDS.index("checker"), -0.17 + 0.17 * wave_x * wave_y, light)
    light = torch.where(kind == KINDS.index("striped"), -0.17 + 0.17 * wave_x, light)
    ground = _palette(GROUNDS, device)[torch.as_tensor(scenes.ground, device=device)]
    return (1 + light[:, None]) * ground.view(len(scenes), 3, 1, 1, 1)


def _draw(
    shape: np.ndarray,
    x: torch.Tensor,
    y: torch.Tensor,
    soft: torch.Tensor,
    cx: torch.Tensor,
    cy: torch.Tensor,
    scale: torch.Tensor,
    angle: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of each pixel one thing covers, and its shading (lighter above): [n, T, h, w] each."""
    cx, cy, scale, angle = (part[:, :, None, None] for part in (cx, cy, scale, angle))
    dx, dy = (x - cx) / scale, (y - cy) / scale
    cos, sin = torch.cos(angle), torch.sin(angle)
    local_x, local_y = dx * cos + dy * sin, dy * cos - dx * sin
    cover = torch.empty_like(local_x)
    for index in np.unique(shape):
        chosen = torch.as_tensor(np.flatnonzero(shape == index), device=x.device)
        outline = distance(int(index), local_x[chosen], local_y[chosen])
        cover[chosen] = (0.5 - outline * (scale * soft)[chosen]).clamp(0, 1)
    return cover, (1 - 0.12 * dy.clamp(-1.1, 1.1)).expand_as(cover)
