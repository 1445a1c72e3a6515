"""A job, the model and the machine as fragments of HTML: pure functions of snapshots that escape every text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from engine.engine import Readiness
from engine.estimate import Estimate
from engine.events import Stage
from engine.job import DecodeState, JobState, StageState
from engine.request import Request
from engine.telemetry import Memory
from engine.web import words

Phase = Literal["todo", "now", "done", "stopped", "failed"]
LABELS: dict[Stage, str] = {
    "load": "Model",
    "text": "Prompt",
    "image": "Picture",
    "denoise": "Denoise",
    "decode": "Decode",
    "file": "File",
}
# Loading takes no time once the model is there, and then it is no stage worth showing; nor is the wait of a free queue.
SHORT_LOAD = SHORT_WAIT = 0.5
LONG_WAIT = 120


@dataclass(frozen=True)
class Row:
    """One stage of the strip. share: how much of it is done, 0 to 1."""

    label: str
    phase: Phase
    detail: str = ""
    share: float = 0.0


def model(title: str, about: str, readiness: Readiness) -> str:
    """Which model this is and whether it could start at once."""
    share = readiness.done / readiness.total if readiness.total else 0
    bar = f'<i class="bar" style="--share: {share:.3f}"></i>' if readiness.state == "loading" and share else ""
    return (
        f'<h1>{escape(title)}</h1><p class="about">{escape(about)}</p>'
        f'<p class="ready {readiness.state}" role="status"><i class="dot"></i>{escape(readiness.text)}</p>{bar}'
    )


def empty(height: int, width: int) -> str:
    """The place of the video before there is one; it says what to do."""
    words_ = "Say what should happen, then press Generate.<br>It starts to play while the rest is still being made."
    return _canvas(height, width, 0.0, "Your video appears here", words_)


def _canvas(height: int, width: int, clear: float, title: str, text: str = "") -> str:
    more = f"<p>{text}</p>" if text else ""
    return (
        f'<div class="canvas" style="--ratio: {width} / {height}; --share: {clear:.3f}"><i class="noise"></i>'
        f'<p class="big">{title}</p>{more}</div>'
    )


def player(state: JobState, fps: int, poster: bool = False) -> str:
    """The player of a job, or its place before there are frames. poster: there is a thumbnail to show until it plays.

    The element only changes its attributes from one snapshot to the next, so that it goes on playing.
    """
    request = state.request
    if state.first_frame_seconds is None and state.video is None:
        return _canvas(request.height, request.width, _cleared(state), *_before_frames(state))
    address = f'src="live/{state.id}.mp4"' + (f' final="video/{state.id}.mp4"' if state.video else "")
    size = f'width="{request.width}" height="{request.height}" style="--ratio: {request.width} / {request.height}"'
    words_ = f'label="{escape(request.prompt)}"' + (f' poster="thumbnail/{state.id}.jpg"' if poster else "")
    return f'<live-video {address} {size} frames="{request.frames}" fps="{fps}" {words_}></live-video>'


def _cleared(state: JobState) -> float:
    """How much of the noise is gone, as far as the steps tell, 0 to 1."""
    stage = next((stage for stage in state.stages if stage.name == "denoise"), None)
    return stage.done / stage.total if stage and stage.total else 0.0


def _before_frames(state: JobState) -> tuple[str, str]:
    if state.status == "failed":
        return "This one failed", "What went wrong stands below."
    if state.status == "interrupted":
        return "Interrupted", "What is left of it stands below."
    if state.over:
        return "Stopped", "There were no frames yet."
    if state.status == "queued":
        return "In the queue", "You may close this page; the address finds it again."
    stage = state.stage
    if stage is None or stage.name in ("load", "text", "image"):
        return "Getting ready", ""
    if stage.name == "denoise":
        return f"Step {min(stage.done + 1, stage.total)} of {stage.total}", "Out of noise, step by step."
    return "Decoding the first frame", ""


def lost(job: str) -> str:
    """What to say of a job that this server doesn't know."""
    return (
        f'<p class="message">The video {escape(job)} is not known here. It may have been deleted, by somebody or to '
        "make room.</p>"
    )


def plan(request: Request, fps: int, estimate: Estimate | None) -> str:
    """What a click would start and how long that would take."""
    picture = (
        f"{words.counted(request.frames, 'frame')} at {fps} a second, {words.pixels(request.height, request.width)}"
    )
    if estimate is None:
        return f'<p class="plan">{picture}. How long it takes is known once the model is loaded.</p>'
    hint = " A shorter video, a smaller size or fewer steps are quicker." if estimate.total > LONG_WAIT else ""
    return (
        f'<p class="plan" title="Reckoned by {escape(estimate.basis)}">{picture}. '
        f"<strong>Takes about {words.roughly(estimate.total)}</strong> on this machine: "
        f"{words.roughly(estimate.denoise)} of steps, {words.roughly(estimate.decode)} of decoding.{hint}</p>"
    )


