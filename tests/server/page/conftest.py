"""Headless Chromium on a real socket. A test fails when the page logs an error or breaks its own policy."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from tests.missing import missing
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService
from tests.server.live import live

# The one without windows takes two fifths of the processor time of a whole browser.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
VIOLATIONS = """addEventListener("securitypolicyviolation",
    (event) => console.error(`policy broken: ${event.violatedDirective} ${event.blockedURI}`));"""
WAIT_MS = 1000 * PATIENCE_S / 2
# Transactions of a database run in their order: this one ends after all that were writing.
ALL_WRITTEN = """async () => { await (await import("/page/store.js")).kept(); }"""

# Empties a page, and what it has stored.
AS_NEW = """async () => {
    const { kept, forgetAll } = await import("/page/store.js");
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    document.getElementById("tab-ask").click();
    document.getElementById("new-conversation").click();
    for (const cross of document.querySelectorAll("#tray [aria-label^='Remove ']")) cross.click();
    for (const field of document.querySelectorAll("textarea, input:not([type=file])")) {
        field.checked = field.defaultChecked;
        field.value = field.defaultValue;
    }
    await kept();
    await forgetAll();
    localStorage.clear();
    document.activeElement.blur();
    scrollTo(0, 0);
}"""

OpenPage = Callable[..., Page]
Serve = Callable[..., str]
PageOf = Callable[[FakeService], Page]
PageOfPocket = Callable[[], Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A page takes a second or two."""
    for item in items:
        if {"open_page", "open_once", "page_of", "page_of_pocket"} & set(getattr(item, "fixturenames", ())):
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
def pages(browser: Browser, wrong: Callable[[str], object]) -> Iterator[OpenPage]:
    """`open_page(url, width, height, **options of the browser context)`; its pages are closed at the end.

    `wrong` is called with each error and warning of the console.
    """
    contexts = []

    def open_page(url: str, width: int = 1440, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(VIOLATIONS)
        page = context.new_page()
        page.on("console", lambda message: message.type in LOUD and wrong(message.text))
        page.on("pageerror", lambda error: wrong(str(error)))
        page.goto(f"{url}/")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def open_page(browser: Browser, problems: list[str], serve: Serve) -> Iterator[OpenPage]:
    """`open_page(url, width, height, **options of the browser context)`."""
    with pages(browser, problems.append) as open_page:
        yield open_page


class Exchanged:
    """A service that is another one whenever a test says so."""

    def __init__(self) -> None:
        self.now = FakeService()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


@dataclass
class KeptPage:
    """A page that tests use one after another: to load it takes longer than what most of them do.

    Attributes:
        load: opens it.
        problems: what the console said, of the test that runs.
        page: None before the first test, and after one that failed, which leaves a page in any state.
    """

    load: Callable[[], Page]
    problems: list[str] = field(default_factory=list)
    page: Page | None = None

    def renew(self) -> Page:
        """The page without what was on it and what it had stored."""
        if self.page is None:
            self.page = self.load()
        else:
            self.page.mouse.move(0, 0)
            self.page.evaluate(AS_NEW)
        return self.page

    @contextmanager
    def lent(self, problems: list[str], session: pytest.Session) -> Iterator[None]:
        """For one test."""
        self.problems, failed = problems, session.testsfailed
        yield
        if session.testsfailed > failed and self.page is not None:
            self.page.context.close()
            self.page = None


@contextmanager
def kept(browser: Browser, url: str) -> Iterator[KeptPage]:
    with pages(browser, lambda text: page.problems.append(text)) as open_page:
        page = KeptPage(lambda: open_page(url))
        yield page


# For the package, as the browser.
@pytest.fixture(scope="package")
def kept_page(browser: Browser) -> Iterator[tuple[KeptPage, Exchanged]]:
    service = Exchanged()
    with live(service) as url, kept(browser, url) as page:  # type: ignore[arg-type]
        yield page, service


@pytest.fixture(scope="package")
def kept_pocket_page(browser: Browser, url: str) -> Iterator[KeptPage]:
    with kept(browser, url) as page:
        yield page


@pytest.fixture
def page_of(
    kept_page: tuple[KeptPage, Exchanged], problems: list[str], request: pytest.FixtureRequest
) -> Iterator[PageOf]:
    """`page_of(service)`: a page of default size over that service, as one that was just loaded.

    Other tests had it before, and will have it: none may replace what its window has, or route its requests.
    """
    page, exchanged = kept_page

    def page_of(service: FakeService) -> Page:
        exchanged.now = service
        return page.renew()

    with page.lent(problems, request.session):
        yield page_of


@pytest.fixture
def page_of_pocket(
    kept_pocket_page: KeptPage, problems: list[str], request: pytest.FixtureRequest
) -> Iterator[PageOfPocket]:
    """`page_of_pocket()`: as `page_of`, over pocket."""
    with kept_pocket_page.lent(problems, request.session):
        yield kept_pocket_page.renew


@pytest.fixture(scope="module")
def open_once(browser: Browser) -> Iterator[OpenPage]:
    """As `open_page`, for a page that tests of a module share, as they only look at it."""
    problems: list[str] = []
    with pages(browser, problems.append) as open_page:
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


@contextmanager
def model_unknown(page: Page) -> Iterator[None]:
    """What the page asks of its model gets no answer until the block ends, whenever it asks."""
    held: list[Route] = []
    known = False

    def answer(route: Route) -> None:
        if known:
            route.continue_()
        else:
            held.append(route)

    page.route("**/v1/models", answer)
    yield
    known = True
    for route in held:
        route.continue_()


def detect(page: Page) -> None:
    tab(page, "Detect")
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-result")).to_be_visible()
