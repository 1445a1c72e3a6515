"""Jobs outlive the server: what an earlier one left is found again, whole, cut short or damaged."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from engine import disk, record, store
from engine.admission import QueueLimits
from engine.errors import BusyError, RequestError, ResourceError
from engine.events import ComparisonFinished
from engine.job_id import known_id
from engine.jobs import Jobs
from engine.preset import load_preset
from engine.record import write_json
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents
from engine.video import probe
from engine.web.compare_form import saved_videos
from tests.double import Double, Pace

PRESET = load_preset("tiny")
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"height": 64, "width": 96, "frames": 9, "steps": 2}
RANDOM = RandomLatents(3, 5, 64, 64)


@pytest.fixture
def registry(tmp_path):
    """Makes registries over one folder, as servers that are started one after the other."""
    made = []

    def start(engine=None):
        if made:
            made[-1].close()
        made.append(Jobs(engine or Double(PRESET), tmp_path / "outputs"))
        return made[-1]

    yield start
    made[-1].close()


def test_a_finished_video_is_there_again_after_a_restart(registry, tmp_path):
    Image.new("RGB", (96, 64), "red").save(tmp_path / "a.png")
    jobs = registry(Double(PRESET, Pace(warning="take care")))
    job = jobs.submit(PRESET.request(prompt="a <b>", image=tmp_path / "a.png", seed=7, **SMALL), group="four")
    before = jobs.wait(job)
    (tmp_path / "a.png").unlink()
    after = registry().snapshot(job)
    assert after == before and after is not before
    assert (after.status, after.warnings, after.group) == ("finished", ["take care"], "four")
    assert after.request.image.read_bytes() == (before.folder / "image.png").read_bytes()
    assert probe(after.video).frames == 9 and after.stats["frames"] == 9


class Compares(Double):
    """A comparison that is done at once."""

    def compare(self, latents, a, b, folder, cancel, frames):
        (folder / "a").mkdir()
        (folder / "a" / "video.mp4").write_bytes(b"mp4")
        sides = {name: {"video": f"{name}/video.mp4", "error": None, "seconds": 1.0} for name in "ab"}
        result = {"sides": sides, "verdict": "close"}
        write_json(folder / "compare.json", result)
        yield ComparisonFinished(result)


def test_a_comparison_is_there_again_without_paths_that_its_file_names(registry):
    jobs = registry(Compares(PRESET))
    sides = DecodeSettings("plain"), DecodeSettings("reference", "fp32")
    job = jobs.submit(CompareRequest(RANDOM, *sides, 5, "noise"))
    before = jobs.wait(job)
    path = before.folder / "compare.json"
    path.write_text(path.read_text().replace("b/video.mp4", "../../../etc/passwd"))
    after = registry().comparison(job)
    assert after.request == before.request and after.result["verdict"] == "close"
    assert [after.result["sides"][name]["video"] for name in "ab"] == ["a/video.mp4", None]


def test_a_closed_server_leaves_interrupted_jobs(registry):
    jobs = registry(Double(PRESET, Pace(step=30)))
    running, waiting = (jobs.submit(PRESET.request(prompt="a", **SMALL)) for _ in range(2))
    while not jobs.snapshot(running).stages:
        pass
    jobs.close()
    assert jobs.snapshot(running).status == "interrupted"
    jobs = registry()
    assert "while this was made. Its settings are kept" in jobs.snapshot(running).error
    assert "before this began. Its settings are kept" in jobs.snapshot(waiting).error
    assert [jobs.snapshot(job).status for job in (running, waiting)] == ["interrupted"] * 2
    assert jobs.snapshot(waiting).started is None
    assert jobs.wait(jobs.submit(PRESET.request(prompt="a", **SMALL))).status == "finished"
    assert registry().snapshot(running).status == "interrupted"


CHILD = """
import sys, time
from pathlib import Path
from engine.jobs import Jobs
from engine.preset import load_preset
from tests.double import Double, Pace
preset = load_preset("tiny")
jobs = Jobs(Double(preset, Pace(chunk=0.3)), Path(sys.argv[1]))
first, second = (jobs.submit(preset.request(prompt="a", height=64, width=96, frames=481, steps=1)) for _ in "ab")
while not (decode := [s for s in jobs.snapshot(first).stages if s.name == "decode"]) or decode[0].done < 33:
    time.sleep(0.02)
