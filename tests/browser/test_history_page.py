"""What outlives a page: the list of videos, settings that come back, a job found again after the server's restart."""

import re

import pytest
from PIL import Image

from engine.preset import load_preset
from engine.settings import DecodeSettings
from engine.sides import CompareRequest, RandomLatents
from tests.browser.conftest import CHROMIUM
from tests.double import Double, Pace, serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

PRESET = load_preset("tiny")
LONG = 60_000
SMALL = {"height": 256, "width": 448, "frames": 25, "steps": 4}


@pytest.fixture
def open_page(chromium):
    """Opens a page in a context of its own, or in one that is given. What it complains of is an error."""
    contexts, faults = [], []

    def open_page(served, path="/", context=None, **options):
        if context is None:
            context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
            context.set_default_timeout(LONG)
            contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.goto(served.url + path)
        page.locator("#plan strong").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def served(tmp_path):
    with serve(Double(PRESET), tmp_path / "outputs") as served:
        yield served


def fill(page, text):
    page.get_by_label("number input for Seconds").fill("1")
    page.get_by_label("number input for Seconds").blur()
    page.get_by_label("Prompt", exact=True).fill(text)


def prompt(page):
    return page.get_by_label("Prompt", exact=True)


def holds(page, text):
    """Wait until the prompt's field has this text."""
    page.wait_for_function("([field, text]) => field.value === text", arg=[prompt(page).element_handle(), text])


def history(page):
    page.get_by_role("tab", name="History").click()
    return page.locator("#history")


def choose_picture(page, path):
    page.get_by_role("button", name="First frame").first.click()
    page.locator("#picture input[type=file]").set_input_files(path)
    page.locator("#picture img").wait_for()


def test_from_the_form_to_the_list_and_back(served, open_page, tmp_path):
    Image.new("RGB", (448, 256), "red").save(tmp_path / "boat.png")
    page = open_page(served)
    history(page).get_by_text("No videos yet").wait_for()
    page.get_by_role("tab", name="Generate").click()
    choose_picture(page, tmp_path / "boat.png")
    fill(page, "a red circle moves right")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("Done in").first.wait_for()
    (job,) = served.jobs.recent()

    fill(page, "something else")
    page.get_by_role("button", name="Remove Image").or_(page.get_by_label("Clear")).first.click()
    entry = history(page).locator(".entry")
    entry.get_by_text("a red circle moves right").wait_for()
    assert entry.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    entry.get_by_role("button", name="Use these settings").click()
    holds(page, "a red circle moves right")
    page.locator("#picture img").wait_for()
    page.get_by_role("button", name="Generate", exact=True).click()
    page.wait_for_function("(job) => !location.href.includes(job)", arg=job.id)
    page.get_by_text("Done in").first.wait_for()
    second = served.jobs.wait(served.jobs.recent()[0].id)
    assert second.id != job.id and second.request.image.is_file()
    first_pixels, second_pixels = (Image.open(one.request.image).tobytes() for one in (job, second))
    assert first_pixels == second_pixels

    entries = history(page).locator(".entry")
    page.wait_for_function("document.querySelectorAll('.entry').length === 2")
    entries.nth(1).get_by_role("button", name="Delete").click()
    assert served.jobs.snapshot(job.id)
    entries.nth(1).get_by_role("button", name="Delete for good").click()
    page.wait_for_function("document.querySelectorAll('.entry').length === 1")
    assert served.jobs.snapshot(job.id) is None and not job.folder.exists()

    with page.expect_download() as download:
        entries.first.get_by_role("link", name="Download").click()
    download.value.save_as(tmp_path / "made.mp4")
    page.get_by_role("tab", name="Generate").click()
    fill(page, "something else")
    history(page).get_by_role("button", name="Settings from a file").click()
    page.locator("#settings input[type=file]").set_input_files(tmp_path / "made.mp4")
    holds(page, "a red circle moves right")
    page.get_by_text("Its first frame, image.png, is not in the file").first.wait_for()

    history(page).locator(".entry").first.get_by_role("button", name="Open", exact=True).click()
    page.wait_for_function("document.querySelector('live-video')?.shadowRoot.querySelector('video').currentTime > 0.1")
    assert second.id in page.url


def test_a_reload_brings_the_job_its_settings_and_its_picture_back(served, open_page, tmp_path):
    Image.new("RGB", (448, 256), "red").save(tmp_path / "boat.png")
    served.engine.pace = Pace(step=0.5, chunk=0.5)
    page = open_page(served)
    choose_picture(page, tmp_path / "boat.png")
    fill(page, "a pink ring")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.wait_for_function("location.href.includes('job=')")
    page.reload()
    holds(page, "a pink ring")
    page.get_by_role("button", name="First frame").first.click()
    page.locator("#picture img").wait_for()
    page.get_by_text("Done in").first.wait_for()


def test_two_pages_share_the_queue_and_say_who_is_first(served, open_page):
    served.engine.pace = Pace(step=30)
    first, second = open_page(served), open_page(served)
    fill(first, "a red circle")
    first.get_by_role("button", name="Generate", exact=True).click()
    first.get_by_text(re.compile("Step 1 of")).wait_for()
    fill(second, "a blue star")
    second.get_by_role("button", name="Generate", exact=True).click()
    second.get_by_text("Waiting in the queue: 1 job before yours.").first.wait_for()
    entries = history(second).locator(".entry")
    entries.first.get_by_text("Waiting").wait_for()
    served.engine.pace = Pace()
    entries.nth(1).get_by_role("button", name="Stop").click()
    first.get_by_text("Stopped after").first.wait_for()
    second.get_by_role("tab", name="Generate").click()
    second.get_by_text("Done in").first.wait_for()


def test_after_a_restart_the_address_finds_the_video_and_decodes_it_again(open_page, tmp_path):
    assert CHROMIUM
    with serve(Double(PRESET), tmp_path / "outputs") as served:
        done = served.jobs.wait(served.jobs.submit(PRESET.request(prompt="a blue star", **SMALL)))
        served.engine.pace = Pace(step=30)
        cut = served.jobs.submit(PRESET.request(prompt="a pink ring", **SMALL))
    with serve(Double(PRESET), tmp_path / "outputs") as served:
        page = open_page(served, f"/?job={cut}")
        page.get_by_text("The server ended").first.wait_for()
        holds(page, "a pink ring")
        page = open_page(served, f"/?job={done.id}")
        page.wait_for_function("document.querySelector('live-video')?.shadowRoot.querySelector('video').readyState > 1")
        page.get_by_role("button", name="Decode again").click()
        page.get_by_text(f"from the latents of {done.id}").wait_for()
        assert served.jobs.recent()[0].status == "finished"


def test_the_list_follows_jobs_that_end_and_opens_comparisons(served, open_page):
    asked = CompareRequest(RandomLatents(1, 5, 64, 96), DecodeSettings("plain"), DecodeSettings("reference"))
    compared = served.jobs.wait(served.jobs.submit(asked))
    served.engine.pace = Pace(step=30)
    running = served.jobs.submit(PRESET.request(prompt="a red circle", **SMALL))
    page = open_page(served)
    entries = history(page).locator(".entry")
    entries.first.get_by_text("At work").wait_for()
    served.jobs.cancel(running)
    entries.first.get_by_text("Stopped early").wait_for()
    assert page.locator(".entry").get_by_role("button", name="Stop", exact=True).count() == 0
    entries.nth(1).get_by_text("plain, auto against reference, auto").wait_for()
    entries.nth(1).get_by_role("button", name="Open", exact=True).click()
    page.locator("#compare-messages").get_by_text(compared.error).wait_for()
