"""Conversations stay: after a reload, beside others, asked again and in other words."""

import json
import re
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect

from snugvl.core.messages import Picture, Request
from snugvl.errors import QueueFull
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService, Script
from tests.server.page.conftest import (
    ALL_WRITTEN,
    OpenPage,
    PageOf,
    PageOfPocket,
    Serve,
    answers,
    ask,
    choose,
    detect,
    provoked,
    reload,
    tab,
    take_sample,
)
from tests.server.page.test_ask import MANY, said


def counted() -> FakeService:
    """Answers "answer 1", "answer 2" …, whatever it is asked."""
    service = FakeService()
    service.script = lambda request: Script((f"answer {len(service.requests) + 1}",))
    return service


def pictures(request: Request) -> list[list[tuple[int, int]]]:
    """Sizes of the pictures of each message."""
    return [
        [part.image.size for part in message.content if isinstance(part, Picture)]
        for message in request.messages
    ]


def kept(page: Page) -> list[str]:
    """Titles in the list of conversations, which is left open."""
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.get_by_role("dialog", name="Conversations")).to_be_visible()
    return page.locator(".talk-title").all_inner_texts()


def test_a_conversation_survives_a_reload(page_of: PageOf, shapes: Path) -> None:
    service = counted()
    page = page_of(service)
    choose(page, shapes)
    ask(page, "First?")
    expect(answers(page)).to_have_text(["answer 1"])
    take_sample_too(page)
    ask(page, "Second?")
    expect(answers(page)).to_have_text(["answer 1", "answer 2"])
    reload(page)
    expect(answers(page)).to_have_text(["answer 1", "answer 2"])
    expect(page.locator(".turn.user .turn-text")).to_have_text(["First?", "Second?"])
    expect(page.locator("#tray .thumb")).to_have_count(2)
    expect(page.locator("#picture-facts")).to_contain_text("sample-sign.png")
    ask(page, "Third?")
    expect(answers(page)).to_have_count(3)
    last = service.requests[-1]
    assert [text for _, text in said(last)] == ["First?", "answer 1", "Second?", "answer 2", "Third?"]
    assert pictures(last) == [[(128, 96)], [], [(512, 512)], [], []]


def take_sample_too(page: Page) -> None:
    """A second picture, as the samples are shown for the first alone."""
    page.evaluate(
        """async () => {
            const { take } = await import("/page/picture.js");
            const response = await fetch("/page/sample-sign.png");
            await take([new File([await response.blob()], "sample-sign.png")]);
        }"""
    )


WRITTEN = """async (words) => {
    const { kept } = await import("/page/store.js");
    return (await kept())[0]?.turns[1]?.text.includes(words);
}"""


def test_what_was_written_before_a_reload_stays(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService(Script(MANY, wait_s=0.02))))
    take_sample(page, "Shapes")
    ask(page, "Go on")
    expect(page.locator(".turn.assistant")).to_contain_text("word3")
    until(lambda: page.evaluate(WRITTEN, "word3"))
    page.reload()
    expect(answers(page)).to_contain_text("word3")
    expect(page.locator(".turn-note")).to_have_text("(broke off)")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def test_conversations_are_listed_opened_and_deleted(page_of: PageOf) -> None:
    service = counted()
    page = page_of(service)
    take_sample(page, "Shapes")
    ask(page, "About shapes?")
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Something else?")
    expect(answers(page)).to_have_text("answer 2")
    assert kept(page) == ["Something else?", "About shapes?"]
    expect(page.locator(".talk").first).to_contain_text("1 question · 1 picture")
    expect(page.locator(".talk").first).to_contain_text("shown now")
    page.get_by_role("button", name="About shapes?").first.click()
    expect(answers(page)).to_have_text("answer 1")
    expect(page.get_by_label("Question")).to_be_focused()
    reload(page)
    expect(answers(page)).to_have_text("answer 1")  # the one that was opened, not the newest
    kept(page)
    page.get_by_role("button", name="Delete About shapes?").click()
    page.get_by_role("button", name="Press again").blur()
    page.get_by_role("button", name="Delete About shapes?").click()  # the first press is forgotten
    assert page.locator(".talk").count() == 2
    page.get_by_role("button", name="Press again to delete About shapes?").click()
    expect(page.locator(".talk-title")).to_have_text(["Something else?"])
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Delete all").click()
    page.locator("#talks-delete").click()
    expect(page.get_by_text("No conversation is kept yet")).to_be_visible()
    reload(page)
    assert kept(page) == []
    assert page.evaluate("import('/page/store.js').then(({ kept }) => kept())") == []


