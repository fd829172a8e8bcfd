"""The conversation."""

from pathlib import Path

from PIL import Image
from playwright.sync_api import expect

from snugvl.core.messages import Picture, Request, Text
from snugvl.errors import EngineError, QueueFull
from tests.patience import until
from tests.server.fake import FakeService, Script
from tests.server.page.conftest import PageOf, PageOfPocket, answers, ask, choose, provoked

MANY = tuple(f"word{index} " for index in range(100_000))  # more than come while a busy browser clicks


def said(request: Request) -> list[tuple[str, str]]:
    """Role and text of every message."""
    return [
        (message.role, "".join(part.text for part in message.content if isinstance(part, Text)))
        for message in request.messages
    ]


def test_pocket_answers(page_of_pocket: PageOfPocket, shapes: Path) -> None:
    page = page_of_pocket()
    choose(page, shapes)
    ask(page, "What color is the circle?")
    expect(answers(page)).to_have_text("red", ignore_case=True)
    expect(page.locator("#ask-form .job-status")).to_contain_text("tokens read")


def test_an_answer_grows_while_it_is_written(page_of: PageOf, shapes: Path) -> None:
    page = page_of(FakeService(Script(MANY, wait_s=0.02)))
    choose(page, shapes)
    ask(page, "Go on")
    busy = page.locator(".turn.assistant.busy .turn-text")
    expect(busy).to_contain_text("word3")
    expect(busy).to_contain_text("word20")
    assert page.locator("#transcript").get_attribute("aria-live") == "polite"


def test_a_conversation_sends_every_turn_and_the_picture_once(page_of: PageOf, shapes: Path) -> None:
    service = FakeService(lambda request: Script((f"answer {len(request.messages)}",)))
    page = page_of(service)
    choose(page, shapes)
    ask(page, "First?")
    expect(answers(page)).to_have_text(["answer 1"])
    ask(page, "Second?")
    expect(answers(page)).to_have_text(["answer 1", "answer 3"])
    first, second = service.requests
    assert said(first) == [("user", "First?")]
    assert said(second) == [("user", "First?"), ("assistant", "answer 1"), ("user", "Second?")]
    (picture,) = [part for part in second.messages[0].content if isinstance(part, Picture)]
    assert picture.image.size == (128, 96)


def test_stop_and_escape_keep_what_was_said_and_end_the_request(page_of: PageOf, shapes: Path) -> None:
    service = FakeService(Script(MANY, wait_s=0.02))
    page = page_of(service)
    choose(page, shapes)
    ask(page, "Go on")
    expect(page.locator(".turn.assistant")).to_contain_text("word3")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn-note")).to_have_text("(stopped)")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    until(lambda: not service.running)
    expect(page.locator("#running")).to_have_text("0")
    service.script = Script(("done",))
    ask(page, "And now?")
    expect(answers(page).last).to_have_text("done")
    assert said(service.requests[-1])[1][1].startswith("word0 word1")
    service.script = Script(MANY, wait_s=0.02)
    ask(page, "Go on again")
    expect(page.locator(".turn.assistant").last).to_contain_text("word3")
    page.keyboard.press("Escape")
    expect(page.locator("#ask-form .job-status")).to_have_text("Stopped.")


def test_a_new_conversation_forgets(page_of: PageOf, shapes: Path) -> None:
    service = FakeService()
    page = page_of(service)
    choose(page, shapes)
    ask(page, "First?")
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_label("Question")).to_be_focused()
    ask(page, "Again?")
    expect(answers(page)).to_have_count(1)
    assert said(service.requests[-1]) == [("user", "Again?")]


def test_another_picture_stays_in_the_conversation(page_of: PageOf, shapes: Path) -> None:
    service = FakeService(Script(MANY, wait_s=0.02))
    page = page_of(service)
    choose(page, shapes)
    ask(page, "Go on")
    expect(page.locator(".turn.assistant")).to_contain_text("word3")
    other = shapes.with_name("other.png")
    Image.new("RGB", (64, 32), "green").save(other)
    choose(page, other)  # while the answer is written
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Stop").click()
    service.script = Script(("yes",))
    ask(page, "And this one?")
    expect(answers(page).last).to_have_text("yes")
    first, _, second = service.requests[-1].messages
    assert [part.image.size for part in first.content if isinstance(part, Picture)] == [(128, 96)]
    assert [part.image.size for part in second.content if isinstance(part, Picture)] == [(64, 32)]


def test_what_a_model_writes_is_text(page_of: PageOf, shapes: Path) -> None:
    nasty = "<img src=x onerror=alert(1)><script>document.title='broken'</script>"
    page = page_of(FakeService(Script((nasty,))))
    choose(page, shapes)
    ask(page, nasty)
    expect(answers(page)).to_have_text(nasty)
    assert page.locator(".turn-text :is(img, script), #transcript [onerror]").count() == 0
    assert page.title() == "snugvl"


def test_a_refusal_shows_the_servers_words_and_keeps_the_question(
    page_of: PageOf, shapes: Path, problems: list[str]
) -> None:
    service = FakeService(Script(refusal=QueueFull("17 requests are waiting, which is the limit")))
    page = page_of(service)
    choose(page, shapes)
    ask(page, "Anyone there?")
    error = page.locator("#ask-form .error")
    expect(error).to_have_text("17 requests are waiting, which is the limit. Try again in 1 s.")
    expect(page.get_by_label("Question")).to_have_value("Anyone there?")
    expect(page.locator(".turn")).to_have_count(0)
    service.script = Script()
    page.get_by_label("Question").press("Enter")
    expect(answers(page)).to_have_text("Hello there")
    expect(error).to_be_hidden()
    provoked(problems, "429")


def test_an_error_in_the_middle_keeps_what_was_said(page_of: PageOf, shapes: Path) -> None:
    service = FakeService(Script(("So far ",), error=EngineError("the engine fell over")))
    page = page_of(service)
    choose(page, shapes)
    ask(page, "Well?")
    expect(page.locator("#ask-form .error")).to_have_text("the engine fell over")
    expect(page.locator(".turn.assistant")).to_contain_text("So far (broke off)")


def test_a_suggestion_asks(page_of_pocket: PageOfPocket, shapes: Path) -> None:
    page, question = page_of_pocket(), "How many things are there?"
    choose(page, shapes)
    expect(page.get_by_role("button", name="What is in the picture?")).to_be_visible()
    page.get_by_role("button", name=question).click()
    expect(page.locator(".turn.user .turn-text")).to_have_text(question)
    expect(answers(page)).not_to_be_empty()


def test_shift_enter_is_a_new_line_and_an_empty_question_is_not_sent(page_of: PageOf, shapes: Path) -> None:
    service = FakeService()
    page = page_of(service)
    choose(page, shapes)
    question = page.get_by_label("Question")
    question.press("Enter")
    expect(page.locator("#ask-form .job-status")).to_contain_text("Write a question first")
    question.fill("one")
    question.press("Shift+Enter")
    question.type("two")
    question.press("Enter")
    expect(answers(page)).to_have_count(1)
    assert [said(request) for request in service.requests] == [[("user", "one\ntwo")]]
