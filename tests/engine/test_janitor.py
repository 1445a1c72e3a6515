"""Limits on what is kept, leftovers of crashes, and disks that are too full: known before the work."""

import dataclasses
import logging
import os
import time
from types import SimpleNamespace

import pytest

from engine import disk, janitor, store
from engine.errors import RequestError, ResourceError
from engine.janitor import Keep, too_many
from engine.job import CompareState, JobState
from engine.jobs import Jobs
from engine.preset import load_preset
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents
from tests.double import Double, Pace

PRESET = load_preset("tiny")
SMALL = {"height": 64, "width": 96, "frames": 9, "steps": 1}
PLAIN = DecodeSettings("plain", "fp32")
MIB = 2**20


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(janitor, "GRACE_SECONDS", 0.0)


@pytest.fixture
def registry(tmp_path):
    made = []

    def start(keep=None, pace=None):
        if made:
            made[-1].close()
        made.append(Jobs(Double(PRESET, pace), tmp_path / "outputs", keep))
        return made[-1]

    yield start
    made[-1].close()


def submit(jobs, **values):
    return jobs.submit(PRESET.request(**({"prompt": "a"} | SMALL | values)))


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def old(name, days, tmp_path):
    state = JobState(id=name, folder=tmp_path / name, request=None, status="finished")
    state.created -= days * 86_400
    return state


def test_the_oldest_go_by_age_count_and_bytes(tmp_path):
    jobs = [old(name, days, tmp_path) for name, days in (("a", 40), ("b", 20), ("c", 10), ("d", 0))]
    sizes = dict.fromkeys("abcd", 2**30)

    def doomed(safe=(), **limits):
        return list(too_many(jobs, sizes, Keep(**({"jobs": 0, "days": 0, "gib": 0} | limits)), safe))

    assert doomed() == []
    assert doomed(days=30) == ["a"] and doomed(days=15) == ["a", "b"]
    assert doomed(jobs=3) == ["a"] and doomed(jobs=1) == ["a", "b", "c"]
    assert doomed(gib=4) == [] and doomed(gib=2.5) == ["a", "b"]
    assert doomed(jobs=2, days=30) == ["a", "b"]
    assert doomed(["a"], jobs=3) == ["b"] and doomed("abcd", gib=1) == []


def test_a_clock_that_is_far_ahead_makes_nothing_old(registry, monkeypatch):
    jobs = registry(Keep(days=30))
    made = [submit(jobs) for _ in range(2)]
    jobs.wait(made[-1])
    jobs.close()
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 400 * 86_400)
    jobs = registry(Keep(days=30))
    assert {job.id for job in jobs.recent()} == set(made)
    late = submit(jobs)
    jobs.wait(late)
    until(lambda: not jobs._tickets)
    jobs._tidy()
    assert {job.id for job in jobs.recent()} == {late, *made}


def test_age_counts_on_from_the_newest_job(tmp_path, monkeypatch):
    jobs = [old(name, days, tmp_path) for name, days in (("a", 50), ("b", 20), ("c", 10))]
    today, began = janitor.calendar(jobs), time.monotonic()
    assert today() == pytest.approx(jobs[-1].created + 86_400, abs=10)
    assert list(too_many(jobs, {}, Keep(), now=today())) == ["a"]
    monkeypatch.setattr(time, "monotonic", lambda: began + 15 * 86_400)
    assert list(too_many(jobs, {}, Keep(), now=today())) == ["a"]
    monkeypatch.setattr(time, "monotonic", lambda: began + 20 * 86_400)
    assert list(too_many(jobs, {}, Keep(), now=today())) == ["a", "b"]
    assert janitor.calendar([])() == pytest.approx(time.time(), abs=30 * 86_400)


