"""How a picture gets into the page."""

from pathlib import Path

from playwright.sync_api import JSHandle, Page, expect

from tests.server.page.conftest import OpenPage, PageOfPocket, choose, take_sample

TRANSFER = """([bytes, name, type]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
    return transfer;
}"""


def transfer(page: Page, data: bytes, name: str = "shapes.png", kind: str = "image/png") -> JSHandle:
    return page.evaluate_handle(TRANSFER, [list(data), name, kind])


def test_the_empty_page_says_what_to_do_and_offers_samples(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    expect(page.get_by_text("Show the model a picture")).to_be_visible()
    expect(page.get_by_text("Photographs are beyond it")).to_be_visible()  # pocket is served
    take_sample(page, "Garden")
    expect(page.locator("#picture-facts")).to_have_text("sample-garden.png · 800 × 600 px · 15 kB")
    expect(page.get_by_text("Show the model a picture")).to_be_hidden()


def test_every_sample_is_a_picture(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    for name in ("Shapes", "Garden", "Sign"):
        take_sample(page, name)
        page.get_by_role("button", name=f"Remove sample-{name.lower()}.png").click()


def test_choose_and_choose_another(page_of_pocket: PageOfPocket, shapes: Path) -> None:
    page = page_of_pocket()
    choose(page, shapes)
    expect(page.locator("#picture-facts")).to_contain_text("shapes.png · 128 × 96 px")
    other = shapes.with_name("other.png")
    other.write_bytes(shapes.read_bytes())
    choose(page, other)
    assert page.locator("#image").get_attribute("alt") == "Your picture, other.png"


def test_drop(page_of_pocket: PageOfPocket, picture: bytes) -> None:
    page = page_of_pocket()
    dropped = transfer(page, picture)
    page.dispatch_event("body", "dragenter", {"dataTransfer": dropped})
    expect(page.get_by_text("Drop the picture")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": dropped})
    expect(page.locator("#picture-facts")).to_contain_text("shapes.png · 128 × 96 px")
    expect(page.get_by_text("Drop the picture")).to_be_hidden()


def test_a_drag_that_leaves_changes_nothing(page_of_pocket: PageOfPocket, picture: bytes) -> None:
    page = page_of_pocket()
    dragged = transfer(page, picture)
    page.dispatch_event("body", "dragenter", {"dataTransfer": dragged})
    page.dispatch_event("body", "dragleave", {"dataTransfer": dragged})
    expect(page.get_by_text("Drop the picture")).to_be_hidden()


def test_paste(page_of_pocket: PageOfPocket, picture: bytes) -> None:
    page = page_of_pocket()
    pasted = transfer(page, picture, "image.png")
    page.evaluate(
        "(clipboardData) => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData }))", pasted
    )
    expect(page.locator("#picture-facts")).to_contain_text("image.png · 128 × 96 px")


def test_a_phone_may_take_a_photo(url: str, open_page: OpenPage, shapes: Path) -> None:
    page = open_page(url, 390, 844, has_touch=True, is_mobile=True)
    expect(page.get_by_text("Take a photo")).to_be_visible()
    camera = page.locator("#camera")
    assert camera.get_attribute("capture") == "environment"
    camera.set_input_files(shapes)
    expect(page.locator("#picture-facts")).to_contain_text("128 × 96 px")


def test_what_is_no_picture_is_refused_by_name(page_of_pocket: PageOfPocket, tmp_path: Path) -> None:
    page = page_of_pocket()
    (tmp_path / "notes.txt").write_text("not a picture")
    page.set_input_files("#file", tmp_path / "notes.txt")
    expect(page.locator("#picture-error")).to_contain_text("notes.txt is not a picture")
    expect(page.locator("#stage")).to_be_hidden()


def test_a_task_without_a_picture_asks_for_one(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    tasks = {"Caption": "Caption the picture", "Scene": "Analyse", "Detect": "Find objects"}
    for number, (tab, button) in enumerate(tasks.items(), 1):
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("button", name=button).click()
        told = page.get_by_role("alert", include_hidden=True).filter(has_text="Choose a picture first")
        expect(told).to_have_count(number)
        expect(told.nth(number - 1)).to_be_visible()
        expect(page.locator("#file")).to_be_focused()
