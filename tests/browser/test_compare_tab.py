"""The Compare tab in a real browser, over a real engine with a toy checkpoint."""

import json

import pytest
import torch

from engine.engine import Engine
from engine.latents import save_latents
from engine.noise import draw_noise
from tests.double import serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

VIEW = "document.querySelector('compare-view')"
WIDE, PHONE = {"width": 1440, "height": 1000}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def served(toy_preset, tmp_path_factory):
    engine = Engine(toy_preset, "cpu")
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture
def open_tab(served, chromium):
    """Opens the tab in a context of its own. What the page complains of is an error."""
    contexts, faults = [], []

    def open_tab(viewport=WIDE, **options):
        context = chromium.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.goto(served.url)
        page.get_by_role("tab", name="Compare").click()
        page.locator("#compare-plan strong").wait_for()
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert faults == []


def set_frames(page, frames):
    field = page.get_by_label("number input for Frames from the start")
    field.fill(str(frames))
    field.blur()


def seed(page):
    return page.locator("#compare-random").get_by_label("Seed")


def compare(page):
    """Press Compare and wait for the view, its videos ready."""
    page.locator("#compare-go").get_by_role("button", name="Compare").click()
    ready(page)


def ready(page):
    page.wait_for_function(f"{VIEW}?.clock?.videos.every((video) => video.readyState >= 2)")


def frames(page):
    """The frame that each video shows."""
    clock = f"{VIEW}.clock"
    return page.evaluate(f"{clock}.videos.map((video) => Math.floor(video.currentTime * {clock}.fps + 0.01))")


def at(page, frame):
    page.wait_for_function(
        "(frame) => { const { clock } = document.querySelector('compare-view');"
        "return clock.videos.every((v) => !v.seeking && Math.floor(v.currentTime * clock.fps + 0.01) === frame) }",
        arg=frame,
    )


def sideways(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_it_is_one_tab_among_the_others(open_tab):
    page = open_tab()
    assert page.get_by_role("tablist").count() == 1
    names = [tab.strip() for tab in page.get_by_role("tab").all_inner_texts()]
    assert names == ["Generate", "World", "History", "Compare", "System"]


def test_two_players_run_on_one_clock(open_tab):
    page = open_tab()
    set_frames(page, 41)
    compare(page)
    page.get_by_label("Loop").uncheck()
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_function(f"{VIEW}.clock.videos.every((video) => video.currentTime > 0.3)")
    apart = page.evaluate(
        f"""async () => {{
          const {{ clock }} = {VIEW};
          const apart = [];
          while (clock.playing && apart.length < 40) {{
            await new Promise((done) => setTimeout(done, 20));
            const [a, b] = clock.videos.map((video) => video.currentTime);
            apart.push(Math.abs(a - b) * clock.fps);
          }}
          return apart;
        }}"""
    )
    assert len(apart) >= 5 and max(apart) < 1
    page.wait_for_function(f"!{VIEW}.clock.playing")
    at(page, 40)

    page.get_by_label("Speed").select_option("0.25")
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_function(f"{VIEW}.clock.lead.currentTime > 0.2 && {VIEW}.clock.lead.currentTime < 1")
    assert page.evaluate(f"{VIEW}.clock.videos.every((video) => Math.abs(video.playbackRate - 0.25) < 0.1)")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_function(f"{VIEW}.clock.videos.every((video) => !video.seeking)")
    one, two = frames(page)
    assert one == two < 40


def test_keys_buttons_slider_and_chart_go_to_a_frame(open_tab):
    page = open_tab()
    compare(page)
    page.evaluate(f"{VIEW}.shadowRoot.querySelector('.view').focus()")
    for key, frame in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 8), ("Home", 0)):
        page.keyboard.press(key)
        at(page, frame)
    page.get_by_role("button", name="One frame on").click()
    at(page, 1)
    page.get_by_role("slider", name="Frame", exact=True).fill("5")
    at(page, 5)
    chart = page.locator("compare-view svg").first
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 10, "y": 40})
    at(page, 8)
    chart.click(position={"x": 56, "y": 40})
    at(page, 0)
    worst = page.evaluate(f"{VIEW}.result.figures.worst_frame")
    page.get_by_role("button", name="Go to the worst frame").click()
    at(page, worst)
    page.evaluate(f"{VIEW}.shadowRoot.querySelector('.view').focus()")
    page.keyboard.press(" ")
    page.wait_for_function(f"{VIEW}.clock.playing")
    page.keyboard.press(" ")
    page.wait_for_function(f"!{VIEW}.clock.playing")


def test_wipe_frames_without_loss_and_difference(open_tab):
    page = open_tab()
    compare(page)
    page.get_by_role("button", name="Wipe").click()
    stage = page.locator("compare-view .stage").bounding_box()
    middle, y = stage["x"] + stage["width"] / 2, stage["y"] + stage["height"] / 2
    page.mouse.move(middle, y)
    page.mouse.down()
    page.mouse.move(stage["x"] + stage["width"] / 4, y, steps=4)
    page.mouse.up()
    line = page.get_by_role("slider", name="Dividing line")
    assert abs(int(line.get_attribute("aria-valuenow")) - 25) <= 1
    assert "25" in page.evaluate(f"getComputedStyle({VIEW}.shadowRoot.querySelector('.b')).clipPath")
    line.press("ArrowRight")
    assert abs(int(line.get_attribute("aria-valuenow")) - 27) <= 1 and frames(page) == [0, 0]

    page.get_by_role("button", name="Single frame").click()
    loaded = "(selector) => {VIEW}.shadowRoot.querySelector(selector)?.naturalWidth === 96".replace("{VIEW}", VIEW)
    for name in "ab":
        page.wait_for_function(loaded, arg=f".{name} .still")
    assert page.evaluate(f"{VIEW}.shadowRoot.querySelector('.b .still').src").endswith("/b/0.png")

    page.get_by_role("button", name="Difference").click()
    page.wait_for_function(loaded, arg=".difference")
    page.get_by_label("Gain").select_option("4")
    page.get_by_role("button", name="One frame on").click()
    page.wait_for_function(f"{VIEW}.shadowRoot.querySelector('.difference').src.endsWith('/difference/1.png?gain=4')")


