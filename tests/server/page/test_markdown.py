"""Answers in Markdown: elements made of tokens, never HTML; what is hostile in them stays text."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.server.fake import FakeService, Script
from tests.server.page.conftest import OpenPage, PageOf, PageOfPocket, Serve, answers, ask, take_sample

ANSWER = """# Title

Some **bold**, *soft*, ~~gone~~ and `code`.
Second line.

- one
- two
  1. inner

> quoted

| left | right |
|:--|--:|
| a | 1 |

```python
print("<b>")
```

[a link](https://example.org/a?b=1) and https://example.org/bare and README.md
"""
HOSTILE = """<script>document.title = "broken"</script>
<img src=x onerror="document.title = 'broken'"> <svg onload=alert(1)>

[js](javascript:alert(1)) [vb](vbscript:x)
[file](file:///etc/passwd) [data](data:text/html,x) [here](/v1/models)

![pixel](https://evil.example/pixel.png) ![inner](data:image/svg+xml;base64,PHN2Zz4=)

<javascript:alert(1)> <https://example.org/ok>

```"><script>alert(1)</script>
</code></pre><script>document.title = "broken"</script>
```

[ref]

[ref]: javascript:alert(1)
"""
SIZE = 100_000
TOO_MUCH = {
    text[:12]: (text * SIZE)[:SIZE]
    for text in (
        ">", "> ", "[", "![", "[a](", "***", "***a ", "_a", "*a_", "`a ", "- ", "1. ", "<", "&", "\\", "~~a ",
        "**a *b ", "[]: ", "a  \n", "# a\n", "```\n", ">\n", "- a\n", "| a ", "http://a", "<!--", "a" * 9,
    )
}  # fmt: skip
FORMULAS = (
    "$",
    "$$",
    "\\[",
    "\\(",
    "\\(a\\)",
    "$a$ ",
    "$a\\$",
    "$$\\ce{H2O ->}$$\n",
    "$$\n",
    "\\[\na\n",
    "$\\frac$ ",
    "$x^{2}$ ",
)
TOO_MUCH |= {text: (text * SIZE)[:SIZE] for text in FORMULAS}
TOO_MUCH["a deep formula"] = f"$${'{' * 900}x{'}' * 900}$$\n" * 50
TOO_MUCH["a wide formula"] = f"$${'x' * 1900}$$\n\n" * 50
TOO_MUCH["table"] = "|" + "a|" * 20_000 + "\n|" + "-|" * 20_000 + "\n" + "|\n" * 9_000
TOO_MUCH["deep list"] = "\n".join(" " * depth + "- a" for depth in range(0, 600, 2))[:SIZE]
MEASURE = """async (texts) => {
    const { markdown } = await import("/page/markdown.js");
    return Object.fromEntries(Object.entries(texts).map(([name, text]) => {
        const fragment = markdown(text);
        const elements = document.createTreeWalker(fragment, NodeFilter.SHOW_ELEMENT);
        let [count, deepest] = [0, 0];
        while (elements.nextNode()) {
            count += 1;
            let depth = 0;
            for (let node = elements.currentNode; node !== fragment; node = node.parentNode) depth += 1;
            deepest = Math.max(deepest, depth);
        }
        return [name, { count, deepest, characters: fragment.textContent.length }];
    }));
}"""


# 100 pieces of 1,000 characters each, as a stream brings them.
GROW = """async (pieces) => {
    const { GrowingMarkdown } = await import("/page/markdown.js");
    const shown = [];
    for (const piece of pieces) {
        const root = document.createElement("div");
        const growing = new GrowingMarkdown(root);
        let text = "";
        while (text.length < 100_000) {
            growing.update(text += piece.repeat(1000 / piece.length));
            await new Promise((resolve) => setTimeout(resolve, 1));
        }
        growing.finish(text);
        shown.push(root.textContent.length);
    }
    return shown;
}"""


def answered(page_of: PageOf, text: str) -> Page:
    """The page after an answer."""
    page = page_of(FakeService(Script((text,))))
    take_sample(page, "Shapes")
    ask(page, "What is it?")
    expect(answers(page)).to_have_count(1)
    return page


def test_markdown_becomes_elements(page_of: PageOf) -> None:
    page = answered(page_of, ANSWER)
    answer = answers(page)
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("em")).to_have_text("soft")
    expect(answer.locator("s")).to_have_text("gone")
    expect(answer.locator("p > code")).to_have_text("code")
    expect(answer.locator("p > br")).to_have_count(1)
    expect(answer.locator("ul > li")).to_have_text(["one", "two inner"], use_inner_text=True)
    expect(answer.locator("ul ol > li")).to_have_text("inner")
    expect(answer.locator("blockquote")).to_have_text("quoted")
    expect(answer.locator("th")).to_have_text(["left", "right"])
    expect(answer.locator("td").last).to_contain_class("align-right")
    expect(answer.locator("pre")).to_have_text('print("<b>")')
    expect(answer.locator(".code-head")).to_contain_text("python")
    links = answer.locator("a")
    expect(links).to_have_text(["a link", "https://example.org/bare"])
    for link in links.all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert link.get_attribute("target") == "_blank"


def test_what_is_hostile_stays_text(page_of: PageOf) -> None:
    asked_elsewhere = []
    service = FakeService(Script((HOSTILE,)))
    page = page_of(service)
    page.on("request", lambda request: "127.0.0.1" in request.url or asked_elsewhere.append(request.url))
    take_sample(page, "Shapes")
    ask(page, HOSTILE)
    expect(answers(page)).to_have_count(1)
    inside = page.locator("#transcript .turn-text")
    expect(inside.locator("script, img, svg, iframe, object, style")).to_have_count(0)
    attributes = (
        "nodes => nodes.flatMap(node => node.getAttributeNames().filter(name => name.startsWith('on')))"
    )
    assert page.locator("#transcript *").evaluate_all(attributes) == []
    targets = inside.locator("a").evaluate_all("nodes => nodes.map(node => node.getAttribute('href'))")
    assert targets == ["https://evil.example/pixel.png", "https://example.org/ok"]  # a picture is a link
    expect(answers(page)).to_contain_text('<script>document.title = "broken"</script>')
    assert page.title() == "snugvl"
    assert [url for url in asked_elsewhere if not url.startswith("blob:")] == []


def test_a_hundred_thousand_hostile_characters_do_not_freeze_the_page(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    made = page.evaluate(MEASURE, TOO_MUCH)
    assert set(made) == set(TOO_MUCH)
    assert max(each["count"] for each in made.values()) <= 50_000
    assert max(each["deepest"] for each in made.values()) <= 100
    assert made[">"]["characters"] == SIZE  # too deep for elements: as it stands, nothing left out
    page.get_by_role("button", name="Settings").click()  # and the page still answers
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()


@pytest.mark.extended
def test_hostile_text_that_streams_does_not_freeze_the_page(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    shown = page.evaluate(GROW, ["![", "> ", "($"])
    assert shown == [SIZE, SIZE, SIZE]


def test_blocks_that_are_complete_stay_the_elements_that_they_are(page_of: PageOf) -> None:
    words = [
        "First *paragraph*.",
        "\n\n",
        "- a",
        "\n- b",
        "\n\nLast",
        *[f" word{count}" for count in range(90_000)],
    ]
    page = page_of(FakeService(Script(tuple(words), wait_s=0.02)))
    take_sample(page, "Shapes")
    ask(page, "Go on")
    busy = page.locator(".turn.busy .turn-text")
    expect(busy).to_contain_text("word1")
    busy.locator("p").first.evaluate("node => { node.mine = true; }")
    busy.locator("ul").evaluate("node => { node.mine = true; }")
    expect(busy).to_contain_text("word9")
    page.keyboard.press("Escape")
    expect(page.locator(".turn-note")).to_have_text("(stopped)")
    kept = answers(page).evaluate("node => [...node.children].map(child => child.mine ?? false)")
    assert kept == [True, True, False]
    expect(answers(page).locator("li")).to_have_text(["a", "b"])


def test_an_address_that_comes_after_its_link(page_of: PageOf) -> None:
    pieces = ("See [here][1].\n\n", "More.\n\n", "[1]: https://example.org/late\n")
    page = page_of(FakeService(Script(pieces, wait_s=0.2)))
    take_sample(page, "Shapes")
    ask(page, "Go on")
    expect(answers(page).locator("a")).to_have_attribute("href", "https://example.org/late")
    expect(answers(page).locator("p")).to_have_text(["See here.", "More."])


def test_code_and_answers_are_copied(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService(Script((ANSWER,)))), permissions=["clipboard-read", "clipboard-write"])
    take_sample(page, "Shapes")
    ask(page, "What is it?")
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>")'
    page.locator(".turn.assistant > .turn-actions .copy").click()
    expect(page.locator(".turn.assistant > .turn-actions .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


def test_copying_where_the_browser_has_no_clipboard_for_the_page(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService(Script(("Some words.",)))))  # as over plain HTTP from another machine
    ask(page, "What is it?")
    expect(answers(page)).to_have_count(1)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    button = page.locator(".turn.assistant .copy")
    button.click()
    expect(button).to_have_text("Copied")
    expect(button).to_be_focused()
    page.get_by_label("Question").focus()
    page.keyboard.press("Control+V")
    expect(page.get_by_label("Question")).to_have_value("Some words.")


def events(*deltas: dict[str, str]) -> str:
    """A stream of /v1/chat/completions."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_reasoning_is_folded_and_not_sent_back(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService()))
    sent = []

    def answer(route: Route) -> None:
        sent.append((route.request.post_data_buffer or b"").decode("utf-8", "replace"))
        body = events(
            {"reasoning_content": "It is **red**"}, {"reasoning_content": ", I think."}, {"content": "Red."}
        )
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    take_sample(page, "Shapes")
    ask(page, "Which colour?")
    expect(answers(page)).to_have_text("Red.")
    fold = page.locator("details.reasoning")
    assert fold.evaluate("node => node.open") is False
    fold.get_by_text("Reasoning").click()
    expect(fold).to_contain_text("It is red, I think.")
    expect(fold.locator("strong")).to_have_text("red")
    ask(page, "Sure?")
    expect(answers(page)).to_have_count(2)
    assert '"Red."' in sent[1]
    assert "I think" not in sent[1]


def test_reasoning_in_the_answer_itself_is_folded_too(page_of: PageOf) -> None:
    service = FakeService()
    page = page_of(service)
    take_sample(page, "Shapes")
    texts = ("<think>Hm.</think>\n\nYes.", "Hm.\n</think>\n\nYes.", "<think>Hm.")
    for count, text in enumerate(texts, 1):
        service.script = Script((text,))
        ask(page, "Sure?")
        expect(answers(page)).to_have_count(count)
        expect(answers(page).last).to_have_text("Yes." if count < 3 else "")
        page.get_by_text("Reasoning").last.click()
        expect(page.locator(".reasoning .markdown").last).to_have_text("Hm.")
    expect(page.locator(".turn-note:visible")).to_have_text("(the model answered nothing)")


def test_the_licence_of_the_markdown_library_is_there(url: str, open_page: OpenPage, shapes: Path) -> None:
    page = open_page(url)
    with page.expect_navigation():
        page.get_by_role("link", name="its licence").first.click()
    expect(page.locator("body")).to_contain_text("Vitaly Puzrin")
