"""For everyone: with the keyboard alone, in both themes, checked by axe-core at two widths.

Screenshots of every state land in the folder that SNUGVL_SCREENSHOTS names, for people to look at.
"""

import json
import os
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from snugvl.server.settings import ServerSettings
from tests.patience import until
from tests.server.fake import FakeService, Script
from tests.server.page.conftest import (
    ALL_WRITTEN,
    OpenPage,
    Serve,
    answers,
    ask,
    detect,
    provoked,
    tab,
    take_sample,
)
from tests.server.page.test_files import STATIC
from tests.server.page.test_memory import Measured

WIDTHS = [(1440, 900), (390, 844)]
LOOKS = [(1440, 900, "light"), (390, 844, "dark")]  # layout stands on the width, contrast on the scheme
ANSWER = "Two blue squares, a large red circle and a large green triangle on a white background. "

RICH = """<think>Hm.</think># One

### Three

A [link](https://example.org), `code`, **bold**:

> quoted

| a | b |
|--|--:|
| a much wider cell than anybody would like to have on a telephone | 2 |

```json
[{"bbox_2d": [100, 100, 600, 900], "label": "cat", "words": "a line too long for any telephone"}]
```

1. one
   - two
"""


FORMULAS = (
    r"""

# Long

The area is $A = \pi r^2$. """
    + "A long paragraph follows, which is read from its beginning. " * 20
    + r"""

$$
f(x) = \sum_{i=1}^{n} \frac{a_i}{b_i} + \int_0^1 \sqrt{x^3 + y^3} \, dx
     + \sum_{i=1}^{n} \frac{a_i}{b_i} + \int_0^1 g(x) \, dx
$$

| component | planned | measured | in use | what it is for, said in one long sentence |
|--|--:|--:|--:|--|
| text weights | 4.2 GiB | 4.1 GiB | 4.1 GiB | what the decoder multiplies with |
| KV cache | 1.0 GiB | 1.0 GiB | 0.2 GiB | keys and values of what was read before |

```python
def area(radius: float) -> float:
    # The area of a circle, in the square of the unit that its radius has: wider than most windows
    return math.pi * radius**2
```

"""
)
THINGS = (("first", 100, "circle"), ("second", 300, "tree"), ("third", 500, "a very long name of a thing"))
BOXES = "".join(
    f"""The {ordinal} image:

```json
[{{"bbox_2d": [{place}, 200, {place + 250}, 700], "label": "{label}"}},
 {{"bbox_2d": [700, 600, 900, 900], "label": "corner"}}]
```

"""
    for ordinal, place, label in THINGS
)
SCENE = json.dumps(
    {
        "summary": ANSWER,
        "setting": "a garden",
        "objects": [{"name": "tree", "count": 2, "positions": ["left", "right"]}],
        "text": ["EXIT"],
        "relations": ["the tree stands beside the house"],
    }
)
SAMPLES = ("sample-garden.png", "sample-shapes.png", "sample-garden.png")
WINDOWS = [(1280, 800, "light"), (1920, 1080, "dark"), (390, 844, "light")]


