"""Seconds, bytes and names as people read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.events import Stage
from engine.request import Request

NAME_LENGTH = 48
STAGES: dict[Stage, str] = {
    "load": "Model",
    "text": "Prompt",
    "image": "Picture",
    "denoise": "Denoise",
    "decode": "Decode",
    "file": "File",
}


def duration(seconds: float) -> str:
    """20 ms, 0.8 s, 12 s, 2 min 10 s, 1 h 5 min."""
    if seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{round(whole / 60)} min"
    hours, rest = divmod(round(whole / 60), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def roughly(seconds: float) -> str:
    """A duration that claims no more precision than an estimate has: 8 seconds, 40 seconds, 3 minutes, 1 hour."""
    steps = ((20, 1), (90, 5), (600, 30), (5400, 300), (float("inf"), 1800))
    step = next(step for limit, step in steps if seconds < limit)
    value = max(step, round(seconds / step) * step)
    if value < 90:
        return f"{value} second{'s' * (value != 1)}"
    if value < 5400:
        return f"{value / 60:.2g} minutes"
    return f"{value / 3600:.2g} hours"


def pixels(height: int, width: int) -> str:
    """A size as people read it, width first."""
    return f"{width} x {height}"


def counted(number: int, thing: str) -> str:
    """1 frame, 2 frames."""
    return f"{number} {thing}{'s' * (number != 1)}"


def beginning(text: str, length: int = 27) -> str:
    """What a prompt is about in a few words: its start up to the place, without the article; several fit on a line."""
    first = re.split(r"[.!?,]| on an? ", text.strip(), maxsplit=1)[0]
    first = re.sub(r"^(an?|the) ", "", first, flags=re.IGNORECASE)
    first = first if len(first) <= length else first[: length + 1].rsplit(" ", 1)[0] + " …"
    return first[:1].upper() + first[1:]


def file_name(request: Request) -> str:
    """What a downloaded video is called: the prompt's first words and the seed, safe on every system."""
    words = re.findall(r"[^\W_]+", request.prompt.lower())
    kept = ""
    for word in words:
        if len(kept) + len(word) >= NAME_LENGTH:
            break
        kept += f"{word}-"
    return f"{kept or 'video-'}{request.seed}.mp4"


def step_cache(figures: Mapping[str, Any] | None) -> str:
    """What the step cache skipped; nothing where there was none."""
    if not figures:
        return ""
    skipped = f"skipped {figures['share']:.0%} of {figures['passes']} passes (threshold {figures['threshold']:g})"
    return f"{skipped}, {figures['psnr']:.0f} dB from full at 50 steps" if figures["psnr"] else skipped


def sent_text(value: object) -> str:
    """Text that a page sent. It may be forged: what is no text, or half a character, counts as nothing."""
    whole = isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
    return value if whole else ""
