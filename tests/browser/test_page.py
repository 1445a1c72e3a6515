"""The page in a real browser, over an engine double: what a visitor does, and what must survive it."""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from engine.preset import load_preset
from engine.video import probe
from tests.double import Double, Pace, serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

PROMPT = "a red circle moves right"
EVIL = """<img src=x onerror="window.hacked=1"></pre><script>window.hacked=1</script>${window.hacked=1}"""
VIDEO = "document.querySelector('live-video')?.shadowRoot.querySelector('video')"
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(Double(load_preset("tiny")), tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture
def open_page(served, chromium):
    """Opens the page in a context of its own; returns it once it can be used. What it complains of is an error."""
    contexts, faults = [], []

    def open_page(path="/", viewport=WIDE, **options):
        context = chromium.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.on(
            "request",
            lambda request: request.url.startswith((served.url, "blob:", "data:")) or faults.append(request.url),
        )
        page.goto(served.url + path)
        page.locator("#plan strong").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    served.engine.pace = Pace()
    for state in served.jobs.recent():
        served.jobs.cancel(state.id)
    assert faults == []


def fill(page, seconds=2, prompt=PROMPT):
    page.get_by_label("number input for Seconds").fill(str(seconds))
    page.get_by_label("number input for Seconds").blur()
    page.get_by_label("Prompt", exact=True).fill(prompt)


def test_what_is_written_before_the_page_has_found_its_job_stays(served, chromium):
    held, page = [], chromium.new_page(viewport=WIDE)
    page.route("**/gradio_api/run/**", lambda route: held.append(route) if held is not None else route.continue_())
    page.goto(served.url)
    field = page.get_by_label("Prompt", exact=True)
    field.wait_for()
    while not held:
        page.wait_for_timeout(50)
    field.fill("typed at once")
    late, held = held, None
    for route in late:
        route.continue_()
    page.locator("#plan strong").wait_for()
    page.wait_for_timeout(500)
    assert field.input_value() == "typed at once"
    page.close()


@pytest.mark.parametrize("viewport", [{"width": 1440, "height": 700}, PHONE], ids=["laptop", "phone"])
def test_the_button_is_in_sight_without_scrolling(open_page, viewport):
    page = open_page(viewport=viewport)
    box = page.get_by_role("button", name="Generate").bounding_box()
    assert box["y"] + box["height"] <= viewport["height"]


def generate(page):
    """Press Generate; returns the job's id once the address names it."""
    before = page.url
    page.get_by_role("button", name="Generate").click()
    page.wait_for_function("(before) => location.href !== before", arg=before)
    return parse_qs(urlparse(page.url).query)["job"][0]


def plays(page, beyond=0.2):
    """Wait until the video has played beyond so many seconds."""
    page.wait_for_function(f"(beyond) => {VIDEO}?.currentTime > beyond", arg=beyond)


def says(page, text):
    page.get_by_text(text).first.wait_for()


def sideways(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_a_video_plays_while_it_is_made_and_then_once_more(served, open_page, tmp_path):
    served.engine.pace = Pace(step=0.02, chunk=0.7)
    page = open_page()
    says(page, "Your video appears here")
    fill(page, seconds=4)
    says(page, "97 frames at 24 a second")
    job = generate(page)
    plays(page)
    first, over = page.evaluate(f"{VIDEO}.currentTime"), served.jobs.snapshot(job).over
    plays(page, first)
    assert not over and not served.jobs.snapshot(job).over
    says(page, "the player waits for frames now and then")
    says(page, "Done in")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "a-red-circle-moves-right-123.mp4"
    download.value.save_as(tmp_path / "a.mp4")
    assert probe(tmp_path / "a.mp4").frames == 97
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("Make it again").click()
    page.get_by_role("button", name="Copy as JSON").click()
    says(page, "Copied")
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))["prompt"] == PROMPT
    page.wait_for_function(f"{VIDEO}.ended")
    assert page.evaluate(f"{VIDEO}.duration") == pytest.approx(97 / 24, abs=0.05)

    served.engine.pace = Pace(chunk=0.2)
    fill(page, seconds=1, prompt="a blue star")
    again = generate(page)
    assert again != job
    page.wait_for_function(f"document.querySelector('live-video[src*=\"{again}\"]')")
    plays(page, 0.1)
    says(page, "Done in")
    assert served.jobs.snapshot(again).request.prompt == "a blue star"


def test_a_phone_that_opens_the_address_of_a_video_shows_the_video(served, open_page):
    served.engine.pace = Pace(chunk=0.5)
    job = served.jobs.submit(served.engine.preset.request(prompt=PROMPT, frames=97, steps=2))
    page = open_page(f"/?job={job}", viewport=PHONE, is_mobile=True, has_touch=True)
    page.wait_for_function("Math.abs(document.getElementById('watch').getBoundingClientRect().top) < 60")
    assert not served.jobs.snapshot(job).over


def test_stop_keeps_what_is_there_and_no_text_becomes_code(served, open_page):
    served.engine.pace = Pace(chunk=0.5, warning=EVIL)
    page = open_page()
    fill(page, seconds=10, prompt=EVIL)
    page.get_by_label("Prompt", exact=True).press("Shift+Enter")
    plays(page, 0.1)
    page.get_by_role("button", name="Stop").click()
    says(page, "is kept.")
    job = parse_qs(urlparse(page.url).query)["job"][0]
    state = served.jobs.snapshot(job)
    assert state.status == "stopped" and 0 < probe(state.video).frames < 241
    assert page.evaluate(f"{VIDEO}.readyState") > 0
    page.wait_for_selector("#go button:has-text('Stop'):disabled")
    page.get_by_text("Make it again").click()
    says(page, "Copy as JSON")
    assert page.evaluate("window.hacked") is None


