"""Jobs outlive whoever looks at them; one runs at a time; a failure of one is no failure of the next."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.errors import Cancelled, RequestError, ResourceError
from engine.events import FramesReady, StageEnded, StageStarted, StepDone, VideoFinished, Warned
from engine.jobs import Jobs
from engine.preset import load_preset

REQUEST = load_preset("tiny").request(prompt="a test", frames=5, steps=2)


class Script:
    """Plays the events it was given; an Exception among them is raised, a threading.Event is waited for."""

    def __init__(self, *events):
        self.events = events
        self.running = 0
        self.most_running = 0

    def generate(self, request, folder, cancel):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, threading.Event):
                    while not event.wait(0.01):
                        if cancel.is_set():
                            raise Cancelled("Stopped.")
                else:
                    yield event
        finally:
            self.running -= 1


FRAMES = np.zeros((1, 4, 4, 3), np.uint8)
WHOLE = (
    StageStarted("text"),
    StageEnded("text", 0.5),
    Warned("long prompt"),
    StageStarted("denoise", 2),
    StepDone(1, 2, 0.25, 0.25),
    StepDone(2, 2, 0.25, 0.0),
    StageEnded("denoise", 0.5),
    StageStarted("decode", 5),
    FramesReady(0, FRAMES, 5),
    FramesReady(1, np.zeros((4, 4, 4, 3), np.uint8), 5),
    StageEnded("decode", 1.0),
    VideoFinished(Path("video.mp4"), False, {"seconds": 2}),
)


@pytest.fixture
def jobs(tmp_path):
    made = []

    def make(*events):
        made.append(Jobs(Script(*events), tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_finished_job_tells_everything(jobs):
    registry = jobs(*WHOLE)
    state = registry.wait(registry.submit(REQUEST))
    assert (state.status, state.video, state.stats) == ("finished", Path("video.mp4"), {"seconds": 2})
    assert state.warnings == ["long prompt"]
    text, denoise, decode = state.stages
    assert (text.seconds, denoise.done, denoise.total, denoise.seconds_each) == (0.5, 2, 2, 0.25)
    assert (decode.done, decode.total, decode.eta) == (5, 5, 0.0)
    assert state.first_frame_seconds is not None and state.over and state.error is None


def test_a_stop_with_frames_is_stopped_and_keeps_the_video(jobs):
    registry = jobs(StageStarted("decode", 5), FramesReady(0, FRAMES, 5), VideoFinished(Path("v.mp4"), True, {}))
    state = registry.wait(registry.submit(REQUEST))
    assert (state.status, state.video) == ("stopped", Path("v.mp4"))


def test_a_fault_with_frames_is_failed_and_keeps_the_video(jobs):
    events = StageStarted("decode", 5), FramesReady(0, FRAMES, 5), VideoFinished(Path("v.mp4"), True, {})
    registry = jobs(*events, ResourceError("3 GiB are missing"))
    state = registry.wait(registry.submit(REQUEST))
    assert (state.status, state.video, state.error) == ("failed", Path("v.mp4"), "3 GiB are missing")


def test_errors_are_told_in_words_and_the_next_job_runs(jobs):
    registry = jobs(ResourceError("3 GiB are missing"))
    first = registry.wait(registry.submit(REQUEST))
    assert (first.status, first.error) == ("failed", "3 GiB are missing")
    registry.engine = Script(*WHOLE)
    assert registry.wait(registry.submit(REQUEST)).status == "finished"


def test_a_fault_of_ours_does_not_end_the_worker(jobs):
    registry = jobs(ZeroDivisionError("oh"))
    state = registry.wait(registry.submit(REQUEST))
    assert state.status == "failed" and "ZeroDivisionError: oh" in state.error
    registry.engine = Script(*WHOLE)
    assert registry.wait(registry.submit(REQUEST)).status == "finished"


def test_one_at_a_time_in_order_with_positions(jobs):
    gate = threading.Event()
    registry = jobs(gate, *WHOLE)
    names = [registry.submit(REQUEST) for _ in range(3)]
    while registry.snapshot(names[0]).status != "running":
        pass
    assert [registry.snapshot(name).position for name in names] == [0, 1, 2]
    gate.set()
    ends = [registry.wait(name) for name in names]
    assert [state.status for state in ends] == ["finished"] * 3
    assert [state.ended for state in ends] == sorted(state.ended for state in ends)
    assert registry.engine.most_running == 1


def test_cancel_reaches_a_running_and_a_waiting_job(jobs):
    registry = jobs(threading.Event(), *WHOLE)
    running, waiting = registry.submit(REQUEST), registry.submit(REQUEST)
    registry.cancel(waiting)
    registry.cancel(running)
    assert registry.wait(running).status == "stopped"
    assert registry.wait(waiting).status == "stopped"
    assert registry.snapshot(waiting).stages == []


def test_a_snapshot_does_not_change(jobs):
    gate = threading.Event()
    registry = jobs(StageStarted("text"), gate, *WHOLE)
    job = registry.submit(REQUEST)
    while not registry.snapshot(job).stages:
        pass
    before = registry.snapshot(job)
    gate.set()
    registry.wait(job)
    assert before.status == "running" and len(before.stages) == 1 and before.stages[0].seconds is None


def test_follow_ends_with_the_last_state_though_nobody_looked_before(jobs):
    registry = jobs(*WHOLE)
    job = registry.submit(REQUEST)
    registry.wait(job)
    assert [state.status for state in registry.follow(job)] == ["finished"]


def test_unknown_job_is_an_error_in_words(jobs):
    registry = jobs()
    assert registry.snapshot("nope") is None
    with pytest.raises(RequestError, match="nope"):
        registry.cancel("nope")
    with pytest.raises(RequestError, match="nope"):
        registry.wait("nope")


def test_jobs_of_one_second_have_different_folders(jobs):
    registry = jobs(*WHOLE)
    folders = {registry.wait(registry.submit(REQUEST)).folder for _ in range(5)}
    assert len(folders) == 5 and all(folder.parent == registry.outputs for folder in folders)


def test_a_waiting_job_is_stopped_at_once_and_never_runs(jobs):
    registry = jobs(threading.Event(), *WHOLE)
    running, waiting, last = (registry.submit(REQUEST) for _ in range(3))
    registry.cancel(waiting)
    assert registry.snapshot(waiting).status == "stopped" and registry.snapshot(last).position == 1
    registry.cancel(running)
    registry.cancel(last)
    assert registry.wait(last).status == "stopped" and registry.snapshot(waiting).stages == []


def test_a_follower_hears_of_changes_only(jobs):
    gate = threading.Event()
    registry = jobs(StageStarted("text"), gate, *WHOLE)
    first, waiting = registry.submit(REQUEST), registry.submit(REQUEST)
    seen = []
    follower = threading.Thread(target=lambda: seen.extend(registry.follow(waiting, 0.02)))
    follower.start()
    registry.snapshot(first)
    threading.Event().wait(0.3)
    assert len(seen) == 1
    gate.set()
    follower.join()
    assert seen[-1].over


def test_jobs_that_are_asked_for_together_are_all_queued_or_none(jobs, tmp_path):
    queue = jobs(*WHOLE)
    asked = [dataclasses.replace(REQUEST, prompt=text) for text in "ab"]
    names = queue.submit_all(asked, group="g")
    assert [state.id for state in queue.of_group("g")] == names
    assert [queue.wait(name).request.prompt for name in names] == ["a", "b"]
    before = set(tmp_path.iterdir())
    with pytest.raises(RequestError):
        queue.submit_all([*asked, dataclasses.replace(REQUEST, image=tmp_path / "nothing.png")], group="h")
    assert queue.of_group("h") == [] and set(tmp_path.iterdir()) == before
