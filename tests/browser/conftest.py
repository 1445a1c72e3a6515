"""One Chromium for the browser tests; skipped where there is none, except in CI."""

import os
import shutil

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync"]


def pytest_collection_modifyitems(items):
    if not CHROMIUM and os.environ.get("CI") == "true" and any(item.get_closest_marker("browser") for item in items):
        raise pytest.UsageError("CI must run the browser tests and finds no Chromium. Install it, or set CHROMIUM.")


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium (Playwright's Browser); every test opens a context of its own."""
    if not CHROMIUM:
        pytest.skip("no Chromium here; set CHROMIUM to its path")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