def refusal(text: str) -> str:
    """Why the form can't be sent as it is."""
    return f'<p class="message error" role="alert">{escape(text)}</p>'


def hint(unknown: Sequence[str]) -> str:
    """Words that the model never saw."""
    if not unknown:
        return ""
    named = ", ".join(f"<b>{escape(word)}</b>" for word in unknown[:12]) + (" …" if len(unknown) > 12 else "")
    verb = "is a word" if len(unknown) == 1 else "are words"
    return f'<p class="hint">{named} {verb} that this small model never saw; it will guess.</p>'


def strip(state: JobState, fps: int) -> str:
    """The stages of a job, and a sentence on what happens now. fps: at which the video will play."""
    items = "".join(_item(row) for row in rows(state))
    return (
        f'<ol class="strip {state.status}" aria-label="Stages">{items}</ol>'
        f'<p class="now {state.status}">{escape(sentence(state, fps))}</p>'
        f'<p class="unseen" role="status">{escape(_announcement(state, fps))}</p>'
    )


def _item(row: Row) -> str:
    current = ' aria-current="step"' if row.phase == "now" else ""
    return (
        f'<li class="{row.phase}"{current}><b>{row.label}</b><span>{escape(row.detail)}</span>'
        f'<i class="bar" style="--share: {row.share:.3f}"></i></li>'
    )


def rows(state: JobState) -> list[Row]:
    """The stages that this job has or will have, the queue first."""
    known = {stage.name: stage for stage in state.stages}
    shown = [name for name in state.stages_to_come if _is_shown(name, known.get(name), state.request)]
    return [_queue_row(state), *(_stage_row(name, known.get(name), state) for name in shown)]


def _is_shown(name: Stage, stage: StageState | None, request: Request) -> bool:
    if name == "load":
        return stage is not None and stage.elapsed > SHORT_LOAD
    return name != "image" or request.image is not None


def _queue_row(state: JobState) -> Row:
    if state.status == "queued":
        return Row("Queue", "now", f"{state.position} before" if state.position else "next")
    if state.started is None:
        return Row("Queue", "stopped")
    waited = state.started - state.created
    return Row("Queue", "done", words.duration(waited) if waited > SHORT_WAIT else "", 1.0)


def _stage_row(name: Stage, stage: StageState | None, state: JobState) -> Row:
    if stage is None:
        return Row(LABELS[name], "todo")
    share = stage.done / stage.total if stage.total else 0.0
    # Only a video that can be fetched makes the last stage whole.
    if stage.seconds is not None and (name != "file" or state.video):
        # A stage that was stopped part of the way has ended too, but not at its end.
        cut = stage.total is not None and 0 < stage.done < stage.total
        detail = f"{stage.done}/{stage.total}" if cut else words.duration(stage.seconds)
        return Row(LABELS[name], "stopped" if cut else "done", detail, share if cut else 1.0)
    phase: Phase = "now" if not state.over else "failed" if state.status == "failed" else "stopped"
    detail = f"{stage.done}/{stage.total}" if stage.total else words.duration(stage.elapsed)
    # While it runs it is never shown as whole.
    return Row(LABELS[name], phase, detail, min(share, 0.99))


def sentence(state: JobState, fps: int) -> str:
    """What happens now, or what became of it."""
    if state.status == "queued":
        waits = f"{words.counted(state.position, 'job')} before yours" if state.position else "yours is next"
        return f"Waiting in the queue: {waits}."
    if state.over:
        return _outcome(state)
    if state.stage is None:
        return "Starting."
    return _doing(state.stage, fps)


def _doing(stage: StageState, fps: int) -> str:
    match stage.name:
        case "load":
            return "Loading the model."
        case "text":
            return "Reading the prompt."
        case "image":
            return "Looking at the first frame."
        case "denoise" if stage.seconds_each:
            return f"{words.duration(stage.seconds_each)} a step{_left(stage)}."
        case "denoise":
            return f"{words.counted(stage.total or 0, 'step')} to go."
        case "decode":
            return _decoding(stage, fps)
        case _:
            return "Finishing and checking the file."


def _left(stage: StageState) -> str:
    return f", about {words.duration(stage.eta)} left" if stage.eta else ""


def decode_rate(stage: StageState | None) -> float | None:
    """Frames decoded a second so far, None before there are enough of them to tell."""
    if stage is None or stage.done < 2 or stage.elapsed <= 0:
        return None
    return stage.done / stage.elapsed


