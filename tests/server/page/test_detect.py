"""Boxes: where they are drawn, what lights them, and what can be taken away."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.patience import PATIENCE_S
from tests.server.fake import FakeService, Script
from tests.server.page.conftest import OpenPage, PageOf, PageOfPocket, Serve, choose, detect

WIDE, NARROW = (1440, 900), (390, 844)
Rectangle = tuple[float, float, float, float]


def answered(url: str, path: Path, **fields: str) -> Any:
    """What the API says about a picture."""
    answer = httpx.post(
        f"{url}/v1/vision/detect",
        files={"image": (path.name, path.read_bytes())},
        data=fields,
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200
    return answer.json()


def drawn(page: Page, width: int, height: int) -> list[Rectangle]:
    """The rectangles over the picture, in pixels of a picture of that size."""
    image = page.locator("#image").bounding_box()
    assert image is not None
    found = []
    for box in page.locator(".box").all():
        rect = box.bounding_box()
        assert rect is not None
        left, top = rect["x"] - image["x"], rect["y"] - image["y"]
        corners = (left, top, left + rect["width"], top + rect["height"])
        scale = (width / image["width"], height / image["height"]) * 2
        found.append(tuple(corner * factor for corner, factor in zip(corners, scale, strict=True)))
    return sorted(found)


def corners(answer: Any) -> list[Rectangle]:
    boxes = [thing["box"] for thing in answer["objects"]]
    return sorted((box["x1"], box["y1"], box["x2"], box["y2"]) for box in boxes)


def assert_drawn_where_the_api_says(page: Page, answer: Any) -> None:
    found, expected = drawn(page, answer["width"], answer["height"]), corners(answer)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=0.5)


def rotated(path: Path) -> Path:
    """The same picture as a camera held sideways writes it: pixels turned, and EXIF that says so."""
    image = Image.open(path).convert("RGB").transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = path.with_name("sideways.jpg")
    image.save(sideways, quality=95, exif=exif)
    return sideways


@pytest.fixture(scope="module")
def found_once(
    url: str, open_once: OpenPage, picture: bytes, tmp_path_factory: pytest.TempPathFactory
) -> Page:
    path = tmp_path_factory.mktemp("detect") / "shapes.png"
    path.write_bytes(picture)
    page = open_once(url)
    choose(page, path)
    detect(page)
    return page


@pytest.fixture
def found(found_once: Page) -> Page:
    """A page that has found the things in `shapes`; tests that only look at it share it."""
    found_once.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
    found_once.locator("h1").hover()
    return found_once


def test_boxes_are_where_the_api_says_in_every_window(url: str, found: Page, shapes: Path) -> None:
    answer = answered(url, shapes)
    assert len(answer["objects"]) == 2
    for width, height in (WIDE, NARROW, (1000, 500)):
        found.set_viewport_size({"width": width, "height": height})
        assert_drawn_where_the_api_says(found, answer)


def test_boxes_of_a_picture_that_exif_turns(url: str, open_page: OpenPage, shapes: Path) -> None:
    sideways = rotated(shapes)
    page = open_page(url, *NARROW)
    choose(page, sideways)
    expect(page.locator("#picture-facts")).to_contain_text("128 × 96 px")
    detect(page)
    answer = answered(url, sideways)
    assert (answer["width"], answer["height"]) == (128, 96)
    assert_drawn_where_the_api_says(page, answer)
    circle = next(thing["box"] for thing in answer["objects"] if "circle" in thing["label"])
    assert (circle["x1"], circle["y1"]) == pytest.approx((10, 8), abs=5)
    saved = saved_png(page)  # the browser turned the pixels too
    red, _, blue = saved.getpixel((30 * 4, 28 * 4))
    assert red > 200
    assert blue < 60


def saved_png(page: Page) -> Image.Image:
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as PNG").click()
    return Image.open(BytesIO(Path(download.value.path()).read_bytes())).convert("RGB")


def test_the_list_says_the_same(url: str, found: Page, shapes: Path) -> None:
    answer = answered(url, shapes)
    expect(found.locator("#detect-summary")).to_have_text("2 objects found.")
    for thing in answer["objects"]:
        x1, y1, x2, y2 = (int(thing["box"][side] + 0.5) for side in ("x1", "y1", "x2", "y2"))
        item = found.get_by_role("button", name=thing["label"])
        expect(item).to_contain_text(f"{x1}, {y1} – {x2}, {y2} px")


def test_a_box_and_its_line_light_up_together(found: Page) -> None:
    page = found
    line = page.locator(".detection").filter(has_text="circle")
    box = page.locator(".box").filter(has_text="circle")
    box.hover()
    expect(line).to_contain_class("lit")
    page.locator("h1").hover()
    expect(line).not_to_contain_class("lit")
    line.hover()
    expect(box).to_contain_class("lit")
    page.locator("h1").hover()
    expect(box).not_to_contain_class("lit")
    line.focus()
    expect(box).to_contain_class("lit")
    expect(page.locator(".box.lit")).to_have_count(1)


def test_only_what_was_asked_for(url: str, page_of_pocket: PageOfPocket, shapes: Path) -> None:
    page = page_of_pocket()
    choose(page, shapes)
    page.get_by_role("tab", name="Detect").click()
    page.get_by_label("What to look for").fill("red circle, , ")
    page.get_by_label("What to look for").press("Enter")
    expect(page.locator(".detection")).to_have_count(1)
    expect(page.locator(".detection-label")).to_have_text("red circle")
    assert_drawn_where_the_api_says(page, answered(url, shapes, objects="red circle"))


def test_png_has_the_boxes(url: str, found: Page, shapes: Path) -> None:
    first = answered(url, shapes)["objects"][0]["box"]
    saved = saved_png(found)
    assert saved.size == (128 * 4, 96 * 4)  # small pictures are enlarged, so that labels can be read
    edge = (round(first["x1"] * 4), round(2 * (first["y1"] + first["y2"])))
    assert saved.getpixel(edge) == pytest.approx((0xC2, 0x18, 0x5B), abs=40)  # smoothed between pixels


def test_coco_is_what_the_server_writes(url: str, page_of_pocket: PageOfPocket, shapes: Path) -> None:
    page = page_of_pocket()
    choose(page, shapes)
    page.get_by_label("What to look for").evaluate("(field) => field.value = 'blue square, red circle, cat'")
    detect(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as COCO JSON").click()
    assert download.value.suggested_filename == "shapes-coco.json"
    data = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert len(data["annotations"]) == 2
    assert data == answered(url, shapes, objects="blue square,red circle,cat", format="coco")


def test_boxes_can_be_hidden_and_do_not_stay_for_the_next_picture(
    page_of_pocket: PageOfPocket, shapes: Path
) -> None:
    page = page_of_pocket()
    choose(page, shapes)
    detect(page)
    page.get_by_role("button", name="Hide the boxes").click()
    expect(page.locator(".box")).to_have_count(0)
    expect(page.locator("#detect-result")).to_be_hidden()
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator(".box")).to_have_count(2)
    other = shapes.with_name("other.png")
    other.write_bytes(shapes.read_bytes())
    choose(page, other)
    expect(page.locator(".box")).to_have_count(0)


def test_nothing_found_and_labels_are_text(page_of: PageOf, shapes: Path) -> None:
    service = FakeService(Script(("[]",)))
    page = page_of(service)
    choose(page, shapes)
    detect(page)
    expect(page.locator("#detect-summary")).to_have_text("Nothing found.")
    nasty = "<b>bold</b>"
    service.script = Script((json.dumps([{"bbox_2d": [100, 200, 300, 400], "label": nasty}]),))
    page.get_by_role("button", name="Find objects").click()
    expect(page.locator(".detection-label")).to_have_text(nasty)
    expect(page.locator(".box-label")).to_have_text(nasty)
    assert drawn(page, 1000, 1000) == [pytest.approx((100, 200, 300, 400), abs=2)]


def test_labels_stay_on_the_picture(serve: Serve, open_page: OpenPage, shapes: Path) -> None:
    label = "a very long label that a model wrote for no good reason at all"
    boxes = [[600, 500, 690, 600], [900, 500, 990, 600], [10, 10, 90, 90], [880, 5, 990, 60]]
    words = json.dumps([{"bbox_2d": box, "label": label} for box in boxes])
    page = open_page(serve(FakeService(Script((words,)))), *NARROW)
    choose(page, shapes)
    detect(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    frame = page.locator("#frame").bounding_box()
    assert frame is not None
    for tag in page.locator(".box-label").all():
        rect = tag.bounding_box()
        assert rect is not None
        assert rect["x"] >= frame["x"] - 3
        assert rect["x"] + rect["width"] <= frame["x"] + frame["width"] + 3
        assert rect["y"] >= frame["y"] - 3


def test_a_crowd_shows_only_the_label_that_is_pointed_at(page_of: PageOf, shapes: Path) -> None:
    boxes = [[50 * index, 400, 50 * index + 40, 500] for index in range(13)]
    words = json.dumps([{"bbox_2d": box, "label": "cup"} for box in boxes])
    page = page_of(FakeService(Script((words,))))
    choose(page, shapes)
    detect(page)
    expect(page.locator(".box")).to_have_count(13)
    expect(page.locator(".box-label:visible")).to_have_count(0)
    page.locator(".detection").nth(3).focus()
    expect(page.locator(".box-label:visible")).to_have_count(1)
