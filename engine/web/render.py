"""A job, the model and the machine as fragments of HTML: pure functions of snapshots that escape every text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from engine.estimate import Estimate
from engine.events import Stage
from engine.job import JobState, StageState
from engine.memory import in_words
from engine.prompt import MAX_TOKENS
from engine.readiness import Readiness
from engine.request import Request
from engine.web import words

Phase = Literal["todo", "now", "done", "stopped", "failed"]
# Loading takes no time once the model is there, and then it is no stage worth showing; nor is the wait of a free queue.
SHORT_LOAD = SHORT_WAIT = 0.5
LONG_WAIT = 120
UNMEASURED = "How long it takes is known once the model is loaded, at the latest after the first video."


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


def player(state: JobState, fps: int, poster: bool = False, found_again: bool = True) -> str:
    """The player of a job, or its place before there are frames. poster: there is a thumbnail to show until it plays;
    found_again: a page that is loaded again finds the job.

    The element only changes its attributes from one snapshot to the next, so that it goes on playing.
    """
    request = state.request
    if state.first_frame_seconds is None and state.video is None:
        if state.previewed and not state.over:
            return _preview(state)
        return _canvas(request.height, request.width, _cleared(state), *_before_frames(state, found_again))
    address = f'src="live/{state.id}.mp4"' + (f' final="video/{state.id}.mp4"' if state.video else "")
    size = f'width="{request.width}" height="{request.height}" style="--ratio: {request.width} / {request.height}"'
    words_ = f'label="{escape(request.prompt)}"' + (f' poster="thumbnail/{state.id}.jpg"' if poster else "")
    return f'<live-video {address} {size} frames="{request.frames}" fps="{fps}" {words_}></live-video>'


def _preview(state: JobState) -> str:
    """Where the steps lead, in the player's place. The address names the step, so that a page takes each one once."""
    request, step = state.request, state.previewed
    steps = next(stage.total for stage in state.stages if stage.name == "denoise")
    return (
        f'<figure class="canvas preview" style="--ratio: {request.width} / {request.height}">'
        f'<img src="preview/{state.id}.webp?step={step}" alt="A small animated preview of: {escape(request.prompt)}">'
        f"<figcaption>Preview, step {step} of {steps}</figcaption></figure>"
    )


def _cleared(state: JobState) -> float:
    """How much of the noise is gone, as far as the steps tell, 0 to 1."""
    stage = next((stage for stage in state.stages if stage.name == "denoise"), None)
    return stage.done / stage.total if stage and stage.total else 0.0


def _before_frames(state: JobState, found_again: bool) -> tuple[str, str]:
    if state.status == "failed":
        return "This one failed", "What went wrong stands below."
    if state.status == "interrupted":
        return "Interrupted", "What is left of it stands below."
    if state.over:
        return "Stopped", "There were no frames yet."
    if state.status == "queued":
        return "In the queue", "You may close this page; the address finds it again." if found_again else ""
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
        return f'<p class="plan">{picture}. {UNMEASURED}</p>'
    hint = " A shorter video, a smaller size or fewer steps are quicker." if estimate.total > LONG_WAIT else ""
    return (
        f'<p class="plan" title="Reckoned by {escape(estimate.basis)}">{picture}. '
        f"<strong>Takes about {words.roughly(estimate.total)}</strong> on this machine: "
        f"{words.roughly(estimate.denoise)} of steps, {words.roughly(estimate.decode)} of decoding."
        f"{memory(estimate)}{hint}</p>"
    )


def memory(estimate: Estimate) -> str:
    """What the work will hold at its peak, as a sentence; nothing where that is not known."""
    return f" Needs about {in_words(estimate.bytes)} of memory." if estimate.bytes else ""


def note(text: str) -> str:
    """Something that has been done."""
    return f'<p class="message" role="status">{escape(text)}</p>'


def refusal(text: str) -> str:
    """Why the form can't be sent as it is."""
    return f'<p class="message error" role="alert">{escape(text)}</p>'


def below_prompt(unknown: Sequence[str], fault: str | None, tokens: int | None) -> str:
    """What is to be said of a prompt before the click. unknown: words that the model never saw; fault: of its JSON;
    tokens: of the MAX_TOKENS that are read, None where that is not known."""
    slip = f'<p class="hint">{escape(fault)}</p>' if fault else ""
    return slip + hint(unknown) + _tokens(tokens)


def _tokens(tokens: int | None) -> str:
    if tokens is None:
        return ""
    if tokens > MAX_TOKENS:
        return f'<p class="hint">{tokens:,} tokens: the last {tokens - MAX_TOKENS:,} will be cut off.</p>'
    return f'<p class="tokens">{tokens:,} of {MAX_TOKENS:,} tokens</p>'


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
    waited = max(0.0, state.started - state.created)
    return Row("Queue", "done", words.duration(waited) if waited > SHORT_WAIT else "", 1.0)


def _stage_row(name: Stage, stage: StageState | None, state: JobState) -> Row:
    if stage is None:
        return Row(words.STAGES[name], "todo")
    share = stage.done / stage.total if stage.total else 0.0
    early: Phase = "failed" if state.status == "failed" else "stopped"
    # Only a video that can be fetched makes the last stage whole.
    if stage.seconds is not None and (name != "file" or state.video):
        # A stage that was stopped part of the way has ended too, but not at its end.
        cut = stage.total is not None and 0 < stage.done < stage.total
        detail = f"{stage.done}/{stage.total}" if cut else words.duration(stage.seconds)
        return Row(words.STAGES[name], early if cut else "done", detail, share if cut else 1.0)
    phase: Phase = early if state.over else "now"
    detail = f"{stage.done}/{stage.total}" if stage.total else words.duration(stage.elapsed)
    # While it runs it is never shown as whole.
    return Row(words.STAGES[name], phase, detail, min(share, 0.99))


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
    return words.STAGES[state.stage.name] if state.stage else "Started"


def messages(warnings: Iterable[str], error: str | None = None) -> str:
    """Warnings and the error of a job, as sentences in a place of their own."""
    lines = [f'<p class="message warning">{escape(text)}</p>' for text in warnings]
    if error:
        lines.append(f'<p class="message error" role="alert">{escape(error)}</p>')
    return "".join(lines)


def of_job(state: JobState) -> str:
    """The messages of a job. That the server ended is no fault of the job, and what is left of it can be used."""
    ended = [state.error] if state.status == "interrupted" and state.error else []
    return messages([*state.warnings, *ended], state.error if state.status == "failed" else None)
