"""What is left after many jobs: nothing. Memory, threads, processes, open files and disk, over the real engine."""

import ctypes
import dataclasses
import gc
import threading
import time
from dataclasses import dataclass

import httpx
import psutil
import pytest
from gradio_client import Client

from engine.engine import Engine
from engine.janitor import Keep
from engine.jobs import Jobs
from tests.double import serve

MIB = 2**20
# What the allocator may keep; one lost video of 5 frames in fp32 has 0.2 MiB, one lost toy model 3 MiB.
SLACK = 12 * MIB


@dataclass
class Held:
    """What a process holds. rss: bytes; files: open ones, without sockets."""

    rss: int
    threads: int
    children: int
    files: int


def held():
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return Held(process.memory_info().rss, threading.active_count(), len(process.children()), len(process.open_files()))


def settled(before, seconds=15):
    """What is held once threads and processes have ended, which they may take a moment for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = held()
        if (now.threads, now.children, now.files) <= (before.threads, before.children, before.files):
            break
        time.sleep(0.2)
    return now


def assert_flat(before, slack=SLACK):
    now = settled(before)
    assert now.threads <= before.threads, [thread.name for thread in threading.enumerate()]
    assert now.children <= before.children, psutil.Process().children()
    assert now.files <= before.files, psutil.Process().open_files()
    assert now.rss - before.rss < slack, f"{(now.rss - before.rss) / MIB:.1f} MiB more"


@pytest.fixture
def small(toy_preset):
    return toy_preset.request(prompt="a red circle", height=64, width=64, frames=5, steps=1)


def test_a_hundred_jobs_leave_nothing(toy_preset, small, tmp_path, monkeypatch):
    # What was just made stays for a while, whatever the limits say.
    monkeypatch.setattr("engine.janitor.GRACE_SECONDS", 0)
    jobs = Jobs(Engine(toy_preset, "cpu"), tmp_path, Keep(jobs=5))
    try:
        run(jobs, small, 20)
        before, disk = held(), bytes_below(tmp_path)
        run(jobs, small, 80)
        assert_flat(before)
        assert bytes_below(tmp_path) < 1.5 * disk
        # The kept ones, and at most the one that has just ended.
        assert len(list(tmp_path.glob("2*"))) <= 6
    finally:
        jobs.close()
        jobs.engine.close()


def run(jobs, request, count):
    for seed in range(count):
        assert jobs.wait(jobs.submit(dataclasses.replace(request, seed=seed))).status == "finished"


def bytes_below(folder):
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def test_twenty_stops_and_starts_bring_memory_back(toy_preset, small, tmp_path):
    jobs = Jobs(Engine(toy_preset, "cpu"), tmp_path, Keep(jobs=5))
    try:
        run(jobs, small, 3)
        before = held()
        for cycle in range(20):
            job = jobs.submit(dataclasses.replace(small, steps=8, frames=9, seed=cycle))
            # Stopped at another place each time: while it waits, loads, denoises and decodes.
            for state in jobs.follow(job, 0.002):
                if len(state.stages) > cycle % 5:
                    break
            jobs.cancel(job)
            assert jobs.wait(job).status in ("stopped", "finished")
            if cycle % 5 == 4:
                jobs.engine.close()
                run(jobs, small, 1)
        assert_flat(before)
    finally:
        jobs.close()
        jobs.engine.close()


def test_an_engine_that_was_closed_holds_no_weights(toy_preset, small, tmp_path):
    before = weights()  # what other tests have left in this process
    engine = Engine(toy_preset, "cpu")
    list(engine.generate(small, tmp_path / "a"))
    parameters = weights() - before
    assert parameters > MIB
    engine.close()
    assert weights() - before < parameters / 100


def weights():
    """Bytes of all parameters of modules that are alive."""
    import torch

    gc.collect()
    alive = {id(x): x for x in gc.get_objects() if isinstance(x, torch.nn.Parameter)}
    return sum(parameter.numel() * parameter.element_size() for parameter in alive.values())


def test_calls_and_pages_over_http_leave_nothing(toy_preset, tmp_path):
    with serve(Engine(toy_preset, "cpu"), tmp_path, keep=Keep(jobs=5)) as served:
        client = Client(served.url, verbose=False)
        visit(served, client, 5)
        before = held()
        visit(served, client, 20)
        # The client and the server share this process, so their buffers count too.
        assert_flat(before, 2 * SLACK)


def visit(served, client, count):
    for _ in range(count):
        assert httpx.get(served.url).status_code == 200
        path, stats = client.predict(
            prompt="a", seconds=0, height=64, width=64, steps=1, guidance=1, api_name="/generate"
        )
        assert stats["frames"] == 1 and path
        assert httpx.get(f"{served.url}/live/{stats['job']}.mp4").status_code in (200, 404)


def test_two_pages_at_once_get_their_own_videos(toy_preset, tmp_path):
    with serve(Engine(toy_preset, "cpu"), tmp_path) as served:
        clients = [Client(served.url, verbose=False) for _ in range(2)]
        small = {"seconds": 0.3, "height": 64, "width": 64, "steps": 4}
        calls = [
            client.submit(prompt=f"page {number}", seed=number, **small, api_name="/generate")
            for number, client in enumerate(clients)
        ]
        for number, call in enumerate(calls):
            _, stats = call.result(120)
            assert (stats["request"]["prompt"], stats["request"]["seed"]) == (f"page {number}", number)
        ids = {call.result()[1]["job"] for call in calls}
        assert len(ids) == 2 and all(served.jobs.snapshot(job).status == "finished" for job in ids)