def test_only_the_newest_stay_and_what_goes_is_logged(registry, caplog):
    caplog.set_level(logging.INFO)
    jobs = registry(Keep(jobs=2))
    made = [submit(jobs) for _ in range(4)]
    until(lambda: len(jobs.recent()) == 2)
    jobs.close()
    assert sorted(folder.name for folder in jobs.outputs.glob("*/")) == sorted(made[2:])
    lines = [record.getMessage() for record in caplog.records if "removing the job" in record.getMessage()]
    assert all(any(job in line and "are kept" in line for line in lines) for job in made[:2])
    assert registry(Keep(jobs=1)).snapshot(made[3]) and not (jobs.outputs / made[2]).exists()


def test_what_runs_waits_or_is_needed_stays(registry):
    jobs = registry()
    first = submit(jobs)
    jobs.wait(first)
    jobs.engine.pace = Pace(chunk=5, step=5)
    running = submit(jobs)
    again = jobs.decode_again(first, PLAIN)
    for job in (running, again):
        with pytest.raises(RequestError, match="still at work"):
            jobs.delete(job)
    with pytest.raises(RequestError, match="about to be decoded"):
        jobs.delete(first)
    jobs.keep = Keep(jobs=1)
    jobs._tidy()
    assert {job.id for job in jobs.recent()} == {first, running, again}
    jobs.cancel(again)
    jobs.cancel(running)
    jobs.wait(running)
    until(lambda: len(jobs.recent()) == 1)


def test_a_job_that_can_not_be_deleted_stays_in_the_list(registry):
    jobs = registry()
    job = submit(jobs)
    jobs.wait(job)
    blocked = jobs.outputs / f"{job}.part"
    (blocked / "x").mkdir(parents=True)
    with pytest.raises(ResourceError, match="could not be deleted"):
        jobs.delete(job)
    assert [state.id for state in jobs.recent()] == [job] and jobs.snapshot(job).video.is_file()
    (blocked / "x").rmdir()
    jobs.delete(job)
    assert jobs.recent() == [] and not (jobs.outputs / job).exists()


def test_what_has_just_ended_stays_for_a_while(registry, monkeypatch):
    monkeypatch.setattr(janitor, "GRACE_SECONDS", 3600.0)
    jobs = registry(Keep(jobs=1))
    made = [submit(jobs) for _ in range(3)]
    jobs.wait(made[-1])
    jobs.close()
    assert len(jobs.recent()) == 3 and (made[0] and (jobs.outputs / made[0] / "live.mp4").exists())


def test_a_waiting_job_that_is_stopped_and_deleted_does_not_end_the_worker(registry):
    jobs = registry(pace=Pace(step=30))
    running, waiting = submit(jobs), submit(jobs)
    jobs.cancel(waiting)
    jobs.delete(waiting)
    jobs.engine.pace = Pace()
    jobs.cancel(running)
    assert jobs.wait(submit(jobs)).status == "finished"


def test_a_folder_that_can_not_be_tidied_does_not_end_the_worker(registry, monkeypatch, caplog):
    jobs = registry()

    def broken(*arguments):
        raise PermissionError("not yours")

    monkeypatch.setattr("engine.jobs.sweep", broken)
    made = [submit(jobs) for _ in range(2)]
    assert [jobs.wait(job).status for job in made] == ["finished"] * 2
    assert "not yours" in caplog.text or "could not be tidied" in caplog.text


def test_deleting_removes_the_folder_and_nothing_else(registry):
    jobs = registry()
    first, second = submit(jobs), submit(jobs)
    jobs.wait(second)
    again = jobs.wait(jobs.decode_again(first, PLAIN))
    jobs.delete(again.id)
    assert not again.folder.exists() and jobs.snapshot(again.id) is None
    assert (jobs.outputs / first / "latents.safetensors").exists() and jobs.snapshot(second)
    with pytest.raises(RequestError, match="There is no job"):
        jobs.delete(again.id)
    with pytest.raises(RequestError, match="There is no job"):
        jobs.delete("../outputs")
    assert registry().snapshot(again.id) is None


