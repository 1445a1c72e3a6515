"""What is known of a job besides its video: figures, charts, paths with their reasons, and how it is made again.

Pure functions of snapshots that escape every text, as in render.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from engine import recipe
from engine.job import DecodeState, JobState
from engine.memory import in_words
from engine.readiness import Readiness
from engine.telemetry import Memory
from engine.web import words
from engine.web.charts import figures
from engine.web.render import decode_rate

PathRow = tuple[str, str, str]


def memory(now: Memory) -> str:
    """What the machine holds at this moment."""
    used = now.host_total - now.host_available
    host = f"{in_words(now.host)} here, {in_words(used)} of {in_words(now.host_total)} in use"
    meters = [_meter("Memory", host, now.host, used, now.host_total)]
    for device in now.devices:
        text = (
            f"allocated {in_words(device.allocated)}, reserved {in_words(device.reserved)}, "
            f"peak {in_words(device.peak)}, device {in_words(device.used)} of {in_words(device.total)}"
        )
        meters.append(_meter(device.name, text, device.allocated, device.used, device.total))
    return f'<div class="meters">{"".join(meters)}</div>'


def _meter(name: str, text: str, own: int, used: int, total: int) -> str:
    scale = max(total, 1)
    return (
        f'<div class="meter"><b>{escape(name)}</b><span>{text}</span>'
        f'<i class="bar two" style="--share: {own / scale:.3f}; --more: {used / scale:.3f}"></i></div>'
    )


def details(state: JobState, now: Memory, running: Mapping[str, Any]) -> str:
    """Live figures while a job runs, its card afterwards. running: `Engine.figures`."""
    if state.over:
        return card(state)
    stage = next((stage for stage in state.stages if stage.name == "decode"), None)
    rate, first = decode_rate(stage), state.first_frame_seconds
    pairs = {
        "Elapsed": words.duration(state.elapsed) if state.started else "",
        "First frame": f"after {words.duration(first)}" if first else "",
        "Decoding": f"{rate:.1f} frames/s" if rate else "",
        "Seed": str(state.request.seed),
    }
    drawn = figures(running, state.id, state.request.steps) if state.status == "running" else ""
    return _table(pairs) + drawn + memory(now)


def _table(pairs: Mapping[str, str]) -> str:
    lines = (f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in pairs.items() if value)
    return f'<dl class="facts">{"".join(lines)}</dl>'


def card(state: JobState) -> str:
    """What to do with a job that is over: its file to save, its figures, its settings to copy."""
    drawn = figures(state.stats, state.id, state.request.steps)
    return _actions(state) + _table(_facts(state)) + drawn + _paths(state.stats) + _again(state)


def _actions(state: JobState) -> str:
    if state.video is None:
        return ""
    name = escape(words.file_name(state.request))
    address = f"video/{state.id}.mp4?download=1"
    return f'<p class="actions"><a class="button" href="{address}" download="{name}">Download the video</a></p>'


def _facts(state: JobState) -> dict[str, str]:
    stats, request = state.stats, state.request
    seconds = {stage.name: stage.seconds for stage in state.stages if stage.seconds is not None}
    decode, each, rate = stats.get("decode") or {}, stats.get("seconds_per_step"), stats.get("decode_frames_per_second")
    frames, fps = stats.get("frames"), stats.get("fps")
    return {
        "Decoded again": f"from the latents of {state.source}"
        if isinstance(state, DecodeState) and state.source
        else "",
        "Video": f"{frames} frames, {frames / fps:.1f} s, {words.pixels(request.height, request.width)}"
        if frames and fps
        else "",
        "File": in_words(stats["file_bytes"]) if stats.get("file_bytes") else "",
        "Total": words.duration(state.elapsed) if state.started else "",
        "First frame": f"after {words.duration(state.first_frame_seconds)}" if state.first_frame_seconds else "",
        "Denoise": _joined(seconds.get("denoise"), f"{words.duration(each)} a step" if each else ""),
        "Step cache": words.step_cache(stats.get("step_cache")),
        "Decode": _joined(seconds.get("decode"), f"{rate:.1f} frames/s" if rate else ""),
        "Decoder": ", ".join(str(decode[key]) for key in ("path", "precision") if decode.get(key)),
        "Peak memory": ", ".join(f"{key} {in_words(value)}" for key, value in (stats.get("peak_bytes") or {}).items()),
        "Device": ", ".join(str(stats[key]) for key in ("device", "precision") if stats.get(key)),
        "Seed": str(request.seed),
    }


def _joined(seconds: float | None, more: str) -> str:
    return ", ".join(text for text in (words.duration(seconds) if seconds is not None else "", more) if text)


def settings(state: JobState) -> dict[str, object]:
    """What somebody needs to make the same video again."""
    request = state.request.to_json() | {"image": state.request.image.name if state.request.image else None}
    kept = ("latents_sha256", "vae_sha256", "device", "precision", "step_cache", "decode", "versions")
    return request | {key: state.stats[key] for key in kept if key in state.stats}


def _paths(stats: Mapping[str, Any]) -> str:
    rows = recipe.paths(stats)
    if not rows:
        return ""
    return f'<details class="settings"><summary>What ran, and why</summary>{path_table(rows)}</details>'


def path_table(rows: Iterable[PathRow]) -> str:
    """Operation, path and the reason for it."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Operation", "Path", "Why"))
    return f'<table class="paths"><thead><tr>{head}</tr></thead><tbody>{"".join(map(_row, rows))}</tbody></table>'


def _row(row: PathRow) -> str:
    operation, path, reason = map(escape, row)
    name = operation.replace("_", " ").capitalize()
    return f'<tr><th scope="row">{name}</th><td>{path}</td><td>{reason}</td></tr>'


def _again(state: JobState) -> str:
    """The card to reproduce a video by, as text, as a command line and as JSON."""
    parts = [("card", "Copy the card", recipe.card(state.request, state.stats))]
    if not isinstance(state, DecodeState):
        parts.append(("command", "Copy the command", recipe.command(state.request)))
    parts.append(("settings", "Copy as JSON", json.dumps(settings(state), indent=1, ensure_ascii=False)))
    shown = "".join(_copied(f"{state.id}-{name}", label, text) for name, label, text in parts)
    return f'<details class="settings"><summary>Make it again</summary>{shown}</details>'


def _copied(key: str, label: str, text: str) -> str:
    return (
        f'<button type="button" class="button" data-copy="{key}">{label}</button>'
        f'<pre id="{key}" tabindex="0">{escape(text)}</pre>'
    )


def system(about: Mapping[str, str], paths: Iterable[PathRow], readiness: Readiness, now: Memory) -> str:
    """Model, devices, versions, the path of each operation with its reason, and memory."""
    facts = _table({"State": readiness.text} | dict(about))
    return f'<div class="system">{facts}{path_table(paths)}{memory(now)}</div>'
