"""No two requests are alike, and the same seed gives the same ones."""

import base64
import json
from dataclasses import replace
from io import BytesIO
from typing import Any

from PIL import Image

from snugvl.bench.workload import Manner, Workload, bodies, picture, text

WORK = Workload(image=(96, 64), prompt_tokens=None, max_tokens=16, same_image=False, seed=5)
MANNER = Manner("m")


def asked(workload: Workload, manner: Manner = MANNER, count: int = 4, seed: int = 5) -> list[dict[str, Any]]:
    return [json.loads(body) for body in bodies(workload, manner, seed, count)]


def url_of(body: dict[str, Any]) -> str:
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    assert isinstance(url, str)
    return url


def test_a_body() -> None:
    body = asked(WORK)[0]
    assert {name: body[name] for name in ("model", "stream", "temperature", "max_tokens")} == {
        "model": "m",
        "stream": True,
        "temperature": 0,
        "max_tokens": 16,
    }
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    head, _, data = url_of(body).partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(BytesIO(base64.b64decode(data))) as image:
        assert (image.format, image.size) == ("JPEG", (96, 64))


def test_every_picture_and_every_text_differs() -> None:
    found = asked(WORK, count=8)
    assert len({url_of(body) for body in found}) == 8
    texts = {body["messages"][0]["content"][1]["text"] for body in found}
    assert len({text.split()[0] + text.split()[1] for text in texts}) > 1
    assert len(texts) == 8


def test_the_same_seed_asks_the_same() -> None:
    assert asked(WORK) == asked(WORK)
    assert asked(WORK) != asked(WORK, seed=6)


def test_one_picture_for_all_on_request() -> None:
    found = asked(replace(WORK, same_image=True))
    assert len({url_of(body) for body in found}) == 1
    assert len({body["messages"][0]["content"][1]["text"] for body in found}) == 4


def test_without_pictures() -> None:
    body = asked(replace(WORK, image=None))[0]
    assert "story" in body["messages"][0]["content"]


def test_fields_that_a_server_does_not_take_are_left_out() -> None:
    body = asked(WORK, Manner("m", ignore_eos=False, usage=False))[0]
    assert "ignore_eos" not in body
    assert "stream_options" not in body


def test_the_text_is_as_long_as_wished() -> None:
    long = replace(WORK, prompt_tokens=300)
    assert len(text(long, 1, 1.0).split()) == 300
    assert len(text(long, 1, 1.5).split()) == 200
    assert len(text(replace(WORK, prompt_tokens=1), 1, 1.0).split()) == 6  # the question and a word


def test_a_picture_is_no_plain_surface() -> None:
    assert len(picture(1024, 1024, 1)) > 50_000
    for size in ((1, 1), (1, 500), (3, 2)):
        with Image.open(BytesIO(picture(*size, 1))) as image:
            assert image.size == size
