"""Motions that begin where the first frame shows a thing: anywhere, also near an edge, of another size, turned.

A video made from words chooses the place that its motion needs. One that goes on from another's last frame can't, and
there things stand where their motion took them. Whoever knows the first frame and the caption knows the whole video.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from presets.tiny.vocabulary import MOTIONS

BEYOND = 0.15  # places from 1 to this much more are partly outside
OUTSIDE = 0.75  # of the way from the usual last place to the edge
TRAVEL, LEAST_TRAVEL = 0.3, 0.25  # what moves goes on at least so far, in units
GROWS = 1.7
TURN = 4.2  # radians in two seconds
NAMES = tuple(MOTIONS)


@dataclass(frozen=True)
class Room:
    """Half the ways that things go, each [n, k, 1] or a number: far_x, far_y of a centre that stays inside; edge_x,
    edge_y of one that leaves; orbit: a circle's radius."""

    far_x: Tensor
    far_y: Tensor
    edge_x: Tensor | float
    edge_y: Tensor | float
    orbit: Tensor


def no_poses(count: int, things: int) -> np.ndarray:
    return np.full((count, things, 4), np.nan)


def draw_poses(count: int, things: int, rng: np.random.Generator) -> np.ndarray:
    """[count, things, 4] of x, y (0 the middle, 1 where motions end, above it partly outside), size, angle: often what
    a usual video ends with, else anything."""
    shape = (count, things)
    places = [_mixed(rng, shape, (0.3, 0.0, 0.15), (0.15, 1.0, 0.04), (0.15, -1.0, 0.04)) for _ in range(2)]
    anywhere = [rng.uniform(-1 - BEYOND, 1 + BEYOND, shape) for _ in range(2)]
    x, y = (np.where(np.isnan(place), other, place) for place, other in zip(places, anywhere, strict=True))
    size = _mixed(rng, shape, (0.6, 1.0, 0.0), (0.12, 1.3, 0.0), (0.12, 0.5, 0.0))
    size = np.where(np.isnan(size), rng.uniform(0.5, 1.4, shape), size)
    angle = _mixed(rng, shape, (0.6, 0.0, 0.0), (0.2, TURN, 0.0))
    angle = np.where(np.isnan(angle), rng.uniform(0, 2 * math.pi, shape), angle)
    return np.stack([x, y, size, angle], axis=2)


def _mixed(rng: np.random.Generator, shape: tuple[int, int], *parts: tuple[float, float, float]) -> np.ndarray:
    """Values around each part's (share, middle, half width); the rest is NaN."""
    chance, jitter = rng.random(shape), rng.uniform(-1, 1, shape)
    values, until = np.full(shape, np.nan), 0.0
    for share, middle, width in parts:
        chosen = (chance >= until) & (chance < until + share)
        values[chosen] = middle + width * jitter[chosen]
        until += share
    return values


def track(motion: Tensor, pose: Tensor, room: Room, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and y from the middle of the thing's part of the picture, growth since the first frame, angle: [n, k, T].

    motion: indices [n, k, 1]; pose: float32 [n, k, 4]; time [n or 1, 1, T] from 0 to 1.
    """
    x0, y0, size, angle = (part[..., None] for part in pose.unbind(-1))
    x, y = _place(x0, room.far_x, room.edge_x), _place(y0, room.far_y, room.edge_y)
    only = functools.partial(when, motion)
    moved_x = sum(
        only(name, _along(sign, x, room.far_x, room.edge_x, time)) for name, sign in (("left", -1), ("right", 1))
    )
    moved_y = sum(
        only(name, _along(sign, y, room.far_y, room.edge_y, time)) for name, sign in (("up", -1), ("down", 1))
    )
    round_x, round_y = _orbit(x, y, room, time)
    moved_x = moved_x + only("orbit", round_x)
    moved_y = moved_y + only("orbit", round_y) + only("bounce", _bounce(y, room.far_y, time))
    grown = only("grow", (1.3 / size).clamp(min=GROWS) - 1) + only("shrink", (0.5 / size).clamp(max=1 / GROWS) - 1)
    return x + moved_x, y + moved_y, 1 + grown * time, angle + only("spin", TURN * time)


def when(motion: Tensor, name: str, value: Tensor) -> Tensor:
    """The value where the motion, an index, is the one of that name; else 0."""
    return torch.where(motion == NAMES.index(name), value, torch.zeros_like(value))


def _place(share: Tensor, far: Tensor, edge: Tensor | float) -> Tensor:
    outside = (share.abs() - 1).clamp(min=0) / BEYOND * OUTSIDE * (edge - far)
    return share.clamp(-1, 1) * far + outside * share.sign()


def _along(sign: int, start: Tensor, far: Tensor, edge: Tensor | float, time: Tensor) -> Tensor:
    """To where that motion usually ends; from there or near it a little on, out of the picture in part.

    What stands too near the edge for that begins a little before.
    """
    begin = torch.minimum(sign * start, edge - LEAST_TRAVEL + 0 * far)
    end = torch.maximum(torch.minimum(begin + TRAVEL, edge + 0 * far), far)
    return sign * (begin + (end - begin) * time) - start


def _bounce(start: Tensor, far: Tensor, time: Tensor) -> Tensor:
    """The usual curve from the point at that height on."""
    phase = torch.asin((0.5 - 0.5 * start.clamp(-far, far) / far).clamp(0, 1))
    return far * (1 - 2 * torch.sin(2 * math.pi * time + phase).abs()) - start.clamp(-far, far)


def _orbit(x: Tensor, y: Tensor, room: Room, time: Tensor) -> tuple[Tensor, Tensor]:
    """A circle on whose outer side, seen from the middle of the picture, the thing begins; clockwise."""
    phase = torch.atan2(x / room.far_x, -y / room.far_y)
    turn = 2 * math.pi * time + phase
    return room.orbit * (turn.sin() - phase.sin()), room.orbit * (phase.cos() - turn.cos())
