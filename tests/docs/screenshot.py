"""Takes the README's picture of the page: `python -m tests.docs.screenshot` writes docs/images/page.png."""

from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine
from tests.docs.generated import FOLDER
from tests.server.live import live
from tests.server.page.conftest import CHROMIUM

PICTURE = FOLDER.parent / "examples" / "images" / "garden.png"
TARGET = FOLDER / "images" / "page.png"
WIDTH, HEIGHT = 1440, 900
COLORS = 128  # the page has few; a photograph would need all


def take(browser: Browser, url: str, target: Path) -> None:
    """The page after it found what is in the example's picture."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    page.goto(f"{url}/")
    expect(page.locator("body")).to_contain_text("ready", timeout=60_000)
    page.set_input_files("#file", PICTURE)
    expect(page.locator("#picture-facts")).to_contain_text(PICTURE.name)
    page.get_by_role("tab", name="Detect").click()
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator("#detect-result")).to_be_visible()
    page.mouse.move(0, 0)
    page.wait_for_timeout(5000)  # the ledger has looked again, and the machine's speed is nobody's figure
    page.screenshot(path=target)
    with Image.open(target) as image:
        image.convert("RGB").quantize(COLORS).save(target, optimize=True)


def main() -> None:
    """A server with an engine of its own, as `snugvl serve` has it, and Chromium."""
    assert CHROMIUM, "needs Chromium"
    service = SupervisedEngine(EngineChoice("pocket", device="cpu"))
    with live(service) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take(browser, url, TARGET)
        browser.close()


if __name__ == "__main__":
    main()
