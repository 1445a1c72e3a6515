"""The page over an engine double: what is refused, what is shown, what survives, what the server gives away."""

import ast
import asyncio
import dataclasses
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradio as gr
import httpx
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

import app
from engine.errors import RequestError
from engine.estimate import Estimate
from engine.jobs import Jobs
from engine.memory import in_words
from engine.preset import load_preset
from engine.settings import DecodeSettings
from engine.telemetry import DeviceMemory, Memory, memory_now
from engine.video import probe
from engine.web import details, render, words
from engine.web.form import Form, build_request, fitting_size, unknown_words
from tests.double import Double, Pace, serve
from tests.markup import Elements

ROOT = Path(app.__file__).parent
PRESET = load_preset("tiny")
EVIL = """<script>alert("1")</script>'${1+1}{{2}}"""
LONGEST = (PRESET.limits.frames - 1) / PRESET.fps
SHORT = {"seconds": 0.2, "steps": 2}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    jobs = Jobs(Double(PRESET), tmp_path_factory.mktemp("outputs"))
    yield app.Page(jobs.engine, jobs)
    jobs.close()


@pytest.fixture
def page(built):
    """The Generate tab. The widgets are built once; engine and jobs are as new for every test."""
    tab = built.generate
    tab.engine.pace, tab.engine.finally_ran = Pace(), 0
    tab.engine.load()
    yield tab
    for state in tab.jobs.recent():
        tab.jobs.cancel(state.id)
        tab.jobs.wait(state.id)
    tab.jobs._states.clear()


@pytest.fixture
def jobs(page):
    return page.jobs


def values(page, job="", **fields):
    """What a page sends: its fields, its job, and the fragments that it shows."""
    form = dataclasses.asdict(Form.of(PRESET)) | SHORT | fields
    shown = dict.fromkeys((page.model, page.player, page.strip, page.messages, page.details), "")
    return {page.fields[name]: value for name, value in form.items()} | {page.job: job} | shown


def start(page, **fields):
    """Press Generate; returns the job's id."""
    return page.start(values(page, **fields))[page.job]


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# ---- the form


