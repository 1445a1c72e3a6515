"""Workers on gloo: the bytes of one device on any number of them, faults that end in words, and no process left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from engine.condition import make_condition
from engine.decode import DecodeRun, HostCopy
from engine.decode_paths import cuts
from engine.decode_plan import Choice, Plan
from engine.errors import Cancelled, EngineError, GroupError, NotFiniteError, ResourceError
from engine.executor import LocalExecutor
from engine.group import WorkerGroup
from engine.noise import draw_noise
from engine.prompt import TextEmbedding
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import latent_shape
from engine.shared import Shared
from engine.spread import GroupExecutor
from kernels.vae_decode.plan import GIB
from kernels.vae_decode.portable import PortableDecoder
from tests.engine.faulty_worker import BARE, Bare
from tests.engine.wan_vae import normal_latents
from tests.toy import TEXT_DIM

pytestmark = pytest.mark.timeout(240)
NEVER = threading.Event()
CPU = torch.device("cpu")
HALF = DecodeSettings("portable", "fp16")
ROOT = Path(__file__).resolve().parents[2]


def quiet(*_):
    pass


def group_of(checkpoint, ranks, **how):
    return GroupExecutor(str(checkpoint), [CPU] * ranks, **how)


def frames_of(executor, latents, settings=None, ranks=None):
    """All frames, and the lengths of the chunks; checks that a chunk stays readable as long as was promised."""
    kept, copies = [], []
    for chunk in executor.decode(latents, settings or DecodeSettings(), NEVER):
        kept.append(chunk.frames)
        copies.append(chunk.frames.copy())
        assert all(np.array_equal(a, b) for a, b in list(zip(kept, copies, strict=True))[-2:])
    return np.concatenate(copies), [len(frames) for frames in copies]


def workers():
    """Every worker process below this one."""
    return {child for child in psutil.Process().children(recursive=True) if _is_worker(child)}


def _is_worker(process):
    try:
        return "worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def local(toy_checkpoint):
    executor = LocalExecutor(str(toy_checkpoint), CPU)
    executor.load(DenoiseSettings(), quiet)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def group(bare_checkpoint):
    """Eight ranks, of which tests use as many as they like."""
    executor = group_of(bare_checkpoint, 8, program="tests.engine.faulty_worker")
    executor.load(DenoiseSettings(), quiet)
    yield executor
    processes = [member.process for member in executor.group.members]
    executor.close()
    assert all(process.poll() is not None for process in processes)


@pytest.fixture
def on(group, monkeypatch):
    """The group, as if it had so many ranks."""

    def use(ranks):
        known = group._known()[:ranks]
        monkeypatch.setattr(group, "_known", lambda: known)
        return group

    return use


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_frames_are_those_of_one_device_byte_for_byte(local, on, ranks):
    latents = normal_latents(6, 9, 4)
    expected, lengths = frames_of(local, latents)
    got, cut = frames_of(on(ranks), latents)
    assert expected.std() > 10 and np.array_equal(got, expected) and cut == lengths == [1, 16, 4]


@pytest.mark.parametrize("ranks", [2, 5])
def test_float_frames_are_those_of_one_device(local, on, ranks):
    latents = normal_latents(3, 5, 6)
    expected = torch.cat(list(local.float_frames(latents, DecodeSettings(), NEVER)))
    assert torch.equal(torch.cat(list(on(ranks).float_frames(latents, DecodeSettings(), NEVER))), expected)


def test_fewer_rows_than_ranks_use_fewer_ranks(local, group):
    latents = normal_latents(2, 3, 4)
    group.begin_request()
    assert np.array_equal(frames_of(group, latents)[0], frames_of(local, latents)[0])
    assert [lane["busy_seconds"] > 0 for lane in group.stats()] == [True] * 3 + [False] * 5


def test_one_device_alone(local, group):
    latents = normal_latents(2, 4, 4)
    alone = DecodeSettings(devices="one")
    assert np.array_equal(frames_of(group, latents, alone)[0], frames_of(local, latents)[0])
    assert group.explain_decode(alone).devices == group.explain_decode(DecodeSettings("reference")).devices == 1


def test_what_every_device_did_is_counted(on):
    group = on(2)
    group.begin_request()
    frames_of(group, normal_latents(3, 4, 4))
    for lane in group.stats()[:2]:
        assert lane["bytes_sent"] > 0 and lane["peak_bytes"] > 2**20
        assert 0 < lane["waiting_seconds"] < lane["busy_seconds"]
        assert all(0 <= began <= ended for _, began, ended in lane["spans"])
    assert group.stats()[0]["bytes_sent"] == group.stats()[1]["bytes_sent"]


def test_a_stop_ends_after_the_chunk_that_is_out(group):
    cancel, latents = threading.Event(), normal_latents(20, 8, 2)
    came = 0
    with pytest.raises(Cancelled, match=r"after 17 of 77"):
        for chunk in group.decode(latents, DecodeSettings(), cancel):
            came += len(chunk.frames)
            if came > 1:
                cancel.set()
    assert came == 17 and group.group.alive
    assert frames_of(group, latents[:, :, :2])[1] == [1, 4]


def test_a_consumer_that_leaves_early_disturbs_nobody(local, group):
    latents = normal_latents(6, 8, 3)
    next(iter(group.decode(latents, DecodeSettings(), NEVER)))
    assert np.array_equal(frames_of(group, latents)[0], frames_of(local, latents)[0])


def test_values_that_are_not_finite_on_one_rank_are_said_and_the_group_stays(group, local):
    latents = normal_latents(2, 8, 3)
    with pytest.raises(EngineError, match="latents hold NaN"):
        list(group.decode(latents * torch.nan, DecodeSettings(), NEVER))
    broken = latents.clone()
    broken[:, :, 1, 7] = 3e38
    with pytest.raises(EngineError, match=r"chunk 1 .*not finite"):
        list(group.decode(broken, DecodeSettings(), NEVER))
    assert np.array_equal(frames_of(group, latents)[0], frames_of(local, latents)[0])


def test_the_parent_holds_no_weights(group):
    assert not [name for name, value in vars(group).items() if isinstance(value, torch.nn.Module)]
    assert group.device.type == "cpu" and not torch.cuda.is_initialized()


def test_memory_is_that_of_all_processes(group):
    memory = group.memory()
    assert len(memory.devices) == 8 and memory.host > sum(entry.used for entry in memory.devices)


def bare(module):
    """A module's weights and numbers without its class."""
    if module is None or isinstance(module, (nn.Identity, torch.Tensor)):
        return module
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [bare(part) for part in module]
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, (int, str, type(None)))}
    parts = {name: bare(part) for name, part in module._modules.items()}
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters(recurse=False)}
    return Bare(**numbers, **parts, **tensors)


