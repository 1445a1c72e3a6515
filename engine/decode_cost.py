"""What a decode will take here, by decoder: from earlier runs where there were any, else from how decoders compare."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from engine.compare import SSIM_THREADS, Decoder
from engine.shapes import video_frames
from engine.vae_stream import SLICE_BYTES

# Time relative to the fastest, on two CPU cores and on one H200. A guess for other machines, until they have run it.
RELATIVE = {
    "cpu": {("plain", "fp32"): 1, ("plain", "bf16"): 30, ("plain", "fp16"): 30, ("reference", "fp32"): 5},
    "cuda": {("plain", "fp32"): 10, ("reference", "fp32"): 12, ("reference", "tf32"): 1.6},
}
SSIM_SECONDS = 0.6e-6  # a pixel and thread
# Elements that the causal convolutions remember, a latent position and a channel of decoder_base_dim: 2.9 GiB in 16 bit
# at 704 x 1248 with 256 channels.
REMEMBERED = 1772
# Tensors of the largest layer that are alive at once, with what the library needs beside them. Ours work in slices;
# the reference holds four whole frames, padded copies and its library's workspace: 347 MiB in all were seen for the
# small model at 256 x 448 on a CPU (143 MiB for ours), 24.4 GiB at 704 x 1248 on a GPU.
ALIVE = 6
ALIVE_REFERENCE = {"cpu": 21, "cuda": 8}


def decode_work(frames: int, height: int, width: int) -> int:
    """What the time of decoding goes with, for latents of this shape: positions of all frames that come out. The first
    latent frame makes one frame, not four, and takes a quarter of the time of another."""
    return video_frames(frames) * height * width


@dataclass(frozen=True)
class DecodeCost:
    """seconds: of one delivery, None before anything was measured here; bytes: on top of what is loaded; measured:
    whether this decoder has run here (else it is a guess)."""

    seconds: float | None
    bytes: int
    measured: bool


@dataclass(frozen=True)
class CompareCost:
    """What a comparison will take. total: seconds with both passes of both sides, the measuring and the files."""

    a: DecodeCost
    b: DecodeCost
    frames: int

    pixels: int

    @property
    def total(self) -> float | None:
        """Seconds from click to figures."""
        if self.a.seconds is None or self.b.seconds is None:
            return None
        measuring = self.frames * self.pixels * SSIM_SECONDS / min(SSIM_THREADS, os.cpu_count() or 1)
        return 2 * (self.a.seconds + self.b.seconds) + measuring + 2.0


class DecodeCosts:
    """Remembers how fast each decoder was and how much memory it took. device_type: "cpu" or "cuda"."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._rates: dict[Decoder, float] = {}
        self._bytes: dict[Decoder, float] = {}

    def learn(self, decoder: Decoder, work: float, seconds: float, added: float | None = None) -> None:
        """One delivery. work: as of `decode_work`; added: bytes a latent position of one frame."""
        self._rates[decoder] = work / max(seconds, 1e-9)
        if added is not None:
            self._bytes[decoder] = added

    def predict(self, decoder: Decoder, latents: tuple[int, int, int], config: Any) -> DecodeCost:
        """latents: frames, height, width; config: of the VAE, None before it is loaded."""
        frames, height, width = latents
        rate = self._rates.get(decoder) or self._guess(decoder)
        area = height * width
        known = self._bytes.get(decoder)
        needed = known * area if known is not None else self._formula(decoder, area, config)
        work = decode_work(frames, height, width)
        return DecodeCost(work / rate if rate else None, int(needed), decoder in self._rates)

    def _guess(self, decoder: Decoder) -> float | None:
        if not self._rates:
            return None
        base, rate = next(iter(self._rates.items()))
        relative = RELATIVE.get(self.device_type, {})
        return rate * relative.get(base, 1) / relative.get(decoder, 1)

    def _formula(self, decoder: Decoder, area: int, config: Any) -> float:
        channels = config["decoder_base_dim"] or config["base_dim"] if config else 256
        size = 4 if decoder.precision in ("fp32", "tf32") else 2
        remembered = REMEMBERED * channels * area * size
        # Four frames at half the height and width of the picture, twice the channels at the top.
        largest = 4 * (8 * 8 * area) * 2 * channels * size
        if decoder.path == "reference":
            return remembered + ALIVE_REFERENCE.get(self.device_type, 8) * largest
        return remembered + ALIVE * min(largest, SLICE_BYTES.get(self.device_type, largest))
