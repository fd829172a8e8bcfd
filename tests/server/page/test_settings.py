"""What the user sets for conversations: it is sent, kept, and refused in words where it makes no sense."""

from playwright.sync_api import Page, expect

from tests.server.fake import FakeService
from tests.server.page.conftest import OpenPage, Serve, answers, ask, take_sample
from tests.server.page.test_ask import said
from tests.server.page.test_conversations import kept


def open_settings(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("dialog", name="Settings of conversations")).to_be_visible()


def save(page: Page) -> None:
    page.get_by_role("button", name="Save", exact=True).click()


def test_settings_are_sent_and_kept(serve: Serve, open_page: OpenPage) -> None:
    service = FakeService()
    page = open_page(serve(service))
    take_sample(page, "Shapes")
    ask(page, "Before?")
    expect(answers(page)).to_have_count(1)
    open_settings(page)
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.get_by_label("System prompt").fill("Answer in German.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Longest answer").fill("64")
    page.get_by_label("Longest answer").press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.reload()
    expect(page.get_by_role("button", name="Settings (changed)")).to_be_visible()
    ask(page, "After?")
    expect(answers(page)).to_have_count(2)
    before, after = service.requests
    assert before.sampling.temperature == 0
    assert before.sampling.max_tokens is None
    assert said(before)[0] == ("user", "Before?")
    assert after.sampling.temperature == 0.7
    assert after.sampling.max_tokens == 64
    assert said(after)[:2] == [("system", "Answer in German."), ("user", "Before?")]
    open_settings(page)
    page.get_by_role("button", name="Defaults").click()
    save(page)
    expect(page.get_by_role("button", name="Settings", exact=True)).to_be_visible()
    assert page.evaluate("Object.keys(localStorage)") == []


TEMPERATURE = "The temperature is a number from 0 to 2, such as 0.7."
TOKENS = "The number of tokens is a whole number from 1 up to 512, this model's context."


def test_what_makes_no_sense_is_refused(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService()))
    expect(page.locator("#model-facts")).to_have_text("512 tokens of context")
    open_settings(page)
    refused = [("Temperature", TEMPERATURE, "2.5"), ("Temperature", TEMPERATURE, "-1")]
    refused += [("Longest answer", TOKENS, value) for value in ("0", "1.5", "513")]
    for name, words, value in refused:
        field = page.get_by_label(name)
        field.fill(value)
        save(page)
        expect(page.locator("#settings-error")).to_contain_text(words)
        expect(field).to_be_focused()
        expect(field).to_have_attribute("aria-invalid", "true")
        page.get_by_role("button", name="Cancel").click()
        open_settings(page)
        expect(field).to_have_value("")
        expect(page.locator("#settings-error")).to_be_hidden()


def test_settings_of_nobody_knows_whom_are_not_believed(serve: Serve, open_page: OpenPage) -> None:
    service = FakeService()
    page = open_page(serve(service))
    page.evaluate(
        """() => localStorage.setItem("snugvl-settings",
            JSON.stringify({ system: 7, temperature: "hot", tokens: 1e400, keep: "yes" }))"""
    )
    page.reload()
    expect(page.get_by_role("button", name="Settings", exact=True)).to_be_visible()
    take_sample(page, "Shapes")
    ask(page, "Hello?")
    expect(answers(page)).to_have_count(1)
    assert said(service.requests[0]) == [("user", "Hello?")]


def test_who_wants_nothing_kept_has_nothing_kept(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService()))
    open_settings(page)
    page.get_by_label("Keep conversations").uncheck()
    save(page)
    take_sample(page, "Shapes")
    ask(page, "Secret?")
    expect(answers(page)).to_have_count(1)
    assert kept(page) == []
    page.get_by_role("button", name="Close").click()
    open_settings(page)
    page.get_by_label("Keep conversations").check()
    save(page)
    expect(page.get_by_role("dialog")).to_be_hidden()  # closed when all is kept
    page.reload()
    expect(answers(page)).to_have_count(1)  # kept from then on