REFUSED = [
    ({"prompt": "  "}, "The prompt is empty"),
    ({"size": "100x256"}, "height = 100"),
    ({"size": "large"}, "must be height x width"),
    ({"seconds": 1000}, f"seconds = 1000 (frames = 24001) must lie between 0 and {LONGEST:g}"),
    ({"shift": 0}, "shift = 0 must lie between 0.01"),
    ({"steps": 0}, "steps = 0"),
    ({"guidance": float("nan")}, "guidance = nan"),
    ({"seed": -5}, "seed = -5"),
    ({"decoder": "magic"}, "'magic' is not known"),
    ({"image": "/nowhere.png"}, "is not a file"),
    ({"image": 5}, "image = 5 must be the path"),
    ({"prompt": "a\ud800"}, "prompt is not valid text: its character 2"),
    ({"seconds": "abc"}, "seconds = 'abc'"),
    ({"seconds": None}, "seconds is empty"),
    ({"steps": None}, "steps is empty"),
    ({"seed": "x"}, "seed = 'x'"),
    ({"shift": 10**400}, "shift = 1000"),
    ({"size": "1" * 5000}, "size = '1111"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_the_engine_refuses_is_said_at_once_and_nothing_is_queued(page, jobs, fields, words):
    changed = page.start(values(page, **fields))
    assert words in Elements(changed[page.plan]).text
    assert set(changed) == {page.plan}
    assert jobs.recent() == []


def test_a_broken_picture_is_refused_by_its_name(page, jobs, tmp_path):
    (tmp_path / "note.png").write_text("no picture")
    said = page.start(values(page, image=str(tmp_path / "note.png")))[page.plan]
    assert "note.png" in said
    assert str(tmp_path) not in said


def test_a_picture_too_narrow_for_the_size_is_refused_before_it_waits(page, jobs, tmp_path):
    Image.new("RGB", (1, 10_000)).save(tmp_path / "line.png")
    changed = page.start(values(page, image=str(tmp_path / "line.png")))
    assert "1 x 10000, too narrow for a video of 448 x 256" in changed[page.plan]
    assert jobs.recent() == []


def test_another_decoder_than_the_presets_takes_the_precision_that_suits_it():
    preset = dataclasses.replace(PRESET, decode=DecodeSettings("plain", "bf16"))
    form = Form.of(preset)
    assert form.request(preset).decode == preset.decode
    other = dataclasses.replace(form, decoder="reference").request(preset)
    assert other.decode == DecodeSettings("reference", "auto")
    assert build_request(preset, "a", None, None, None).decode == preset.decode


def test_a_preset_without_a_menu_of_sizes_takes_a_picture(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    assert fitting_size(dataclasses.replace(PRESET, sizes=()), str(tmp_path / "a.png")) is None


def test_a_click_submits_what_the_form_says(page, jobs, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    fields = {"prompt": "a", "negative_prompt": "b", "image": str(tmp_path / "a.png"), "size": "448x256", "seed": 7}
    job = start(page, **fields, guidance=1.5, shift=4.0, decoder="reference", quality="draft", precision="fp32")
    request = jobs.snapshot(job).request
    assert (request.prompt, request.negative_prompt, request.seed) == ("a", "b", 7)
    assert (request.height, request.width, request.frames, request.steps) == (448, 256, 5, 2)
    assert (request.guidance, request.shift, request.decode.path) == (1.5, 4.0, "reference")
    assert (request.denoise.precision, request.denoise.quality) == ("fp32", "draft")
    # The upload is kept for a day, the job may wait for longer.
    assert request.image == jobs.outputs / job / "image.png" and request.image.is_file()


def test_a_drawn_seed_is_shown(page, jobs):
    seeds = set()
    for _ in range(3):
        changed = page.start(values(page, randomise=True))
        seeds.add(changed[page.fields["seed"]])
        assert jobs.snapshot(changed[page.job]).request.seed == changed[page.fields["seed"]]
    assert len(seeds) == 3


def test_the_plan_tells_frames_and_time_and_refusals_before_the_click(page):
    text = Elements(page.tell_plan(values(page, prompt="", seconds=2))).text
    assert "49 frames at 24 a second" in text and "448 x 256" in text and "Takes about" in text
    long = Elements(page.tell_plan(values(page, seconds=5, size="704x1248"))).text
    assert "minutes" in long and "quicker" in long
    assert Elements(page.tell_plan(values(page, seconds=0))).text.startswith("1 frame at")
    assert "at most" in Elements(page.tell_plan(values(page, size="992x1024"))).text
    page.engine.close()
    assert "once the model is loaded" in page.tell_plan(values(page))


def test_words_that_the_small_model_never_saw_are_named(page):
    assert Elements(page.tell_hint("a red circle moves right")).text == "5 of 1,536 tokens"
    assert "<b>elephant</b>" in page.tell_hint("a red elephant")
    assert "script" in Elements(page.tell_hint(EVIL)).text and "script" not in Elements(page.tell_hint(EVIL)).tags
    assert unknown_words(load_preset("pan2"), "a red elephant") == []


def test_a_picture_chooses_the_size_of_its_shape(page, tmp_path):
    for shape, size in (((90, 160), "448x256"), ((100, 100), "320x320"), ((160, 90), "256x448")):
        Image.new("RGB", shape).save(tmp_path / "a.png")
        assert page.fit_size(str(tmp_path / "a.png"), "1x1") == size
    assert page.fit_size(None, "256x448") == page.fit_size("/nowhere.png", "256x448") == "256x448"


# ---- following a job


def test_a_page_gets_only_what_differs_from_what_it_shows(page, jobs):
    job = start(page)
    jobs.wait(job)
    first = page.look(values(page, job))
    assert {page.model, page.player, page.strip, page.details} <= set(first)
    second = page.look(values(page, job) | first)
    assert set(second) == {page.generate, page.stop, page.timer, page.onward, page.again}


def test_buttons_and_ticks_follow_the_job(page, jobs):
    jobs.engine.pace.step = 5
    job = start(page)
    until(lambda: jobs.snapshot(job).stages)
    seen = page.look(values(page, job))
    assert (seen[page.generate].value, seen[page.stop].interactive, seen[page.timer].active) == (
        "Queue another",
        True,
        True,
    )
    assert page.cancel(job).value == "Stopping ..."
    jobs.wait(job)
    seen = page.look(values(page, job))
    assert (seen[page.generate].value, seen[page.stop].interactive, seen[page.timer].active) == (
        "Generate",
        False,
        False,
    )
    assert "Stopped after" in seen[page.strip] and "no frames yet" in seen[page.player]
    assert page.cancel(job).value == page.cancel("unknown").value == "Stop"


def test_a_second_job_is_queued_while_the_first_runs_but_not_by_a_double_click(page, jobs):
    jobs.engine.pace.step = 5
    first = start(page, seed=1)
    assert "is being made" in page.start(values(page, first, seed=1))[page.plan]
    second = page.start(values(page, first, seed=2))
    assert second[page.job] != first and second[page.stop].interactive
    page.cancel(second[page.job])
    assert jobs.wait(second[page.job]).status == "stopped" and not jobs.snapshot(first).over


def test_a_page_that_waits_for_the_model_looks_again(page):
    page.engine.close()
    assert page.look(values(page))[page.timer].active


def test_a_stopped_decode_keeps_what_is_there(page, jobs):
    jobs.engine.pace.chunk = 0.1
    job = start(page, seconds=4)
    until(lambda: jobs.snapshot(job).first_frame_seconds)
    page.cancel(job)
    state = jobs.wait(job)
    seen = page.look(values(page, job))
    assert state.status == "stopped"
    frames = probe(state.video).frames
    assert 0 < frames < 97
    assert f"{frames} frames, is kept" in seen[page.strip] if frames > 1 else "1 frame, is kept" in seen[page.strip]
    assert f'final="video/{job}.mp4"' in seen[page.player]
    assert "Download" in seen[page.details]
    assert jobs.engine.finally_ran == 1


@pytest.mark.parametrize(
    ("fail_at", "words"),
    [
        ("text", "the <tokenizer> is missing"),
        ("denoise", "out of memory"),
        ("decode", "Internal error, please report it"),
    ],
)
def test_an_error_is_a_sentence_in_its_own_place_and_the_next_job_runs(page, jobs, fail_at, words):
    jobs.engine.pace.fail_at = fail_at
    job = start(page)
    jobs.wait(job)
    seen = page.look(values(page, job))
    said = Elements(seen[page.messages])
    assert words in said.text
    assert said.tags == ["p"]
    assert words not in seen[page.player]
    assert 'class="failed"' in seen[page.strip]
    jobs.engine.pace.fail_at = None
    assert jobs.wait(start(page)).status == "finished"


def test_the_end_of_the_server_is_a_warning_and_no_error_of_the_job(page, jobs):
    job = start(page)
    state = dataclasses.replace(jobs.wait(job), status="interrupted", error="Decoding again brings the rest.")
    assert "message warning" in render.of_job(state) and "message error" not in render.of_job(state)
    assert "message error" in render.of_job(dataclasses.replace(state, status="failed"))


def test_what_was_decoded_before_a_fault_can_be_fetched(page, jobs):
    jobs.engine.pace = Pace(fail_at="decode", fail_after=17)
    job = start(page, seconds=1)
    state = jobs.wait(job)
    assert state.status == "failed" and probe(state.video).frames == 17
    seen = page.look(values(page, job))
    assert "Download the video" in Elements(seen[page.details]).text
    assert "17 frames, is kept" in Elements(seen[page.strip]).text


def test_a_reopened_page_finds_its_job_and_fills_its_form(page, jobs):
    jobs.engine.pace.step = 5
    job = start(page, prompt="a blue star", seconds=4, size="320x320", seed=9, steps=4)
    seen = page.reopen(values(page, job))
    filled = {name: seen[field] for name, field in page.fields.items() if field in seen}
    assert filled == {
        "prompt": "a blue star", "negative_prompt": "", "seconds": 4.0, "size": "320x320", "seed": 9, "steps": 4,
        "guidance": 2.5, "shift": PRESET.defaults.shift, "decoder": "auto",
        "quality": "full", "precision": "auto", "image": None, "randomise": False,
    }  # fmt: skip
    assert page.strip in seen and page.job not in seen
    page.cancel(job)


def test_a_job_that_is_gone_is_said_and_forgotten(page):
    seen = page.reopen(values(page, f"20260101-{EVIL}"))
    assert seen[page.job] == ""
    assert "not known here" in seen[page.messages]
    assert Elements(seen[page.messages]).tags == ["p"]
    buttons = {page.generate, page.stop, page.timer, page.onward, page.again}
    assert page.reopen(values(page)).keys() == {page.model, *buttons, page.fields["image"]}


def test_a_job_of_the_api_is_followed_though_the_menu_lacks_its_size(page, jobs):
    job = jobs.submit(PRESET.request(prompt="a", height=64, width=96, frames=1, steps=1))
    seen = page.reopen(values(page, job))
    size = f"{PRESET.defaults.height}x{PRESET.defaults.width}"
    assert seen[page.fields["size"]] == size and seen[page.fields["seconds"]] == 0
    jobs.wait(job)


def test_a_page_that_outlived_the_server_says_so(page):
    seen = page.look(values(page, "20260101-000000-0"))
    assert "not known here" in seen[page.messages]
    assert "Your video appears here" in seen[page.player]
    assert seen[page.generate].interactive and not seen[page.timer].active


def test_the_second_job_says_what_is_before_it(page, jobs):
    jobs.engine.pace.step = 5
    first, second = start(page), start(page)
    seen = page.look(values(page, second))
    assert "1 job before yours" in seen[page.strip]
    assert "In the queue" in seen[page.player]
    page.cancel(first)
    page.cancel(second)
    jobs.wait(second)
    assert "Stopped" in page.look(values(page, second))[page.strip]


def test_nothing_is_whole_before_the_file_exists(page, jobs):
    jobs.engine.pace = Pace(step=0.005, chunk=0.02)
    job, seen = start(page, seconds=2, steps=3), []
    for state in jobs.follow(job, 0.01):
        if state.video is None:
            seen.append([(row.phase, row.share) for row in render.rows(state)])
    assert len(seen) > 5
    assert not [rows for rows in seen if all(phase == "done" for phase, _ in rows)]
    assert not [share for rows in seen for phase, share in rows if phase == "now" and share >= 1]
    assert {row.phase for row in render.rows(jobs.snapshot(job))} == {"done"}


def test_every_text_of_a_visitor_is_escaped(built, page, jobs):
    jobs.engine.pace = Pace(warning=EVIL)
    job = start(page, prompt=EVIL, negative_prompt=EVIL)
    jobs.wait(job)
    seen = page.look(values(page, job))
    for part in (page.model, page.player, page.strip, page.messages, page.details):
        assert "script" not in Elements(seen[part]).tags
        assert "<script" not in seen[part]
    assert EVIL in Elements(seen[page.messages]).text
    assert "&lt;script&gt;" in seen[page.player]
    system = Elements(built.tell_system())
    assert "script" not in system.tags and "no GPU here <b>" in system.text


def test_strangers_see_the_name_of_the_checkpoint_and_not_where_it_lies(jobs, monkeypatch):
    about = {"Model": "Toy", "Checkpoint": "/srv/models/toy", "torch": "2"}
    monkeypatch.setattr(jobs.engine, "about", lambda: about)
    shown = {listed: Elements(app.Page(jobs.engine, jobs, listed).tell_system()).text for listed in (True, False)}
    assert "/srv/models/toy" in shown[True]
    assert "Checkpointtoy" in shown[False] and "srv" not in shown[False]
    assert shown[True].index("Guardrail") < shown[True].index("Model") < shown[True].index("gradio")


def test_memory_is_asked_of_the_engine_since_its_workers_are_not_this_process(built, page, jobs, monkeypatch):
    devices = tuple(DeviceMemory(f"cuda:{index}", 5, 6, 7, 8, 9) for index in range(2))
    monkeypatch.setattr(jobs.engine, "memory", lambda: Memory(1, 2, 3, devices))
    jobs.engine.pace = Pace(step=30)
    job = start(page)
    for text in (page.look(values(page, job))[page.details], built.tell_system()):
        assert "cuda:0" in text and "cuda:1" in text
    page.cancel(job)


def test_a_preview_stands_in_the_players_place_until_there_are_frames(page, jobs):
    jobs.engine.pace = Pace(step=0.3, chunk=5, previews=True)
    job = start(page, seconds=1, steps=3, prompt=EVIL)
    until(lambda: jobs.snapshot(job).previewed == 1)
    shown = Elements(page.look(values(page, job))[page.player])
    assert "Preview, step 1 of 3" in shown.text and shown.tags == ["figure", "img", "figcaption"]
    until(lambda: jobs.snapshot(job).previewed == 2)
    assert f"preview/{job}.webp?step=2" in page.look(values(page, job))[page.player]
    page.cancel(job)
    assert jobs.wait(job).status == "stopped"
    assert "Stopped" in page.look(values(page, job))[page.player]


def test_the_plan_tells_the_memory_where_it_is_known():
    request = PRESET.request(prompt="a")
    known = Estimate(1.0, 1.0, 1.0, "a test", bytes=3 * 2**30)
    assert "Needs about 3.0 GiB of memory." in render.plan(request, 24, known)
    assert "memory" not in render.plan(request, 24, dataclasses.replace(known, bytes=None))


def test_details_draw_charts_while_it_runs_and_afterwards(page, jobs):
    jobs.engine.pace.step = 5
    job = start(page)
    until(lambda: jobs.snapshot(job).stages)
    assert page.look(values(page, job))[page.details].count("<svg") == 4
    page.cancel(job)
    jobs.wait(job)
    assert page.look(values(page, job))[page.details].count("<svg") == 4
    jobs.engine.pace = Pace(fail_at="denoise")
    failed = start(page)
    jobs.wait(failed)
    assert page.look(values(page, failed))[page.details].count("<svg") == 4
    jobs.engine.pace = Pace()
    last = jobs.wait(start(page))
    drawn = details.details(last, memory_now(), {})
    assert drawn.count("<svg") == 4 and "What ran, and why" in drawn and "python -m engine" in drawn


@pytest.mark.parametrize(
    ("prompt", "words"),
    [('{"a": 1,}', "line 1, column"), ("red " * 1600, "the last 64 will be cut off"), (EVIL, "tokens")],
)
def test_what_is_to_be_said_of_a_prompt_stands_below_it(page, prompt, words):
    said = Elements(page.tell_hint(prompt))
    assert words in said.text and "script" not in said.tags


# ---- words and figures


def test_durations_and_sizes_are_short():
    assert [words.duration(s) for s in (0.04, 0.8, 9.96, 59.6, 130, 3600, 3900)] == [
        "40 ms", "0.8 s", "10 s", "1 min", "2 min 10 s", "1 h", "1 h 5 min",
    ]  # fmt: skip
    assert [words.roughly(s) for s in (0.2, 1, 33, 130, 1500, 9000)] == [
        "1 second", "1 second", "35 seconds", "2 minutes", "25 minutes", "2.5 hours",
    ]  # fmt: skip
    assert [in_words(n) for n in (12, 5000, 3 * 2**20, 1.5 * 2**30)] == ["12 bytes", "5 KiB", "3.0 MiB", "1.5 GiB"]


def test_a_download_is_named_after_prompt_and_seed():
    request = PRESET.request(prompt='A "red" circle/../moves: right, ' + "and on " * 40, seed=5)
    assert words.file_name(request) == "a-red-circle-moves-right-and-on-and-on-and-on-5.mp4"
    assert words.file_name(PRESET.request(prompt="???", seed=5)) == "video-5.mp4"


def test_memory_shows_every_device():
    gib = 2**30
    device = DeviceMemory("cuda:1", 60 * gib, 70 * gib, 65 * gib, 80 * gib, 140 * gib)
    text = Elements(details.memory(Memory(2 * gib, 100 * gib, 128 * gib, (device,)))).text
    assert "2.0 GiB here, 28.0 GiB of 128.0 GiB in use" in text
    assert "cuda:1allocated 60.0 GiB, reserved 70.0 GiB, peak 65.0 GiB, device 80.0 GiB of 140.0 GiB" in text


def test_settings_to_copy_make_the_same_request_again(page, jobs):
    job = start(page, prompt='say "hi" & <go>', seed=11)
    state = jobs.wait(job)
    settings = details.settings(state)
    assert settings["latents_sha256"] == "0" * 64
    assert settings | {"image": None} == settings
    assert 'say "hi" & <go>'.replace('"', '\\"') in Elements(details.card(state)).text


# ---- the server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(Double(PRESET, Pace(load=0.3)), tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return Client(served.url, verbose=False)


@pytest.fixture
def done(served):
    """The id of a finished job."""
    job = served.jobs.submit(PRESET.request(prompt="a red circle", frames=5, steps=1))
    assert served.jobs.wait(job).status == "finished"
    return job


def test_health_at_once_and_ready_once_the_model_is_there(served):
    assert httpx.get(f"{served.url}/healthz").json() == {"status": "ok"}
    until(lambda: served.engine.readiness().state == "ready")
    served.engine.close()
    waiting = httpx.get(f"{served.url}/readyz")
    assert (waiting.status_code, waiting.json()["state"]) == (503, "idle")
    served.engine.load()
    ready = httpx.get(f"{served.url}/readyz")
    assert (ready.status_code, ready.json()["state"]) == (200, "ready")


def test_the_page_and_its_parts_are_served_from_here_alone(served):
    html = httpx.get(served.url).text
    for name in ("style.css", "page.js", "player.js", "player.css", "icon.svg"):
        answer = httpx.get(f"{served.url}/web/{name}")
        assert answer.status_code == 200 and len(answer.text) > 100, name
    assert "fonts.googleapis" not in html
    assert "http" not in httpx.get(f"{served.url}/web/style.css").text.replace("http://www.w3.org/2000/svg", "")


OUTSIDE = [
    "/web/../app.py",
    "/web/..%2fapp.py",
    "/web/render.py",
    "/web/%2e%2e%2f%2e%2e%2fpyproject.toml",
    "/video/..%2f..%2fetc%2fpasswd.mp4",
    "/video/../app.mp4",
    "/thumbnail/..%2f..%2fx.jpg",
    "/preview/..%2f..%2fx.webp",
    "/preview/unknown.webp",
    "/live/..%2f..%2fetc%2fpasswd.mp4",
    "/live/unknown.mp4",
    "/video/unknown.mp4",
    "/gradio_api/file=app.py",
    "/gradio_api/file=/etc/passwd",
    f"/gradio_api/file={ROOT / 'app.py'}",
    f"/gradio_api/file={ROOT / 'outputs' / '..' / 'app.py'}",
    "/monitoring",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_else_of_the_disk_is_served(served, path):
    answer = httpx.get(served.url + path, follow_redirects=True)
    assert answer.status_code in (403, 404), answer.text[:200]


def test_videos_come_in_ranges_and_under_a_readable_name(served, done):
    address = f"{served.url}/video/{done}.mp4"
    part = httpx.get(address, headers={"Range": "bytes=0-99"})
    assert (part.status_code, len(part.content), part.headers["content-type"]) == (206, 100, "video/mp4")
    whole = httpx.get(address, params={"download": 1})
    assert 'attachment; filename="a-red-circle-123.mp4"' in whole.headers["content-disposition"]
    assert whole.content == served.jobs.snapshot(done).video.read_bytes()
    assert httpx.get(f"{served.url}/preview/{done}.webp").status_code == 404, "it had none"
    assert httpx.get(f"{served.url}/thumbnail/{done}.jpg").headers["content-type"] == "image/jpeg"
    assert httpx.get(f"{served.url}/live/{done}.mp4").content[4:8] == b"ftyp"


# ---- the API


def test_the_api_has_its_names_and_gives_an_mp4_and_its_figures(served, client, tmp_path):
    assert list(client.view_api(return_format="dict", print_info=False)["named_endpoints"]) == [
        "/generate",
        "/decode",
        "/compare",
    ]
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    path, stats = client.predict(
        prompt="a red circle", image=handle_file(tmp_path / "a.png"), seconds=0.3, height=64, width=96, steps=1, seed=5,
        guidance=1.0, shift=3.0, decoder="plain", quality="balanced", precision="fp32", negative_prompt="blue",
        api_name="/generate",
    )  # fmt: skip
    info = probe(Path(path))
    assert (info.frames, info.height, info.width, info.fps, info.codec) == (9, 64, 96, 24.0, "h264")
    assert (stats["status"], stats["frames"], stats["request"]["seed"]) == ("finished", 9, 5)
    assert stats["request"]["decode"]["decoder"] == "plain"
    assert stats["request"]["denoise"] | {"precision": "fp32", "quality": "balanced"} == stats["request"]["denoise"]


def test_a_call_without_values_takes_the_presets(served, client):
    _, stats = client.predict(prompt="a", api_name="/generate")
    request, default = stats["request"], PRESET.defaults
    assert (request["frames"], request["height"], request["seed"]) == (default.frames, default.height, default.seed)


BAD_CALLS = [
    ({"prompt": ""}, "The prompt is empty"),
    ({"height": 100}, "height = 100 must be a multiple of 32; the nearest is 96"),
    ({"height": "tall"}, "height = 'tall' must be a whole number"),
    ({"steps": 10**9}, "steps = 1000000000 must lie between 1 and 100"),
    ({"steps": 2.5}, "steps = 2.5 must be a whole number"),
    ({"seconds": -1}, "seconds = -1"),
    ({"seconds": 1e5}, f"seconds = 100000 (frames = 2400001) must lie between 0 and {LONGEST:g}"),
    ({"decoder": "x"}, "decode path = 'x' is not known; choose one of auto"),
    ({"prompt": ["a"]}, "prompt must be text"),
]


@pytest.mark.parametrize(("call", "words"), BAD_CALLS)
def test_a_bad_call_gets_the_engines_words(served, client, call, words):
    before = len(served.jobs.recent())
    with pytest.raises(AppError, match="^" + re.escape(words)):
        client.predict(**({"prompt": "a"} | call), api_name="/generate")
    assert len(served.jobs.recent()) == before


def test_a_decoder_that_this_machine_lacks_is_refused_before_it_waits(served, client, monkeypatch):
    def decoder(settings):
        raise RequestError(f"{settings.path} is not here")

    monkeypatch.setattr(served.engine, "decoder", decoder)
    before = len(served.jobs.recent())
    with pytest.raises(AppError, match="reference is not here"):
        client.predict(prompt="a", decoder="reference", api_name="/generate")
    assert len(served.jobs.recent()) == before


def raw_call(served, image, prompt="a", guidance=None, **sent):
    """Call the endpoint as no well-behaved client would; returns the server's answer."""
    data = [prompt, None, image, 0.2, None, None, 1, guidance, *[None] * 5]
    address = f"{served.url}/gradio_api/call/generate"
    # Python's own JSON, since other writers refuse half characters and long numbers.
    body, kind = json.dumps({"data": data} | sent), {"content-type": "application/json"}
    event = httpx.post(address, content=body, headers=kind).json()["event_id"]
    return httpx.get(f"{address}/{event}", timeout=30).text


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"guidance": 10**400}, "guidance = 1000"),
        ({"guidance": [1]}, "guidance = [1] must be a number"),
        ({"prompt": "a\udcffb"}, "prompt is not valid text: its character 2 is U+DCFF"),
        ({"data": ["a"]}, "The call has 1 values and needs 13"),
    ],
)
def test_what_no_client_sends_is_refused_in_words_too(served, sent, words):
    before = len(served.jobs.recent())
    assert words in raw_call(served, None, **sent)
    assert len(served.jobs.recent()) == before


def preprocessed(built, function, **sent):
    """What a handler of the page gets for its fields' own values, or these."""
    fields = built.generate.fields
    names = {field: name for name, field in fields.items()}
    given = [sent.get(names.get(field), getattr(field, "value", None)) for field in function.inputs]
    with ThreadPoolExecutor() as elsewhere:
        # Playwright leaves a running loop in the main thread.
        taken = elsewhere.submit(asyncio.run, built.demo.preprocess_data(function, given, None)).result()
    return dict(zip(function.inputs, taken, strict=True))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"seed": -5}, "seed = -5"),
        ({"shift": 0}, "shift = 0 must lie"),
        ({"seconds": 99}, "seconds = 99"),
        ({"steps": None}, "steps is empty"),
        ({"steps": "x"}, "steps = 'x'"),
        ({"guidance": -1}, "guidance = -1"),
    ],
)
def test_what_a_field_of_numbers_holds_reaches_the_engine_which_refuses_it_in_words(built, page, sent, said):
    function = next(found for found in built.demo.fns.values() if found.fn == page.tell_plan)
    defaults = dataclasses.asdict(Form.of(PRESET))
    assert said in Elements(page.tell_plan(preprocessed(built, function, **(defaults | sent)))).text


