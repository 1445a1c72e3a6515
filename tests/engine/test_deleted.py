"""What somebody deletes while others still look at it, and a clock that is set back."""

import gradio as gr
import httpx
import pytest

import app
from engine.job import JobState
from engine.preset import load_preset
from engine.video import probe
from engine.web import api
from tests.double import Double, Pace, serve

PRESET = load_preset("tiny")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    engine = Double(PRESET)
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        yield served


def make(served, **more):
    job = served.jobs.submit(PRESET.request(prompt="a", frames=5, height=64, width=64, steps=1), **more)
    served.jobs.wait(job)
    return job


def frames(served, job, path):
    path.write_bytes(httpx.get(f"{served.url}/chain/{job}.mp4").content)
    return probe(path).frames


def test_a_chain_forgets_what_was_deleted(served, tmp_path):
    first = make(served)
    second = make(served, parent=first)
    third = make(served, parent=second)
    folder = served.jobs.snapshot(third).folder
    assert frames(served, third, tmp_path / "a.mp4") == 13
    served.jobs.delete(first)
    assert frames(served, third, tmp_path / "a.mp4") == 9
    assert len(list(folder.glob("chain*.mp4"))) == 1
    served.jobs.delete(second)
    assert frames(served, third, tmp_path / "a.mp4") == 5
    assert not list(folder.glob("chain*.mp4"))


def test_a_chain_whose_file_is_gone_is_not_there(served):
    first = make(served)
    second = make(served, parent=first)
    for job in (second, first):
        served.jobs.snapshot(job).video.unlink()
        found = httpx.get(f"{served.url}/chain/{job}.mp4")
        assert found.status_code == 404 and "no such file" in found.text


def test_a_live_video_ends_when_its_job_is_deleted(served):
    job = make(served)
    source = app._live_source(served.jobs, job)
    served.jobs.delete(job)
    assert source.finished()


def test_a_call_whose_job_is_deleted_gets_words(served):
    served.engine.pace = Pace(step=30)
    job = served.jobs.submit(PRESET.request(prompt="a", frames=5, height=64, width=64, steps=1))
    answers = api.follow(served.jobs, job)
    assert next(answers)[1]["job"] == job
    served.jobs.cancel(job)
    served.jobs.wait(job)
    served.jobs.delete(job)
    with pytest.raises(gr.Error, match="may have been deleted"):
        list(answers)


def test_a_caller_that_leaves_after_a_deletion_leaves_in_peace(served):
    served.engine.pace = Pace(step=30)
    job = served.jobs.submit(PRESET.request(prompt="a", frames=5, height=64, width=64, steps=1))
    answers = api.follow(served.jobs, job)
    next(answers)
    served.jobs.cancel(job)
    served.jobs.wait(job)
    served.jobs.delete(job)
    answers.close()


def test_an_answer_whose_file_is_gone_is_said(served):
    served.engine.pace = Pace()
    state = served.jobs.snapshot(make(served))
    state.video.unlink()
    with pytest.raises(gr.Error, match="was deleted"):
        api.answer(state)


def test_no_duration_is_negative_though_the_clock_was_set_back(tmp_path):
    request = PRESET.request(prompt="a")
    state = JobState(id="a", folder=tmp_path, request=request, status="finished", created=900.0, started=1000.0)
    state.ended = 100.0
    assert state.elapsed == 0.0
    state.ended = 1002.5
    assert state.elapsed == 2.5
