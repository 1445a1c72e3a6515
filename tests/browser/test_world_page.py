"""The World tab in a real browser, over an engine double: look, try what could happen, choose, go on."""

import io

import pytest
from PIL import Image

from engine.preset import load_preset
from engine.video import probe
from tests.double import Double, Pace, serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

GRID = "document.querySelector('video-grid').shadowRoot"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    engine = Double(load_preset("tiny"))
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture
def page(served, chromium):
    faults = []
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    yield page
    context.close()
    assert faults == []


def act(page, **actions):
    for letter, text in actions.items():
        page.get_by_label(f"Action {letter}").fill(text)
    page.get_by_role("button", name="See what happens").click()


def test_from_a_video_to_branches_to_a_chain(served, page, tmp_path):
    source = served.jobs.submit(served.engine.preset.request(prompt="a red star", frames=25, steps=2))
    served.jobs.wait(source)
    page.goto(f"{served.url}/?job={source}")
    page.get_by_role("button", name="Go on from its last frame").click()
    page.get_by_text("This is seen now, after 1 video").wait_for()
    assert page.get_by_label("Action A").input_value() == "a red star"

    served.engine.pace = Pace(step=0.02, chunk=0.4)
    act(page, A="a red star moves left", B="a red star grows")
    page.locator(".cell").nth(1).wait_for()
    assert page.get_by_role("button", name="See what happens").is_disabled()
    group = served.jobs.recent()[0].group
    named = f"job={source}&tab=world&from={source}&group={group}"
    page.wait_for_function("(named) => location.search === `?${named}`", arg=named)
    page.reload()
    page.locator("video-grid").wait_for()
    page.wait_for_function(f"[...{GRID}.querySelectorAll('video')].every((video) => video.readyState >= 3)")
    page.evaluate(f"{GRID}.querySelector('button').click()")
    page.wait_for_function(f"{GRID}.querySelector('video').currentTime > 0.3")
    page.evaluate(f"{GRID}.querySelector('button').click()")
    page.wait_for_function(f"[...{GRID}.querySelectorAll('video')].every((video) => video.paused && !video.seeking)")
    times = page.evaluate(f"[...{GRID}.querySelectorAll('video')].map((video) => video.currentTime)")
    assert len(times) == 2 and abs(times[0] - times[1]) < 1 / 24

    page.get_by_role("button", name="Go on from B").click()
    page.get_by_text("This is seen now, after 2 videos").wait_for()
    assert page.locator("video-grid").count() == 0
    assert page.locator(".told li").all_inner_texts() == ["a red star", "a red star grows"]
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the chain").click()
    download.value.save_as(tmp_path / "chain.mp4")
    assert probe(tmp_path / "chain.mp4").frames == 25 + 49 - 1
    page.get_by_role("button", name="Step back").click()
    page.get_by_text("This is seen now, after 1 video").wait_for()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_an_action_without_a_place_to_begin_is_refused_before_it_waits(served, page):
    before = len(served.jobs.recent())
    page.goto(served.url)
    page.get_by_role("tab", name="World").click()
    page.get_by_text("Look, act, look again").wait_for()
    act(page, A="it grows")
    page.get_by_text("There is nothing to go on from.").first.wait_for()
    assert len(served.jobs.recent()) == before


def search(page, expected):
    page.wait_for_function("(expected) => location.search === expected", arg=expected)


def test_the_address_names_the_open_tab_and_the_place_on_any_machine(served, page, chromium):
    job = served.jobs.submit(served.engine.preset.request(prompt="a red star", frames=9, steps=2))
    served.jobs.wait(job)
    page.goto(f"{served.url}/?tab=world&from={job}")
    page.get_by_text("This is seen now, after 1 video").wait_for()
    page.get_by_role("tab", name="Compare").click()
    search(page, "?tab=compare")
    page.reload()
    page.locator("#compare-go").wait_for(state="visible")
    page.get_by_role("tab", name="World").click()
    search(page, f"?tab=world&from={job}")
    page.get_by_role("tab", name="Generate").click()
    search(page, "")


@pytest.mark.parametrize("address", ["tab=<b>", "tab=world&from=<b>&group=x", "tab=%22]&from=..%2F..", "tab=world"])
def test_an_address_that_nobody_here_wrote_does_no_harm(served, page, address):
    page.goto(f"{served.url}/?{address}")
    page.get_by_role("tab", name="World").click()
    page.get_by_text("Look, act, look again").wait_for()
    if "from=<b>" in address:
        page.get_by_text("not known here").wait_for()
    assert page.locator("#world-watch b").count() == 0


def test_a_seed_that_is_none_is_refused_where_it_is_seen(served, page):
    page.goto(f"{served.url}/?tab=world")
    page.get_by_label("Seed of all").fill("-5")
    Image.new("RGB", (64, 64)).save(picture := io.BytesIO(), "PNG")
    upload = {"name": "a.png", "mimeType": "image/png", "buffer": picture.getvalue()}
    page.locator("#world-picture input[type=file]").set_input_files(upload)
    act(page, A="it grows")
    page.get_by_text("seed = -5").wait_for()