def test_a_fault_of_another_field_is_not_taken_for_an_upload(built, page):
    function = next(found for found in built.demo.fns.values() if found.fn == page.tell_plan)
    with pytest.raises(gr.Error, match="not known here any more"):
        preprocessed(built, function, decoder=["x"])


MARKED = {"meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    "image",
    [
        {"path": "SECRET", **MARKED},
        {"path": "SECRET"},
        {"path": "http://127.0.0.1:1/a.png", **MARKED},
        {"path": "http://127.0.0.1:1/a.png", "url": "http://127.0.0.1:1/a.png", **MARKED},
        {"path": "http://example.com/a.png"},
        {"path": "", "url": "data:image/png;base64,AAAA", **MARKED},
        {"path": "/etc/passwd", **MARKED},
        {"path": ["SECRET"], **MARKED},
        {"path": ["SECRET"]},
        {"path": "a\0", **MARKED},
        {"path": "a\0"},
        {"path": "x" * 9999, **MARKED},
        {"url": "http://example.com/a.png"},
        {"url": "http://example.com/a.png", **MARKED},
        {},
        ["SECRET"],
        "SECRET",
        "",
        5,
        0,
    ],
)
def test_only_an_upload_can_be_a_first_frame(served, image, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (64, 64)).save(secret)
    if isinstance(image, dict):
        image = {key: str(secret) if value == "SECRET" else value for key, value in image.items()}
    before = len(served.jobs.recent())
    answer = raw_call(served, str(secret) if image == "SECRET" else image)
    assert "event: error" in answer and "event: complete" not in answer
    assert "Upload the file itself" in answer
    assert len(served.jobs.recent()) == before


