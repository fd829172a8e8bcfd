"""Takes the pictures in docs/page.md: `python -m tests.docs.page_pictures` writes docs/images/page-*.png.

The server is the tests' own with a scripted engine, so that every picture shows the same answers again.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from snugvl.core.messages import Request, Text
from snugvl.server.settings import ServerSettings
from tests.docs.generated import FOLDER
from tests.server.fake import CAPABILITIES, FakeService, Script
from tests.server.live import live
from tests.server.page.conftest import CHROMIUM, answers, ask

IMAGES = FOLDER / "images"
SAMPLES = [FOLDER.parent / "examples" / "images" / f"{name}.png" for name in ("garden", "shapes", "sign")]
MODEL = "Qwen3-VL-4B"
COLORS = 128  # the page has few; a photograph would need all
WIDE, TALL, PHONE = (1440, 900), (1440, 1200), (390, 844)

MARKDOWN = """<think>The cat sits left of the tree, so it comes first.</think>## What is there

A **cat** beside a *tree*, a car, a banana and a dog:

| thing | where | how sure |
|:--|:--|--:|
| cat | left | 0.98 |
| tree | middle | 0.95 |

1. The cat looks at the dog.
2. The dog looks at the [banana](https://example.org/banana).

> Nobody looks at the car.

```python
things = ["cat", "tree", "car"]
print(len(things))
```
"""
BOXES = (
    "Both are on Picture 2:\n\n```json\n"
    + json.dumps(
        [
            {"bbox_2d": [93, 103, 376, 480], "label": "circle"},
            {"bbox_2d": [750, 666, 925, 896], "label": "square"},
        ]
    )
    + "\n```"
)


def answer(request: Request) -> Script:
    """What the scripted engine says to the questions of these pictures."""
    last = "".join(part.text for part in request.messages[-1].content if isinstance(part, Text))
    return Script((BOXES if "Where" in last else MARKDOWN,))


def markdown(page: Page) -> None:
    """An answer in Markdown, its reasoning unfolded."""
    page.set_input_files("#file", SAMPLES[0])
    ask(page, "What is in the picture? Use a table, a list and some code.")
    expect(answers(page)).to_have_count(1)
    page.get_by_text("Reasoning").click()
    expect(page.locator(".reasoning")).to_contain_text("it comes first")
    page.locator("#transcript").evaluate("node => { node.scrollTop = 0; }")


def three_pictures(page: Page) -> None:
    """Three pictures in one question, and boxes on the second of them."""
    page.set_input_files("#file", SAMPLES)
    expect(page.locator("#tray li")).to_have_count(3)
    ask(page, "Where is the circle, and where is the square?")
    expect(page.locator(".boxed .box")).to_have_count(2)


def reloaded(page: Page) -> None:
    """The list of conversations, after the page was loaded again."""
    three_pictures(page)
    page.get_by_role("button", name="New conversation").click()
    ask(page, "What is in the picture?")
    expect(answers(page)).to_have_count(1)
    page.reload()
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.locator(".talk")).to_have_count(2)


def refusals(page: Page) -> None:
    """Files that are refused before anything is sent."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logo.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        (folder / "notes.txt").write_text("bread, milk, eggs")
        Image.new("1", (20_000, 12_000)).save(folder / "map.png")
        (folder / "torn.png").write_bytes(SAMPLES[0].read_bytes()[:8000])
        (folder / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(64))
        (folder / "page.pdf").write_bytes(b"%PDF-1.7\n")
        page.set_input_files("#file", sorted(folder.iterdir()))
        expect(page.locator("#picture-error")).to_contain_text("torn.png")


TAKEN: dict[str, tuple[Callable[[Page], None], tuple[int, int], str]] = {
    "markdown": (markdown, TALL, "light"),
    "three-pictures": (three_pictures, WIDE, "light"),
    "after-reload": (reloaded, WIDE, "light"),
    "refusals": (refusals, WIDE, "light"),
    "dark": (markdown, TALL, "dark"),
    "phone": (three_pictures, PHONE, "light"),
}


def take(browser: Browser, url: str, name: str, target: Path) -> None:
    """One picture of the page."""
    play, (width, height), scheme = TAKEN[name]
    phone = {"is_mobile": True, "has_touch": True} if width < 500 else {}
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-GB", **phone
    )
    page = context.new_page()
    page.goto(f"{url}/")
    expect(page.locator("#state")).to_have_text("ready")
    play(page)
    page.mouse.move(0, 0)
    page.screenshot(path=target, full_page=name in ("phone", "refusals"))
    context.close()
    with Image.open(target) as image:
        image.convert("RGB").quantize(COLORS).save(target, optimize=True)


def main(folder: Path) -> None:
    """All of them."""
    assert CHROMIUM, "needs Chromium"
    service = FakeService(answer, capabilities=replace(CAPABILITIES, model=MODEL, context_tokens=16_384))
    settings = ServerSettings(names=(MODEL,))
    with live(service, settings) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in TAKEN:
            take(browser, url, name, folder / f"page-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
