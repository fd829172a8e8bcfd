"""Headless Chromium on a real socket. A test fails when the page logs an error or breaks its own policy."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.missing import missing
from tests.patience import PATIENCE_S, until
from tests.server.live import live

# The one without windows takes two fifths of the processor time of a whole browser.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
VIOLATIONS = """addEventListener("securitypolicyviolation",
    (event) => console.error(`policy broken: ${event.violatedDirective} ${event.blockedURI}`));"""
WAIT_MS = 1000 * PATIENCE_S / 2
# Transactions of a database run in their order: this one ends after all that were writing.
ALL_WRITTEN = """async () => { await (await import("/page/store.js")).kept(); }"""

OpenPage = Callable[..., Page]
Serve = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A page takes a second or two."""
    for item in items:
        if {"open_page", "open_once"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


# For this package only: while it lives, the thread has an event loop that runs, and other tests start theirs.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        missing("needs Chromium (apt-get install chromium)")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def problems() -> Iterator[list[str]]:
    """What the console said; empty at the end. A test takes out what it provoked (see `provoked`)."""
    found: list[str] = []
    yield found
    assert not found


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(service, settings)`: the URL of a server that outlives the pages of the test."""
    with ExitStack() as servers:
        yield lambda service, settings=None: servers.enter_context(live(service, settings))


@contextmanager
def pages(browser: Browser, problems: list[str]) -> Iterator[OpenPage]:
    """`open_page(url, width, height, **options of the browser context)`; its pages are closed at the end.

    What the console says goes to `problems`.
    """
    contexts = []

    def open_page(url: str, width: int = 1440, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(VIOLATIONS)
        page = context.new_page()
        page.on("console", lambda message: message.type in LOUD and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{url}/")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def open_page(browser: Browser, problems: list[str], serve: Serve) -> Iterator[OpenPage]:
    """`open_page(url, width, height, **options of the browser context)`."""
    with pages(browser, problems) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def open_once(browser: Browser) -> Iterator[OpenPage]:
    """As `open_page`, for a page that tests of a module share, as they only look at it."""
    problems: list[str] = []
    with pages(browser, problems) as open_page:
        yield open_page
    assert not problems


LOUD = ("error", "warning")


def provoked(problems: list[str], text: str) -> None:
    """Forget what a test caused on purpose: a browser logs every failed request."""
    assert any(text in problem for problem in problems)
    problems[:] = [problem for problem in problems if text not in problem]


@pytest.fixture
def shapes(tmp_path: Path, picture: bytes) -> Path:
    """The red circle and the blue square as a file."""
    path = tmp_path / "shapes.png"
    path.write_bytes(picture)
    return path


def choose(page: Page, path: Path) -> None:
    """Choose a picture, as with the file dialog."""
    page.set_input_files("#file", path)
    expect(page.locator("#picture-facts")).to_contain_text(path.name)


def take_sample(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click()
    expect(page.locator("#picture-facts")).to_contain_text(f"sample-{name.lower()}.png")


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_label("Question").press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".turn.assistant:not(.busy) .turn-text")


def reload(page: Page) -> None:
    """Load the page again once what it keeps is written; a browser drops what it had not written."""
    page.evaluate(ALL_WRITTEN)
    page.reload()


def until_the_speed_rose(page: Page) -> None:
    """Wait for the line: the figure is 0 again after seconds, and a busy machine may look later."""
    rose = "line => line.getAttribute('points').split(' ').some((point) => Number(point.split(',')[1]) < 19)"
    until(lambda: page.locator("#sparkline polyline").evaluate(rose))


def detect(page: Page) -> None:
    tab(page, "Detect")
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-result")).to_be_visible()