def test_a_failed_call_gets_the_reason(served, client):
    served.engine.pace = Pace(fail_at="denoise")
    with pytest.raises(AppError, match="ran out of memory"):
        client.predict(prompt="a", api_name="/generate")
    served.engine.pace = Pace()


def test_a_caller_that_goes_away_stops_its_job(served, client):
    served.engine.pace = Pace(step=0.2)
    call = client.submit(prompt="a", steps=90, api_name="/generate")
    until(lambda: call.outputs())
    job = call.outputs()[-1][1]["job"]
    call.cancel()
    until(lambda: served.jobs.snapshot(job).over)
    assert served.jobs.snapshot(job).status == "stopped"
    served.engine.pace = Pace()


# ---- around it


def test_the_double_is_out_of_reach_of_the_app():
    for path in [ROOT / "app.py", *(ROOT / "engine").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name.split(".")[0] == "tests"], path


NAMES = ("host", "port", "outputs")


def test_arguments_come_from_the_environment():
    given = {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "9", "ENGINE_OUTPUTS": "/o"}
    for arguments, found in (([], ("0.0.0.0", 9, Path("/o"))), (["--port", "8"], ("0.0.0.0", 8, Path("/o")))):
        assert tuple(vars(app.settings(app.parser().parse_args(arguments), given))[k] for k in NAMES) == found


