"""The Compare tab without a browser: its form, its words, its routes, its API."""

import dataclasses
import io
import json
import math
from pathlib import Path

import gradio as gr
import httpx
import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from engine.compare import amplified
from engine.decode_cost import CompareCost, DecodeCost
from engine.engine import Engine
from engine.errors import RequestError
from engine.job import CompareState, StageState
from engine.latents import save_latents
from engine.noise import draw_noise
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents
from engine.video import probe
from engine.web import compare_render as render
from engine.web.compare_api import call_form
from engine.web.compare_form import CompareForm, decoder_menu, saved_videos, start_form
from engine.web.compare_tab import CompareTab
from tests.double import serve
from tests.markup import Elements

EVIL = "<script>alert('1')</script>"


@pytest.fixture(scope="module")
def served(toy_preset, tmp_path_factory):
    engine = Engine(toy_preset, "cpu")
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return Client(served.url, verbose=False)


@pytest.fixture(scope="module")
def done(served):
    """A finished comparison's state."""
    noise = RandomLatents(7, 5, 64, 96)
    return served.jobs.wait(served.jobs.submit(CompareRequest(noise, DecodeSettings(), DecodeSettings("reference"))))


def form(served, **changed):
    return CompareForm(**(vars(start_form(served.engine)) | {"frames": 5} | changed))


# ---- the form


def test_the_tab_begins_with_the_best_decoder_against_the_reference(served):
    start = start_form(served.engine)
    assert (start.source, start.a, start.b, start.frames) == ("random", "auto:auto", "reference:fp32", 9)
    names = [value for _, value in decoder_menu(served.engine)]
    assert names == ["auto:auto", "plain:fp32", "plain:bf16", "plain:fp16", "reference:fp32"]


def test_each_kind_of_latents_becomes_a_request(served, tmp_path):
    outputs = tmp_path / "outputs"
    request, shape = form(served).request(served.engine, outputs)
    assert (request.latents, shape) == (RandomLatents(123, 5, 64, 96), (2, 4, 6))
    folder = outputs / "20260101-000000-aaaaaaaa"
    folder.mkdir(parents=True)
    for hidden in (f".unchecked-{folder.name}", f"{folder.name}.part"):
        (outputs / hidden).mkdir()
        (outputs / hidden / "latents.safetensors").touch()
    save_latents(folder / "latents.safetensors", draw_noise(3, (1, 48, 3, 4, 6)), {})
    asked = {"prompt": "a blue star", "seed": 5, "frames": 9}
    (folder / "request.json").write_text(json.dumps(asked))
    assert saved_videos(outputs) == [("a blue star (9 frames, seed 5)", folder.name)]
    request, shape = form(served, source="job", job=folder.name).request(served.engine, outputs)
    assert (request.latents, request.frames, shape) == (folder / "latents.safetensors", 5, (2, 4, 6))
    # More frames than there are means all of them.
    request, shape = form(served, source="file", file=str(request.latents), frames=41).request(served.engine, outputs)
    assert (request.frames, shape) == (9, (3, 4, 6))


