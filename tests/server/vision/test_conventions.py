"""Boxes over HTTP are those of the model's family; what it can't do is refused before fetching a picture."""

from dataclasses import replace

import httpx
import pytest

from snugvl.core.messages import Picture
from tests.patience import PATIENCE_S
from tests.server.fake import CAPABILITIES, FakeService, Script
from tests.server.live import live


def test_boxes_come_in_pixels_of_the_picture_that_was_sent(data_url: str) -> None:
    """128×96, which Qwen2.5-VL reads as 140×112 here."""
    qwen = replace(CAPABILITIES, architecture="Qwen2_5_VLForConditionalGeneration", min_pixels=12_544)
    words = ['[{"bbox_2d": [0, 0, 70, 56], "label": "circle"}]']
    with live(FakeService(Script(words), capabilities=qwen)) as base:
        answer = httpx.post(f"{base}/v1/vision/detect", json={"image": data_url}, timeout=PATIENCE_S).json()
    (found,) = answer["objects"]
    assert found["box"] == {"x1": 0, "y1": 0, "x2": 64, "y2": 48}


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("Gemma3ForConditionalGeneration", "detect"),
        ("SmolVLMForConditionalGeneration", "detect"),
        ("PaliGemmaForConditionalGeneration", "scene"),
    ],
)
def test_what_a_family_cannot_do_is_refused_before_its_picture_is_fetched(
    architecture: str, task: str
) -> None:
    service = FakeService(capabilities=replace(CAPABILITIES, architecture=architecture))
    nowhere = {"image": "http://192.0.2.1/never.png"}  # would take seconds, and fail with another error
    with live(service) as base:
        response = httpx.post(f"{base}/v1/vision/{task}", json=nowhere, timeout=PATIENCE_S)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "model"
    assert "fake is a" in error["message"]
    assert not service.requests


def test_every_way_of_asking_about_a_file_is_about_the_same_picture(data_url: str) -> None:
    """What was encoded for one question is there for the next one, however it is put."""
    service = FakeService(Script(["{}"]))
    part = {"type": "image_url", "image_url": {"url": data_url}}
    chat = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]}
    bodies = {"ask": {"question": "What is it?"}, "detect": {"objects": ["cat"]}, "scene": {}, "caption": {}}
    with live(service) as base:
        httpx.post(f"{base}/v1/chat/completions", json=chat, timeout=PATIENCE_S)
        for task, fields in bodies.items():
            httpx.post(f"{base}/v1/vision/{task}", json={"image": data_url, **fields}, timeout=PATIENCE_S)
    shown = [part for r in service.requests for part in r.messages[-1].content if isinstance(part, Picture)]
    assert len(shown) == 5
    assert {picture.file for picture in shown} == {shown[0].file}
    assert shown[0].file is not None
