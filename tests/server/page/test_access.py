"""Keys, and a server that comes and goes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from playwright.sync_api import expect

from snugvl.bench.measure import free_port
from snugvl.core.service import EngineService
from snugvl.server.app import create_app
from snugvl.server.connection import address_of, listen, uvicorn_config
from snugvl.server.context import Context
from snugvl.server.media.loading import MediaLoader
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService, Script
from tests.server.page.conftest import OpenPage, Serve, answers, ask, choose, provoked

LOCKED = ServerSettings(api_keys=("right",))


@contextmanager
def at_port(service: EngineService, port: int) -> Iterator[int]:
    """A server at a chosen port, so that it can come back to the same one."""
    settings = ServerSettings(port=port)
    listener = listen(settings)
    server = uvicorn.Server(
        uvicorn_config(create_app(Context(service, settings, MediaLoader())), settings),
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield address_of(listener)[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def test_wrong_key_then_right_key(
    serve: Serve, open_page: OpenPage, shapes: Path, problems: list[str]
) -> None:
    service = FakeService()
    page = open_page(serve(service, LOCKED))
    dialog = page.get_by_role("dialog", name="This server wants an API key")
    expect(dialog).to_be_visible()
    field = dialog.get_by_label("API key", exact=True)
    expect(field).to_be_focused()
    expect(dialog.locator("#key-error")).to_be_hidden()  # nothing was wrong yet
    field.fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.locator("#key-error")).to_have_text("the API key is wrong")
    expect(field).to_be_focused()
    field.fill("right")
    field.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#state")).to_have_text("ready")
    choose(page, shapes)
    ask(page, "Hello?")
    expect(answers(page)).to_have_text("Hello there")
    assert page.evaluate("Object.entries(sessionStorage).concat(Object.entries(localStorage))") == []
    provoked(problems, "401")


def test_an_empty_key_is_not_sent(serve: Serve, open_page: OpenPage, problems: list[str]) -> None:
    page = open_page(serve(FakeService(), LOCKED))
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key-error")).to_have_text("Enter a key, or cancel.")
    provoked(problems, "401")


def test_a_key_is_kept_only_when_told_to(serve: Serve, open_page: OpenPage, problems: list[str]) -> None:
    page = open_page(serve(FakeService(), LOCKED))
    page.locator("#key").fill("right")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#state")).to_have_text("ready")
    page.reload()
    expect(page.get_by_role("dialog")).to_be_visible()  # forgotten
    page.locator("#key").fill("right")
    page.get_by_label("Remember it until this tab is closed").check()
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#state")).to_have_text("ready")
    page.reload()
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.get_by_role("dialog")).to_be_hidden()
    provoked(problems, "401")


def test_who_cancels_is_not_asked_again_until_they_want_something(
    serve: Serve, open_page: OpenPage, shapes: Path, problems: list[str]
) -> None:
    page = open_page(serve(FakeService(), LOCKED))
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#state")).to_have_text("key needed")
    expect(page.locator("#banner-text")).to_contain_text("wants an API key")
    with page.expect_response("**/memory"):
        pass  # it goes on looking, without a dialog
    expect(page.get_by_role("dialog")).to_be_hidden()
    choose(page, shapes)
    ask(page, "Hello?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#ask-form .error")).to_contain_text("no API key")
    page.get_by_role("button", name="API key").click()
    page.locator("#key").fill("right")
    page.locator("#key").press("Enter")
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#banner")).to_be_hidden()
    provoked(problems, "401")


# All that the banner says: "is back" stands for some seconds only, and a busy machine may look later.
RECORD = """() => {
    window.banners = [];
    const banner = document.getElementById("banner-text");
    new MutationObserver(() => banners.push(banner.textContent)).observe(banner, { childList: true });
}"""


def test_the_server_goes_and_comes_back(open_page: OpenPage, shapes: Path, problems: list[str]) -> None:
    with at_port(FakeService(), free_port()) as port:
        page = open_page(f"http://127.0.0.1:{port}")
        expect(page.locator("#state")).to_have_text("ready")
        choose(page, shapes)
    expect(page.locator("#state")).to_have_text("no answer")
    expect(page.locator("#banner-text")).to_have_text("The server doesn't answer. This page goes on trying.")
    ask(page, "Anyone?")
    expect(page.locator("#ask-form .error")).to_have_text("The server doesn't answer.")
    expect(page.get_by_label("Question")).to_have_value("Anyone?")
    page.evaluate(RECORD)
    with at_port(FakeService(Script(("I am",))), port):
        until(lambda: "The server is back." in page.evaluate("() => window.banners"))
        expect(page.locator("#state")).to_have_text("ready")
        page.get_by_label("Question").press("Enter")
        expect(answers(page)).to_have_text("I am")
        page.close()
    provoked(problems, "ERR_CONNECTION_REFUSED")
    problems[:] = [
        problem for problem in problems if "net::ERR_" not in problem
    ]  # cut while it was answering


def test_a_stream_that_ends_too_early_says_so(url: str, open_page: OpenPage, shapes: Path) -> None:
    chunk = '{"choices":[{"index":0,"delta":{"content":"So far "},"finish_reason":null}]}'
    page = open_page(url)
    choose(page, shapes)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=f"data: {chunk}\n\n", content_type="text/event-stream"),
    )
    ask(page, "Go on")
    expect(page.locator("#ask-form .error")).to_contain_text("broke off before the answer was complete")
    expect(page.locator(".turn.assistant")).to_contain_text("So far (broke off)")


def test_an_answer_that_breaks_off_is_no_answer(open_page: OpenPage, serve: Serve) -> None:
    """Once what was thrown while a body was read ended the page's watch over the server for good."""
    page = open_page(serve(FakeService()))
    said = page.evaluate(
        """async () => {
            const { json, Unreachable } = await import("/page/api.js");
            const real = window.fetch;
            const late = () => new DOMException("signal timed out", "TimeoutError");
            window.fetch = async () => new Response(new ReadableStream({ pull(to) { to.error(late()); } }));
            try { await json("/health"); } catch (error) { return error instanceof Unreachable; }
            finally { window.fetch = real; }
        }"""
    )
    assert said is True
