"""A comparison as fragments of HTML: pure functions of snapshots that escape every text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from engine.compare import decibels
from engine.decode_cost import CompareCost, DecodeCost
from engine.job import CompareState
from engine.memory import in_words
from engine.readiness import Readiness
from engine.shapes import SPATIAL_FACTOR, video_frames
from engine.sides import SIDES, CompareRequest, Option, RandomLatents
from engine.web import words
from engine.web.compare_form import has_kernel

DOING = {"measure": "frames before rounding", "decode": "frames as delivered, timed", "file": "writing the video"}
# How much of a side each of its stages is, and how much lies before it.
SHARES = {"measure": (0.0, 0.5), "decode": (0.5, 0.45), "file": (0.95, 0.05)}

EMPTY = (
    '<p class="nothing">Choose latents and two decoders, then press Compare.<br>Both videos, their difference and the '
    "figures of every frame appear here.</p>"
)


def decoder(path: str, precision: str) -> str:
    """A decoder's name in menus and tables."""
    return f"{path}, {precision}"


def about(options: Sequence[Option]) -> str:
    """What can be compared on this machine."""
    text = (
        "The same latents are decoded twice, and what differs is shown."
        if has_kernel(options)
        else "No decode kernel is on this machine, so the plain decoder is compared with the reference in fp32."
    )
    return f'<p class="about">{text}</p>'


def plan(cost: CompareCost, shape: tuple[int, int, int]) -> str:
    """What a click would start, how long each side takes and what memory it needs."""
    frames, height, width = video_frames(shape[0]), shape[1] * SPATIAL_FACTOR, shape[2] * SPATIAL_FACTOR
    picture = f"{words.counted(frames, 'frame')}, {words.pixels(height, width)}."
    if cost.total is None:
        return f'<p class="plan">{picture} How long it takes is known once the model is loaded.</p>'
    sides = " ".join(_side_plan(name, side) for name, side in (("A", cost.a), ("B", cost.b)))
    guess = "" if cost.a.measured and cost.b.measured else " What has not run here yet is a guess."
    return (
        f'<p class="plan">{picture} <strong>Takes about {words.roughly(cost.total)}</strong>: each side runs twice, '
        f"once to measure, once timed. {sides}{guess}</p>"
    )


def _side_plan(name: str, cost: DecodeCost) -> str:
    return f"{name}: about {words.roughly(cost.seconds)} a run and {in_words(cost.bytes)} more memory."


def readiness(now: Readiness) -> str:
    """What the model still needs before it can decode; nothing once it is ready."""
    return "" if now.state == "ready" else f'<p class="plan" role="status">{escape(now.text)}</p>'


def refusal(text: str) -> str:
    """Why the form can't be sent as it is."""
    return f'<p class="message error" role="alert">{escape(text)}</p>'


def lost(job: str) -> str:
    """What to say of a comparison that this server doesn't know."""
    return (
        f'<p class="message">The comparison {escape(job)} is not known here. It may have been deleted, by somebody or '
        "to make room.</p>"
    )


def progress(state: CompareState) -> str:
    """The parts of a comparison as a strip, and a sentence on what happens now."""
    items = "".join(
        f'<li class="{phase}"><b>{label}</b><span>{escape(detail)}</span>'
        f'<i class="bar" style="--share: {share:.3f}"></i></li>'
        for label, phase, detail, share in _rows(state)
    )
    return (
        f'<ol class="strip {state.status}" aria-label="Parts">{items}</ol>'
        f'<p class="now {state.status}" role="status">{escape(sentence(state))}</p>'
    )


def _rows(state: CompareState) -> list[tuple[str, str, str, float]]:
    waiting = state.status == "queued"
    queue = ("Queue", "now" if waiting else "done", f"{state.position} before" if state.position else "", 1.0 - waiting)
    figures = ("Figures", "done" if state.result else "todo", "", 1.0 if state.result else 0.0)
    return [queue, *(_side_row(name, state) for name in SIDES), figures]


def _side_row(name: str, state: CompareState) -> tuple[str, str, str, float]:
    label, ended = f"Side {name.upper()}", state.sides.get(name)
    if ended:
        return label, "failed" if ended["error"] else "done", "" if ended["error"] else _seconds(ended), 1.0
    stage = state.stage
    if state.side != name or stage is None:
        return label, "todo", "", 0.0
    before, weight = SHARES.get(stage.name, (0.0, 0.0))
    share = before + weight * (stage.done / stage.total if stage.total else 0.0)
    phase = "now" if not state.over else "failed" if state.status == "failed" else "stopped"
    return label, phase, f"{stage.done} of {stage.total}" if stage.total else "", share