REFUSED = [
    ({"source": "file"}, "Choose a file"),
    ({"source": "job"}, "Choose a video"),
    ({"source": "job", "job": "../../etc"}, "Choose a video"),
    ({"source": "job", "job": ["x"]}, "Choose a video"),
    ({"source": "moon"}, "'moon' is not known"),
    ({"a": "magic:fp32"}, "'magic' is not known"),
    ({"b": "reference:tf32"}, "tf32"),
    ({"size": "large"}, "height x width"),
    ({"seed": -5}, "seed = -5"),
    ({"frames": 6}, "frames = 6"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_what_can_not_be_compared_is_said(served, tmp_path, changed, words):
    with pytest.raises(RequestError, match=words):
        form(served, **changed).request(served.engine, tmp_path)


def test_a_file_is_named_as_people_know_it(served, tmp_path):
    (tmp_path / "mine.safetensors").write_bytes(b"x")
    with pytest.raises(RequestError) as caught:
        form(served, source="file", file=str(tmp_path / "mine.safetensors")).request(served.engine, tmp_path)
    assert "mine.safetensors" in str(caught.value) and str(tmp_path) not in str(caught.value)


# ---- words


def test_the_plan_tells_seconds_and_memory_of_both_sides_and_what_is_a_guess():
    cost = CompareCost(DecodeCost(3.0, 2**30, True), DecodeCost(70.0, 24 * 2**30, False), 121, 704 * 1248)
    text = Elements(render.plan(cost, (31, 44, 78))).text
    assert "121 frames, 1248 x 704" in text and "A: about 3 seconds a run and 1.0 GiB" in text
    assert "B: about 70 seconds a run and 24.0 GiB" in text and "guess" in text
    unknown = CompareCost(DecodeCost(None, 1, False), DecodeCost(None, 1, False), 9, 64)
    assert "once the model is loaded" in render.plan(unknown, (3, 4, 6))


def state(**values):
    request = CompareRequest(RandomLatents(1, 5, 64, 96), DecodeSettings(), DecodeSettings())
    return CompareState(id="job", folder=Path("x"), request=request, **values)


def test_progress_says_which_side_is_at_what():
    running = state(status="running", started=1.0, side="a", stages=[StageState("measure", 5, 2)])
    assert "Side A: frames before rounding" in render.progress(running) and "2 of 5" in render.progress(running)
    waiting = state(position=2)
    assert "2 jobs before it" in render.sentence(waiting)
    failed = state(status="failed", error=EVIL, started=1.0, ended=2.0)
    assert Elements(render.messages(failed)).tags == ["p"] and EVIL in Elements(render.messages(failed)).text


def test_no_text_of_a_result_becomes_code(done):
    side = done.result["sides"]["a"] | {"error": EVIL, "reason": EVIL, "path": EVIL, "precision": EVIL}
    verdict = done.result["verdict"] | {"text": EVIL}
    done.result = done.result | {"sides": {"a": side, "b": side}, "verdict": verdict}
    assert "script" not in Elements(render.result(done) + render.view(done)).tags


# ---- routes


@pytest.fixture
def get(served):
    return lambda path, **params: httpx.get(f"{served.url}/compare/{path}", params=params or None)


def test_the_figures_are_json_for_every_reader(get, done):
    found = get(f"{done.id}.json")
    assert math.isfinite(json.loads(found.text, parse_constant=lambda name: pytest.fail(name))["figures"]["psnr"])
    saved = get(f"{done.id}.json", download=True)
    assert "attachment" in saved.headers["content-disposition"] and saved.json() == found.json()


def test_frames_and_differences_are_the_raw_bytes(get, done):
    def picture(path, **params):
        answer = get(path, **params)
        assert answer.headers["content-type"] == "image/png"
        return np.asarray(Image.open(io.BytesIO(answer.content)))

    a, b = (np.load(done.folder / side / "frames.npy") for side in "ab")
    assert np.array_equal(picture(f"{done.id}/a/3.png"), a[3]) and np.array_equal(picture(f"{done.id}/b/0.png"), b[0])
    assert np.array_equal(picture(f"{done.id}/difference/4.png", gain=100), amplified(a[4], b[4], 100))
    assert get(f"{done.id}/a.mp4").content[4:8] == b"ftyp"


def test_a_link_out_of_its_folder_is_not_followed(get, done, tmp_path):
    for name, path in (("video.mp4", "a.mp4"), ("frames.npy", "a/0.png"), ("frames.npy", "difference/0.png")):
        file, outside = done.folder / "a" / name, tmp_path / name
        file.rename(outside)
        file.symlink_to(outside)
        assert get(f"{done.id}/{path}").status_code == 404
        outside.rename(file)
        assert get(f"{done.id}/{path}").status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("nope.json", 404),
        ("nope/a.mp4", 404),
        ("{id}/c.mp4", 404),
        ("{id}/a/5.png", 404),
        ("{id}/..%2Fa/0.png", 404),
        ("{id}/difference/0.png?gain=0", 422),
        ("{id}/difference/-1.png", 404),
    ],
)
def test_nothing_else_is_given(get, done, path, status):
    assert get(path.format(id=done.id)).status_code == status


# ---- the API


def test_the_api_compares_random_latents(client):
    figures, a, b = client.predict(seed=7, frames=5, api_name="/compare")
    assert figures["status"] == "finished" and figures["verdict"]["passed"]
    assert figures["sides"]["b"]["decoder"] == "reference" and figures["figures"]["frames"] == 5
    assert probe(Path(a)).frames == probe(Path(b)).frames == 5


def test_the_api_takes_a_file_and_refuses_in_words(client, tmp_path):
    save_latents(tmp_path / "l.safetensors", draw_noise(3, (1, 48, 2, 4, 6)), {"seed": "3"})
    latents = handle_file(tmp_path / "l.safetensors")
    figures, *_ = client.predict(latents=latents, a="plain", b="plain:fp32", api_name="/compare")
    assert figures["source"]["seed"] == "3" and figures["figures"]["psnr"] == "Infinity"
    for call, words in (({"b": "magic"}, "magic"), ({"frames": 6}, "frames = 6"), ({"job": "x"}, "Choose a video")):
        with pytest.raises(AppError, match=words):
            client.predict(**call, api_name="/compare")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"height": 0}, "height = 0"),
        ({"width": 0}, "width = 0"),
        ({"height": "tall"}, "size = 'tallx96'"),
        ({"frames": 0}, "frames = 0"),
        ({"a": ""}, "decode path = ''"),
        ({"b": [1]}, r"decode path = '\[1\]'"),
        ({"job": ""}, "Choose a video"),
        ({"job": ["x"]}, "Choose a video"),
        ({"job": "x", "seed": 0}, "Give one kind of latents"),
        ({"job": "x", "height": 64}, "Give one kind of latents"),
    ],
)
def test_the_api_leaves_nothing_out_in_silence(served, client, call, words):
    before = len(served.jobs.comparisons())
    with pytest.raises(AppError, match=words):
        client.predict(**call, api_name="/compare")
    assert len(served.jobs.comparisons()) == before