def _decoding(stage: StageState, fps: int) -> str:
    rate = decode_rate(stage)
    if rate is None:
        return "Decoding the first frames."
    slower = f", {rate / fps:.2g}x playback speed: the player waits for frames now and then" if rate < fps else ""
    return f"{rate:.1f} frames a second{slower}{_left(stage)}."


def _outcome(state: JobState) -> str:
    took = words.duration(state.elapsed)
    if state.status == "finished":
        first = state.first_frame_seconds
        return f"Done in {took}" + (f"; the first frame was there after {words.duration(first)}." if first else ".")
    if state.status == "interrupted":
        return "Interrupted: the server ended before it did."
    kept = f" What was decoded by then, {words.counted(_frames(state), 'frame')}, is kept." if state.video else ""
    if state.status == "failed":
        return f"Failed after {took}.{kept}" if state.started else "Failed."
    if state.video:
        return f"Stopped after {took}.{kept}"
    return f"Stopped after {took}, before there were frames." if state.started else "Stopped before it began."


def _frames(state: JobState) -> int:
    decoded = next((stage.done for stage in state.stages if stage.name == "decode"), 0)
    return state.stats.get("frames") or decoded


def _announcement(state: JobState, fps: int) -> str:
    """The same for screen readers: without the figures that change all the time."""
    if state.over or state.status == "queued":
        return sentence(state, fps)
    return LABELS[state.stage.name] if state.stage else "Started"


def messages(warnings: Iterable[str], error: str | None = None) -> str:
    """Warnings and the error of a job, as sentences in a place of their own."""
    lines = [f'<p class="message warning">{escape(text)}</p>' for text in warnings]
    if error:
        lines.append(f'<p class="message error" role="alert">{escape(error)}</p>')
    return "".join(lines)


def of_job(state: JobState) -> str:
    """The messages of a job."""
    return messages(state.warnings, state.error if state.status in ("failed", "interrupted") else None)


def memory(now: Memory) -> str:
    """What the machine holds at this moment."""
    used = now.host_total - now.host_available
    host = f"{words.size(now.host)} here, {words.size(used)} of {words.size(now.host_total)} in use"
    meters = [_meter("Memory", host, now.host, used, now.host_total)]
    for device in now.devices:
        text = (
            f"allocated {words.size(device.allocated)}, reserved {words.size(device.reserved)}, "
            f"peak {words.size(device.peak)}, device {words.size(device.used)} of {words.size(device.total)}"
        )
        meters.append(_meter(device.name, text, device.allocated, device.used, device.total))
    return f'<div class="meters">{"".join(meters)}</div>'


def _meter(name: str, text: str, own: int, used: int, total: int) -> str:
    scale = max(total, 1)
    return (
        f'<div class="meter"><b>{escape(name)}</b><span>{text}</span>'
        f'<i class="bar two" style="--share: {own / scale:.3f}; --more: {used / scale:.3f}"></i></div>'
    )


def details(state: JobState, now: Memory) -> str:
    """Live figures while a job runs, its card afterwards."""
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
    return _table(pairs) + memory(now)


def _table(pairs: Mapping[str, str]) -> str:
    lines = (f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in pairs.items() if value)
    return f'<dl class="facts">{"".join(lines)}</dl>'


def card(state: JobState) -> str:
    """What to do with a job that is over: its file to save, its figures, its settings to copy."""
    return _actions(state) + _table(_facts(state)) + _settings(state)


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
        "File": words.size(stats["file_bytes"]) if stats.get("file_bytes") else "",
        "Total": words.duration(state.elapsed) if state.started else "",
        "First frame": f"after {words.duration(state.first_frame_seconds)}" if state.first_frame_seconds else "",
        "Denoise": _joined(seconds.get("denoise"), f"{words.duration(each)} a step" if each else ""),
        "Step cache": words.step_cache(stats.get("step_cache")),
        "Decode": _joined(seconds.get("decode"), f"{rate:.1f} frames/s" if rate else ""),
        "Decoder": ", ".join(str(decode[key]) for key in ("path", "precision") if decode.get(key)),
        "Peak memory": ", ".join(
            f"{key} {words.size(value)}" for key, value in (stats.get("peak_bytes") or {}).items()
        ),
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


def _settings(state: JobState) -> str:
    text = escape(json.dumps(settings(state), indent=1, ensure_ascii=False))
    return (
        '<details class="settings"><summary>Settings</summary>'
        f'<button type="button" class="button" data-copy="{state.id}-settings">Copy as JSON</button>'
        f'<pre id="{state.id}-settings" tabindex="0">{text}</pre></details>'
    )


def system(about: Mapping[str, str], readiness: Readiness, now: Memory) -> str:
    """Model, devices, precision, decoder path, versions and memory."""
    return f'<div class="system">{_table({"State": readiness.text} | dict(about))}{memory(now)}</div>'