def test_leftovers_of_crashes_go_and_foreign_files_stay(registry, caplog):
    caplog.set_level(logging.INFO)
    jobs = registry()
    job = submit(jobs)
    jobs.wait(job)
    jobs.close()
    outputs = jobs.outputs
    orphan, half = outputs / "20260101-000000-00000000", outputs / "20260101-000000-00000001.part"
    comparison = outputs / "20260101-000000-00000002"
    for folder in (orphan / "a", half, comparison / "a", outputs / "mine.part"):
        folder.mkdir(parents=True)
    state = CompareState(
        id=comparison.name, folder=comparison, request=CompareRequest(RandomLatents(1, 5, 64, 64), PLAIN, PLAIN)
    )
    state.status, state.started = "running", state.created
    janitor_files = [
        outputs / job / "video.mp4.part", orphan / "live.mp4", orphan / "video.mp4.part", orphan / "a" / "frames.npy",
        half / "video.mp4", comparison / "float.npy", comparison / "a" / "frames.npy",
    ]  # fmt: skip
    stays = [orphan / "video.mp4", orphan / "note.txt", outputs / "live.mp4", outputs / "mine.part" / "a.part"]
    for path in (*janitor_files, *stays):
        path.write_bytes(b"x")
    store.save(state)
    jobs = registry()
    assert [path for path in janitor_files if path.exists()] == []
    assert [path for path in stays if not path.exists()] == []
    assert not half.exists() and not (outputs / job / "live.mp4").exists()
    assert (outputs / job / "video.mp4").exists()
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(str(path.parent if half in path.parents else path) in said for path in janitor_files)


def full(monkeypatch, free):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))


def test_a_full_disk_is_said_before_the_work_with_both_figures(registry, monkeypatch):
    jobs = registry()
    full(monkeypatch, 100 * MIB)
    with pytest.raises(ResourceError, match=r"This job may need 200\.0 MiB .* 100\.0 MiB are free"):
        submit(jobs)
    with pytest.raises(ResourceError, match="may need"):
        jobs.submit(CompareRequest(RandomLatents(1, 5, 64, 64), PLAIN, PLAIN))
    assert jobs.recent() == [] and not list(jobs.outputs.glob("*/"))


def test_what_waits_has_its_room_promised(registry, monkeypatch):
    jobs = registry(pace=Pace(step=5))
    large = {"height": 320, "width": 320, "frames": 241}
    one = disk.video(241, 320, 320) + disk.latents(241, 320, 320)
    full(monkeypatch, disk.SPARE + int(2.5 * one))
    made = [submit(jobs, **large) for _ in range(2)]
    with pytest.raises(ResourceError, match="This job and those before it may need"):
        submit(jobs, **large)
    for job in reversed(made):
        jobs.cancel(job)
    jobs.wait(made[0])
    until(lambda: not jobs._tickets)
    jobs.cancel(submit(jobs, **large))


def test_a_comparison_needs_its_raw_frames_and_a_second_decode_no_latents(tmp_path):
    comparison = CompareState(
        id="a", folder=tmp_path, request=CompareRequest(RandomLatents(1, 5, 64, 96), PLAIN, PLAIN)
    )
    raw = 5 * 64 * 96 * 3
    assert janitor.room(comparison) == 6 * raw + 2 * int(0.2 * raw)
    video = JobState(id="a", folder=tmp_path, request=PRESET.request(prompt="a", **SMALL))
    assert janitor.room(video) == int(0.2 * 9 * 64 * 96 * 3) + 48 * 3 * 4 * 6 * 4


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("0", 0), ("1.5", 1.5)])
def test_limits_come_from_the_environment(monkeypatch, text, value):
    assert Keep.from_environment() == Keep(200, 30, 20)
    monkeypatch.setenv("ENGINE_KEEP_DAYS", text)
    assert Keep.from_environment() == dataclasses.replace(Keep(), days=value)


@pytest.mark.parametrize("text", ["many", "-1", "inf", "nan"])
def test_limits_that_are_none_are_refused_by_name(monkeypatch, text):
    monkeypatch.setitem(os.environ, "ENGINE_KEEP_GIB", text)
    with pytest.raises(RequestError, match="ENGINE_KEEP_GIB = "):
        Keep.from_environment()