print(first, second, flush=True)
time.sleep(600)
"""


def test_a_killed_server_leaves_the_part_of_the_video_that_was_seen(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        first, second = process.stdout.readline().split()
        (tmp_path / first / "latents.safetensors").write_bytes(b"as if")
        process.send_signal(signal.SIGKILL)
    jobs = Jobs(Double(PRESET), tmp_path)
    state = jobs.snapshot(first)
    jobs.close()
    assert (state.status, state.partial) == ("interrupted", True)
    assert "What was decoded by then is kept, and decoding again brings the rest." in state.error
    assert 17 <= probe(state.video).frames < 481
    assert "before this began" in jobs.snapshot(second).error


def test_an_interrupted_job_is_listed_where_nothing_can_be_written(registry, monkeypatch):
    jobs = registry()
    folder = jobs.wait(jobs.submit(PRESET.request(prompt="a", **SMALL))).folder
    jobs.close()
    values = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(values | {"status": "running", "ended": None}))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "_replace", full)
    (state,) = registry().recent()
    assert state.status == "interrupted" and "No space left on device" in state.warnings[-1]


def test_damaged_and_foreign_folders_are_left_alone_and_named_in_one_line(registry, tmp_path, caplog):
    jobs = registry()
    good = [jobs.submit(PRESET.request(prompt="a", **SMALL)) for _ in range(5)]
    for job in good:
        jobs.wait(job)
    jobs.close()
    texts = ["{", "[]", '{"kind": "magic"}', None]
    for job, text in zip(good, texts, strict=False):
        path = tmp_path / "outputs" / job / "job.json"
        values = json.loads(path.read_text()) | {"id": "../../etc"}
        path.write_text(text or json.dumps(values))
    (tmp_path / "outputs" / "holiday").mkdir()
    (tmp_path / "outputs" / "20260101-000000-00000000").symlink_to(tmp_path / "outputs" / good[4])
    (tmp_path / "outputs" / "notes.txt").write_text("mine")
    before = sorted(path for path in (tmp_path / "outputs").rglob("*"))
    caplog.clear()
    jobs = registry()
    assert [job.id for job in jobs.recent()] == [good[4]]
    lines = [record.getMessage() for record in caplog.records if "left alone" in record.getMessage()]
    assert len(lines) == 1 and all(name in lines[0] for name in [*good[:4], "holiday"])
    assert sorted(path for path in (tmp_path / "outputs").rglob("*")) == before


NAN, LARGE = float("nan"), 10**400
DEEP = "[" * 100_000
DAMAGED = {
    "job": [
        *({"created": value} for value in (None, NAN, float("inf"), -1e30, 1e18, True, LARGE)),
        *({"started": value} for value in (NAN, 1e300, "now")),
        {"ended": float("inf")},
        *({"warnings": value} for value in (None, 5, [1], "abc", ["\ud800"])),
        *({"stages": [{"name": "decode"} | stage]} for stage in ({"done": "y"}, {"total": 1.5}, {"started": "a"})),
        *({"stages": value} for value in (None, [{"name": "x"}], [{"name": "denoise", "seconds": "x"}])),
        {"first_frame_seconds": NAN},
        *({name: [1]} for name in ("error", "partial", "parent", "group", "kind", "status")),
    ],
    "request": [
        *({"prompt": value} for value in (5, None, ["a"], "\ud800")),
        *({"steps": value} for value in ("x", None, 0, LARGE)),
        *({name: value} for name in ("shift", "guidance") for value in ("x", None, [], NAN, LARGE)),
        *({name: value} for name in ("height", "width", "frames", "seed") for value in ("x", None, -1, LARGE)),
    ],
    "stats": [
        *({"frames": value} for value in ("x", {}, -3, LARGE)),
        *({"stages": value} for value in (5, [5], [{"name": "x"}])),
        *(
            {"memory": value}
            for value in (5, {"seconds": [1], "host": []}, {"seconds": ["x"], "host": ["y"]}, {"a": [1]})
        ),
        *({"paths": value} for value in (5, [1], {"a": 5}, {"a": {}})),
        *({"peak_bytes": value} for value in (5, {"a": "x"})),
        *({"step_seconds": value} for value in ("x", 5, ["a"])),
        *({name: value} for name in ("decode", "versions", "step_cache", "devices") for value in (5, {"path": []})),
        *(
            {name: "x"}
            for name in ("seconds", "seconds_to_first_frame", "fps", "file_bytes", "decode_frames_per_second")
        ),
    ],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished video, to be damaged."""
    jobs = Jobs(Double(PRESET), tmp_path_factory.mktemp("outputs"))
    folder = jobs.wait(jobs.submit(PRESET.request(prompt="a", **SMALL))).folder
    jobs.close()
    return folder


@pytest.mark.parametrize(
    ("file", "change"), [(file, change) for file, changes in DAMAGED.items() for change in changes]
)
def test_a_record_with_a_value_that_can_not_be_is_left_alone(finished, tmp_path, caplog, file, change):
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    assert len(store.load_all(tmp_path)) == 1
    path = folder / ("stats.json" if file == "stats" else "job.json")
    values = json.loads(path.read_text())
    (values["request"] if file == "request" else values).update(change)
    path.write_text(json.dumps(values))
    caplog.clear()
    assert store.load_all(tmp_path) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert "left alone" in line and folder.name in line and len(line) < 1000


