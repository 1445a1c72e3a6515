"""What no page of ours sends, and what an old page sends: answered as nothing or in words, never with an empty 500."""

import json

import httpx
import pytest

from engine.preset import load_preset
from engine.web.files import NO_CHOICE
from tests.double import Double, serve

PRESET = load_preset("tiny")
HALF = "\ud800"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    engine = Double(PRESET)
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        served.job = served.jobs.submit(PRESET.request(prompt="a", frames=5, height=64, width=64, steps=1))
        served.jobs.wait(served.job)
        yield served


@pytest.fixture(scope="module")
def page(served):
    return httpx.get(f"{served.url}/config").json()


def send(served, page, name, event=None, session="s", **sent):
    """Call an event of the page. sent: values by the label of a field, or by its kind."""
    parts = {part["id"]: part for part in page["components"]}
    (found, *_) = [entry for entry in page["dependencies"] if entry["api_name"] == name]

    def value(part):
        kind, props = part["type"], part["props"]
        return next((sent[key] for key in (props.get("label"), kind) if key in sent), props.get("value"))

    data = [value(parts[number]) for number in found["inputs"]]
    body = {"data": data, "fn_index": found["id"], "session_hash": session, "event_data": event}
    return httpx.post(f"{served.url}/gradio_api/run/predict", content=json.dumps(body), timeout=60,
                      headers={"content-type": "application/json"})  # fmt: skip


@pytest.mark.parametrize("value", [5, [], {}, HALF])
@pytest.mark.parametrize("name", ["look", "look_1", "look_2", "look_3", "come"])
def test_a_state_of_the_browser_that_is_none_counts_as_nothing(served, page, name, value):
    assert send(served, page, name, browserstate=value).status_code == 200


@pytest.mark.parametrize("value", [None, 5, HALF])
def test_a_prompt_that_is_no_text_has_no_hint(served, page, value):
    assert send(served, page, "tell_hint", Prompt=value).status_code == 200


@pytest.mark.parametrize(
    "event", [None, {}, 5, "x", {"job": HALF, "page": -5}, {"job": 5, "page": 10**30}, {"job": []}]
)
@pytest.mark.parametrize("name", ["turn", "delete", "stop", "open", "open_comparison", "use"])
def test_an_event_without_its_data_is_told_in_words(served, page, name, event):
    assert send(served, page, name, event).status_code == 200
    assert served.jobs.snapshot(served.job)


def test_no_file_is_no_settings(served, page):
    answer = send(served, page, "use_file")
    assert answer.status_code == 200 and "There is no file" in answer.text


@pytest.mark.parametrize("value", ["20200101-000000-deadbeef", 5, {}, HALF])
def test_an_old_choice_is_refused_where_it_is_seen(served, page, value):
    answer = send(served, page, "begin_with", **{"The end of a video made here": value})
    assert answer.status_code == 200 and NO_CHOICE in answer.text
    answer = send(served, page, "tell_plan_2", Latents="job", Video=value)
    assert answer.status_code == 200 and "Choose a video that was made here" in answer.text


def test_a_video_is_taken_from_a_page_that_is_older_than_the_list(served, page):
    for session in ("fresh", "listed"):
        if session == "listed":
            send(served, page, "list_videos", session=session)
            served.job = served.jobs.submit(PRESET.request(prompt="b", frames=5, height=64, width=64, steps=1))
            served.jobs.wait(served.job)
        answer = send(served, page, "begin_with", session=session, **{"The end of a video made here": served.job})
        assert answer.status_code == 200 and f"last/{served.job}.png" in answer.text


def test_another_old_choice_gets_words(served, page):
    answer = send(served, page, "tell_plan_2", **{"Side A": "gone"})
    assert NO_CHOICE in answer.text