def test_a_link_within_the_page_does_not_lose_the_conversation(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService()), 390, 844)
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(answers(page)).to_have_count(1)
    page.locator("#meter").click()
    expect(page).to_have_url(re.compile("#memory$"))
    reload(page)
    expect(answers(page)).to_have_count(1)


def test_a_conversation_that_another_tab_deleted(page_of: PageOf) -> None:
    page = page_of(FakeService())
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="New conversation").click()
    assert kept(page) == ["First?"]
    page.evaluate("import('/page/store.js').then(({ forgetAll }) => forgetAll())")
    page.locator(".talk").click()
    expect(page.get_by_text("No conversation is kept yet")).to_be_visible()


def test_a_new_conversation_leaves_the_boxes_on_the_picture(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    take_sample(page, "Shapes")
    detect(page)
    expect(page.locator(".box")).not_to_have_count(0)
    tab(page, "Ask")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#picture-facts")).to_contain_text("sample-shapes.png")
    expect(page.locator("#overlay .box")).not_to_have_count(0)


def test_what_is_kept_is_bounded(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    found = page.evaluate(
        """async () => {
            const { keep, kept, find, MOST_KEPT, MOST_BYTES } = await import("/page/store.js");
            const talk = (number, file = new Blob(["x"])) => ({
                id: `t${number}`, title: "", updated: number, pictures: [{ id: "p", name: "p", file }],
                turns: [{ role: "user", text: "?", pictures: ["p"] }],
            });
            for (let number = 0; number < MOST_KEPT + 5; number += 1) await keep(talk(number));
            const many = (await kept()).map(({ id }) => id);
            const old = await find("t0");
            const large = new Blob(["x"]);
            Object.defineProperty(large, "size", { value: MOST_BYTES });
            await keep(talk(1000, large));
            return { many, old, left: (await kept()).map(({ id }) => id) };
        }"""
    )
    assert len(found["many"]) == 100
    assert found["many"][0] == "t104"
    assert found["many"][-1] == "t5"
    assert found["old"] is None
    assert found["left"] == ["t1000"]  # the one in use stays, whatever its size


def ask_twice(page: Page, picture: Path) -> None:
    """Two questions about a picture, each answered."""
    choose(page, picture)
    for count, question in enumerate(("First?", "Second?"), 1):
        ask(page, question)
        expect(answers(page)).to_have_count(count)
        expect(page.locator("#transcript")).not_to_contain_class("busy")


def test_an_answer_is_generated_again(page_of: PageOf, shapes: Path) -> None:
    service = counted()
    page = page_of(service)
    ask_twice(page, shapes)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)  # of the last answer alone
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_text(["answer 1", "answer 3"])
    assert said(service.requests[2]) == said(service.requests[1])
    assert pictures(service.requests[2]) == [[(128, 96)], [], []]


def test_a_regeneration_that_fails_leaves_the_answer(page_of: PageOf, problems: list[str]) -> None:
    service = FakeService(Script(("good",)))
    page = page_of(service)
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(answers(page)).to_have_text(["good"])
    service.script = Script(refusal=QueueFull("the queue is full"))
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#ask-form .error")).to_contain_text("the queue is full")
    expect(answers(page)).to_have_text(["good"])
    expect(page.get_by_label("Question")).to_have_value("")
    provoked(problems, "429")


def test_a_question_is_put_in_other_words(page_of: PageOf, shapes: Path) -> None:
    service = counted()
    page = page_of(service)
    ask_twice(page, shapes)
    edit = page.get_by_role("button", name="Edit")
    edit.first.click()
    field = page.get_by_label("Ask this instead")
    expect(field).to_be_focused()
    expect(field).to_have_value("First?")
    field.press("Escape")
    expect(edit.first).to_be_focused()
    edit.first.click()
    field.fill("Better?")
    field.press("Enter")
    expect(answers(page)).to_have_text(["answer 3"])
    expect(page.locator(".turn.user .turn-text")).to_have_text(["Better?"])
    assert said(service.requests[-1]) == [("user", "Better?")]
    assert pictures(service.requests[-1]) == [[(128, 96)]]
    reload(page)
    expect(page.locator(".turn.user .turn-text")).to_have_text(["Better?"])


def test_a_late_answer_stays_in_its_own_conversation(page_of: PageOf) -> None:
    page = page_of(FakeService(Script(MANY, wait_s=0.02)))
    take_sample(page, "Shapes")
    ask(page, "Go on")
    expect(page.locator(".turn.assistant")).to_contain_text("word3")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    kept(page)
    page.locator(".talk").click()
    expect(answers(page)).to_contain_text("word3")
    expect(page.locator(".turn-note")).to_have_text("(stopped)")


def test_a_browser_that_keeps_nothing_says_so(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService()))
    page.evaluate(
        """() => {
            const refuse = () => { throw new DOMException("no", "SecurityError"); };
            IDBFactory.prototype.open = refuse;
            IDBDatabase.prototype.transaction = refuse;
        }"""
    )
    take_sample(page, "Shapes")
    ask(page, "First?")
    expect(answers(page)).to_have_text("Hello there")
    expect(page.locator("#kept-error")).to_have_text(
        "This browser does not keep the conversation: it lets this page store nothing. "
        "It is here until you leave the page."
    )
    assert kept(page) == []
    expect(page.get_by_text("This browser lets the page store nothing")).to_be_visible()