def sentence(state: CompareState) -> str:
    """What happens now, or what became of it."""
    if state.status == "queued":
        waits = f"{words.counted(state.position, 'job')} before it" if state.position else "it is next"
        return f"Waiting in the queue: {waits}."
    if state.over:
        end = "Compared" if state.status == "finished" else state.status.capitalize()
        return f"{end} after {words.duration(state.elapsed)}."
    stage = state.stage
    if stage is None or stage.name == "load":
        return "Loading the model."
    if stage.name == "compare":
        return "Comparing the delivered bytes."
    left = f", about {words.duration(stage.eta)} left of this run" if stage.eta else ""
    return f"Side {state.side.upper()}: {DOING[stage.name]}{left}."


def messages(state: CompareState) -> str:
    """What went wrong, with one side or with the whole."""
    texts = [f"Side {name.upper()}: {figures['error']}" for name, figures in state.sides.items() if figures["error"]]
    if state.error and state.status in ("failed", "interrupted"):
        texts = [state.error]
    return "".join(f'<p class="message error" role="alert">{escape(text)}</p>' for text in texts)


def view(state: CompareState) -> str:
    """Players, wipe, frames and charts: the element loads the figures itself."""
    return f'<compare-view src="compare/{escape(state.id)}.json"></compare-view>' if state.result else ""


def result(state: CompareState) -> str:
    """Verdict, table and figures of a finished comparison."""
    if not state.result:
        return ""
    found = state.result
    parts = [_compared(state.request, found), _verdict(found["verdict"]), _table(found), _figures(found["figures"])]
    address = f"compare/{escape(state.id)}.json?download=1"
    return (
        "".join(parts)
        + '<p class="actions"><a class="button" href="'
        + f'{address}" download="compare.json">Download the figures as JSON</a></p>'
    )


def _compared(request: CompareRequest, found: Mapping[str, Any]) -> str:
    """Which latents, and how much of them."""
    latents = request.latents
    name = f"random latents, seed {latents.seed}" if isinstance(latents, RandomLatents) else latents.name
    extent = f"{words.counted(found['frames'], 'frame')}, {words.pixels(found['height'], found['width'])}"
    return f'<p class="compared">{escape(request.source or name)}; {extent}</p>'


def _verdict(verdict: Mapping[str, Any] | None) -> str:
    if not verdict:
        return '<p class="verdict none">No verdict: only one side has a result.</p>'
    return f'<p class="verdict {"pass" if verdict["passed"] else "fail"}">{escape(verdict["text"])}</p>'


def _table(found: Mapping[str, Any]) -> str:
    sides = found["sides"]
    rows: dict[str, list[str]] = {
        "Decoder": [decoder(side["path"], side["precision"]) for side in sides.values()],
        "Why": [side["error"] or side["reason"] for side in sides.values()],
        "Seconds": [_seconds(side) for side in sides.values()],
        "Frames a second": [_rate(side) for side in sides.values()],
        "Peak memory": [_peaks(side) for side in sides.values()],
    }
    if found["ratio"]:
        rows["Time"] = ["1", f"{found['ratio']:.2f} times that of A"]
    lines = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for label, cells in rows.items()
    )
    head = "".join(f'<th scope="col">{name.upper()}</th>' for name in sides)
    return f'<table class="sides"><thead><tr><th></th>{head}</tr></thead><tbody>{lines}</tbody></table>'


def _seconds(side: Mapping[str, Any]) -> str:
    return f"{side['seconds']:.2f} s" if side["seconds"] is not None else "none"


def _rate(side: Mapping[str, Any]) -> str:
    return f"{side['frames_per_second']:.1f}" if side["frames_per_second"] else "none"


def _peaks(side: Mapping[str, Any]) -> str:
    peaks = ", ".join(f"{device} {in_words(peak)}" for device, peak in side["peak_bytes"].items())
    added = f" ({in_words(side['added_bytes'])} of it for this decode)" if side["added_bytes"] is not None else ""
    return f"{peaks}{added}" if peaks else "none"


def _figures(figures: Mapping[str, Any] | None) -> str:
    if not figures:
        return ""
    worst = figures["worst_frame"]
    pairs = {
        "PSNR, float frames": f"{_db(figures, 'psnr')}; worst {_db(figures, 'psnr_worst')}, frame {worst}",
        "PSNR, delivered 8 bit": f"{_db(figures, 'psnr_8bit')}; worst {_db(figures, 'psnr_8bit_worst')}",
        "SSIM": f"{figures['ssim']:.6f}; worst {figures['ssim_worst']:.6f}",
        "Largest difference": f"{figures['max_abs']:.2g} of [-1, 1]; {figures['max_levels']} of 255 levels",
        "Identical bytes": _share(figures["same_bytes"]),
    }
    lines = (f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in pairs.items())
    return f'<dl class="facts">{"".join(lines)}</dl>'


def _db(figures: Mapping[str, Any], name: str) -> str:
    return decibels(float(figures[name]))


def _share(share: float) -> str:
    """A share in percent that says 100 only if it is all of them."""
    return "all" if share == 1.0 else f"{min(share * 100, 99.9999):.4f} %"
