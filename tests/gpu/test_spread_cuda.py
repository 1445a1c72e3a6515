"""Ranks that share one GPU, by way of the host, against that GPU alone. Prints how far apart they are (-s shows it)."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch

from engine.compare import levels_apart, limits_for
from engine.condition import make_condition
from engine.decode import decode
from engine.decode_paths import cuts, explain, fast_decoder, fit
from engine.errors import Cancelled, GroupError, RequestError
from engine.mmdit import MMDiTConfig
from engine.noise import draw_noise
from engine.preset import load_preset
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import latent_shape
from kernels.vae_decode.plan import GIB

pytest.importorskip("diffusers")
from engine.random_group import RandomGroup
from engine.rehearsal import FULL, SMALL, Scene, random_vae

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPU = torch.device("cuda", 0)
NEVER = threading.Event()
PAIRS = [(path, precision) for path in ("plain", "portable", "built") for precision in ("fp32", "bf16", "fp16")]


def quiet(*_):
    pass


def group_of(ranks: int, scene: Scene, **settings):
    group = RandomGroup([GPU] * ranks, scene)
    group.load(DenoiseSettings(**settings), quiet)
    return group


@pytest.fixture(scope="module")
def small():
    """Three ranks with a small decoder and a small transformer."""
    group = group_of(3, SMALL)
    yield group
    group.close()


@pytest.fixture(scope="module")
def vae():
    return random_vae(SMALL.vae, GPU)


def settings_for(path, precision):
    if path == "built" and precision == "fp32":
        pytest.skip("its convolutions take 16-bit numbers")
    settings = DecodeSettings(path, precision)
    try:
        explain(settings, GPU)
    except RequestError as error:
        pytest.skip(str(error))
    return settings


def frames_of(executor, latents, settings):
    return np.concatenate([chunk.frames.copy() for chunk in executor.decode(latents, settings, NEVER)])


def compare(name, got, expected, choice):
    """Print how far apart two decodes are, and hold them to what the page says of such a pair."""
    levels, share = max(int(levels_apart(a, b).max()) for a, b in zip(got, expected, strict=True)), (got != expected)
    print(f"\n{name}: {levels} levels apart at most, {share.mean():.2e} of the bytes differ, deviation {got.std():.0f}")
    limits = limits_for(choice, choice, gpu=True)
    assert expected.std() > 5 and levels <= (0 if limits.same_bytes else limits.levels)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("path, precision", PAIRS)
def test_a_decode_is_that_of_one_process(small, vae, path, precision, ranks):
    settings, latents = settings_for(path, precision), draw_noise(7, (1, 48, 9, 7, 6))
    expected = np.concatenate([chunk.frames.copy() for chunk in decode(vae, latents, settings)])
    small.most = ranks
    small.begin_request()
    got = frames_of(small, latents, settings)
    choice = small.explain_decode(settings)
    assert choice.devices == ranks and "ranks share cuda:0" in choice.reason
    lanes = small.stats()[:ranks]
    assert all(lane["bytes_sent"] > 0 and lane["waiting_seconds"] > 0 for lane in lanes)
    small.most = 3
    compare(f"{path} {precision}, {ranks} ranks", got, expected, choice)


def test_fp16_that_overflows_goes_on_in_bf16_on_all_ranks(small, vae):
    settings, latents = settings_for("portable", "fp16"), draw_noise(7, (1, 48, 9, 7, 6))
    latents[:, :, 5:, 5] *= 1e5
    wanted = [(chunk.frames.copy(), chunk.stats) for chunk in decode(vae, latents, settings)]
    found = [(chunk.frames.copy(), chunk.stats) for chunk in small.decode(latents, settings, NEVER)]
    assert [stats.precision for _, stats in found] == [stats.precision for _, stats in wanted]
    assert [stats.notes for _, stats in found] == [stats.notes for _, stats in wanted] and found[-1][1].notes
    for (got, stats), (expected, _) in zip(found, wanted, strict=True):
        compare(f"portable {stats.precision} after an overflow", got, expected, small.explain_decode(settings))


def test_ranks_that_share_a_gpu_share_its_memory_and_cut_alike(small, vae):
    """A budget between what the larger and the smaller bands take."""
    settings, latents = settings_for("portable", "fp16"), draw_noise(7, (1, 48, 5, 7, 6))
    expected = np.concatenate([chunk.frames.copy() for chunk in decode(vae, latents, settings)])
    decoder = fast_decoder(vae, explain(settings, GPU))
    low, high = (decoder.peak(cuts(3)[2], rows, 6) for rows in (2, 3))
    budget = dataclasses.replace(settings, memory_gib=(low + high) / 2 / GIB)
    plan = small._agreed(latents, budget)
    found = small._ask(plan, "decode_fit", plan.choice, (7, 6), budget.memory_gib, 3, 0)
    assert found == [2, 2, 3] and small._fit(plan, 0) == 3
    compare("portable fp16 in a budget", frames_of(small, latents, budget), expected, plan.choice)
    free = torch.cuda.mem_get_info(GPU)[0]
    assert fit(decoder, 7, 6, None, sharing=3) == 0 or free < 3 * decoder.peak(cuts(1)[0], 7, 6)


def test_what_runs_is_said(small):
    assert small.device_name().count("cuda:0") == 4 and "nothing is gained" in small.device_name()


def request_for(scene, steps, **changes):
    sizes = {name: getattr(scene, name) for name in ("height", "width", "frames")}
    return load_preset("pan2" if scene.height > 64 else "tiny").request(steps=steps, **sizes, **changes)


def steps_of(executor, request, cancel=NEVER):
    shape = latent_shape(request.frames, request.height, request.width)
    texts = executor.encode_prompt("words"), executor.encode_prompt(" ")
    return executor.denoise(request, texts, make_condition(shape), draw_noise(3, (1, *shape)), cancel)


def killed_soon(executor, rank, seconds):
    timer = threading.Timer(seconds, executor.group.members[rank].process.kill)
    timer.start()
    return timer


def test_a_rank_killed_in_the_middle_ends_in_words_and_the_next_request_works(small):
    settings, latents = DecodeSettings("plain", "fp32"), draw_noise(1, (1, 48, 401, 9, 8))
    short = latents[:, :, :5]
    expected = frames_of(small, short, settings)
    killed_soon(small, 2, 0.3)
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"Rank 2 \(cuda:0\) ended in stage decode: killed by SIGKILL"):
        frames_of(small, latents, settings)
    assert time.monotonic() - began < 30
    small.load(DenoiseSettings(), quiet)
    assert np.array_equal(frames_of(small, short, settings), expected)

    request = request_for(SMALL, 50, guidance=1.0)
    expected = list(steps_of(small, dataclasses.replace(request, steps=2)))[-1].latents
    steps = steps_of(small, request)
    next(steps)
    small.group.members[1].process.kill()
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"Rank 1 \(cuda:0\) ended in stage denoise: killed by SIGKILL"):
        list(steps)
    assert time.monotonic() - began < 30
    small.load(DenoiseSettings(), quiet)
    assert torch.equal(list(steps_of(small, dataclasses.replace(request, steps=2)))[-1].latents, expected)


def test_a_stop_ends_within_a_chunk_or_a_step_and_the_next_request_works(small):
    settings, latents = DecodeSettings("plain", "fp32"), draw_noise(1, (1, 48, 41, 9, 8))
    for _ in range(2):
        cancel, came = threading.Event(), 0
        with pytest.raises(Cancelled, match=r"of 161"):
            for chunk in small.decode(latents, settings, cancel):
                came += len(chunk.frames)
                cancel.set()
        assert came < 1 + 3 * 16
        cancel = threading.Event()
        with pytest.raises(Cancelled, match="after 1 of 6"):
            for _ in steps_of(small, request_for(SMALL, 6), cancel):
                cancel.set()


@pytest.mark.parametrize("path", ["portable", "built"])
def test_the_released_decoder_at_its_true_size(released, path):
    settings = settings_for(path, "fp16")
    latents = draw_noise(5, (1, *latent_shape(17, 704, 1248)))
    took, found = {}, {}
    for devices in ("one", "all"):
        for _ in range(2):  # the first one compiles
            released.begin_request()
            began = time.perf_counter()
            found[devices] = frames_of(released, latents, dataclasses.replace(settings, devices=devices))
            took[devices] = time.perf_counter() - began
    shares = [f"{lane['peak_bytes'] / 2**30:.1f} GiB, {lane['bytes_sent'] / 1e6:.0f} MB" for lane in released.stats()]
    print(f"\n{path}: {took['one']:.2f} s by one rank, {took['all']:.2f} s by two that share the GPU ({shares})")
    choice = released.explain_decode(settings)
    compare(f"{path} fp16, 704 x 1248, 17 frames, 2 ranks", found["all"], found["one"], choice)


@pytest.fixture(scope="module")
def released():
    """Two ranks with the released decoder's sizes."""
    group = group_of(2, dataclasses.replace(FULL, config=SMALL.config))
    yield group
    group.close()