def test_an_error_stands_beside_the_video_not_over_it(served, open_page):
    served.engine.pace = Pace(chunk=0.4, fail_at="decode", fail_after=33)
    page = open_page()
    fill(page, seconds=3)
    generate(page)
    plays(page, 0.1)
    says(page, "Internal error, please report it")
    message, video = page.locator("#messages .error"), page.locator("live-video")
    assert "<b>of ours</b>" in message.inner_text()
    assert message.bounding_box()["y"] >= video.bounding_box()["y"] + video.bounding_box()["height"]
    assert page.evaluate(f"{VIDEO}.error") is None
    served.engine.pace = Pace()
    fill(page, seconds=0.5)
    generate(page)
    says(page, "Done in")
    assert page.locator("#messages .error").count() == 0


def test_a_refusal_is_said_at_once(served, open_page):
    page, before = open_page(), len(served.jobs.recent())
    fill(page, prompt=" ")
    page.get_by_role("button", name="Generate").click()
    says(page, "The prompt is empty.")
    assert len(served.jobs.recent()) == before and "job=" not in page.url


def test_numbers_out_of_range_are_refused_where_the_click_was(served, open_page):
    page, before = open_page(), len(served.jobs.recent())
    page.get_by_label("Seed", exact=True).fill("-5")
    page.get_by_role("button", name="Generate").click()
    says(page, "seed = -5 must lie between 0 and")
    page.get_by_label("Seed", exact=True).fill("1")
    page.get_by_text("Advanced").click()
    page.get_by_label("Shift of the noise schedule").fill("0")
    page.get_by_role("button", name="Generate").click()
    says(page, "shift = 0 must lie between 0.01 and")
    assert len(served.jobs.recent()) == before and "job=" not in page.url


def test_another_video_can_be_queued_while_one_is_made(served, open_page):
    served.engine.pace = Pace(step=5)
    page = open_page()
    first = generate(page)
    button = page.get_by_role("button", name="Queue another")
    button.click()
    says(page, "This very video is being made.")
    page.get_by_label("Seed", exact=True).fill("7")
    button.click()
    says(page, "Waiting in the queue: 1 job before yours.")
    page.get_by_role("button", name="Stop").click()
    says(page, "Stopped before it began.")
    assert not served.jobs.snapshot(first).over
    page.get_by_role("button", name="Generate").wait_for()


def test_a_reload_and_another_window_find_the_running_job(served, open_page):
    served.engine.pace = Pace(step=0.02, chunk=1.2)
    page = open_page()
    fill(page, seconds=4, prompt="a pink ring orbits")
    job = generate(page)
    plays(page, 0.1)
    page.reload()
    plays(page, 0.1)
    assert not served.jobs.snapshot(job).over
    assert page.get_by_label("Prompt", exact=True).input_value() == "a pink ring orbits"
    page.close()
    other = open_page(f"/?job={job}")
    says(other, "Done in")
    plays(other, 0.1)
    assert served.jobs.snapshot(job).status == "finished"


def test_a_phone_shows_everything_without_scrolling_sideways(served, open_page, tmp_path):
    page = open_page(viewport=PHONE, is_mobile=True, has_touch=True, color_scheme="dark")
    assert sideways(page) == 0
    fill(page, seconds=0.5)
    generate(page)
    says(page, "Done in")
    page.wait_for_function("document.querySelector('#watch').getBoundingClientRect().top < innerHeight / 2")
    page.get_by_text("Advanced").click()
    page.get_by_text("First frame").first.click()
    assert sideways(page) == 0
    page.get_by_role("tab", name="System").click()
    page.locator("#system").get_by_text("a test bench").first.wait_for()
    assert sideways(page) == 0
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert Path(tmp_path / "phone.png").stat().st_size > 10_000


def test_previews_show_while_denoising_and_charts_stay(served, open_page):
    served.engine.pace = Pace(step=0.7, previews=True)
    page = open_page()
    fill(page, seconds=1)
    generate(page)
    picture = page.locator(".canvas.preview img")
    picture.wait_for()
    says(page, "Preview, step ")
    page.wait_for_function("document.querySelector('.canvas.preview img')?.naturalWidth > 0")
    assert page.locator(".charts svg.lane").count() == 2
    served.engine.pace.step = 0.0
    says(page, "Done in")
    assert picture.count() == 0 and page.locator(".charts svg").count() == 4
    assert page.get_by_role("img", name="Time by stage").is_visible()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("Make it again").click()
    page.get_by_role("button", name="Copy the command").click()
    says(page, "Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("python -m engine --preset tiny --height 256")
    assert sideways(page) == 0


def test_the_builder_writes_into_the_prompt_and_slips_of_json_are_pointed_at(open_page):
    page = open_page()
    page.get_by_text("Compose", exact=True).click()
    page.get_by_label("Prompt", exact=True).fill('{"events": [1,}')
    says(page, "line 1, column 15")
    page.get_by_role("button", name="Write it into the prompt").click()
    page.wait_for_function("document.querySelector('#form textarea').value.startsWith('a red circle moves right on')")
    says(page, "12 of 1,536 tokens")
