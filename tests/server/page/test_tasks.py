"""Caption and scene."""

import json
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from snugvl.errors import RequestError
from tests.patience import PATIENCE_S, until
from tests.photographs import photograph
from tests.server.fake import FakeService, Script
from tests.server.page.conftest import (
    OpenPage,
    PageOf,
    PageOfPocket,
    Serve,
    choose,
    detect,
    provoked,
    tab,
    take_sample,
)

SCENE = {
    "summary": "Two cups on a table.",
    "setting": "a kitchen",
    "objects": [{"name": "cup", "count": 2, "positions": ["left", "right"]}, {"name": "table", "count": 1}],
    "text": ["TEA"],
    "relations": ["the cups are on the table"],
}


@pytest.mark.extended
def test_pocket_captions_short_and_detailed(url: str, page_of_pocket: PageOfPocket, shapes: Path) -> None:
    page = page_of_pocket()
    choose(page, shapes)
    tab(page, "Caption")
    said = []
    for detail, label in (("short", "One sentence"), ("detailed", "Detailed")):
        answer = httpx.post(
            f"{url}/v1/vision/caption",
            files={"image": shapes.read_bytes()},
            data={"detail": detail},
            timeout=PATIENCE_S,
        )
        page.get_by_label(label).check()
        page.get_by_role("button", name="Caption the picture").click()
        expect(page.locator("#caption-result")).to_have_text(answer.json()["text"])
        said.append(answer.json()["text"])
    assert said[0] != said[1]


def test_the_page_shows_that_pocket_knows_no_photographs(
    page_of_pocket: PageOfPocket, tmp_path: Path
) -> None:
    file = tmp_path / "tree.png"
    photograph(96, 64).save(file)
    page = page_of_pocket()
    choose(page, file)
    tab(page, "Caption")
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-form .job-status")).to_contain_text("looks like a photograph")
    tab(page, "Ask")
    page.get_by_label("Question").fill("What is it?")
    page.get_by_label("Question").press("Enter")
    expect(page.locator(".turn-note").last).to_contain_text("looks like a photograph")


def test_a_caption_grows_and_can_be_stopped(page_of: PageOf, shapes: Path) -> None:
    service = FakeService(Script(tuple(f"word{index} " for index in range(100_000)), wait_s=0.02))
    page = page_of(service)
    choose(page, shapes)
    tab(page, "Caption")
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-result")).to_contain_text("word3")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#caption-form .job-status")).to_have_text("Stopped.")
    until(lambda: not service.running)
    expect(page.locator("#running")).to_have_text("0")


def test_a_scene_with_all_its_parts(page_of: PageOf, shapes: Path) -> None:
    page = page_of(FakeService(Script((json.dumps(SCENE),))))
    choose(page, shapes)
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    result = page.locator("#scene-result")
    expect(result.locator("p").first).to_have_text("Two cups on a table.")
    headings = ["Setting", "Objects", "Written in the picture", "Relations"]
    expect(result.locator("h3")).to_have_text(headings)
    lines = ["a kitchen", "2 × cup left, right", "1 × table", "TEA", "the cups are on the table"]
    expect(result.locator("li")).to_have_text(lines)


def test_pocket_analyses_a_sample(page_of_pocket: PageOfPocket) -> None:
    page = page_of_pocket()
    take_sample(page, "Garden")
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    expect(page.locator("#scene-result")).to_contain_text("1 × cat")


@pytest.mark.parametrize("task", ["scene", "detect"])
@pytest.mark.sample("scene")
def test_a_result_that_breaks_off_is_said_in_words(
    serve: Serve, open_page: OpenPage, shapes: Path, task: str
) -> None:
    page = open_page(serve(FakeService()))
    choose(page, shapes)
    tab(page, task.capitalize())
    page.evaluate(
        """(task) => {
            const real = window.fetch;
            const fail = (to) => to.error(new TypeError("network error"));
            const broken = () => new ReadableStream({ pull: fail });
            window.fetch = (path, ...options) =>
                `${path}`.endsWith(task) ? Promise.resolve(new Response(broken())) : real(path, ...options);
        }""",
        task,
    )
    page.locator(f"#{task}-form button[type=submit]").click()
    expect(page.locator(f"#{task}-form .error")).to_have_text("The server's answer broke off.")


