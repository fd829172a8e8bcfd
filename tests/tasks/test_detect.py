"""Boxes: Qwen's form and its neighbours, always inside the image and in order."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from snugvl.errors import OutputError, RequestError
from snugvl.tasks import detect
from snugvl.tasks.results import Box, Detection, Detections, Reply
from tests.tasks.fake import BOXES, FakeBackend, images_of, model, prompt_of

SIZE = (200, 100)
NUMBERS = st.floats(allow_nan=False) | st.integers(-(10**12), 10**12) | st.integers(0, 1000)
QUADS = st.lists(NUMBERS, min_size=4, max_size=4)
KEYS = st.sampled_from(["bbox_2d", "bbox", "box_2d", "x1", "label", "objects", "red circle"])
ANSWERS = st.recursive(
    QUADS | st.text(max_size=5) | NUMBERS | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)


def found(text: str, names: tuple[str, ...] = (), size: tuple[int, int] = SIZE) -> Detections:
    return detect.result(Reply(text=text, finish_reason="stop"), size, names, FakeBackend().capabilities)


def box(*corners: float) -> Box:
    return Box(**dict(zip(("x1", "y1", "x2", "y2"), corners, strict=True)))


CUP = [Detection(label="cup", box=box(20, 20, 60, 40))]


@pytest.mark.parametrize(
    "answer",
    [
        '[{"bbox_2d": [100, 200, 300, 400], "label": "cup"}]',
        '```json\n[\n\t{"bbox_2d": [100, 200, 300, 400], "label": "cup"}\n]\n```',
        '{"bbox_2d": [100, 200, 300, 400], "label": "cup"}',
        '{"bbox_2d": [100, 200, 300, 400], "label": "cup"}\n{"bbox_2d": [9, 9, 9, 9], "label": "cup"}',
        "[{'bbox_2d': [100, 200, 300, 400], 'label': 'cup'}]",
        '[{"bbox": [100, 200, 300, 400], "name": "cup"}]',
        '[{"box": ["100", "200", "300", "400"], "label": "cup"}]',
        '[{"bbox_2d": "[100, 200, 300, 400]", "label": "cup"}]',
        '[{"bbox_2d": [[100, 200], [300, 400]], "label": "cup"}]',
        '[{"bbox_2d": [[100, 200, 300, 400]], "label": "cup"}]',
        '[{"bbox_2d": {"x1": 100, "y1": 200, "x2": 300, "y2": 400}, "label": "cup"}]',
        '[{"x1": 100, "y1": 200, "x2": 300, "y2": 400, "label": "cup"}]',
        '[{"box_2d": [200, 100, 400, 300], "label": "cup"}]',
        '[{"bbox_2d": [0.1, 0.2, 0.3, 0.4], "label": "cup"}]',
        '[{"bbox_2d": [300, 400, 100, 200], "label": "cup"}]',
        '{"objects": [{"bbox_2d": [100, 200, 300, 400], "label": "cup"}]}',
        '{"cup": [100, 200, 300, 400]}',
        '{"cup": [[100, 200, 300, 400]]}',
        'The cup is here: {"label": "Cup", "bbox_2d": [100, 200, 300, 400]}.',
    ],
)
def test_every_spelling_of_a_box_is_read(answer: str) -> None:
    result = found(answer, ("cup",))
    assert list(result.objects) == CUP
    assert not result.truncated
    assert (result.width, result.height) == SIZE


def test_a_bare_box_is_what_was_asked_for() -> None:
    assert list(found("[[100, 200, 300, 400]]", ("cup",)).objects) == CUP
    assert found("[100, 200, 300, 400]").objects[0].label == "object"


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "```json\n[]\n```",
        '{"objects": []}',
        "There are no cups in the image.",
        "None.",
        "No cup is visible.",
    ],
)
def test_nothing_found_is_a_result(answer: str) -> None:
    assert found(answer, ("cup",)).objects == ()


@pytest.mark.parametrize(
    "answer", ["A cup on a table.", '{"answer": 5}', "[1, 2, 3]", "I can't do that [1]."]
)
def test_another_answer_is_an_error_with_its_text(answer: str) -> None:
    with pytest.raises(OutputError) as caught:
        found(answer)
    assert caught.value.text == answer


def test_an_answer_cut_before_its_first_box_says_so() -> None:
    for answer in ("[", '```json\n[{"bbox_2d": [100, 200, 3', '[{"bbox_2d": [100, 200, 300, 400], "lab'):
        with pytest.raises(OutputError, match="cut before the first one; allow more tokens"):
            found(answer)


def test_boxes_are_clamped_and_those_outside_dropped() -> None:
    answer = [[-50, -50, 1200, 500], [1000, 0, 1300, 500], [300, 300, 300, 900]]
    result = found(json.dumps([{"bbox_2d": four, "label": "a"} for four in answer]))
    assert [thing.box for thing in result.objects] == [box(0, 0, 200, 50)]


def test_a_loop_is_counted_once_and_a_cut_is_told() -> None:
    one = '{"bbox_2d": [100, 200, 300, 400], "label": "cup"}'
    result = found(f"[{one}, {one}, {one}, {one[:25]}")
    assert list(result.objects) == CUP
    assert result.truncated
    cut = Reply(text=f"[{one}]", finish_reason="length")
    assert detect.result(cut, SIZE, (), FakeBackend().capabilities).truncated


@given(ANSWERS.map(json.dumps) | st.text(), st.tuples(st.integers(1, 5000), st.integers(1, 5000)))
def test_boxes_are_always_inside_and_ordered(answer: str, size: tuple[int, int]) -> None:
    try:
        result = found(answer, size=size)
    except OutputError:
        return
    for thing in result.objects:
        assert 0 <= thing.box.x1 < thing.box.x2 <= size[0]
        assert 0 <= thing.box.y1 < thing.box.y2 <= size[1]
        assert thing.label
        assert thing.box.area > 0
    Detections.model_validate_json(result.model_dump_json())


@pytest.mark.parametrize("names", [[""], [" "], ["a,b"], ['a"b'], ["a\nb"], " , ", 42])
def test_names_that_the_prompt_cannot_carry_are_refused(names: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        model().detect(Image.new("RGB", (64, 64)), names)
    assert caught.value.field == "objects"


def test_one_string_holds_several_names_as_on_the_command_line() -> None:
    assert detect.check_names("red circle, blue square,") == ("red circle", "blue square")
    assert detect.check_names("red circle") == ("red circle",)
    assert detect.check_names(name for name in ("a cup", "a plate")) == ("a cup", "a plate")


def test_the_prompt_lists_each_name_once_and_the_image_is_the_original() -> None:
    fake = model(BOXES)
    picture = Image.new("RGB", (640, 320))
    result = fake.detect(picture, ["Red  Circle", "cup", "cup"])
    request = fake.backend.requests[0]
    assert '"Red Circle, cup"' in prompt_of(request)
    assert images_of(request)[0].size == (640, 320)
    assert [(thing.label, thing.box) for thing in result.objects] == [
        ("Red Circle", box(64, 64, 192, 128)),
        ("cup", box(320, 160, 576, 320)),
    ]


@pytest.mark.parametrize(
    "corners", [(1, 0, 1, 5), (5, 0, 1, 5), (0, 0, float("nan"), 1), (0, 0, float("inf"), 1)]
)
def test_a_box_without_area_cannot_be_made(corners: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        box(*corners)