@pytest.fixture(scope="module")
def wide():
    """Two ranks with three blocks of the released transformer's width."""
    group = group_of(2, dataclasses.replace(FULL, config=MMDiTConfig(num_layers=3), vae=SMALL.vae))
    yield group
    group.close()


def test_steps_of_the_released_width_are_those_of_one_process(wide):
    """26,598 video tokens, bf16, two steps: the guidance branches on two ranks, and one branch's tokens on two."""
    last = {}
    for fused in ("on", "off"):
        wide.load(DenoiseSettings(fused_kernels=fused), quiet)
        for guidance in (2.5, 1.0):
            for devices in ("one", "all"):
                how = DenoiseSettings(fused_kernels=fused, devices=devices)
                began = time.perf_counter()
                steps = list(steps_of(wide, request_for(wide.scene, 2, guidance=guidance, denoise=how)))
                last[fused, guidance, devices] = steps[-1].latents
                print(f"\nfused {fused}, guidance {guidance}, {devices}: {time.perf_counter() - began:.2f} s")
    for guidance in (2.5, 1.0):
        # What two right ways of computing in bf16 are apart is the measure of what another order of sums may be.
        usual = distance(last["on", guidance, "one"], last["off", guidance, "one"])
        for fused in ("on", "off"):
            far = distance(last[fused, guidance, "all"], last[fused, guidance, "one"])
            print(f"fused {fused}, guidance {guidance}: {far:.1e} from one rank; fused and plain are {usual:.1e} apart")
            assert 0 < usual < 0.05 and far <= 2 * usual


def distance(a, b):
    """Relative L2."""
    return float((a.double() - b.double()).norm() / b.double().norm())
