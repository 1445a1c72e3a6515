"""What a machine was seen to do with a model, and what that says of the next request: kept apart from the engine, so
that a run in another process can hand over what it learned."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from engine import estimate as cost
from engine.compare import Decoder
from engine.decode_cost import CompareCost, DecodeCost, DecodeCosts, decode_work
from engine.errors import ResourceError
from engine.measure import measure
from engine.memory import memory_in_words
from engine.preset import Preset
from engine.request import Request
from engine.settings import BUDGETED
from engine.shapes import SPATIAL_FACTOR, latent_shape, video_frames
from engine.sides import Comparison

log = logging.getLogger(__name__)


class Experience:
    """Rates of denoising and costs of decoding; it can be pickled. device_type: "cpu" or "cuda"; unmeasured: why
    nothing is known, in words, after a short run that told nothing."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.rates: cost.Rates | None = None
        self.unmeasured = ""
        self.costs = DecodeCosts(device_type)

    def measure(self, executor: Any, preset: Preset, decoder: Decoder) -> None:
        """Learn from a short run, unless anything is known already. decoder: of the preset.

        Where memory is too small for that run it is not tried again: smaller videos may fit, and the first one tells.
        """
        if self.rates is not None or self.unmeasured:
            return
        try:
            with memory_in_words("A short run at the preset's size", None, executor.device, "Smaller videos may."):
                rates = measure(executor, preset)
        except ResourceError as error:
            self.unmeasured = f"How long a video takes is known after the first one. {error}"
            log.warning("%s", self.unmeasured)
            return
        self.rates = rates
        self.costs.learn(decoder, rates.positions, 1.0)

    def estimate(self, executor: Any, request: Request, decoder: Decoder) -> cost.Estimate | None:
        """What a request will take; None as long as nothing is known, of the machine or of the model."""
        if self.rates is None or executor.folder is None:
            return None
        latents = latent_shape(request.frames, request.height, request.width)[1:]
        decode = self.costs.predict(decoder, latents, executor.vae_config)
        return cost.estimate(executor.transformer_config, request, self.rates, decode, executor.itemsize)

    def estimate_comparison(self, sides: Sequence[Decoder], latents: tuple[int, int, int], config: Any) -> CompareCost:
        """What a comparison of latents [frames, height, width] will take. config: of the VAE, None if not loaded."""
        costs: list[DecodeCost] = [self.costs.predict(decoder, latents, config) for decoder in sides]
        return CompareCost(*costs, frames=video_frames(latents[0]), pixels=latents[1] * latents[2] * SPATIAL_FACTOR**2)

    def adopt(self, other: Experience) -> None:
        """Know what another knows."""
        self.rates, self.costs = other.rates, other.costs

    def learn_denoise(self, config: Any, request: Request, seconds: float, steps: Sequence[tuple[float, int]]) -> None:
        """One denoising run. config: of the transformer; steps: as of `engine.estimate.learn_denoise`."""
        self.unmeasured = ""
        self.rates = cost.learn_denoise(self.rates or cost.UNKNOWN, config, request, seconds, steps)

    def learn_decode(self, decoder: Decoder, latents: tuple[int, int, int], part: float, seconds: float) -> None:
        """One decoding. latents: frames, height, width; part: how much of them, 0 to 1."""
        self.costs.learn(decoder, decode_work(*latents) * part, seconds)

    def learn_peak(self, needed: int, peaks: Mapping[str, int]) -> None:
        """What a stage held that was reckoned to need so many bytes on top of what is loaded: a process on a CPU keeps
        some of what earlier work has freed. peaks: as of `engine.telemetry.StageRecord`."""
        if self.rates is None or self.rates.loaded is None:
            return
        names = ["host"] if self.device_type == "cpu" else [name for name in peaks if name != "host"]
        beyond = max((peaks.get(name, 0) for name in names), default=0) - self.rates.loaded - needed
        self.rates = dataclasses.replace(self.rates, unforeseen=max(self.rates.unforeseen, beyond))

    def learn_decode_peak(
        self, decoder: Decoder, latents: tuple[int, int, int], config: Any, peaks: Mapping[str, int]
    ) -> None:
        """The same of a decoding. latents: frames, height, width; config: of the VAE."""
        height, width = (side * SPATIAL_FACTOR for side in latents[1:])
        # The other paths fill what is free, or what they are allowed: that is no need.
        if decoder.path not in BUDGETED:
            self.learn_peak(cost.decode_bytes(self.costs.predict(decoder, latents, config), height, width), peaks)

    def learn_sides(self, comparison: Comparison) -> None:
        """Both decodings of a comparison."""
        frames, height, width = comparison.latents.shape[2:]
        for side in comparison.sides:
            if side.seconds:
                added = side.added / (height * width) if side.added is not None else None
                self.costs.learn(side.decoder, decode_work(frames, height, width), side.seconds, added)
