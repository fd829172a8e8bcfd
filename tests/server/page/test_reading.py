"""Where the reader is: a long answer is read from its beginning, and only who is at the end is kept there."""

from playwright.sync_api import Page, expect

from tests.server.fake import FakeService, Script
from tests.server.page.conftest import PageOf, answers, ask, reload, take_sample

LONG = tuple(f"Paragraph {index} of a long answer.\n\n" for index in range(60))
AT_END = "(node) => node.scrollHeight - node.scrollTop - node.clientHeight < 2"
QUESTION_ON_TOP = """(node) => Math.abs(
    [...node.querySelectorAll(".turn.user")].at(-1).getBoundingClientRect().top
    - node.getBoundingClientRect().top) < 3"""

# Where it is once it has been there for ten frames: a wheel goes on by itself.
AT_REST = """(node) => new Promise((resolve) => {
    let place = node.scrollTop, frames = 0;
    const look = () => {
        frames = node.scrollTop === place ? frames + 1 : 0;
        place = node.scrollTop;
        if (frames < 10) requestAnimationFrame(look); else resolve(place);
    };
    look();
})"""


def until_it_is(page: Page, condition: str) -> None:
    page.wait_for_function(condition, arg=page.locator("#transcript").element_handle())


def test_a_long_answer_is_read_from_its_beginning(page_of: PageOf) -> None:
    page = page_of(FakeService(Script(LONG)))
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(answers(page)).to_have_count(1)
    until_it_is(page, QUESTION_ON_TOP)
    ask(page, "Second?")
    expect(answers(page)).to_have_count(2)
    until_it_is(page, QUESTION_ON_TOP)
    expect(page.locator(".turn.user").last).to_contain_text("Second?")
    expect(page.get_by_text("Paragraph 1 of").last).to_be_in_viewport()
    expect(page.get_by_text("Paragraph 59").last).not_to_be_in_viewport()
    reload(page)
    expect(answers(page)).to_have_count(2)
    until_it_is(page, QUESTION_ON_TOP)


def test_a_button_leads_to_the_end(page_of: PageOf) -> None:
    page = page_of(FakeService(Script(LONG)))
    button = page.get_by_role("button", name="To the end")
    expect(button).to_be_hidden()
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(answers(page)).to_have_count(1)
    expect(button).to_be_visible()
    button.press("Enter")
    until_it_is(page, AT_END)
    expect(button).to_be_hidden()
    expect(page.locator("#transcript")).to_be_focused()  # where arrow keys go on from
    page.keyboard.press("Home")
    expect(button).to_be_visible()


def test_who_is_at_the_end_is_kept_there(page_of: PageOf) -> None:
    service = FakeService(Script((*LONG, "The very last.", "."), wait_s=0.02))
    page = page_of(service)
    take_sample(page, "Shapes")
    ask(page, "First?")
    page.get_by_role("button", name="To the end").click()
    expect(page.get_by_text("The very last.")).to_be_in_viewport()
    expect(answers(page)).to_have_count(1)
    until_it_is(page, AT_END)


def test_who_reads_elsewhere_is_left_alone(page_of: PageOf) -> None:
    service = FakeService(Script((*LONG, "The end."), wait_s=0.02))
    page = page_of(service)
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(page.get_by_role("button", name="To the end")).to_be_visible()
    page.locator("#transcript").hover()
    page.mouse.wheel(0, 60)
    page.wait_for_function("() => document.getElementById('transcript').scrollTop > 50")
    place = page.locator("#transcript").evaluate(AT_REST)
    expect(answers(page)).to_have_count(1)
    assert page.locator("#transcript").evaluate("(node) => node.scrollTop") == place