def two_talks(page: Page) -> None:
    """Two conversations, the newest first: about cats, about a circle."""
    take_sample(page, "Shapes")
    ask(page, "Where is the red circle?")
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Tell me of cats")
    expect(answers(page)).to_have_count(1)


def test_a_conversation_is_renamed_and_keeps_its_name(page_of: PageOf) -> None:
    page = page_of(counted())
    two_talks(page)
    kept(page)
    page.get_by_role("button", name="Rename Tell me of cats").press("Enter")
    field = page.get_by_label("New name of Tell me of cats")
    expect(field).to_be_focused()
    field.press("Escape")
    expect(page.get_by_role("dialog", name="Conversations")).to_be_visible()
    rename = page.get_by_role("button", name="Rename Tell me of cats")
    expect(rename).to_be_focused()
    rename.click()
    field.fill("  ")
    field.press("Enter")
    expect(field).to_be_focused()  # a name has letters
    field.fill("Animals")
    field.press("Enter")
    expect(page.locator(".talk-title")).to_have_text(["Animals", "Where is the red circle?"])
    page.get_by_role("button", name="Close").click()
    ask(page, "And of dogs?")  # which keeps the conversation once more
    expect(answers(page)).to_have_count(2)
    reload(page)
    expect(answers(page)).to_have_count(2)
    ask(page, "And of birds?")
    expect(answers(page)).to_have_count(3)
    assert kept(page) == ["Animals", "Where is the red circle?"]


def test_conversations_are_found_by_what_was_said(page_of: PageOf) -> None:
    page = page_of(counted())
    two_talks(page)
    assert len(kept(page)) == 2
    search = page.get_by_label("Search in all of them")
    search.fill("RED circle")
    expect(page.locator(".talk-title")).to_have_text(["Where is the red circle?"])
    expect(page.locator("#talks-empty")).to_have_text("1 of 2 conversations")
    search.fill("answer 2")
    expect(page.locator(".talk-title")).to_have_text(["Tell me of cats"])
    expect(page.locator(".talk .muted").first).to_have_text("answer 2")  # all of it: nothing is left out
    search.fill("nothing like it")
    expect(page.locator(".talk")).to_have_count(0)
    expect(page.locator("#talks-empty")).to_have_text("0 of 2 conversations")
    search.fill("")
    expect(page.locator(".talk")).to_have_count(2)


def test_a_place_that_was_found_is_shown_in_whole_words(page_of: PageOf) -> None:
    words = (
        "There were several animals standing in the garden behind the house, and birds that sang above it."
    )
    page = page_of(FakeService(Script((words,))))
    ask(page, "Hello?")
    expect(answers(page)).to_have_count(1)
    page.evaluate(ALL_WRITTEN)
    kept(page)
    page.get_by_label("Search in all of them").fill("garden")
    shown = "… were several animals standing in the garden behind the house, and birds that sang …"
    expect(page.locator(".talk .muted").first).to_have_text(shown)


def test_a_conversation_is_taken_away(serve: Serve, open_page: OpenPage, shapes: Path) -> None:
    base = serve(counted())
    page = open_page(base)
    choose(page, shapes)
    ask(page, "What: is/there?")
    expect(answers(page)).to_have_count(1)
    ask(page, "Sure?")
    expect(answers(page)).to_have_count(2)
    page.evaluate(ALL_WRITTEN)
    kept(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Markdown of What: is/there?").click()
    assert download.value.suggested_filename == "What-is-there.md"
    assert Path(download.value.path()).read_text("utf-8") == (
        "# What: is/there?\n\n## You\n\n*Picture: shapes.png*\n\nWhat: is/there?\n\n"
        "## pocket\n\nanswer 1\n\n## You\n\nSure?\n\n## pocket\n\nanswer 2\n"
    )
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON of What: is/there?").click()
    assert download.value.suggested_filename == "What-is-there.json"
    data = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert [message["role"] for message in data["messages"]] == ["user", "assistant"] * 2
    assert data["pictures"][0]["name"] == "shapes.png"
    data["messages"].append({"role": "user", "content": "And now?"})
    body = {"model": data["model"], "messages": data["messages"]}  # a server takes it as it is
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.json()["choices"][0]["message"]["content"] == "answer 3"
