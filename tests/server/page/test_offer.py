"""The page offers what the model can, and says what is missing."""

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from snugvl.core.messages import Text
from tests.server.fake import CAPABILITIES, FakeService
from tests.server.page.conftest import OpenPage, Serve, answers, ask, choose, model_unknown, provoked, tab
from tests.server.page.test_accessible import check
from tests.server.page.test_picture import transfer

TEXT = replace(CAPABILITIES, images=False, max_pixels=0, min_pixels=0)
PALIGEMMA = replace(CAPABILITIES, architecture="PaliGemmaForConditionalGeneration")


def tabs(page: Page) -> list[str]:
    return [tab.inner_text() for tab in page.get_by_role("tab").all()]


@pytest.mark.parametrize(("width", "height"), [(390, 844)])
def test_a_model_of_text_alone_is_asked_without_a_picture(
    serve: Serve, open_page: OpenPage, picture: bytes, width: int, height: int
) -> None:
    service = FakeService(capabilities=TEXT)
    page = open_page(serve(service), width, height, bypass_csp=True)
    expect(page.locator("#offer")).to_contain_text("This model reads text alone.")
    assert tabs(page) == []
    expect(page.locator("#picture")).to_be_hidden()
    expect(page.get_by_text("What is in the picture?")).to_be_hidden()
    expect(page.get_by_text("Ask anything, then go on asking")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, picture)})
    check(page, f"text-{width}")
    ask(page, "What is 2 + 2?")
    expect(answers(page)).to_have_text(["Hello there"])
    ask(page, "And 3 + 3?")
    expect(answers(page)).to_have_text(["Hello there", "Hello there"])
    parts = [part for request in service.requests for message in request.messages for part in message.content]
    assert len(parts) == 4
    assert all(isinstance(part, Text) for part in parts)


def test_a_question_without_a_picture_that_is_asked_before_the_model_is_known(
    serve: Serve, open_page: OpenPage
) -> None:
    page = open_page("about:blank#")
    with model_unknown(page):
        page.goto(f"{serve(FakeService())}/")
        ask(page, "Hello?")
        expect(page.locator("#ask-form .job-status")).to_contain_text("Working")
        page.get_by_label("Question").fill("What I write meanwhile")
    expect(answers(page)).to_have_text(["Hello there"])
    expect(page.get_by_label("Question")).to_have_value("What I write meanwhile")


def test_tasks_that_a_family_was_not_trained_for_are_left_out(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService(capabilities=PALIGEMMA)))
    expect(page.locator("#offer")).to_contain_text("not trained for it: Scene.")
    assert tabs(page) == ["Ask", "Caption", "Detect"]
    page.get_by_role("tab", name="Ask").press("End")
    expect(page.get_by_role("button", name="Find objects")).to_be_visible()
    page.get_by_role("tab", name="Detect").press("ArrowRight")
    page.get_by_role("tab", name="Ask").press("ArrowLeft")
    expect(page.get_by_role("tab", name="Detect")).to_be_focused()


def test_a_server_that_comes_back_with_a_model_of_text_alone(
    serve: Serve, open_page: OpenPage, shapes: Path, problems: list[str]
) -> None:
    service = FakeService()
    page = open_page(serve(service))
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#offer")).to_be_hidden()
    assert tabs(page) == ["Ask", "Caption", "Scene", "Detect"]
    choose(page, shapes)
    ask(page, "What is it?")
    expect(answers(page)).to_have_count(1)
    tab(page, "Detect")
    page.route("**/memory", lambda route: route.abort())
    expect(page.locator("#state")).to_have_text("no answer")
    service.capabilities = TEXT
    page.unroute("**/memory")
    expect(page.locator("#picture")).to_be_hidden()
    expect(page.get_by_label("Question")).to_be_visible()  # the tab that is gone was the chosen one
    expect(answers(page)).to_have_count(0)  # it can't see what they spoke of
    provoked(problems, "ERR_FAILED")