def test_a_model_that_can_not_be_loaded_is_said_on_the_page(tmp_path, monkeypatch):
    engine = Double(PRESET)
    failed = threading.Event()

    def load():
        failed.set()
        raise RuntimeError("no such folder")

    monkeypatch.setattr(engine, "load", load)
    with serve(engine, tmp_path) as served:
        assert failed.wait(5)
        assert httpx.get(f"{served.url}/readyz").status_code == 503
        assert httpx.get(served.url).status_code == 200


def test_the_real_program_over_the_real_engine(toy_checkpoint, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "app.py", "--preset", "tiny", "--checkpoint", str(toy_checkpoint), "--devices", "cpu"]
    command += ["--port", port, "--host", "127.0.0.1", "--outputs", str(tmp_path)]
    said = tmp_path / "said.txt"
    with said.open("w") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(f"{url}/readyz"), seconds=120)
            path, stats = Client(url, verbose=False).predict(
                prompt="a red circle", seconds=0.2, height=64, width=64, steps=1, api_name="/generate"
            )
            assert probe(Path(path)).frames == stats["frames"] == 5
        finally:
            # The client still holds its connection, as a page does.
            process.send_signal(signal.SIGINT)
            process.wait(30)
    assert "Traceback" not in said.read_text()


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(self.format(record))


