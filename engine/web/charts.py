"""A request's figures as pictures: where the time went, what each device held meanwhile, how long each step took.

Shapes are SVG that is stretched to the page's width, words are HTML beside it, so that both stay readable on a phone.
Colours are classes named after stages; style.css gives them one for light and one for dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from engine.memory import in_words
from engine.web import words

WIDTH, HEIGHT = 1000, 100
HOST = "This process on the host"


def figures(stats: Mapping[str, Any], name: str, steps: int | None = None) -> str:
    """All charts of a request that runs or has run; nothing where there is nothing to draw yet.

    stats: as in stats.json, or `Telemetry.summary` while it runs; name: makes ids unique; steps: how many there will
    be.
    """
    total, stages = stats.get("seconds") or 0.0, stats.get("stages") or []
    if not stages or total <= 0:
        return ""
    parts = [stage_bar(stages, total, name), *device_lanes(stats.get("devices") or [], total, name)]
    parts += memory_lanes(stats.get("memory") or {}, stages, total, name)
    if seconds := stats.get("step_seconds"):
        parts.append(step_bars(seconds, max(steps or 0, len(seconds)), name))
    return f'<div class="charts">{"".join(parts)}</div>'


def stage_bar(stages: Sequence[Mapping[str, Any]], total: float, name: str) -> str:
    """The share of each stage in the total, with the shares in words below."""
    known = [stage for stage in stages if stage["name"] in words.STAGES]
    shown = [(stage["name"], stage["started"], _seconds(stage, total)) for stage in known]
    rects = "".join(_band(*stage, total, 1.0) for stage in shown)
    said = [(stage, words.STAGES[stage], words.duration(each), _percent(each, total)) for stage, _, each in shown]
    legend = "".join(f'<li class="{key}"><i></i>{name} <b>{took}</b> {share}</li>' for key, name, took, share in said)
    items = (f"{name} {took}, {share}" for _, name, took, share in said)
    head = _head("Time", words.duration(total))
    drawn = _svg(f"{name}-time", "Time by stage", "; ".join(items), rects, "bar")
    return f'<div class="chart">{head}{drawn}<ul class="legend">{legend}</ul></div>'


def device_lanes(devices: Sequence[Mapping[str, Any]], total: float, name: str) -> list[str]:
    """When each of several devices was at work and on what, with what it waited for others and sent to them."""
    lanes = []
    for device in devices:
        spans = [span for span in device["spans"] if span[0] in words.STAGES]
        bands = (_band(stage, began, ended - began, total, 1.0) for stage, began, ended in spans)
        said = (
            f"busy {words.duration(device['busy_seconds'])}, {device['waiting_share']:.0%} of it waiting for others; "
        )
        said += f"sent {in_words(device['bytes_sent'])}"
        drawn = _svg(f"{name}-busy-{device['name']}", f"Work over time: {device['name']}", said, "".join(bands), "bar")
        lanes.append(f'<div class="chart">{_head(device["name"], said)}{drawn}</div>')
    return [*lanes, _axis(total)] if lanes else []


def memory_lanes(
    memory: Mapping[str, Sequence[Any]], stages: Sequence[Mapping[str, Any]], total: float, name: str
) -> list[str]:
    """Bytes over time, one lane a device, all over the same seconds, with the stages as bands behind them."""
    lanes = []
    for device in sorted(memory.keys() - {"seconds"}, key=lambda device: (device != "host", device)):
        pairs = zip(memory["seconds"], memory[device], strict=True)
        points = [(moment, value) for moment, value in pairs if value is not None]
        if len(points) > 1:
            lanes.append(_lane(device, points, stages, total, name))
    return [*lanes, _axis(total)] if lanes else []


def _lane(
    device: str, points: list[tuple[float, int]], stages: Sequence[Mapping[str, Any]], total: float, name: str
) -> str:
    most = max(value for _, value in points)
    title = HOST if device == "host" else device
    bands = (
        _band(stage["name"], stage["started"], _seconds(stage, total), total, 0.28)
        for stage in stages
        if stage["name"] in words.STAGES
    )
    line = [(_x(moment, total), HEIGHT * (1 - 0.92 * value / max(most, 1))) for moment, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    area = f"{line[0][0]:.1f},{HEIGHT} {path} {line[-1][0]:.1f},{HEIGHT}"
    shapes = f'{"".join(bands)}<polygon class="area" points="{area}"/><polyline class="line" points="{path}"/>'
    said = f"From {in_words(points[0][1])} at the start to {in_words(points[-1][1])}; the most is {in_words(most)}."
    drawn = _svg(f"{name}-{device}", f"Memory over time: {title}", said, shapes, "lane")
    return f'<div class="chart">{_head(f"Memory: {title}", f"at most {in_words(most)}")}{drawn}</div>'


def step_bars(seconds: Sequence[float], steps: int, name: str) -> str:
    """A bar for each denoising step; the place of those to come is left free."""
    most, width = max(seconds), WIDTH / steps
    gap = min(0.2 * width, 4)
    rects = "".join(
        f'<rect class="denoise" x="{index * width:.1f}" width="{width - gap:.1f}" '
        f'y="{HEIGHT * (1 - value / max(most, 1e-9)):.1f}" height="{HEIGHT * value / max(most, 1e-9):.1f}">'
        f"<title>Step {index + 1}: {words.duration(value)}</title></rect>"
        for index, value in enumerate(seconds)
    )
    said = f"{words.duration(median(seconds))} each, the slowest {words.duration(most)}"
    drawn = _svg(f"{name}-steps", "Seconds of each step", f"{len(seconds)} of {steps} steps: {said}.", rects, "steps")
    return f'<div class="chart">{_head("Steps", said)}{drawn}</div>'


def _seconds(stage: Mapping[str, Any], total: float) -> float:
    """Of a stage that is over, or until now."""
    return stage["seconds"] if stage["seconds"] is not None else max(0.0, total - stage["started"])


def _band(stage: str, started: float, seconds: float, total: float, opacity: float) -> str:
    return (
        f'<rect class="{stage}" x="{_x(started, total):.1f}" width="{_x(seconds, total):.1f}" y="0" height="{HEIGHT}" '
        f'opacity="{opacity:g}"><title>{words.STAGES[stage]}: {words.duration(seconds)}</title></rect>'
    )


def _x(moment: float, total: float) -> float:
    return WIDTH * min(max(moment / total, 0.0), 1.0)


def _percent(seconds: float, total: float) -> str:
    share = 100 * seconds / total
    return f"{share:.0f} %" if share >= 1 or share == 0 else "under 1 %"


def _head(name: str, figure: str) -> str:
    return f'<p class="head"><b>{escape(name)}</b><span>{escape(figure)}</span></p>'


def _axis(total: float) -> str:
    marks: Iterable[str] = (words.duration(total * part) if part else "0 s" for part in (0, 0.5, 1))
    return f'<p class="axis">{"".join(f"<span>{mark}</span>" for mark in marks)}</p>'


def _svg(name: str, title: str, said: str, shapes: str, kind: str) -> str:
    key = re.sub(r"[^\w-]+", "-", name)  # a list of ids is separated by spaces
    return (
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{key}-title {key}-said"><title id="{key}-title">{escape(title)}</title>'
        f'<desc id="{key}-said">{escape(said)}</desc>{shapes}</svg>'
    )