def check(page: Page, name: str) -> None:
    """No violation of any rule of axe-core, nothing wider than the window; and a screenshot."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if folder := os.environ.get("SNUGVL_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
    found = Axe().run(page)
    assert not found.response["violations"], found.generate_report()


def tab_to(page: Page, name: str, key: str = "Tab") -> None:
    """Press Tab, or another key, until the thing of that name has the focus."""
    for _ in range(60):
        page.keyboard.press(key)
        if (
            page.evaluate("document.activeElement.labels?.[0]?.innerText ?? document.activeElement.innerText")
            == name
        ):
            return
    raise AssertionError(f"Tab never reached {name!r}")


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS)
@pytest.mark.sample("390-844-dark")
def test_axe_finds_nothing(url: str, open_page: OpenPage, width: int, height: int, scheme: str) -> None:
    # axe-core is put into the page, which its policy forbids to anyone else.
    page = open_page(url, width, height, color_scheme=scheme, bypass_csp=True)
    name = f"{width}-{scheme}"
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#ledger")).to_contain_text("weights")
    check(page, f"empty-{name}")
    take_sample(page, "Garden")
    detect(page)
    page.locator(".detection").first.focus()
    check(page, f"detect-{name}")
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    expect(page.locator("#scene-result")).to_be_visible()
    check(page, f"scene-{name}")
    tab(page, "Caption")
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-form .job-status")).to_contain_text("written")
    check(page, f"caption-{name}")


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS[:1])
def test_axe_finds_nothing_in_a_conversation_beside_a_full_gpu(
    serve: Serve, open_page: OpenPage, width: int, height: int, scheme: str
) -> None:
    service = Measured(Script((ANSWER,) * 3), rate=60)
    page = open_page(serve(service), width, height, color_scheme=scheme, bypass_csp=True)
    take_sample(page, "Shapes")
    ask(page, "What is in the picture?")
    expect(answers(page)).to_have_count(1)
    ask(page, "And what is it all on? Answer in one sentence.")
    expect(answers(page)).to_have_count(2)
    expect(page.locator("#speed")).not_to_have_text("0.0")
    check(page, f"conversation-{width}-{scheme}")


@pytest.mark.parametrize(("width", "height"), WIDTHS[1:])
def test_axe_finds_nothing_in_errors_and_dialogs(
    serve: Serve, open_page: OpenPage, problems: list[str], width: int, height: int
) -> None:
    base = serve(FakeService(), ServerSettings(api_keys=("right",)))
    page = open_page(base, width, height, bypass_csp=True)
    page.locator("#key").fill("wrong")
    page.locator("#key").press("Enter")
    expect(page.locator("#key-error")).to_be_visible()
    check(page, f"key-{width}")
    page.get_by_role("button", name="Cancel").click()
    ask(page, "Hello?")
    page.get_by_role("button", name="Cancel").click()  # a question is worth asking for the key again
    expect(page.locator("#ask-form .error")).to_be_visible()
    check(page, f"error-{width}")
    page.close()  # it asks again and again
    provoked(problems, "401")


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS[1:])
def test_axe_finds_nothing_in_what_conversations_have(
    serve: Serve, open_page: OpenPage, width: int, height: int, scheme: str
) -> None:
    page = open_page(serve(FakeService(Script((RICH,)))), width, height, color_scheme=scheme, bypass_csp=True)
    page.set_input_files("#file", [STATIC / "sample-garden.png", STATIC / "sample-shapes.png"])
    expect(page.locator("#tray li")).to_have_count(2)
    page.set_input_files("#file", STATIC / "index.html")
    expect(page.locator("#picture-error")).to_be_visible()
    check(page, f"pictures-{width}-{scheme}")
    ask(page, "What is there?")
    expect(page.locator(".boxed .box")).to_have_count(1)
    page.get_by_text("Reasoning").click()
    expect(page.locator(".reasoning .markdown")).to_have_text("Hm.")
    page.get_by_role("button", name="Edit").click()
    check(page, f"rich-{width}-{scheme}")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#settings-error")).to_be_visible()
    check(page, f"settings-{width}-{scheme}")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.locator(".talk")).to_have_count(1)
    check(page, f"conversations-{width}-{scheme}")


@pytest.mark.parametrize(("width", "height", "scheme"), WINDOWS)
@pytest.mark.sample("1280-800-light")
def test_axe_finds_nothing_in_long_answers_and_several_results(
    serve: Serve, open_page: OpenPage, width: int, height: int, scheme: str
) -> None:
    """Formulas, a table and code wider than the window, boxes on three pictures; each task of three."""
    service = FakeService(Script((FORMULAS + BOXES,)))
    page = open_page(serve(service), width, height, color_scheme=scheme, bypass_csp=True)
    name = f"{width}-{scheme}"
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    page.set_input_files("#file", [STATIC / sample for sample in SAMPLES])
    expect(page.locator("#tray li")).to_have_count(3)
    ask(page, "Explain all three, with formulas.")
    expect(page.locator(".boxed")).to_have_count(3)
    expect(page.locator("math")).to_have_count(2)
    rows = page.locator(".table tr").evaluate_all("(rows) => rows.map((row) => row.offsetHeight)")
    assert max(rows) < 100, rows  # no cell of a word a line
    cut = page.locator(".boxed .box-label").evaluate_all(
        "(labels) => labels.filter((label) => label.scrollWidth > label.clientWidth"
        " || label.scrollHeight > label.clientHeight).map((label) => label.textContent)"
    )
    assert not cut
    check(page, f"long-{name}")
    if folder := os.environ.get("SNUGVL_SCREENSHOTS"):  # as it looks without scrolling the window
        page.screenshot(path=Path(folder) / f"long-window-{name}.png")
        page.set_viewport_size({"width": width, "height": 3400})
        page.screenshot(path=Path(folder) / f"long-all-{name}.png")
        page.set_viewport_size({"width": width, "height": height})
    service.script = Script(
        (
            '[{"bbox_2d": [100, 100, 600, 900], "label": "cat"},'
            ' {"bbox_2d": [600, 300, 900, 800], "label": "dog"}]',
        )
    )
    tab(page, "Detect")
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-blocks .boxed .box")).to_have_count(6)
    page.locator(".detection").nth(2).focus()
    check(page, f"detect-three-{name}")
    service.script = Script((SCENE,))
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    expect(page.locator("#scene-result h3", has_text="sample-")).to_have_count(3)
    check(page, f"scene-three-{name}")
    service.script = Script((ANSWER,))
    tab(page, "Caption")
    page.get_by_role("button", name="Caption 3 pictures").click()
    expect(page.locator("#caption-result h3")).to_have_count(3)
    check(page, f"caption-three-{name}")


@pytest.mark.parametrize(("width", "height", "scheme"), LOOKS)
@pytest.mark.sample("1440-900-light")
def test_axe_finds_nothing_in_a_list_that_is_renamed_and_searched(
    serve: Serve, open_page: OpenPage, width: int, height: int, scheme: str
) -> None:
    base = serve(FakeService(Script((ANSWER,))))
    page = open_page(base, width, height, color_scheme=scheme, bypass_csp=True)
    name = f"{width}-{scheme}"
    for question in (
        "What is there?",
        "What is in a question that is so long that its title needs two lines?",
    ):
        ask(page, question)
        expect(answers(page)).to_have_count(1)
        page.get_by_role("button", name="New conversation").click()
    page.evaluate(ALL_WRITTEN)
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.get_by_role("button", name="Rename What is there?").click()
    check(page, f"talks-edit-{name}")
    page.keyboard.type("Squares")
    page.keyboard.press("Enter")
    expect(page.locator(".talk-title").last).to_have_text("Squares")
    page.get_by_label("Search").fill("blue squares")
    expect(page.locator("#talks-empty")).to_have_text("2 of 2 conversations")
    check(page, f"talks-found-{name}")
    page.get_by_label("Search").fill("nothing like it")
    expect(page.locator("#talks-empty")).to_have_text("0 of 2 conversations")
    check(page, f"talks-none-{name}")
    page.get_by_label("Search").fill("")
    page.get_by_role("button", name="Delete Squares").click()
    check(page, f"talks-delete-{name}")


def test_what_scrolls_and_several_results_with_the_keyboard_alone(serve: Serve, open_page: OpenPage) -> None:
    """Tables, code and formulas that are too wide scroll by arrow keys; results are reached one by one."""
    service = FakeService(Script((FORMULAS,)))
    page = open_page(serve(service), 390, 844)
    expect(page.locator("#model-facts")).to_contain_text("512 tokens")
    page.set_input_files("#file", [STATIC / sample for sample in SAMPLES])
    expect(page.locator("#tray li")).to_have_count(3)
    page.locator("#work").focus()
    tab_to(page, "Question")
    page.keyboard.type("Explain.")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(1)
    for kind in ("pre", "table", "math"):  # from the end to the beginning
        for _ in range(30):
            page.keyboard.press("Shift+Tab")
            scrolls = page.evaluate(
                "(kind) => { const node = document.activeElement;"
                " return Boolean(node.closest('.turn') && (node.matches(kind) || node.querySelector(kind))"
                " && node.scrollWidth > node.clientWidth); }",
                kind,
            )
            if scrolls:
                break
        assert scrolls, kind
        page.keyboard.press("ArrowRight")
        until(lambda: page.evaluate("document.activeElement.scrollLeft") > 0)
    service.script = Script(('[{"bbox_2d": [100, 100, 600, 900], "label": "cat"}]',))
    tab_to(page, "Ask", "Shift+Tab")
    page.keyboard.press("ArrowLeft")
    tab_to(page, "Find objects")
    page.keyboard.press("Enter")
    expect(page.locator(".detection")).to_have_count(3)
    for place in range(3):
        tab_to(page, page.locator(".detection").nth(place).inner_text())
        expect(page.locator("#detect-blocks .box").nth(place)).to_contain_class("lit")


def test_the_list_of_conversations_with_the_keyboard_alone(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(FakeService(Script((ANSWER,)))))
    for question in ("One?", "Two?"):
        tab_to(page, "Question")
        page.keyboard.type(question)
        page.keyboard.press("Enter")
        expect(answers(page)).to_have_count(1)
        back_to(page, "New conversation")
        page.keyboard.press("Enter")
    page.evaluate(ALL_WRITTEN)
    back_to(page, "Conversations")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Conversations")).to_be_visible()
    tab_to(page, "Rename")
    page.keyboard.press("Enter")
    page.keyboard.type("Blue")  # the old name is selected
    page.keyboard.press("Enter")
    expect(page.locator(".talk-title")).to_have_text(["Blue", "One?"])
    assert page.evaluate("document.activeElement.innerText") == "Rename"
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")  # the name stays, and so does the dialog
    expect(page.locator(".talk-title")).to_have_text(["Blue", "One?"])
    tab_to(page, "Search in all of them", "Shift+Tab")
    page.keyboard.type("blue")
    expect(page.locator("#talks-empty")).to_have_text("2 of 2 conversations")
    for _ in range(4):
        page.keyboard.press("Backspace")
    page.keyboard.type("One?")
    expect(page.locator(".talk")).to_have_count(1)
    tab_to(page, "Delete")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Press again to delete One?")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".talk")).to_have_count(0)


def test_a_whole_round_with_the_keyboard_alone(serve: Serve, open_page: OpenPage) -> None:
    words = FakeService(lambda request: Script((f"answer {len(request.messages)}",)))
    page = open_page(serve(words), permissions=["clipboard-read", "clipboard-write"])
    tab_to(page, "Shapes")
    page.keyboard.press("Enter")
    expect(page.locator("#work")).to_be_focused()
    tab_to(page, "Question")
    page.keyboard.type("First?")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["answer 1"])
    page.keyboard.type("Second?")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["answer 1", "answer 3"])
    back_to(page, "Regenerate")
    back_to(page, "Copy")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copied")).to_be_focused()
    assert page.evaluate("navigator.clipboard.readText()") == "answer 3"
    back_to(page, "New conversation")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_label("Question")).to_be_focused()
    back_to(page, "Conversations")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Conversations")).to_be_visible()
    tab_to(page, page.locator(".talk").inner_text())
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["answer 1", "answer 3"])
    expect(page.get_by_label("Question")).to_be_focused()
    back_to(page, "Add another")


def back_to(page: Page, name: str) -> None:
    """Press Shift + Tab until the thing of that name has the focus."""
    tab_to(page, name, "Shift+Tab")


@pytest.mark.extended
def test_with_the_keyboard_alone(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    expect(page.locator("#state")).to_have_text("ready")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the tasks")).to_be_focused()
    tab_to(page, "Choose a picture")
    tab_to(page, "Shapes")
    page.keyboard.press("Enter")
    expect(page.locator("#work")).to_be_focused()  # where to go on
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Ask")).to_be_focused()
    page.keyboard.press("ArrowLeft")  # round the end
    expect(page.get_by_role("tab", name="Detect")).to_have_attribute("aria-selected", "true")
    tab_to(page, "What to look for")
    page.keyboard.type("red circle")
    page.keyboard.press("Enter")
    expect(page.locator(".detection")).to_have_count(1)
    tab_to(page, page.locator(".detection").inner_text())
    expect(page.locator(".box")).to_contain_class("lit")
    tab_to(page, "Download as COCO JSON")
    with page.expect_download():
        page.keyboard.press("Enter")


@pytest.mark.extended
def test_a_question_with_the_keyboard_alone(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    tab_to(page, "Shapes")
    page.keyboard.press("Enter")
    expect(page.locator("#work")).to_be_focused()
    tab_to(page, "Question")
    page.keyboard.type("How many squares are there?")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("2")
    expect(page.get_by_label("Question")).to_be_focused()


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_themes(url: str, open_page: OpenPage) -> None:
    page = open_page(url, color_scheme="dark")
    dark = background(page)
    page.emulate_media(color_scheme="light")
    light = background(page)
    assert light != dark
    toggle = page.get_by_role("button", name="Theme")
    toggle.click()
    expect(toggle).to_have_text("Theme: light")
    toggle.click()
    expect(toggle).to_have_text("Theme: dark")
    assert background(page) == dark
    page.reload()
    assert background(page) == dark  # remembered
    toggle.click()
    expect(toggle).to_have_text("Theme: auto")
    assert background(page) == light


def test_nothing_moves_for_those_who_want_it_still(serve: Serve, open_page: OpenPage) -> None:
    words = tuple(f"word{index} " for index in range(100_000))
    page = open_page(serve(FakeService(Script(words, wait_s=0.02))), reduced_motion="reduce")
    take_sample(page, "Shapes")
    ask(page, "Go on")
    busy = page.locator(".turn.busy .turn-text")
    expect(busy).to_contain_text("word1")
    assert busy.evaluate("(node) => getComputedStyle(node, '::after').animationName") == "none"


def test_the_focus_is_visible(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    for name in ("Skip to the tasks", "API key", "Choose a picture", "Shapes", "Ask"):
        tab_to(page, name)
        outline = page.evaluate(
            """() => {
                const node = document.activeElement;
                return getComputedStyle(node.type === "file" ? node.labels[0] : node).outlineWidth;
            }"""
        )
        assert outline == "3px", name
