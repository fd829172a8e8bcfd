"""Who has the room: the conversation takes what the window leaves, and memory is folded on demand."""

import pytest
from playwright.sync_api import Page, expect

from tests.server.fake import FakeService, Script
from tests.server.page.conftest import OpenPage, Serve, answers, ask, provoked, take_sample
from tests.server.page.test_memory import Measured

WIDE = "a cell that is much wider than any conversation would like it to be " * 3
ANSWER = f"""| name | what there is to say of it |
|--|--|
| {"x" * 400} | {WIDE} |

```
{"print(1); " * 60}
```

{"A sentence of many words that goes on. " * 30}
"""
INSIDE = """(node) => {
    const frame = document.getElementById("transcript").getBoundingClientRect();
    const own = node.getBoundingClientRect();
    return own.left >= frame.left - 1 && own.right <= frame.right + 1;
}"""
SCROLLS = "(node) => node.scrollWidth > node.clientWidth && getComputedStyle(node).overflowX === 'auto'"


def width(page: Page, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["width"]


@pytest.mark.parametrize(
    ("window", "opened", "folded"),
    [(1280, 760, 760), (1920, 860, 1250)],
)
@pytest.mark.sample("1280-760-760")
def test_the_conversation_has_what_the_window_leaves(
    serve: Serve, open_page: OpenPage, window: int, opened: int, folded: int
) -> None:
    page = open_page(serve(Measured()), window)
    assert width(page, "#transcript") >= opened
    page.get_by_role("button", name="Fold the memory panel").click()
    assert width(page, "#transcript") >= folded
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_folded_panel_stays_folded(serve: Serve, open_page: OpenPage, problems: list[str]) -> None:
    page = open_page(serve(Measured()), 1280)
    expect(page.locator("#ledger")).to_be_visible()
    page.get_by_role("button", name="Fold the memory panel").press("Enter")
    button = page.get_by_role("button", name="Show the memory panel")
    expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(page.locator("#ledger")).to_be_hidden()
    expect(page.locator("#meter")).to_have_text("Memory 6.00 GiB of 8.00 GiB")  # its sum is still there
    page.route("**/page/app.js", lambda route: route.abort())
    page.reload(wait_until="domcontentloaded")
    expect(page.locator("#memory-body")).to_be_hidden()  # before any module runs: it doesn't flash
    provoked(problems, "ERR_FAILED")


def test_the_sum_unfolds_the_panel(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(Measured()), 1280)
    page.get_by_role("button", name="Fold the memory panel").click()
    page.get_by_role("link", name="Memory 6.00 GiB of 8.00 GiB").click()
    expect(page.locator("#ledger")).to_be_visible()
    page.reload()
    expect(page.locator("#ledger")).to_be_visible()


@pytest.mark.parametrize("window", [390, 1280])
@pytest.mark.sample("390")
def test_what_is_wide_scrolls_by_itself(serve: Serve, open_page: OpenPage, window: int) -> None:
    page = open_page(serve(FakeService(Script((ANSWER,)))), window)
    take_sample(page, "Shapes")
    ask(page, "What is there?")
    expect(answers(page)).to_have_count(1)
    for selector in (".turn .table", ".turn pre"):
        part = page.locator(selector)
        assert part.evaluate(INSIDE)
        assert part.evaluate(SCROLLS)
        part.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("(node) => node.scrollLeft > 0", arg=part.element_handle())
    assert page.locator("#transcript").evaluate("(node) => node.scrollWidth <= node.clientWidth")
    prose = width(page, ".turn.assistant .markdown > p")
    assert prose <= 46 * 16  # a line that can be read


def test_the_question_stays_in_the_window_below_a_long_answer(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService(Script((ANSWER * 5,)))), 1280, 800)
    take_sample(page, "Shapes")
    ask(page, "What is there?")
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_label("Question")).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_in_viewport(ratio=1)
