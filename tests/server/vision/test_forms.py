"""Pictures as files of a form, as `curl -F` sends them."""

import httpx
import pytest

from tests.patience import PATIENCE_S


def send(url: str, task: str, files: object, data: object = None) -> httpx.Response:
    return httpx.post(f"{url}/v1/vision/{task}", files=files, data=data, timeout=PATIENCE_S)  # type: ignore[arg-type]


def test_a_file_and_a_question(url: str, picture: bytes) -> None:
    answer = send(url, "ask", {"image": ("a.png", picture)}, {"question": "What colour is the circle?"})
    assert answer.json()["text"].lower() == "red"


def test_a_form_is_the_same_request_as_its_json(url: str, picture: bytes, data_url: str) -> None:
    fields = {"detail": "detailed", "max_tokens": "20", "temperature": "0.5", "seed": "3"}
    json_body = {"detail": "detailed", "max_tokens": 20, "temperature": 0.5, "seed": 3, "image": data_url}
    form = send(url, "caption", {"image": ("a.png", picture)}, fields).json()
    assert form == httpx.post(f"{url}/v1/vision/caption", json=json_body, timeout=PATIENCE_S).json()


def test_several_files_are_several_pictures(url: str, picture: bytes) -> None:
    files = [("image", ("a.png", picture)), ("image", ("b.png", picture))]
    one = send(url, "ask", files[:1], {"question": "What is this?"}).json()
    two = send(url, "ask", files, {"question": "What is this?"}).json()
    assert two["usage"]["image_tokens"] == 2 * one["usage"]["image_tokens"]


def test_a_url_may_stand_where_a_file_would(url: str, data_url: str) -> None:
    answer = send(url, "scene", {"image": (None, data_url)})
    assert answer.json()["objects"]


@pytest.mark.parametrize("objects", ["red circle, blue square", ["red circle", "blue square"]])
def test_objects_with_commas_or_as_several_fields(url: str, picture: bytes, objects: object) -> None:
    data = send(url, "detect", {"image": ("cat.png", picture)}, {"objects": objects, "format": "coco"}).json()
    assert [kind["name"] for kind in data["categories"]] == ["red circle", "blue square"]
    assert data["images"][0]["file_name"] == "cat.png"


def test_a_stream(url: str, picture: bytes) -> None:
    answer = send(url, "caption", {"image": ("a.png", picture)}, {"stream": "true"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert '"result"' in answer.text


PNG = object()  # stands for the picture


@pytest.mark.parametrize(
    ("files", "data", "message"),
    [
        ({"detail": (None, "short")}, {}, "image is missing: send it as a file, -F image=@FILE with curl"),
        (
            {"photo": ("a.png", b"x")},
            {},
            "photo is a file; the field of the picture is called image: -F image=@FILE",
        ),
        ({"image": ("a.png", PNG)}, {"x": "y"}, "x is not supported; leave it out"),
        ({"image": ("a.png", PNG)}, {"seed": ["1", "2"]}, "the form has seed twice"),
        (
            {"image": ("a.png", PNG)},
            {"temperature": "warm"},
            "temperature must be a number, not 'warm'",
        ),
        (
            [("image", ("a.png", PNG)), ("image", ("b.png", PNG))],
            {},
            "this task looks at one image, not 2; /v1/vision/ask takes several",
        ),
    ],
)
def test_what_is_wrong_with_a_form_is_said(
    url: str, picture: bytes, files: object, data: object, message: str
) -> None:
    entries = files.items() if isinstance(files, dict) else files
    real = [(name, (file, picture if value is PNG else value)) for name, (file, value) in entries]  # type: ignore[union-attr]
    response = send(url, "caption", real, data)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] == message


def test_a_form_that_breaks_off(url: str) -> None:
    kind = {"content-type": "multipart/form-data; boundary=a"}
    for content in (b"", b"zz", b"--a\r\nnonsense"):
        response = httpx.post(f"{url}/v1/vision/caption", content=content, headers=kind)
        assert response.status_code == 400, content
