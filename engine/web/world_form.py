"""The World tab's fields on one side, checked requests for the candidates on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from engine.chain import MAX_BRANCHES, observation
from engine.engine import Engine
from engine.errors import RequestError
from engine.job import JobState
from engine.request import Request
from engine.web.form import build_request, checked, fitting_size, parse_size


@dataclass(frozen=True)
class WorldForm:
    """What stands in the fields. image: an upload's path; seconds: of each candidate; actions: empty ones don't count.
    seed: one for all candidates, so that only the action tells them apart."""

    image: str | None
    seconds: float | None
    seed: int | None
    actions: Sequence[str]

    def requests(self, engine: Engine, seen: JobState | None) -> list[Request]:
        """One checked request for each action that was written down. seen: the video to go on from, None to begin with
        the picture. RequestError in words for all of them before any is queued."""
        actions = [text.strip() for text in self.actions if isinstance(text, str) and text.strip()]
        if not actions:
            raise RequestError("No action is written down. Say in one or more of the fields what happens next.")
        if len(actions) > MAX_BRANCHES:
            raise RequestError(f"{len(actions)} actions are too many; at most {MAX_BRANCHES} are tried together.")
        first = self._request(engine, seen, actions[0])
        return [checked(engine, dataclasses.replace(first, prompt=action)) for action in actions]

    def _request(self, engine: Engine, seen: JobState | None, prompt: str) -> Request:
        """The settings of the video that it goes on from; those of the preset for a picture."""
        preset = engine.preset
        size = (preset.defaults.height, preset.defaults.width)
        image = self.image if seen is None else str(observation(seen))
        if not image:
            raise RequestError("There is nothing to go on from. Give a picture, or choose a video made here.")
        if seen is None and (fitting := fitting_size(preset, image)):
            size = parse_size(fitting)
        height, width = size
        new = build_request(preset, prompt, image, self.seconds, None, height=height, width=width, seed=self.seed)
        if seen is None:
            return new
        own = {"prompt": new.prompt, "image": new.image, "frames": new.frames, "seed": new.seed}
        return dataclasses.replace(seen.request, **own)
