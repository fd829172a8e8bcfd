"""Boxes in answers of the conversation: read from the model's JSON and drawn on the right picture."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from snugvl.core.messages import Capabilities
from snugvl.tasks.conventions import convention_of, grounding_of
from tests.server.fake import CAPABILITIES, FakeService, Script
from tests.server.page.conftest import PageOf, answers, ask, reload
from tests.server.page.test_pictures import transfer

# Runs grounding.js on an answer about three pictures of 200×100 pixels.
READ = """async ([answer, question, grounding]) => {
    const { boxesIn } = await import("/page/grounding.js");
    const still = { kind: "picture", width: 200, height: 100 };
    const pictures = ["a", "b", "c"].map((id) => ({ id, name: `${id}.png`, ...still }));
    return boxesIn(answer, question, pictures, pictures[0], grounding);
}"""
BOX = '{"bbox_2d": [100, 200, 300, 400], "label": "cat"}'
CAT = {"picture": "a", "label": "cat", "box": [0.1, 0.2, 0.3, 0.4]}


def served(architecture: str) -> Capabilities:
    return replace(CAPABILITIES, architecture=architecture, max_pixels=1 << 20)


QWEN3 = served("Qwen3VLForConditionalGeneration")
QWEN2_5 = served("Qwen2_5_VLForConditionalGeneration")
PALIGEMMA = served("PaliGemmaForConditionalGeneration")
GEMMA3 = served("Gemma3ForConditionalGeneration")
CASES: dict[str, tuple[str, str, Capabilities, list[dict[str, Any]]]] = {
    "fenced": (f"Here:\n```json\n[{BOX}]\n```", "", QWEN3, [CAT]),
    "bare": (BOX, "", QWEN3, [CAT]),
    "cut": (f'[{BOX}, {{"bbox_2d": [1, 2', "", QWEN3, [CAT]),
    "y first": ('{"box_2d": [200, 100, 400, 300], "label": "cat"}', "", QWEN3, [CAT]),
    "no box": ('{"a": 1} [1, 2, 3, 4] {"bbox_2d": [1, 2, 3]} {"bbox_2d": "x"}', "", QWEN3, []),
    "turned over": ('{"bbox_2d": [300, 400, 100, 200], "label": "cat"}', "", QWEN3, []),
    "no label": ('{"bbox_2d": [100, 200, 300, 400]}', "", QWEN3, [CAT | {"label": ""}]),
    "question": (BOX, "What is in the second picture?", QWEN3, [CAT | {"picture": "b"}]),
    "heading": (f"Picture 1: {BOX}\nPicture 3: {BOX}", "", QWEN3, [CAT, CAT | {"picture": "c"}]),
    "key": (BOX.replace('"label"', '"image": 3, "label"'), "picture 2?", QWEN3, [CAT | {"picture": "c"}]),
    "name": (BOX.replace('"label"', '"image": "b.png", "label"'), "", QWEN3, [CAT | {"picture": "b"}]),
    "nowhere": (f"Picture 9: {BOX}", "", QWEN3, [CAT]),
    "1024ths": (
        '{"bbox_2d": [256, 512, 512, 1024], "label": "cat"}', "", PALIGEMMA,
        [CAT | {"box": [0.25, 0.5, 0.5, 1]}],
    ),
    "a family without boxes": (BOX, "", GEMMA3, []),
    "pixels": (
        '{"bbox_2d": [20, 20, 60, 40], "label": "cat"}', "", QWEN2_5,
        [CAT | {"box": [20 / 196, 20 / 112, 60 / 196, 40 / 112]}],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reader(browser: Any, url: str) -> Any:
    """One page for all answers that are only read."""
    page = browser.new_page()
    page.goto(f"{url}/")
    yield page
    page.close()


def read(reader: Page, answer: str, question: str, capabilities: Capabilities) -> list[dict[str, Any]]:
    """Boxes that the page reads, told of the model as the server tells it."""
    said = grounding_of(capabilities)
    found: list[dict[str, Any]] = reader.evaluate(READ, [answer, question, said and asdict(said)])
    return found


@pytest.mark.parametrize("case", CASES)
def test_boxes_are_read(reader: Page, case: str) -> None:
    answer, question, capabilities, expected = CASES[case]
    found = read(reader, answer, question, capabilities)
    assert [each | {"box": pytest.approx(each["box"])} for each in expected] == found


def test_hostile_answers_are_read_in_bounds(reader: Page) -> None:
    texts = ["{" * 100_000, '{"bbox_2d"' * 10_000, "picture 1 " * 10_000 + BOX, f"{BOX} " * 2_000]
    counts = [len(read(reader, text, text, QWEN3)) for text in texts]
    assert counts == [0, 0, 1, 200]


# Of 200×100 pixels: as it is, made smaller, made larger.
@pytest.mark.parametrize(("least", "most"), [(3_136, 1 << 20), (3_136, 10_000), (40_000, 1 << 20)])
def test_the_page_counts_pixels_as_the_server_does(reader: Page, least: int, most: int) -> None:
    capabilities = replace(QWEN2_5, min_pixels=least, max_pixels=most)
    width, height = convention_of(capabilities).grid((200, 100), capabilities, None)
    answer = json.dumps({"bbox_2d": [width / 4, height / 2, width / 2, height], "label": "cat"})
    (box,) = read(reader, answer, "", capabilities)
    assert box["box"] == pytest.approx([0.25, 0.5, 0.5, 1])


def test_boxes_are_drawn_on_the_picture_that_is_meant(page_of: PageOf) -> None:
    words = (
        "Picture 2 has it:\n```json\n"
        + json.dumps([{"bbox_2d": [250, 500, 750, 1000], "label": "<b>cat</b>"}])
        + "\n```"
    )
    service = FakeService(Script((words,)), capabilities=QWEN3)
    page = page_of(service)
    page.dispatch_event("body", "drop", {"dataTransfer": transfer(page, "red", "lime", "blue")})
    expect(page.locator("#tray li")).to_have_count(3)
    ask(page, "Where is the cat?")
    expect(answers(page)).to_have_count(1)
    figure = page.locator(".boxed")
    expect(figure).to_have_count(1)
    expect(figure.locator("img")).to_have_attribute("alt", "lime.png")
    expect(figure.locator(".box-label")).to_have_text("<b>cat</b>")
    image, box = figure.locator("img").bounding_box(), figure.locator(".box").bounding_box()
    assert image is not None
    assert box is not None
    assert (box["x"] - image["x"]) / image["width"] == pytest.approx(0.25, abs=0.01)
    assert (box["y"] - image["y"]) / image["height"] == pytest.approx(0.5, abs=0.01)
    assert box["width"] / image["width"] == pytest.approx(0.5, abs=0.01)
    page.get_by_label("Picture of these boxes").select_option(label="3: blue.png")
    expect(figure.locator("img")).to_have_attribute("alt", "blue.png")
    expect(page.get_by_label("Picture of these boxes")).to_be_focused()
    reload(page)
    expect(figure.locator("img")).to_have_attribute("alt", "blue.png")  # put right, and kept so

    page.get_by_role("button", name="New conversation").click()
    ask(page, "Where is the cat?")
    expect(page.locator(".boxed figcaption")).to_have_text("1 box on blue.png")  # nothing to choose from
