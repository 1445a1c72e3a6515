"""Prompts: slips in JSON are pointed at, what is composed is plain text in the words that the model knows."""

import json

import gradio as gr
import pytest

from engine.description import fault
from engine.errors import RequestError
from engine.preset import load_preset
from engine.web import compose
from engine.web.compose import CAMERA, NOTHING, add_builder, caption, describe, vocabulary

WHOLE = json.dumps({"events": [{"time": "0-3 s", "who": "a robot"}], "camera": ["static"]}, indent=2)


@pytest.mark.parametrize(
    "prompt", ["", "a red circle", WHOLE, f"  \n{WHOLE}\n", "[]", "say {this}", "0-3 s: [a] walks"]
)
def test_whole_descriptions_and_free_text_are_left_alone(prompt):
    assert fault(prompt) is None


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ('{"a": 1,}', "line 1, column 8|line 1, column 9"),
        ('{\n  "a": 1\n  "b": 2\n}', "line 3, column 3"),
        ('{"a": "x', "line 1, column 7"),
        ("  [1, 2", "line 1, column 8"),
        ('{"a": 1} and more', "line 1, column 10"),
        ("{'a': 1}", "line 1, column 2"),
    ],
)
def test_a_slip_is_pointed_at_by_line_and_column(prompt, where):
    told = fault(prompt)
    assert any(part in told for part in where.split("|")) and "sent as it stands" in told


@pytest.mark.parametrize("prompt", ["[" * 100_000, '{"a": ' + "1" * 10_000 + "}"])
def test_what_python_can_not_read_is_said_too(prompt):
    assert "can't be read" in fault(prompt)


def test_events_come_in_the_order_of_time_and_the_camera_last():
    events = [(3, 5, "it", "stops"), (0, 2.5, "a robot", "rolls along"), (None, None, "", "")]
    text = describe("a greenhouse", "A robot, white and round", events, ["static", "tilt up"])
    assert text == (
        "A greenhouse. A robot, white and round. 0-2.5 s: a robot rolls along. 3-5 s: it stops. "
        "The camera stands still and tilts up."
    )


def test_parts_may_be_missing():
    assert describe("", "", [(None, None, "", "rain falls")], []) == "Rain falls."
    assert describe("", "", [(2, None, "rain", "falls")], None) == "From 2 s: rain falls."
    assert describe("", None, [(None, 2, "rain", "falls!")], []) == "Until 2 s: rain falls!"
    assert describe("A beach.", "", [], ["pan right"]) == "A beach. The camera pans to the right."


def test_nothing_and_a_time_that_runs_backwards_are_refused_in_words():
    with pytest.raises(RequestError, match="Nothing is filled in"):
        describe(" ", "", [(0, 1, "", "")], [])
    with pytest.raises(RequestError, match="Event 2 ends at 1 s, before it begins at 3 s"):
        describe("a", "", [(0, 1, "a", "b"), (3, 1, "c", "d")], [])


def test_the_camera_has_the_words_that_were_seen_and_no_guesses():
    assert len(CAMERA) == 9 and not {"pan left", "track left", "dolly down"} & set(CAMERA)


def test_the_small_model_gets_its_own_sentence():
    words = vocabulary(load_preset("tiny"))
    one = caption(words, ("red", "circle", "right"), (NOTHING, "circle", "right"), ("plain", "navy", "static"))
    assert one == "a red circle moves right on a plain navy background, static camera"
    two = caption(words, ("yellow", "ring", "up"), ("orange", "star", "down"), ("gradient", "black", "static"))
    assert two == words.EXAMPLES[2]
    assert words.unknown_words(two) == []
    assert vocabulary(load_preset("pan2")) is None


@pytest.mark.parametrize("preset", ["tiny", "pan2"])
def test_the_button_writes_what_stands_in_the_fields(preset):
    with gr.Blocks() as demo:
        prompt = gr.Textbox()
        add_builder(load_preset(preset), prompt)
    (click,) = demo.fns.values()
    assert click.outputs[0] is prompt
    start = [field.value for field in click.inputs]
    if preset == "tiny":
        assert click.fn(*start) == "a red circle moves right on a plain navy background, static camera"
        return
    _, said = click.outputs
    refused = click.fn(*start)
    assert set(refused) == {said} and "Nothing is filled in" in refused[said]
    assert len(start) == 3 + 4 * compose.EVENTS
    assert click.fn("a pier", *start[1:]) == {prompt: "A pier.", said: ""}


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        ("", "", "A boat sails."),
        (None, None, "A boat sails."),
        ("0", "", "From 0 s: a boat sails."),
        (" 1,5 s ", "3", "1.5-3 s: a boat sails."),
        ("soon", "", "Event 1: &#x27;soon&#x27; is no time. Write seconds"),
        ("-1", "2", "Event 1: &#x27;-1&#x27; is no time."),
        ("nan", "2", "is no time."),
        ("3", "1", "Event 1 ends at 1 s, before it begins at 3 s."),
    ],
)
def test_times_are_what_somebody_wrote_and_nothing_means_none(start, end, text):
    with gr.Blocks() as demo:
        add_builder(load_preset("pan2"), gr.Textbox())
    (click,) = demo.fns.values()
    empty = [field.value for field in click.inputs]
    written = click.fn(*empty[:2], start, end, "a boat", "sails", *empty[6:])
    assert any(text in told for told in written.values())
