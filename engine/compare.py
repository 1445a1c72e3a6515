"""How far two decodes of the same latents are apart, frame by frame, in memory that does not grow with the video.

PSNR of float frames: over [-1, 1], before any rounding: 10 log10(4 / mse). PSNR of 8-bit frames: over 0 to 255, on the
bytes that are delivered; two faithful decodes can't be told apart there beyond about 60 dB. Of a whole video: from the
squared error of all its frames, so that one identical frame does not make it infinite. SSIM: scikit-image, Gaussian
window of 11 with sigma 1.5, population covariance, data range 2 (float frames), mean over red, green and blue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import MediaError

FLOAT_RANGE = 2.0
BYTE_RANGE = 255.0
SSIM_SIDE = 11
SSIM_THREADS = 8
METHOD = {
    "psnr": "float frames before rounding, over [-1, 1]: 10 log10(4 / mse)",
    "psnr_8bit": "delivered 8-bit frames, over 0 to 255",
    "ssim": "float frames, Gaussian window 11, sigma 1.5, population covariance, data range 2, mean of three channels",
    "whole": "PSNR of a video is that of the squared error of all its frames; SSIM is the mean of its frames",
}


def psnr(mse: float, data_range: float) -> float:
    """Decibels of a mean squared error; infinite for identical data."""
    return 10 * math.log10(data_range**2 / mse) if mse > 0 else math.inf


def ssim(a: np.ndarray, b: np.ndarray, data_range: float = FLOAT_RANGE) -> float:
    """Structural similarity of two frames [3, H, W], at least 11 pixels a side; the settings are those of Wang et al.
    2004 and stand at the top of this file."""
    # Imported here: nobody who only makes videos should wait for scipy.
    from skimage.metrics import structural_similarity

    return float(
        structural_similarity(
            a,
            b,
            channel_axis=0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=data_range,
        )
    )


@dataclass(frozen=True)
class FloatFigures:
    """One frame before rounding. mse, max_abs: of values in [-1, 1]."""

    mse: float
    max_abs: float
    ssim: float


@dataclass(frozen=True)
class ByteFigures:
    """One frame as delivered. mse: of levels 0 to 255; same: share of its bytes that are identical, 0 to 1."""

    mse: float
    max_levels: int
    same: float


class Meter:
    """Takes frames of both sides as they come and keeps a few numbers a frame."""

    def __init__(self) -> None:
        self.floats: list[FloatFigures] = []
        self.bytes: list[ByteFigures] = []
        self._pool = ThreadPoolExecutor(min(SSIM_THREADS, os.cpu_count() or 1), thread_name_prefix="ssim")

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """The next frames before rounding, fp32 [t, 3, H, W] in [-1, 1]."""
        self.floats += self._pool.map(_float_figures, a, b)

    def add_bytes(self, a: np.ndarray, b: np.ndarray) -> None:
        """The next frames as delivered, uint8 [t, H, W, 3]."""
        self.bytes += map(_byte_figures, a, b)

    def figures(self) -> dict[str, Any]:
        """Everything as plain values: of the whole video, and "per_frame". Infinite where there is no difference."""
        per_frame = [
            {
                "frame": index,
                "psnr": psnr(values.mse, FLOAT_RANGE),
                "ssim": values.ssim,
                "max_abs": values.max_abs,
                "psnr_8bit": psnr(levels.mse, BYTE_RANGE),
                "same_bytes": levels.same,
            }
            for index, (values, levels) in enumerate(zip(self.floats, self.bytes, strict=True))
        ]
        worst = min(per_frame, key=lambda frame: (frame["psnr"], frame["ssim"]))
        return {
            "frames": len(per_frame),
            "psnr": psnr(_mean(frame.mse for frame in self.floats), FLOAT_RANGE),
            "psnr_worst": worst["psnr"],
            "worst_frame": worst["frame"],
            "ssim": _mean(frame.ssim for frame in self.floats),
            "ssim_worst": min(frame.ssim for frame in self.floats),
            "max_abs": max(frame.max_abs for frame in self.floats),
            "psnr_8bit": psnr(_mean(frame.mse for frame in self.bytes), BYTE_RANGE),
            "psnr_8bit_worst": min(frame["psnr_8bit"] for frame in per_frame),
            "max_levels": max(frame.max_levels for frame in self.bytes),
            "same_bytes": _mean(frame.same for frame in self.bytes),
            "per_frame": per_frame,
        }


def _mean(values: Iterator[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _float_figures(a: np.ndarray, b: np.ndarray) -> FloatFigures:
    difference = np.subtract(a, b)
    mse = float(np.mean(np.square(difference, dtype=np.float64)))
    return FloatFigures(mse, float(np.abs(difference).max()), ssim(a, b) if mse else 1.0)


def _byte_figures(a: np.ndarray, b: np.ndarray) -> ByteFigures:
    difference = levels_apart(a, b)
    mse = float(np.mean(np.square(difference, dtype=np.float64)))
    return ByteFigures(mse, int(difference.max()), float(np.mean(difference == 0)))


def levels_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| of bytes, as bytes."""
    return np.maximum(a, b) - np.minimum(a, b)


def amplified(a: np.ndarray, b: np.ndarray, gain: float) -> np.ndarray:
    """The difference of two frames uint8 [H, W, 3], `gain` times, as a picture of the same kind."""
    return np.minimum(levels_apart(a, b) * float(gain), BYTE_RANGE).astype(np.uint8)


