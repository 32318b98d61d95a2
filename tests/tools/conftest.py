"""Results of a benchmark that answers at once, and a real browser for pages.

The browser is Chromium: the program that ATTN_ENGINE_CHROMIUM names, or chromium, chromium-browser
or google-chrome on the path, driven by playwright. Without them the tests are skipped; in CI they
fail.
"""

import os
import shutil
from importlib.util import find_spec

import pytest
from support.fake_bench import COMMAND, FakeTeam, fake_memory

from attn_engine.bench import session
from attn_engine.bench.session import FILE, Session, Settings
from attn_engine.bench.suites import SUITES

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("ATTN_ENGINE_CHROMIUM") or next(
    filter(None, map(shutil.which, NAMES)), None
)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Makes the file of a whole run by the fake team."""
    monkeypatch.setattr(session, "Team", FakeTeam)
    monkeypatch.setattr(session, "extra_memory", fake_memory)

    def make(name="first", slowdown=1.0, suites=tuple(SUITES)):
        monkeypatch.setattr(FakeTeam, "slowdown", slowdown)
        settings = Settings(suites, 4, ("torch", "numpy"), True)
        Session(settings, tmp_path / name, COMMAND).run(lambda *ignored: None)
        return tmp_path / name / FILE

    return make


@pytest.fixture(scope="module")
def browser():
    """Chromium, driven by playwright."""
    if CHROMIUM is None or find_spec("playwright") is None:
        missing = "needs playwright, and chromium or ATTN_ENGINE_CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(f"THE PAGE IS NOT TESTED: {missing}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a page; at the end it has asked for nothing else and logged nothing."""
    contexts, requests, complaints = [], [], []

    def open_page(text, **options):
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) == {(tmp_path / "page.html").as_uri()}