@pytest.mark.parametrize("name", ["job.json", "stats.json"])
def test_a_record_that_is_nested_deep_is_left_alone(finished, tmp_path, caplog, name):
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    (folder / name).write_text(DEEP)
    assert store.load_all(tmp_path) == [] and "nested too deep" in caplog.text


def test_a_request_that_is_nested_deep_is_listed_by_the_folder(finished, tmp_path):
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    (folder / "request.json").write_text(DEEP)
    assert saved_videos(tmp_path) == [(folder.name, folder.name)]


def test_what_a_record_says_never_becomes_a_path(registry, tmp_path):
    jobs = registry()
    job = jobs.submit(PRESET.request(prompt="a", **SMALL))
    folder = jobs.wait(job).folder
    values = json.loads((folder / "job.json").read_text())
    values["request"]["image"] = "/etc/passwd"
    (folder / "job.json").write_text(json.dumps(values | {"video": "/etc/passwd"}))
    state = registry().snapshot(job)
    assert state.request.image is None and state.video == folder / "video.mp4"
    (folder / "job.json").write_text(json.dumps(values | {"kind": "decode", "source": "../../../etc"}))
    assert registry().snapshot(job) is None
    for wrong in ("../a", "a", "20260131-235959-0123abcd/..", 5, ["a"]):
        with pytest.raises(RequestError, match="no id of a job"):
            known_id(wrong)


def test_two_servers_do_not_share_a_folder(registry, tmp_path):
    registry()
    with pytest.raises(ResourceError, match="Another server uses the outputs folder"):
        Jobs(Double(PRESET), tmp_path / "outputs")


def test_jobs_are_found_by_what_they_go_on_from_and_by_group(registry):
    jobs = registry()
    first = jobs.submit(PRESET.request(prompt="a", **SMALL))
    second = jobs.submit(PRESET.request(prompt="b", **SMALL), parent=first, group="g")
    third = jobs.submit(PRESET.request(prompt="c", **SMALL), group="g")
    jobs.wait(third)
    for found in (jobs, registry()):
        assert [job.id for job in found.going_on_from(first)] == [second]
        assert [job.id for job in found.of_group("g")] == [second, third]


def test_a_job_that_can_not_be_written_down_is_refused_and_leaves_nothing(registry, monkeypatch, tmp_path):
    jobs = registry()
    request = PRESET.request(prompt="a", **SMALL)

    def full(job):
        raise ResourceError("the disk is full")

    monkeypatch.setattr(store, "save", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        jobs.submit(request)
    monkeypatch.undo()
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(RequestError, match="none of"):
        jobs.submit(PRESET.request(prompt="a", image=tmp_path / "a.png", **SMALL))
    assert jobs.recent() == [] and not list(jobs.outputs.glob("*/"))


def test_whatever_goes_wrong_with_a_new_folder_leaves_none(registry):
    jobs = registry()
    request = PRESET.request(prompt="a", **SMALL)
    for parent in ("../../etc", "20260131-235959-0123abcd/..", "\ud800", 5, ["a"]):
        with pytest.raises(RequestError, match="no id of a job"):
            jobs.submit(request, parent=parent)
    with pytest.raises(UnicodeEncodeError):
        jobs.submit(request, group="half a \ud800")
    assert jobs.recent() == [] and not list(jobs.outputs.glob("*/"))


def test_what_is_refused_does_not_use_up_the_hour(tmp_path, monkeypatch):
    jobs = Jobs(Double(PRESET), tmp_path, limits=QueueLimits(per_hour=1), visitor=lambda: "192.0.2.1")
    request = PRESET.request(prompt="a", **SMALL)
    monkeypatch.setattr(disk, "SPARE", 2**62)
    for _ in range(3):
        with pytest.raises(ResourceError, match="may need"):
            jobs.submit(request)
    monkeypatch.undo()
    jobs.wait(jobs.submit(request))
    with pytest.raises(BusyError, match="within an hour"):
        jobs.submit(request)
    jobs.close()


def test_a_record_that_can_not_be_written_costs_no_video(registry, monkeypatch):
    jobs = registry(Double(PRESET, Pace(step=0.2)))
    job = jobs.submit(PRESET.request(prompt="a", **SMALL))

    def full(state):
        raise ResourceError("the disk is full")

    monkeypatch.setattr(store, "save", full)
    state = jobs.wait(job)
    assert state.status == "finished" and "the disk is full" in state.warnings[-1]


def test_a_record_is_written_when_the_status_changes_and_not_at_events(registry, monkeypatch):
    seen = []
    save = store.save
    monkeypatch.setattr(store, "save", lambda job: (seen.append(job.status), save(job)))
    jobs = registry(Double(PRESET, Pace(step=0.01, chunk=0.01)))
    jobs.wait(jobs.submit(PRESET.request(prompt="a", **SMALL)))
    assert seen == ["queued", "running", "finished"]
