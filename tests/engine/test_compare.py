"""Figures of two decodes: against scikit-image, on identical frames, in bounded memory, held against limits."""

import json
import math
import tracemalloc

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity

from engine.compare import (
    FP32,
    LEVEL,
    REDUCED,
    SAME,
    Decoder,
    FrameFile,
    Meter,
    amplified,
    decibels,
    judge,
    limits_for,
    plain_json,
    psnr,
    read_frame,
    ssim,
)
from engine.errors import MediaError

RANDOM = np.random.default_rng(0)
FRAMES, HEIGHT, WIDTH = 5, 40, 56


def pair(noise, frames=FRAMES, height=HEIGHT, width=WIDTH):
    """Float frames [t, 3, H, W] of two sides and their bytes [t, H, W, 3]; `noise` grows with the frame."""
    a = RANDOM.uniform(-1, 1, (frames, 3, height, width)).astype(np.float32)
    steps = noise * np.arange(1, frames + 1, dtype=np.float32).reshape(-1, 1, 1, 1)
    b = np.clip(a + steps * RANDOM.standard_normal(a.shape).astype(np.float32), -1, 1)
    return a, b, *(np.round((x / 2 + 0.5) * 255).astype(np.uint8).transpose(0, 2, 3, 1) for x in (a, b))


def figures(a, b, a8, b8, chunk=2):
    with Meter() as meter:
        for start in range(0, len(a), chunk):
            meter.add(a[start : start + chunk], b[start : start + chunk])
        for start in range(0, len(a), chunk):
            meter.add_bytes(a8[start : start + chunk], b8[start : start + chunk])
        return meter.figures()


def test_every_figure_is_what_scikit_image_says():
    a, b, a8, b8 = pair(0.01)
    found = figures(a, b, a8, b8)
    settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 2.0}
    for index, frame in enumerate(found["per_frame"]):
        assert frame["psnr"] == pytest.approx(peak_signal_noise_ratio(a[index], b[index], data_range=2.0), abs=1e-4)
        assert frame["psnr_8bit"] == pytest.approx(peak_signal_noise_ratio(a8[index], b8[index]), abs=1e-9)
        assert frame["ssim"] == pytest.approx(structural_similarity(a[index], b[index], channel_axis=0, **settings))
        assert frame["max_abs"] == np.abs(a[index] - b[index]).max()
        assert frame["same_bytes"] == (a8[index] == b8[index]).mean()
    assert found["psnr"] == pytest.approx(10 * math.log10(4 / mean_squared_error(a, b)), abs=1e-4)
    assert found["psnr_8bit"] == pytest.approx(peak_signal_noise_ratio(a8, b8), abs=1e-9)
    assert found["ssim"] == pytest.approx(np.mean([frame["ssim"] for frame in found["per_frame"]]))
    assert (found["worst_frame"], found["frames"]) == (FRAMES - 1, FRAMES)
    assert found["psnr_worst"] == found["per_frame"][-1]["psnr"] == min(f["psnr"] for f in found["per_frame"])
    assert found["ssim_worst"] == min(frame["ssim"] for frame in found["per_frame"])
    assert found["max_levels"] == np.abs(a8.astype(int) - b8.astype(int)).max()
    assert found["same_bytes"] == pytest.approx((a8 == b8).mean())


def test_ssim_is_that_of_wang_et_al():
    a, b = (side[0].astype(np.float64) for side in pair(0.2, frames=1)[:2])

    def blur(x):
        return gaussian_filter(x, 1.5, truncate=3.5)[5:-5, 5:-5]

    shares = []
    for x, y in zip(a, b, strict=True):
        mean_x, mean_y = blur(x), blur(y)
        var_x, var_y, both = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2, blur(x * y) - mean_x * mean_y
        c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
        top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
        shares.append(np.mean(top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))))
    assert ssim(a, b) == pytest.approx(np.mean(shares), abs=1e-12)


def test_identical_frames_are_infinite_and_said_to_be():
    a, _, a8, _ = pair(0)
    found = figures(a, a.copy(), a8, a8.copy())
    assert found["psnr"] == found["psnr_worst"] == found["psnr_8bit"] == math.inf
    assert (found["ssim"], found["max_abs"], found["same_bytes"], found["max_levels"]) == (1.0, 0.0, 1.0, 0)
    assert decibels(found["psnr"]) == "infinite (identical)"
    text = json.dumps(plain_json(found), allow_nan=False)
    assert float(json.loads(text)["psnr"]) == math.inf