def test_a_call_names_one_kind_of_latents(served):
    start = start_form(served.engine)
    nothing = dict.fromkeys(("file", "job", "seed", "height", "width", "frames", "a", "b"))
    assert call_form(start, **nothing) == start
    assert call_form(start, **nothing | {"width": 64, "seed": 0}) == dataclasses.replace(start, size="64x64", seed=0)
    assert call_form(start, **nothing | {"file": "l"}) == dataclasses.replace(start, source="file", file="l")
    with pytest.raises(gr.Error, match="one kind"):
        call_form(start, **nothing | {"file": "l", "job": "x"})


def test_stopping_what_is_not_known_or_over_stops_nothing(served, done):
    with gr.Blocks():
        tab = CompareTab(served.engine, served.jobs)
    for job in ("", "unknown", done.id):
        assert (tab.cancel(job).value, tab.cancel(job).interactive) == ("Stop", False)


MARKED = {"meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    "latents",
    [
        {"path": "SECRET", **MARKED},
        {"path": "SECRET"},
        {"path": "http://127.0.0.1:1/l.safetensors", **MARKED},
        {"path": "", "url": "data:application/octet-stream;base64,AAAA", **MARKED},
        {"url": "http://127.0.0.1:1/l.safetensors"},
        {"path": ["SECRET"]},
        {},
        ["SECRET"],
        "SECRET",
    ],
)
def test_the_api_reads_no_file_of_the_server(served, latents, tmp_path):
    secret = tmp_path / "l.safetensors"
    save_latents(secret, draw_noise(3, (1, 48, 2, 4, 6)), {})
    latents = json.loads(json.dumps(latents).replace("SECRET", str(secret)))
    before = len(served.jobs.comparisons())
    address = f"{served.url}/gradio_api/call/compare"
    event = httpx.post(address, json={"data": [latents, *[None] * 7]}).json()["event_id"]
    answer = httpx.get(f"{address}/{event}", timeout=30).text
    assert "event: error" in answer and "event: complete" not in answer
    assert "Upload the file itself" in answer
    assert len(served.jobs.comparisons()) == before


# ---- what was compared, and the form after a reload


def test_the_result_says_what_was_compared(done):
    html = render.result(done)
    assert "random latents, seed 7; 5 frames, 96 x 64" in Elements(html).text
    assert html.index("random latents") < html.index('class="verdict')
    named = dataclasses.replace(done, request=dataclasses.replace(done.request, source=EVIL))
    assert "<script>" not in render.result(named) and EVIL in Elements(render.result(named)).text


@pytest.fixture
def tab(served):
    with gr.Blocks() as demo:
        tab = CompareTab(served.engine, served.jobs)
        tab.build(demo)
    return tab


def values(tab, job):
    shown = dict.fromkeys((tab.model, tab.strip, tab.messages, tab.view, tab.result), "")
    return shown | {tab.job: job} | {field: field.value for field in tab.fields.values()}


def test_a_page_that_is_opened_again_shows_what_was_asked_for(tab, done):
    told = tab.reopen(values(tab, done.id))
    form = {name: told[field] for name, field in tab.fields.items() if name != "file"}
    # The menu has no reference with a precision of its own choice, so that side stays as it was.
    asked = {"source": "random", "seed": 7, "frames": 5, "size": "64x96", "a": "auto:auto", "b": "reference:fp32"}
    assert form == {"job": None, **asked}
    assert done.id in told[tab.view]


def test_the_video_whose_latents_were_compared_is_chosen_again(served, tab):
    folder = served.jobs.outputs / "20260101-000000-bbbbbbbb"
    folder.mkdir()
    save_latents(folder / "latents.safetensors", draw_noise(3, (1, 48, 2, 4, 6)), {})
    asked = form(served, source="job", job=folder.name, frames=5, a="plain:bf16")
    request, _ = asked.request(served.engine, served.jobs.outputs)
    job = served.jobs.wait(served.jobs.submit(request))
    told = tab.reopen(values(tab, job.id))
    chosen = told[tab.fields["job"]]
    assert (told[tab.fields["source"]], chosen["value"], told[tab.fields["a"]]) == ("job", folder.name, "plain:bf16")
    assert tab.choose("job", folder.name)[-1]["value"] == folder.name
    # Whoever may not see what others made is not told either.
    tab.listed = False
    told = tab.reopen(values(tab, job.id))
    assert told[tab.fields["source"]] == "random" and told[tab.fields["job"]] is None


@pytest.mark.parametrize("job", [EVIL, "../..", ["x"], {"a": 1}, 5])
def test_an_address_that_names_no_comparison_says_so(tab, job):
    told = tab.reopen(values(tab, job))
    assert "not known here" in told[tab.messages] and "<script>" not in told[tab.messages] and told[tab.job] == ""


def test_a_seed_that_is_none_is_refused_in_words(tab):
    sent = values(tab, "") | {tab.fields["seed"]: tab.fields["seed"].preprocess(-5)}
    for told in (tab.tell_plan(sent), tab.start(sent)[tab.plan]):
        assert 'class="message error"' in told and "seed = -5" in told


def test_an_empty_view_says_what_to_do():
    assert "Choose" in render.EMPTY and "press Compare" in render.EMPTY
