"""What the small model can draw and the words for it: its whole language, for training, the checker and the page.

The first phrase of each entry is the usual one; the others are synonyms that training uses now and then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

COLOURS = {
    "red": (225, 35, 40),
    "green": (40, 185, 70),
    "blue": (45, 95, 235),
    "yellow": (245, 220, 40),
    "orange": (250, 135, 20),
    "purple": (140, 60, 200),
    "pink": (250, 130, 190),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring")
MOTIONS = {
    "left": ("moves left", "slides left", "moving left", "moves to the left"),
    "right": ("moves right", "slides right", "moving right", "moves to the right"),
    "up": ("moves up", "rises", "moving up", "floats up"),
    "down": ("moves down", "falls", "moving down", "sinks down"),
    "bounce": ("bounces", "jumps", "bouncing", "bounces up and down"),
    "grow": ("grows", "gets bigger", "growing"),
    "shrink": ("shrinks", "gets smaller", "shrinking"),
    "spin": ("spins", "rotates", "spinning", "spins around"),
    "orbit": ("orbits", "moves around", "orbiting"),
    "still": ("stands still", "rests", "standing still"),
}
KINDS = ("plain", "gradient", "checker", "striped")
GROUNDS = {
    "black": (30, 30, 36),
    "gray": (100, 102, 108),
    "navy": (22, 32, 84),
    "brown": (90, 62, 40),
    "teal": (12, 88, 92),
    "sky": (110, 165, 215),
}
CAMERAS = {
    "static": ("static camera",),
    "pan_left": ("camera pans left",),
    "pan_right": ("camera pans right",),
    "zoom_in": ("camera zooms in",),
    "zoom_out": ("camera zooms out",),
}
SYNONYMS = {
    "circle": ("ball", "disc"),
    "square": ("box", "cube"),
    "ring": ("donut",),
    "purple": ("violet",),
    "gray": ("grey",),
    "checker": ("checkered",),
    "striped": ("stripes",),
}
# What is drawn where a caption does not say it.
DEFAULT_KIND, DEFAULT_GROUND, DEFAULT_CAMERA = "gradient", "navy", "static"
FILLERS = ("a", "an", "the", "on", "and", "background", "camera", "to", "in", "of", "with", "its", "is", "two", "one")
UNKNOWN = "[UNK]"
EXAMPLES = (
    "a red circle moves right on a plain navy background, static camera",
    "a white heart grows on a striped sky background, static camera",
    "a yellow ring moves up and an orange star moves down on a gradient black background, static camera",
    "a pink star stands still on a striped teal background, camera zooms in",
    "a green square moves left on a checker gray background, static camera",
    "a blue triangle orbits on a plain brown background, static camera",
)


@dataclass(frozen=True)
class Thing:
    """One object by its words."""

    colour: str
    shape: str
    motion: str


@dataclass(frozen=True)
class Words:
    """A whole scene by its words; the first thing is drawn left of (or above) the second."""

    things: tuple[Thing, ...]
    kind: str
    ground: str
    camera: str


def words(text: str) -> list[str]:
    """The lower-case words of a text, without punctuation."""
    return re.findall(r"\w+", text.lower())


def known_words() -> list[str]:
    """Every word the model was trained on, sorted."""
    phrases = [*COLOURS, *SHAPES, *KINDS, *GROUNDS, *FILLERS]
    for table in (MOTIONS, CAMERAS, SYNONYMS):
        phrases += [phrase for entry in table.values() for phrase in entry]
    return sorted({word for phrase in phrases for word in words(phrase)})


def unknown_words(prompt: str) -> list[str]:
    """The words of a prompt that the model has never seen, in order, each once.

    A colour of things behind a background's kind was never seen there either: "purple background".
    """
    known = set(known_words())
    unknown = [word for word in words(prompt) if word not in known]
    grounds = re.findall(rf"\b(?:{'|'.join(KINDS)}) (\w+) background", prompt.lower())
    return list(dict.fromkeys([*unknown, *(f"{word} background" for word in grounds if word in COLOURS)]))


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def caption(scene: Words) -> str:
    """The usual sentence for a scene: what, what happens, where, camera."""
    return _sentence(scene, [MOTIONS[thing.motion][0] for thing in scene.things], "full")


def varied_caption(scene: Words, rng: np.random.Generator, plainness: float = 0.5, shown: bool = False) -> str:
    """A sentence for a scene: the usual one with probability `plainness`, else with synonyms and parts left out.

    Parts are left out only where the scene has what is drawn in their absence, or where a first frame shows them, so
    that no caption is ambiguous.
    """
    if rng.random() < plainness:
        return caption(scene)
    motions = [_pick(rng, MOTIONS[thing.motion]) for thing in scene.things]
    text = _sentence(scene, motions, str(rng.choice(_styles(scene, shown))))
    text = " ".join(_pick_synonym(rng, word) for word in text.split(" "))
    return _roughen(text, rng)


def _pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[rng.integers(len(choices))]


def _pick_synonym(rng: np.random.Generator, word: str) -> str:
    choices = SYNONYMS.get(word)
    return _pick(rng, choices) if choices and rng.random() < 0.4 else word


def _styles(scene: Words, shown: bool) -> list[str]:
    styles = ["full", "ground first"]
    if shown:
        styles += ["no ground"] * 2 + ["action"] * 2
    if scene.camera == DEFAULT_CAMERA:
        styles += ["no camera", "no camera"]
        if scene.kind == "plain":
            styles.append("no kind")
        if (scene.kind, scene.ground) == (DEFAULT_KIND, DEFAULT_GROUND):
            styles += ["no ground"] * 4
    return styles


def _sentence(scene: Words, motions: Sequence[str], style: str) -> str:
    subject = " and ".join(
        f"{article(thing.colour)} {thing.colour} {thing.shape} {motion}"
        for thing, motion in zip(scene.things, motions, strict=True)
    )
    ground = f"on a {scene.kind} {scene.ground} background"
    camera = CAMERAS[scene.camera][0]
    pairs = zip(scene.things, motions, strict=True)
    return {
        "full": f"{subject} {ground}, {camera}",
        "ground first": f"{ground} {subject}, {camera}",
        "no camera": f"{subject} {ground}",
        "no kind": f"{subject} on {article(scene.ground)} {scene.ground} background",
        "no ground": subject,
        "action": " and ".join(f"the {thing.shape} {motion}" for thing, motion in pairs),
    }[style]


def _roughen(text: str, rng: np.random.Generator) -> str:
    """Typing habits: no articles, a full stop, a word the model does not know."""
    if rng.random() < 0.25:
        text = re.sub(r"\b(an|a|the) ", "", text)
    if rng.random() < 0.2:
        text += "."
    if rng.random() < 0.1:
        text = re.sub(rf"\b({'|'.join(COLOURS)})\b", rf"{UNKNOWN} \1", text, count=1)
    return text


def grammar() -> dict[str, object]:
    """The language as plain data."""
    return {
        "pattern": "a {colour} {shape} {motion} on a {kind} {ground} background, {camera}",
        "two objects": "a {colour} {shape} {motion} and a {colour} {shape} {motion} on ...",
        "colours": list(COLOURS),
        "shapes": list(SHAPES),
        "motions": {name: list(phrases) for name, phrases in MOTIONS.items()},
        "kinds": list(KINDS),
        "grounds": list(GROUNDS),
        "cameras": [phrases[0] for phrases in CAMERAS.values()],
        "synonyms": {name: list(phrases) for name, phrases in SYNONYMS.items()},
        "examples": list(EXAMPLES),
        "words": known_words(),
    }


def write_grammar(path: Path) -> None:
    path.write_text(json.dumps(grammar(), indent=1) + "\n", encoding="utf-8")