def test_the_table_says_what_ran_and_the_figures_can_be_had_as_json(open_tab, tmp_path):
    page = open_tab()
    compare(page)
    table = page.locator("#compare-result table")
    rows = {row[0]: row[1:] for row in (line.split("\t") for line in table.inner_text().splitlines()) if row[0]}
    assert rows["Decoder"] == ["plain, fp32", "reference, fp32"]
    assert all(float(cell.split()[0]) > 0 for name in ("Seconds", "Frames a second") for cell in rows[name])
    assert all("host" in cell for cell in rows["Peak memory"]) and "times that of A" in rows["Time"][1]
    assert "Within the limits" in page.locator(".verdict.pass").inner_text()
    assert "no decode kernel" in page.locator("#compare-form").inner_text().lower()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the figures").click()
    download.value.save_as(tmp_path / "compare.json")
    figures = json.loads((tmp_path / "compare.json").read_text())["figures"]
    assert len(figures["per_frame"]) == 9 and figures["psnr"] > 100
    page.reload()
    ready(page)


def test_the_address_finds_a_comparison_and_what_it_was_asked_for(open_tab, chromium):
    page = open_tab()
    seed(page).fill("77")
    set_frames(page, 5)
    compare(page)
    assert page.locator(".compared").inner_text() == "random latents, seed 77; 5 frames, 96 x 64"
    page.wait_for_function("/^\\?tab=compare&compare=[\\w-]+$/.test(location.search)")
    other = chromium.new_context(viewport=WIDE).new_page()
    other.goto(page.url)
    ready(other)
    assert seed(other).input_value() == "77"
    assert other.get_by_label("number input for Frames from the start").input_value() == "5"
    other.context.close()


def test_a_seed_that_is_none_is_refused_where_it_is_seen(open_tab):
    page = open_tab()
    seed(page).fill("-5")
    page.locator("#compare-go").get_by_role("button", name="Compare").click()
    page.locator("#compare-plan").get_by_text("seed = -5").wait_for()


def test_identical_sides_are_infinite(open_tab):
    page = open_tab()
    page.get_by_label("Side B").click()
    page.get_by_role("option", name="plain, fp32", exact=True).click()
    compare(page)
    text = page.locator("#compare-result").inner_text()
    assert "Every byte is the same" in text and "infinite (identical)" in text
    assert "identical" in page.locator("compare-view .place").inner_text()


def test_what_fails_on_one_side_leaves_the_other(served, open_tab, monkeypatch):
    real = served.engine.executor.decode

    def decode(latents, settings, cancel):
        if settings.path == "reference":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(latents, settings, cancel)

    monkeypatch.setattr(served.engine.executor, "decode", decode)
    page = open_tab()
    compare(page)
    assert "Side B does not fit" in page.locator("#compare-messages .error").inner_text()
    assert page.evaluate(f"{VIEW}.clock.videos.length") == 1
    assert "only one side" in page.locator(".verdict").inner_text()
    page.get_by_role("button", name="Single frame").click()
    page.wait_for_function(f"{VIEW}.shadowRoot.querySelector('.a .still').naturalWidth === 96")


def test_an_uploaded_file_is_checked_and_compared(open_tab, tmp_path):
    page = open_tab()
    page.get_by_label("Latents", exact=True).click()
    page.get_by_role("option", name="A file of latents").click()
    page.get_by_text("Choose a file of latents first").wait_for()
    (tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    upload = page.locator("#compare-form input[type=file]")
    upload.set_input_files(tmp_path / "bad.safetensors")
    page.get_by_text("not a whole safetensors file").wait_for()
    assert "/tmp" not in page.locator("#compare-plan").inner_text()
    page.locator("#compare-form").get_by_label("Clear").click()
    save_latents(tmp_path / "good.safetensors", draw_noise(3, (1, 48, 2, 4, 6)), {})
    upload.set_input_files(tmp_path / "good.safetensors")
    page.get_by_text("5 frames, 96 x 64").wait_for()
    compare(page)
    assert page.evaluate(f"{VIEW}.result.frames") == 5


def test_a_phone_shows_everything_without_scrolling_sideways(open_tab):
    page = open_tab(viewport=PHONE, is_mobile=True, has_touch=True, color_scheme="dark")
    assert sideways(page) == 0
    compare(page)
    for name in ("Wipe", "Single frame", "Difference", "Side by side"):
        page.get_by_role("button", name=name).click()
        assert sideways(page) == 0
    a, b = (page.locator(f"compare-view figure.{name}").bounding_box() for name in "ab")
    assert b["y"] > a["y"] and a["width"] > 300
