"""The History tab over an engine double: what is listed, what its buttons do, and settings that come from a file."""

import dataclasses
import json
import re
import threading
import time

import gradio as gr
import pytest
from PIL import Image

import app
from engine import store
from engine.errors import RequestError
from engine.events import ComparisonFinished
from engine.jobs import Jobs
from engine.preset import load_preset
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents
from engine.web import details
from engine.web.form import Form
from engine.web.history_render import PAGE, STATES
from engine.web.settings_file import read_settings_file
from tests.double import Double, Pace
from tests.markup import Elements

PRESET = load_preset("tiny")
EVIL = """<script>alert("1")</script>'"""
SMALL = {"height": 256, "width": 448, "frames": 5, "steps": 3}


@pytest.fixture
def jobs(tmp_path):
    jobs = Jobs(Double(PRESET), tmp_path / "outputs")
    yield jobs
    jobs.close()


@pytest.fixture
def tab(jobs):
    return app.Page(jobs.engine, jobs).history


def submit(jobs, **values):
    return jobs.submit(PRESET.request(**({"prompt": "a red circle"} | SMALL | values)))


def made(jobs, **values):
    return jobs.wait(submit(jobs, **values))


def click(job="", page=0):
    """What a button of the list sends."""
    return gr.EventData(None, {"job": job, "page": page})


def form(tab, **fields):
    values = dataclasses.asdict(Form.of(PRESET)) | fields
    return {field: values[name] for name, field in tab.generate.fields.items()}


def filled(tab, changed):
    return {name: changed[field] for name, field in tab.generate.fields.items()}


def test_where_strangers_come_nobody_sees_or_deletes_what_others_made(jobs):
    blocks = app.build(jobs.engine, jobs, listed=False).blocks.values()
    named = {block.label: block for block in blocks if getattr(block, "label", None)}
    assert "History" not in named and "Generate" in named
    assert not named["The end of a video made here"].visible
    assert [name for _, name in named["Latents"].choices] == ["random", "file"]


def test_an_empty_list_says_what_to_do(tab):
    assert "Make one on the Generate tab" in Elements(tab.show()).text


def test_every_video_is_listed_with_what_can_be_done(jobs, tab):
    jobs.engine.pace = Pace(fail_at="denoise")
    failed = made(jobs, prompt=EVIL)
    jobs.engine.pace = Pace()
    finished = made(jobs, seed=77)
    jobs.engine.pace = Pace(step=30)
    submit(jobs, prompt="")
    html = tab.show()
    entries = html.split('<li class="entry">')[1:]
    texts = [Elements(entry).text for entry in entries]
    assert "script" not in Elements(html).tags
    assert EVIL in texts[2] and "Failed" in texts[2] and "Download" not in texts[2]
    assert "seed 77" in texts[1] and "448 x 256" in texts[1] and "3 steps" in texts[1] and "KiB" in texts[1]
    assert f'src="thumbnail/{finished.id}.jpg"' in entries[1] and f"video/{finished.id}.mp4?download=1" in entries[1]
    assert "Without words" in texts[0] and "Stop" in texts[0] and "Delete" not in texts[0]
    assert failed.id in entries[2] and set(STATES) >= {"interrupted", "failed", "stopped"}


def test_two_hundred_videos_come_page_by_page_and_quickly(jobs, tab):
    one = made(jobs)
    for number in range(200):
        state = dataclasses.replace(one, id=f"20260101-000000-{number:08x}", created=float(number))
        state.folder = jobs.outputs / state.id
        state.folder.mkdir()
        store.save(state)
        jobs._states[state.id] = state
    began = time.monotonic()
    html = tab.show(1)
    assert html.count('<li class="entry">') == PAGE and f"{PAGE + 1} to {2 * PAGE} of 201" in html
    assert time.monotonic() - began < 5
    assert tab.show(10**6).count('<li class="entry">') == 201 % PAGE
    assert tab.turn(click(page=1))[0] == html and tab.turn(click(page="x"))[0] == tab.show()
    seen = re.findall(r'aria-label="Open[^"]*', "".join(tab.show(page) for page in range(17)))
    assert len(seen) == 201


def test_deleting_removes_a_video_and_never_one_at_work(jobs, tab):
    first, second = made(jobs), made(jobs)
    html, *_, note = tab.delete(click(first.id))
    assert note == "" and first.id not in html and second.id in html and not first.folder.exists()
    assert "There is no job" in tab.delete(click(first.id))[-1]
    assert "There is no job" in tab.delete(click(["x"]))[-1]
    jobs.engine.pace = Pace(step=30)
    running = submit(jobs)
    assert "Stop it first" in tab.delete(click(running))[-1] and jobs.snapshot(running)
    tab.stop(click(running))
    assert jobs.wait(running).status == "stopped"


def test_the_list_follows_what_is_at_work_and_rests_when_all_is_over(jobs, tab):
    jobs.engine.pace = Pace(step=30)
    running, waiting = submit(jobs), submit(jobs)
    jobs.cancel(waiting)
    shown, page, timer, _ = tab.refresh()
    assert "Stop" in shown and timer.active
    first = shown.split('<li class="entry">')[1]
    assert "Stopped before it began" in first and "448 x 256" in first and "s, 448" not in first
    jobs.cancel(running)
    jobs.wait(running)
    fresh, page, timer = tab.tick(page, shown)
    assert "At work" not in fresh and not timer.active
    assert tab.tick(page, fresh)[0] == gr.skip(), "a button may wait for its second click"


