"""What a screen reader, a keyboard and weak eyes need: axe's rules of WCAG 2 A and AA on every tab, light and dark."""

import pytest

from engine.preset import load_preset
from tests.double import Double, Pace, serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

RULES = {"runOnly": ["wcag2a", "wcag2aa"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    engine = Double(load_preset("tiny"), Pace(step=0.01, chunk=0.4))
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        yield served


def violations(page) -> list[str]:
    """What axe finds, each with the element and the reason."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options=RULES).response["violations"]
    return [f"{rule['id']}: {node['html'][:200]} {node['failureSummary']}" for rule in found for node in rule["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_in_every_state(served, chromium, scheme):
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(served.url)
    page.locator("#plan strong").wait_for()
    assert violations(page) == []
    page.get_by_label("Prompt", exact=True).fill("a red circle moves right")
    page.get_by_role("button", name="Generate").click()
    page.locator("live-video").wait_for()
    assert violations(page) == [], "while it is made"
    page.get_by_text("Done in").first.wait_for()
    assert violations(page) == [], "when it is done"
    page.get_by_label("Prompt", exact=True).fill(" ")
    page.get_by_role("button", name="Generate").click()
    page.locator("#plan .error").wait_for()
    assert violations(page) == [], "after a refusal"
    for tab in [text.strip() for text in page.get_by_role("tab").all_inner_texts()][1:]:
        page.get_by_role("tab", name=tab).click()
        page.locator("[role=tabpanel]:visible").first.wait_for()
        page.wait_for_timeout(700)  # what the tab asks of the server when it is opened
        assert violations(page) == [], tab
    context.close()


def test_the_keyboard_alone_makes_a_video(served, chromium):
    page = chromium.new_page()
    page.goto(served.url)
    page.locator("#plan strong").wait_for()
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("a blue star moves up")
    page.keyboard.press("Shift+Enter")
    page.get_by_text("Done in").first.wait_for()
    assert served.jobs.recent()[0].request.prompt == "a blue star moves up"
    page.get_by_label("Prompt", exact=True).focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Generate":
            break
    assert page.evaluate("document.activeElement.textContent.trim()") == "Generate"
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    page.close()