def test_one_identical_frame_makes_no_video_infinite():
    a, b, a8, b8 = pair(0.01)
    b[0], b8[0] = a[0], a8[0]
    found = figures(a, b, a8, b8)
    assert found["per_frame"][0]["psnr"] == math.inf
    assert found["psnr"] == pytest.approx(psnr(mean_squared_error(a, b), 2.0), abs=1e-4)


def test_memory_does_not_grow_with_the_number_of_frames():
    a, b, a8, b8 = pair(0.01, frames=2, height=64, width=96)

    def peak(rounds):
        with Meter() as meter:
            tracemalloc.start()
            for _ in range(rounds):
                meter.add(a, b)
                meter.add_bytes(a8, b8)
            size = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return size

    peak(1)
    # Twenty times the frames; two threads may meet at their peaks or not.
    assert peak(40) < 4 * peak(2)


def test_frames_on_disk_are_an_ordinary_npy_file(tmp_path):
    _, _, frames, _ = pair(0)
    file = FrameFile(tmp_path / "frames.npy", frames.shape, np.uint8)
    file.append(frames[:1])
    assert not file.complete
    file.append(frames[1:])
    assert file.complete and np.array_equal(np.load(tmp_path / "frames.npy"), frames)
    assert np.array_equal(np.concatenate(list(file.chunks(2))), frames)
    assert np.array_equal(read_frame(file.path, 3), frames[3])
    for index in (-1, FRAMES):
        with pytest.raises(MediaError, match=f"no frame {index}"):
            read_frame(file.path, index)
    with pytest.raises(MediaError, match="do not belong"):
        file.append(frames[:, :-1])
    with pytest.raises(MediaError, match="Run it again"):
        read_frame(tmp_path / "gone.npy", 0)


def test_a_frame_that_was_never_written_is_said_to_be_missing(tmp_path):
    FrameFile(tmp_path / "f.npy", (4, 8, 8, 3), np.uint8)
    with pytest.raises(MediaError, match="was not written"):
        read_frame(tmp_path / "f.npy", 2)


def test_the_difference_is_amplified_and_cut_at_white():
    a, b = np.array([[[10, 20, 0]]], np.uint8), np.array([[[12, 19, 200]]], np.uint8)
    assert amplified(a, b, 1).tolist() == [[[2, 1, 200]]]
    assert amplified(a, b, 20).tolist() == amplified(b, a, 20).tolist() == [[[40, 20, 255]]]


def test_limits_follow_from_what_is_compared():
    reference, plain = Decoder("reference", "fp32"), Decoder("plain", "fp32")
    assert limits_for(plain, plain) is SAME and limits_for(plain, plain, gpu=True) is LEVEL
    assert limits_for(Decoder("built", "fp16"), Decoder("built", "fp16", 2), gpu=True) is SAME
    assert limits_for(Decoder("portable", "fp16"), Decoder("portable", "fp16")) is LEVEL
    assert limits_for(plain, reference) is FP32
    assert limits_for(Decoder("plain", "bf16"), reference) is REDUCED
    assert limits_for(Decoder("reference", "tf32"), reference) is REDUCED


@pytest.mark.parametrize(
    ("limits", "values", "passed", "words"),
    [
        (REDUCED, {"psnr": 61.0, "ssim": 0.998}, True, "Within the limits: PSNR 61.0 dB (at least 61 dB)"),
        (REDUCED, {"psnr": 60.9, "ssim": 1.0}, False, "Outside"),
        (REDUCED, {"psnr": 70.0, "ssim": 0.99}, False, "SSIM 0.99000 (at least 0.998)"),
        (FP32, {"psnr": math.inf, "ssim": 1.0}, True, "infinite (identical)"),
        (SAME, {"same_bytes": 1.0}, True, "Every byte is the same"),
        (SAME, {"same_bytes": 0.5}, False, "50.000% of the bytes differ"),
        (LEVEL, {"max_levels": 1}, True, "No byte is further off than 1 of 255 levels (at most 1)"),
        (LEVEL, {"max_levels": 2}, False, "2 of 255 levels (at most 1)"),
    ],
)
def test_the_verdict_names_figures_and_limits(limits, values, passed, words):
    verdict = judge(values, limits)
    assert verdict.passed == passed and words in verdict.text and limits.why in verdict.text