class Decoder(NamedTuple):
    """What decoded a side, and on how many devices."""

    path: str
    precision: str
    devices: int = 1


@dataclass(frozen=True)
class Limits:
    """What a comparison is held to. psnr: decibels on float frames; same_bytes: every byte; why: whose figures;
    levels: how far a byte may be off, of 255."""

    psnr: float | None
    ssim: float | None
    same_bytes: bool
    why: str
    levels: int | None = None


SAME = Limits(None, None, True, "the same path and precision has to give the same bytes, however the work is spread")
LEVEL = Limits(None, None, False, "cuDNN may sum in another order where the work is cut in another way", 1)
FP32 = Limits(100.0, 0.9999, False, "fp32 on both sides may differ by the order of its sums; 131 dB were measured")
REDUCED = Limits(61.0, 0.998, False, "the published figures of a 16-bit kernel against fp32")


def limits_for(a: Decoder, b: Decoder, gpu: bool = False) -> Limits:
    """Which limits hold for a pair, on a CPU or on a GPU, where path plain convolves with cuDNN too."""
    if a[:2] == b[:2]:
        return LEVEL if a.path == "portable" or (gpu and a.path == "plain") else SAME
    return FP32 if a.precision == b.precision == "fp32" else REDUCED


@dataclass(frozen=True)
class Verdict:
    """passed: whether every limit holds; text: a sentence with figures and limits."""

    passed: bool
    text: str
    limits: Limits


def judge(figures: Mapping[str, Any], limits: Limits) -> Verdict:
    """Hold the figures of a whole video against limits."""
    if limits.same_bytes:
        passed = figures["same_bytes"] == 1.0
        text = "Every byte is the same" if passed else f"{1 - figures['same_bytes']:.3%} of the bytes differ"
        return Verdict(passed, f"{text}: {limits.why}.", limits)
    if limits.levels is not None:
        off = figures["max_levels"]
        text = f"No byte is further off than {off} of 255 levels (at most {limits.levels})"
        return Verdict(off <= limits.levels, f"{text}: {limits.why}.", limits)
    passed = figures["psnr"] >= limits.psnr and figures["ssim"] >= limits.ssim
    return Verdict(
        passed,
        f"{'Within' if passed else 'Outside'} the limits: PSNR {decibels(figures['psnr'])} "
        f"(at least {limits.psnr:g} dB), SSIM {figures['ssim']:.5f} (at least {limits.ssim:g}); {limits.why}.",
        limits,
    )


def decibels(value: float) -> str:
    """62.3 dB, or infinite in words."""
    return "infinite (identical)" if math.isinf(value) else f"{value:.1f} dB"


def plain_json(value: Any) -> Any:
    """The same values in a form that every JSON reader takes: infinity as the string "Infinity", paths as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "Infinity" if value > 0 else "-Infinity" if value < 0 else "NaN"
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, Limits | Verdict):
        return plain_json(asdict(value))
    return str(value) if isinstance(value, Path) else value


class FrameFile:
    """Frames on disk as one .npy file, read and written a few at a time. Not mapped into memory: pages of a mapping
    would count as memory of the process that is being measured.

    shape: of the whole, [frames, ...]; dtype: of the values.
    """

    def __init__(self, path: Path, shape: Sequence[int], dtype: Any) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), np.dtype(dtype)
        self.written = 0
        with path.open("wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
            np.lib.format.write_array_header_1_0(file, header)
            self._start = file.tell()

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Whether every frame is there."""
        return self.written == self.shape[0]

    def append(self, frames: np.ndarray) -> None:
        """Write the next frames [t, ...]. Raises MediaError for another shape or type."""
        if frames.dtype != self.dtype or frames.shape[1:] != self.shape[1:] or frames.ndim != len(self.shape):
            raise MediaError(
                f"{self.path.name} holds {self.dtype} frames of {list(self.shape[1:])}; "
                f"{frames.dtype} of {list(frames.shape)} do not belong there."
            )
        with self.path.open("r+b") as file:
            file.seek(self._start + self.written * self.frame_bytes)
            file.write(np.ascontiguousarray(frames).data)
        self.written += len(frames)

    def read(self, start: int, count: int) -> np.ndarray:
        """Frames [count, ...] from `start` on."""
        with self.path.open("rb") as file:
            file.seek(self._start + start * self.frame_bytes)
            values = np.fromfile(file, self.dtype, count * self.frame_bytes // self.dtype.itemsize)
        return values.reshape(count, *self.shape[1:])

    def chunks(self, count: int) -> Iterator[np.ndarray]:
        """All frames, `count` at a time."""
        for start in range(0, self.written, count):
            yield self.read(start, min(count, self.written - start))


def read_frame(path: Path, index: int) -> np.ndarray:
    """One frame of a .npy file of frames. Raises MediaError if the file or the frame is not there."""
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if not 0 <= index < shape[0]:
                raise MediaError(f"There is no frame {index}; this comparison has {shape[0]}, counted from 0.")
            size = math.prod(shape[1:])
            file.seek(index * size * dtype.itemsize, os.SEEK_CUR)
            values = np.fromfile(file, dtype, size)
    except (OSError, ValueError) as error:
        raise MediaError("The raw frames of this comparison are not there any more. Run it again.") from error
    if values.size != size:
        raise MediaError(f"Frame {index} was not written; this side ended before it.")
    return values.reshape(shape[1:])