def test_a_server_that_ends_ends_the_video_that_is_followed_live(tmp_path):
    kept, followed = Kept(), []
    log = logging.getLogger("uvicorn.error")
    with serve(Double(PRESET, Pace(chunk=0.4)), tmp_path) as served:
        log.addHandler(kept)
        job = served.jobs.submit(PRESET.request(prompt="a", frames=241, steps=1))
        until(lambda: served.jobs.snapshot(job).live.is_file())

        def follow():
            with httpx.stream("GET", f"{served.url}/live/{job}.mp4", timeout=60) as answer:
                followed.extend(answer.iter_raw())

        reader = threading.Thread(target=follow)
        reader.start()
        until(lambda: followed)
    reader.join(60)
    log.removeHandler(kept)
    assert not reader.is_alive() and kept.texts == []


def test_without_the_extra_for_tools_the_program_ends_with_a_sentence(toy_checkpoint, tmp_path, monkeypatch):
    for module in ("mcp", "gradio.mcp"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("ENGINE_MCP", "1")
    arguments = ["app.py", "--checkpoint", str(toy_checkpoint), "--devices", "cpu", "--outputs", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match=r"^ENGINE_MCP is set and .* Install \.\[mcp\]\.$"):
        app.main()


def answers(url):
    """Whether a server answers there, and with 200."""
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
