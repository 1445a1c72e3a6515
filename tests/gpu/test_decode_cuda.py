"""Decoding on a CUDA device: the same frames, pinned memory, the next pass queued while a chunk is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decode import decode, explain, float_frames
from engine.settings import DecodeSettings
from tests.engine.wan_vae import normal_latents, small_vae, theirs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def vae():
    return small_vae(16).cuda()


@pytest.fixture(scope="module")
def expected():
    return theirs(small_vae(16), normal_latents(9))


def psnr(a, b):
    """Decibels of float frames over [-1, 1]."""
    return float(10 * torch.log10(4 / (a.double() - b.double()).square().mean()))


@pytest.mark.parametrize(
    "path, precision, decibels",
    [("plain", "fp32", 90), ("reference", "fp32", 90), ("plain", "bf16", 45), ("plain", "fp16", 60)],
)
@pytest.mark.parametrize("passes", [(1, 4), (9,), (2, 3, 4)], ids=str)
def test_float_frames_equal_the_cpu(vae, expected, path, precision, decibels, passes):
    settings = DecodeSettings(path=path, precision=precision)
    got = torch.cat([part.cpu() for part in float_frames(vae, normal_latents(9), settings, passes=passes)])
    assert psnr(got, expected) > decibels


def test_chunks_are_right_and_valid_while_the_next_pass_runs(vae):
    settings = DecodeSettings(path="plain", precision="fp32")
    floats = torch.cat([part.cpu() for part in float_frames(vae, normal_latents(9, 8, 8), settings)])
    wanted = torch.round(255 * (floats / 2 + 0.5).clamp(0, 1)).permute(0, 2, 3, 1).numpy()
    kept = []
    for chunk in decode(vae, normal_latents(9, 8, 8), settings, passes=(1, 2)):
        kept.append((chunk.start, chunk.frames, chunk.frames.copy()))
        for _, view, copy in kept[-2:]:
            assert np.array_equal(view, copy)
    got = np.concatenate([copy for _, _, copy in kept]).astype(int)
    assert [start for start, _, _ in kept] == [0, 1, 9, 17, 25]
    assert np.abs(got - wanted).max() <= 1


def test_memory_does_not_grow_with_the_number_of_frames(vae):
    peaks = []
    for frames in (9, 33):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in decode(vae, normal_latents(frames, 8, 8)):
            pass
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.02 * peaks[0]


def test_auto_takes_a_fast_path_in_sixteen_bits(vae):
    choice = explain(DecodeSettings(), vae.device)
    assert choice.path in ("built", "portable") and choice.precision == "fp16"
    assert next(decode(vae, normal_latents(1))).stats.precision == choice.precision