def test_comparisons_are_listed_opened_stopped_and_deleted(jobs, tab, monkeypatch):
    begun = threading.Event()

    def compare(latents, a, b, folder, cancel, frames):
        folder.mkdir(exist_ok=True)
        (folder / "raw").write_bytes(b"x" * 3 * 2**20)
        begun.set()
        cancel.wait(60)
        yield ComparisonFinished({"sides": {}, "verdict": {"passed": True, "text": "The same <b>picture</b>."}})

    monkeypatch.setattr(jobs.engine, "compare", compare)
    asked = CompareRequest(
        RandomLatents(1, 5, 64, 96), DecodeSettings("plain", "fp32"), DecodeSettings("reference"), source="noise of 1"
    )
    job = jobs.submit(asked)
    assert begun.wait(60)
    shown, _, timer, _ = tab.refresh()
    text = Elements(shown).text
    assert "plain, fp32 against reference, auto" in text and "noise of 1" in text and "Stop" in text and timer.active
    assert "Stop it first" in tab.delete(click(job))[-1]
    tab.stop(click(job))
    assert jobs.wait(job).over
    text = Elements(tab.show()).text
    assert "The same <b>picture</b>." in text and "3.0 MiB" in text and "took" in text and "Delete" in text
    found, tabs = tab.open_comparison(click(job))
    assert found == job and tabs.selected == "compare"
    assert job not in tab.delete(click(job))[0] and not (jobs.outputs / job).exists()


def test_settings_of_a_video_fill_the_form_with_its_picture(jobs, tab, tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    state = made(jobs, prompt="a blue star", image=tmp_path / "a.png", seed=9, negative_prompt="dull", guidance=3.5)
    changed = tab.use(form(tab, randomise=True), click(state.id))
    asked = filled(tab, changed)
    assert (asked["prompt"], asked["negative_prompt"], asked["seed"], asked["randomise"]) == (
        "a blue star",
        "dull",
        9,
        False,
    )
    assert asked["image"] == str(state.folder / "image.png") and asked["guidance"] == 3.5
    assert changed[tab.tabs].selected == "generate"
    gone = tab.use(form(tab, prompt="mine", image="mine.png"), click("nope"))
    assert "not here any more" in gone[tab.note] and filled(tab, gone)["image"] == "mine.png"
    assert tab.tabs not in gone and filled(tab, gone)["prompt"] == "mine"


def test_settings_come_back_from_the_video_and_from_every_json_of_it(jobs, tab, tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    state = made(jobs, prompt='say "hi"', image=tmp_path / "a.png", seed=11)
    copied = tmp_path / "copied.json"
    copied.write_text(json.dumps(details.settings(state)))
    for path in (state.video, state.folder / "job.json", state.folder / "stats.json", copied):
        found = read_settings_file(path, PRESET)
        assert dataclasses.replace(found, image=None, decode=state.request.decode) == dataclasses.replace(
            state.request, image=None
        ), path
        assert found.image.name == "image.png"
    changed = tab.use_file(form(tab, image="mine.png") | {tab.file: str(copied)})
    assert filled(tab, changed)["prompt"] == 'say "hi"' and filled(tab, changed)["image"] is None
    assert "image.png, is not in the file" in changed[tab.generate.note]
    broken = tab.use_file(form(tab, image="mine.png") | {tab.file: str(tmp_path / "a.png")})
    assert "a.png is no JSON" in broken[tab.note] and filled(tab, broken)["image"] == "mine.png"


BAD = {
    "a.mp4": ("x", "is not an mp4"),
    "a.json": ("{", "is no JSON"),
    "b.json": ("[" * 100_000, "is no JSON"),
    "c.json": ("[1]", "holds no settings"),
    "d.json": ('{"prompt": "a"}', "lacks frames"),
    "e.json": (" " * (2**20 + 1), "too large"),
    "f.json": ("{}", "holds no settings"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_hold_no_settings_are_refused_in_words(tmp_path, name):
    text, said = BAD[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=said) as caught:
        read_settings_file(tmp_path / name, PRESET)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("change", [{"steps": 10**6}, {"height": 100}, {"shift": 500.0}])
def test_settings_that_the_preset_does_not_do_are_refused_with_the_reason(tmp_path, change):
    values = PRESET.request(prompt="a").to_json() | {"preset": "pan2"} | change
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(RequestError, match=rf"{next(iter(change))}.*made with the preset pan2"):
        read_settings_file(tmp_path / "a.json", PRESET)


@pytest.mark.parametrize("change", [{"seed": "x"}, {"prompt": 5}, {"shift": [1]}, {"frames": None}])
def test_settings_that_no_preset_does_are_refused_by_name(tmp_path, change):
    (tmp_path / "a.json").write_text(json.dumps(PRESET.request(prompt="a").to_json() | change))
    with pytest.raises(RequestError, match=rf"^{next(iter(change))} .*must be"):
        read_settings_file(tmp_path / "a.json", PRESET)


def test_a_reopened_page_gets_its_picture_and_never_leaves_the_field_of_it_out(jobs, tab, tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    state, page = made(jobs, image=tmp_path / "a.png"), tab.generate
    shown = dict.fromkeys((page.model, page.player, page.strip, page.messages, page.details), "")
    assert page.reopen(form(tab) | shown | {page.job: state.id})[page.fields["image"]] == str(state.request.image)
    for job in ("", "20260101-000000-00000000"):
        assert page.reopen(form(tab, image="x.png") | shown | {page.job: job})[page.fields["image"]] == "x.png"