def test_an_answer_that_is_no_scene_is_said_to_be_none(
    page_of: PageOf, shapes: Path, problems: list[str]
) -> None:
    page = page_of(FakeService(Script(("I would rather not.",))))
    choose(page, shapes)
    tab(page, "Scene")
    page.get_by_role("button", name="Analyse").click()
    expect(page.locator("#scene-form .error")).to_contain_text("I would rather not.")
    expect(page.locator("#scene-result")).to_be_hidden()
    provoked(problems, "502")


def test_results_of_one_picture_do_not_stay_for_the_next(page_of: PageOf, shapes: Path) -> None:
    page = page_of(FakeService(Script(("A caption.",))))
    choose(page, shapes)
    tab(page, "Caption")
    page.get_by_role("button", name="Caption the picture").click()
    expect(page.locator("#caption-result")).to_have_text("A caption.")
    other = shapes.with_name("other.png")
    other.write_bytes(shapes.read_bytes())
    choose(page, other)
    expect(page.locator("#caption-result")).to_be_hidden()


@pytest.mark.parametrize(
    ("name", "button", "answer", "shown"),
    [
        ("Caption", "Caption 3 pictures", "A caption.", "A caption."),
        ("Scene", "Analyse", json.dumps(SCENE), "Two cups on a table."),
        ("Detect", "Find objects", json.dumps([{"bbox_2d": [1, 1, 500, 500], "label": "cup"}]), "cup"),
    ],
)
@pytest.mark.sample('Detect-Find objects-[{"bbox_2d": [1, 1, 500, 500], "label": "cup"}]-cup')
def test_every_picture_has_its_result(
    page_of: PageOf,
    shapes: Path,
    problems: list[str],
    name: str,
    button: str,
    answer: str,
    shown: str,
) -> None:
    service = FakeService()
    service.script = lambda request: (
        Script(refusal=RequestError("too dark", field="image"))
        if len(service.requests) == 1
        else Script((answer,))
    )
    page = page_of(service)
    paths = [shapes, shapes.with_name("second.png"), shapes.with_name("third.png")]
    for path in paths:
        path.write_bytes(shapes.read_bytes())
    page.set_input_files("#file", paths)
    expect(page.locator("#tray li")).to_have_count(3)
    tab(page, name)
    expect(page.get_by_label("All 3")).to_be_checked()
    page.get_by_role("button", name=button).click()
    status = page.locator(f"#{name.lower()}-form .job-status")
    expect(status).to_contain_text("3 pictures. 14 tokens read")
    place = page.locator("#detect-blocks" if name == "Detect" else f"#{name.lower()}-result")
    expect(place.locator("section > h3")).to_have_text(["1: shapes.png", "2: second.png", "3: third.png"])
    expect(place.locator(".task-result").nth(0)).to_contain_text(shown)
    expect(place.locator(".task-result").nth(1)).to_contain_text("too dark")  # and the next one all the same
    expect(place.locator(".task-result").nth(2)).to_contain_text(shown)
    assert len(service.requests) == 3
    provoked(problems, "400")


def test_boxes_of_several_pictures(page_of: PageOf, shapes: Path) -> None:
    words = json.dumps([{"bbox_2d": [100, 100, 500, 500], "label": "cup"}])
    page = page_of(FakeService(Script((words,))))
    other = shapes.with_name("other.png")
    other.write_bytes(shapes.read_bytes())
    page.set_input_files("#file", [shapes, other])
    expect(page.locator("#tray li")).to_have_count(2)
    detect(page)
    expect(page.locator("#detect-summary")).to_have_text("2 objects found in 2 pictures.")
    expect(page.locator("#detect-blocks .boxed .box")).to_have_count(2)
    expect(page.locator("#overlay .box")).to_have_count(1)  # on the stage those of its picture
    page.locator(".detection").first.focus()
    expect(page.locator("#detect-blocks .box").first).to_contain_class("lit")
    expect(page.locator("#overlay .box")).not_to_contain_class("lit")
    page.get_by_role("button", name="Show picture 1").click()
    page.locator(".detection").first.focus()
    expect(page.locator("#overlay .box")).to_contain_class("lit")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as COCO JSON").click()
    data = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert [image["file_name"] for image in data["images"]] == ["shapes.png", "other.png"]
    assert [(each["id"], each["image_id"]) for each in data["annotations"]] == [(1, 1), (2, 2)]
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as PNG").nth(1).click()
    assert download.value.suggested_filename == "other-boxes.png"