@pytest.fixture(scope="module")
def bare_checkpoint(toy_checkpoint, local, tmp_path_factory):
    """The toy checkpoint with its VAE in a form that is quick to read."""
    folder = shutil.copytree(toy_checkpoint, tmp_path_factory.mktemp("bare") / "checkpoint")
    vae = bare(local.vae)
    vae.config = dict(local.vae.config)
    torch.save(vae, folder / BARE)
    return folder


@contextmanager
def faulty(checkpoint, ranks):
    """A group that reads its faults from the environment each time that it starts."""
    others = workers()
    executor = group_of(checkpoint, ranks, program="tests.engine.faulty_worker")
    try:
        yield executor
    finally:
        executor.close()
        assert workers() == others


FAULTS = {
    "die": (GroupError, r"Rank 1 \(cpu\) ended in stage decode: killed by SIGKILL"),
    "stop": (GroupError, r"Rank 1 \(cpu\) hung in stage decode: its process is stopped"),
    "oom": (ResourceError, r"Rank 1 \(cpu\), stage decode: .* does not fit on cpu"),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_faults_in_the_middle_of_a_pass_end_in_words_and_the_next_request_works(
    bare_checkpoint, local, tmp_path, monkeypatch, ranks
):
    latents = normal_latents(2, 5, 3)
    expected, _ = frames_of(local, latents)
    with faulty(bare_checkpoint, ranks) as executor:
        for kind, (error, words) in FAULTS.items():
            monkeypatch.setenv("FAULT", f"1 {kind} 40 {tmp_path / kind}")
            executor.load(DenoiseSettings(), quiet)
            processes, clock = [member.process for member in executor.group.members], time.monotonic()
            with pytest.raises(error, match=words):
                for _ in range(9):
                    frames_of(executor, latents)
            assert time.monotonic() - clock < 30 and not executor.holds(DenoiseSettings())
            assert all(process.poll() is not None for process in processes)
        executor.load(DenoiseSettings(), quiet)
        assert np.array_equal(frames_of(executor, latents)[0], expected)


def steps_of(executor, preset, cancel=NEVER, **changes):
    """The steps of a run that needs no text model."""
    request = preset.request(steps=6, **changes)
    shape = latent_shape(request.frames, request.height, request.width)
    texts = [TextEmbedding(draw_noise(seed, (1, tokens, TEXT_DIM)), tokens, 0) for seed, tokens in ((1, 5), (2, 3))]
    return executor.denoise(request, tuple(texts), make_condition(shape), draw_noise(3, (1, *shape)), cancel)


@pytest.mark.parametrize("ranks", [2, 4])
def test_faults_in_the_middle_of_a_step_and_a_stop_between_two(
    bare_checkpoint, local, toy_preset, tmp_path, monkeypatch, ranks
):
    *_, expected = steps_of(local, toy_preset)
    with faulty(bare_checkpoint, ranks) as executor:
        for kind, (error, words) in FAULTS.items():
            monkeypatch.setenv("FAULT", f"1 {kind} 5 {tmp_path / kind}")
            executor.load(DenoiseSettings(), quiet)
            clock = time.monotonic()
            with pytest.raises(error, match=words.replace("decode", "denoise")):
                list(steps_of(executor, toy_preset))
            assert time.monotonic() - clock < 30
        executor.load(DenoiseSettings(), quiet)
        cancel, came = threading.Event(), 0
        with pytest.raises(Cancelled, match="after 2 of 6"):
            for step in steps_of(executor, toy_preset, cancel):
                came = step.k
                if came == 2:
                    cancel.set()
        *_, last = steps_of(executor, toy_preset)
        assert (last.latents - expected.latents).abs().max() < 1e-4 * expected.latents.abs().max()


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_by_way_of_the_host_change_nothing(bare_checkpoint, local, toy_preset, monkeypatch, ranks):
    """What ranks that share a GPU do, on a CPU."""
    monkeypatch.setenv("FAULT", "-1 staged 0 /")
    latents = normal_latents(6, 9, 4)
    *_, expected = steps_of(local, toy_preset)
    with faulty(bare_checkpoint, ranks) as executor:
        executor.load(DenoiseSettings(), quiet)
        assert np.array_equal(frames_of(executor, latents)[0], frames_of(local, latents)[0])
        assert all(lane["bytes_sent"] > 0 for lane in executor.stats())
        *_, last = steps_of(executor, toy_preset)
        assert (last.latents - expected.latents).abs().max() < 1e-4 * expected.latents.abs().max()


@pytest.mark.parametrize(
    "ranks, kind, words", [(2, "path", "its compiler is missing"), (4, "build", "nvcc ended with 1")]
)
def test_a_rank_without_the_decoder_makes_all_take_the_common_one(
    bare_checkpoint, local, monkeypatch, ranks, kind, words
):
    latents = normal_latents(2, 4, 3)
    monkeypatch.setenv("FAULT", f"1 {kind} 0 /")
    with faulty(bare_checkpoint, ranks) as executor:
        executor.load(DenoiseSettings(), quiet)
        assert np.array_equal(frames_of(executor, latents)[0], frames_of(local, latents)[0])
        choice = executor.explain_decode(DecodeSettings())
        assert choice[:2] == ("plain", "fp32") and f"rank 1 (cpu): {words}" in choice.reason


def test_the_ranks_say_again_which_decoders_they_have_once_they_know_the_vae(bare_checkpoint, monkeypatch):
    monkeypatch.setenv("FAULT", "1 widths 0 /")
    with faulty(bare_checkpoint, 2) as executor:
        assert executor.explain_decode(DecodeSettings())[:2] == ("plain", "bf16")
        executor.load(DenoiseSettings(), quiet)
        assert executor.explain_decode(DecodeSettings())[:2] == ("plain", "fp32")


def portable(latents, bare_checkpoint, precision, passes=(1, 4)):
    """Frames that one device gives on path portable, without asking whether it is there."""
    choice = Choice("portable", precision, "asked for")
    run = DecodeRun(torch.load(bare_checkpoint / BARE, weights_only=False), Plan(latents, choice, passes))
    copy = HostCopy(run)
    return np.concatenate([copy.start(span).chunk().frames.copy() for span in run.plan.passes])


@pytest.mark.parametrize("ranks, precision", [(2, "fp32"), (4, "fp32"), (4, "fp16")])
def test_a_fast_path_takes_more_frames_at_once_and_gives_the_same_bytes(bare_checkpoint, on, ranks, precision):
    latents = normal_latents(9, 6, 4)
    assert cuts(ranks)[0].slices == tuple(ranks * frames for frames in cuts(1)[0].slices) and cuts(ranks)[1:] == cuts(1)
    got, lengths = frames_of(on(ranks), latents, DecodeSettings("portable", precision))
    assert np.array_equal(got, portable(latents, bare_checkpoint, precision)) and lengths == [1, 16, 16]


def decoder_of(bare_checkpoint, dtype):
    return PortableDecoder(torch.load(bare_checkpoint / BARE, weights_only=False), dtype)


def test_a_budget_of_memory_makes_all_ranks_cut_alike(bare_checkpoint, group):
    """Between what the larger and what the smaller band take: left to themselves they would exchange other shapes."""
    latents = normal_latents(9, 5, 8)
    decoder = decoder_of(bare_checkpoint, torch.float32)
    low, high = (decoder.peak(cuts(2)[2], rows, 8) for rows in (2, 3))
    settings = DecodeSettings("portable", "fp32", memory_gib=(low + high) / 2 / GIB)
    most, group.most = group.most, 2
    try:
        plan = group._agreed(latents, settings)
        assert group._ask(plan, "decode_fit", plan.choice, (5, 8), plan.memory_gib, 2, 0) == [2, 3]
        assert group._fit(plan, 0) == 3
        got, lengths = frames_of(group, latents, settings)
        assert np.array_equal(got, portable(latents, bare_checkpoint, "fp32")) and lengths == [1, 16, 16]
        with pytest.raises(ResourceError, match=r"rank 0 \(cpu\): .* memory_gib allows 0\.0 GiB"):
            frames_of(group, latents, DecodeSettings("portable", "fp32", memory_gib=0.01))
        half = (decoder_of(bare_checkpoint, dtype).peak(cuts(2)[-1], 3, 8) for dtype in (torch.bfloat16, torch.float32))
        settings = DecodeSettings("portable", "fp32", memory_gib=sum(half) / 2 / GIB)
        with pytest.raises(ResourceError, match=r"in fp32 .* In bf16 it fits: choose decode precision bf16"):
            frames_of(group, latents, settings)
        plan = group._agreed(latents, settings)
        plan.asked = False
        plan, cut = group._fitting(plan, 0)
        assert (plan.choice.precision, cut) == ("bf16", 4) and "goes on in bf16" in plan.notes[0]
        assert group.group.alive
    finally:
        group.most = most


def test_fp16_that_overflows_goes_on_in_bf16_and_what_was_delivered_stays(bare_checkpoint, group):
    latents = normal_latents(9, 6, 4)
    latents[:, :, 5:, 4] *= 1e5
    chunks = [(c.start, c.frames.copy(), c.stats) for c in group.decode(latents, HALF, NEVER)]
    assert [start for start, _, _ in chunks] == [0, 1, 17]
    assert [stats.precision for _, _, stats in chunks] == ["fp16", "fp16", "bf16"]
    assert [len(stats.notes) for _, _, stats in chunks] == [0, 0, 1]
    assert "fp16 overflowed at frame 17" in chunks[2][2].notes[0] and group.group.alive
    assert np.array_equal(chunks[1][1], portable(latents[:, :, :5], bare_checkpoint, "fp16")[1:])
    assert np.array_equal(chunks[2][1], portable(latents, bare_checkpoint, "bf16")[17:])
    with pytest.raises(NotFiniteError):
        list(group.float_frames(latents, HALF, NEVER))


def test_a_rank_out_of_memory_makes_all_go_on_in_smaller_pieces(bare_checkpoint, tmp_path, monkeypatch):
    latents, settings = normal_latents(9, 6, 4), DecodeSettings("portable", "fp32")
    with faulty(bare_checkpoint, 2) as executor:
        monkeypatch.setenv("FAULT", f"1 oom 60 {tmp_path / 'once'}")
        executor.load(DenoiseSettings(), quiet)
        chunks = [(c.start, c.frames.copy(), c.stats.notes) for c in executor.decode(latents, settings, NEVER)]
        assert (tmp_path / "once").exists() and executor.holds(DenoiseSettings())
    assert [start for start, _, _ in chunks] == [0, 1, 17]
    (notes,) = (notes for _, _, notes in chunks if notes)
    assert notes[0].startswith("Rank 1 (cpu) ran out of memory in slices of 8, ") and "smaller pieces" in notes[0]
    frames = np.concatenate([frames for _, frames, _ in chunks])
    assert np.array_equal(frames, portable(latents, bare_checkpoint, "fp32"))


def test_a_rank_that_dies_between_two_chunks_is_named(bare_checkpoint):
    with faulty(bare_checkpoint, 2) as executor:
        executor.load(DenoiseSettings(), quiet)
        frames = executor.decode(normal_latents(6, 4, 3), DecodeSettings(), NEVER)
        first = next(frames).frames
        executor.group.members[0].process.send_signal(signal.SIGKILL)
        with pytest.raises(GroupError, match=r"Rank 0 \(cpu\) ended in stage decode: killed by SIGKILL"):
            list(frames)
        assert first.any()  # what was delivered stays readable


def test_a_rank_that_does_not_come_leaves_nothing_behind(bare_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("FAULT", f"1 start 0 {tmp_path / 'once'}")
    with faulty(bare_checkpoint, 3) as executor:
        with pytest.raises(GroupError, match=r"Rank 1 \(cpu\) .*start"):
            executor.load(DenoiseSettings(), quiet)
        assert not executor.group.alive
        executor.load(DenoiseSettings(), quiet)


PARENT = """
import sys, time, torch
from engine.group import WorkerGroup
group = WorkerGroup([torch.device("cpu")] * 2)
group.start()
print(*(member.process.pid for member in group.members), flush=True)
time.sleep(600)
"""


def test_workers_end_with_a_parent_that_is_killed():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, text=True) as parent:
        left = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(left) == 2 and all(process.is_running() for process in left)
        parent.kill()
    gone, alive = psutil.wait_procs(left, timeout=30)
    assert len(gone) == 2 and not alive


def test_two_groups_at_once_do_not_meet():
    groups = [WorkerGroup([CPU] * 2) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            assert [len(facts) for facts in pool.map(WorkerGroup.start, groups)] == [2, 2]
    finally:
        for group in groups:
            group.close()


def test_shared_memory_outlives_its_descriptor_and_has_no_name():
    block = Shared.make("test", 8)
    values = block.array((2,), np.int32)
    values[:] = 7
    other = Shared(os.dup(block.fd), 8).array((2,), np.int32)
    block.close()
    assert other.tolist() == [7, 7] and not list(Path("/dev/shm").glob("test*"))


def test_a_request_after_the_group_was_let_go_of_is_refused_in_words():
    with pytest.raises(GroupError, match="let go of before stage decode"):
        WorkerGroup([CPU]).call("decode", "decode_pass", 0)
