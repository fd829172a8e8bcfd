"""What the four tasks answer, with pocket behind them."""

import base64
import io
import json
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.patience import PATIENCE_S
from tests.server.media.films import film


def post(url: str, task: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/vision/{task}", json=body, timeout=PATIENCE_S)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_caption_names_the_model_and_its_tokens(url: str, data_url: str) -> None:
    answer = post(url, "caption", {"image": data_url}).json()
    assert "red circle" in answer["text"]
    assert "blue square" in answer["text"]
    assert answer["model"] == "pocket"
    assert answer["truncated"] is False
    assert answer["usage"]["image_tokens"] > 0


def test_detail_changes_the_prompt(url: str, data_url: str) -> None:
    short = post(url, "caption", {"image": data_url}).json()
    detailed = post(url, "caption", {"image": data_url, "detail": "detailed"}).json()
    assert len(detailed["text"]) > len(short["text"])


@pytest.mark.parametrize(
    ("task", "more"), [("caption", {}), ("ask", {"question": "What colour is the circle?"})]
)
def test_a_stream_is_the_same_answer_in_pieces(
    url: str, data_url: str, task: str, more: dict[str, Any]
) -> None:
    whole = post(url, task, {"image": data_url, **more}).json()
    response = post(url, task, {"image": data_url, "stream": True, **more})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(response)
    assert "".join(piece["delta"] for piece in pieces).strip() == whole["text"]
    assert last == {"result": whole}


def test_a_question_about_one_picture(url: str, data_url: str) -> None:
    answer = post(url, "ask", {"image": data_url, "question": "What colour is the circle?"}).json()
    assert answer["text"].lower() == "red"


def test_a_question_about_several_pictures_shows_them_all(url: str, data_url: str) -> None:
    one = post(url, "ask", {"images": [data_url], "question": "What colour is the circle?"}).json()
    two = post(url, "ask", {"images": [data_url] * 2, "question": "What colour is the circle?"}).json()
    assert two["usage"]["image_tokens"] == 2 * one["usage"]["image_tokens"]


def test_a_scene_is_typed(url: str, data_url: str) -> None:
    scene = post(url, "scene", {"image": data_url}).json()
    found = {thing["name"]: thing["count"] for thing in scene["objects"]}
    assert found == {"red circle": 1, "blue square": 1}
    assert scene["summary"]


def test_boxes_are_pixels_of_the_picture_as_it_was_sent(url: str, data_url: str) -> None:
    found = post(url, "detect", {"image": data_url, "objects": ["blue square"]}).json()
    assert (found["width"], found["height"]) == (128, 96)
    (thing,) = found["objects"]
    assert thing["label"] == "blue square"
    box = [thing["box"][key] for key in ("x1", "y1", "x2", "y2")]
    assert box == pytest.approx([80, 52, 118, 90], abs=4)


def test_boxes_are_those_of_the_upright_picture(url: str, picture: bytes) -> None:
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90° to the right
    Image.open(io.BytesIO(picture)).rotate(90, expand=True).save(turned, "JPEG", exif=exif, quality=95)
    data = "data:image/jpeg;base64," + base64.b64encode(turned.getvalue()).decode()
    found = post(url, "detect", {"image": data, "objects": ["blue square"]}).json()
    assert (found["width"], found["height"]) == (128, 96)
    assert found["objects"][0]["box"]["x1"] == pytest.approx(80, abs=4)


def test_a_smaller_max_pixels_gives_fewer_tokens_and_boxes_in_the_same_pixels(
    url: str, data_url: str
) -> None:
    full = post(url, "detect", {"image": data_url}).json()
    small = post(url, "detect", {"image": data_url, "max_pixels": 64 * 64}).json()
    assert small["usage"]["image_tokens"] < full["usage"]["image_tokens"]
    assert (small["width"], small["height"]) == (128, 96)


def test_coco_is_a_data_set_of_one_picture(url: str, data_url: str) -> None:
    data = post(url, "detect", {"image": data_url, "objects": ["blue square"], "format": "coco"}).json()
    assert data["images"] == [{"id": 1, "file_name": "image", "width": 128, "height": 96}]
    assert [kind["name"] for kind in data["categories"]] == ["blue square"]
    assert len(data["annotations"]) == 1


def test_png_is_the_picture_with_boxes_on_it(url: str, data_url: str) -> None:
    response = post(url, "detect", {"image": data_url, "format": "png"})
    assert response.headers["content-type"] == "image/png"
    drawn = Image.open(io.BytesIO(response.content)).convert("RGB")
    factor = drawn.width / 128
    assert factor == drawn.height / 96
    # In the middle of the square's upper edge is a line of another colour now.
    column = [drawn.getpixel((round(99 * factor), round(y * factor))) for y in (49, 50, 51, 52, 53, 54)]
    assert set(column) - {(255, 255, 255), (0, 0, 255)}


def test_max_tokens_cuts_and_says_so(url: str, data_url: str) -> None:
    answer = post(url, "caption", {"image": data_url, "max_tokens": 3.0}).json()
    assert answer["truncated"] is True
    assert answer["usage"]["completion_tokens"] == 3


def test_the_same_seed_gives_the_same_answer(url: str, data_url: str) -> None:
    body = {"image": data_url, "temperature": 1.5, "seed": 7}
    assert post(url, "caption", body).json() == post(url, "caption", body).json()


def test_a_video_in_the_place_of_a_picture(url: str) -> None:
    clip = film()
    video = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    shown = post(url, "caption", {"image": video}).json()
    assert shown["usage"]["image_tokens"] > 0
    asked = {"question": "What happens?", "max_tokens": 4}
    told = post(url, "ask", {"images": [video], **asked}).json()
    form = httpx.post(
        f"{url}/v1/vision/ask", files={"image": ("clip.mp4", clip)}, data=asked, timeout=PATIENCE_S
    )
    assert form.json() == told
    refused = post(url, "detect", {"image": video})
    assert refused.status_code == 400
    assert "it looks like a video (MP4 or QuickTime)" in refused.json()["error"]["message"]
