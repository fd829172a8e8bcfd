"""Every family is asked in its own words, and its boxes come back in pixels of the picture that was sent."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from snugvl.checkpoint.families.traits import Resized
from snugvl.checkpoint.image_rules import smart_resize
from snugvl.core.messages import Capabilities, Text
from snugvl.core.sampling import SamplingParams
from snugvl.errors import OutputError, RequestError
from snugvl.model import Model
from snugvl.tasks import detect, grammar, scene
from snugvl.tasks.conventions import CONVENTIONS, UNKNOWN, convention_of, grounding, grounding_of, tasks_of
from snugvl.tasks.results import Detections, Reply
from tests.tasks.fake import FakeBackend, prompt_of

QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
INTERNVL = "InternVLForConditionalGeneration"
GEMMA4 = "Gemma4ForConditionalGeneration"
PALIGEMMA = "PaliGemmaForConditionalGeneration"
PICTURE = Image.new("RGB", (64, 48))

Corners = tuple[float, float, float, float]


def model_of(architecture: str, **changes: int) -> Capabilities:
    return replace(FakeBackend().capabilities, architecture=architecture, **changes)


@pytest.mark.parametrize(
    ("architecture", "images", "tasks"),
    [
        ("Qwen3VLForConditionalGeneration", True, ("ask", "caption", "scene", "detect")),
        ("Gemma3ForConditionalGeneration", True, ("ask", "caption", "scene")),
        (PALIGEMMA, True, ("ask", "caption", "detect")),
        ("Qwen3ForCausalLM", False, ()),
    ],
)
def test_the_tasks_of_a_family(architecture: str, images: bool, tasks: tuple[str, ...]) -> None:
    assert tasks_of(model_of(architecture, images=images)) == tasks


def found(
    text: str, architecture: str, size: tuple[int, int] = (200, 100), names: tuple[str, ...] = ()
) -> Detections:
    return detect.result(Reply(text=text, finish_reason="stop"), size, names, model_of(architecture))


def on(box: Corners, size: tuple[int, int], grid: tuple[int, int]) -> list[int]:
    """A box in pixels of a picture, as a model counts it that counts to `grid`."""
    scale = [grid[0] / size[0], grid[1] / size[1]] * 2
    return [round(value * factor) for value, factor in zip(box, scale, strict=True)]


def json_boxes(key: str, four: list[int]) -> str:
    return "```json\n" + json.dumps([{key: four, "label": "cup"}]) + "\n```"


def locations(four: list[int]) -> str:
    return "".join(f"<loc{min(value, 1023):04}>" for value in four) + " cup"


def y_first(four: list[int]) -> list[int]:
    x1, y1, x2, y2 = four
    return [y1, x1, y2, x2]


# What a model of each family writes for a box, and what it counts to (None: pixels of the picture it reads).
WRITERS: dict[str, tuple[Callable[[list[int]], str], tuple[int, int] | None]] = {
    "": (lambda four: json_boxes("bbox_2d", four), (1000, 1000)),
    "SomethingNewForConditionalGeneration": (lambda four: json_boxes("box_2d", y_first(four)), (1000, 1000)),
    "Qwen3VLForConditionalGeneration": (lambda four: json_boxes("bbox_2d", four), (1000, 1000)),
    "Qwen3_5ForConditionalGeneration": (lambda four: json_boxes("bbox_2d", four), (1000, 1000)),
    QWEN2_5: (lambda four: json_boxes("bbox_2d", four), None),
    INTERNVL: (lambda four: f"<ref>cup</ref><box>[{four}]</box>", (1000, 1000)),
    GEMMA4: (lambda four: json_boxes("box_2d", y_first(four)), (1000, 1000)),
    PALIGEMMA: (lambda four: locations(y_first(four)), (1024, 1024)),
}
LIMITS = st.none() | st.integers(28 * 28 * 4, 1 << 22)


def sides(longest: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(28, longest), st.integers(28, longest))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, int], Corners]:
    """A picture's size and a box in it that no grid of thousandths is too coarse for."""
    width, height = draw(sides(5000))
    spans = []
    for side in (width, height):
        low = draw(st.floats(0, 0.5)) * side
        spans.append((low, low + draw(st.floats(0.2, 0.5)) * side))
    (x1, x2), (y1, y2) = spans
    return (width, height), (x1, y1, x2, y2)


def overlap(truth: Corners, result: Detections) -> float:
    """Intersection over union with the one box found."""
    (item,) = result.objects
    box = item.box
    width = min(box.x2, truth[2]) - max(box.x1, truth[0])
    height = min(box.y2, truth[3]) - max(box.y1, truth[1])
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (box.area + (truth[2] - truth[0]) * (truth[3] - truth[1]) - shared)


@pytest.mark.parametrize("architecture", WRITERS)
@given(boxes(), LIMITS, st.integers(28 * 28 * 4, 1 << 24))
@example(((4000, 3000), (400.0, 300.0, 2000.0, 1500.0)), 1 << 20, 1 << 24)
def test_a_box_comes_back_in_pixels_of_the_picture(
    architecture: str, drawn: tuple[tuple[int, int], Corners], limit: int | None, own_limit: int
) -> None:
    (width, height), truth = drawn
    capabilities = model_of(architecture, min_pixels=28 * 28 * 4, max_pixels=own_limit)
    write, grid = WRITERS[architecture]
    if grid is None:
        most = min(own_limit, limit or own_limit)
        least = min(capabilities.min_pixels, most)
        rows, columns = smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
        grid = (columns, rows)
    reply = Reply(text=write(on(truth, (width, height), grid)), finish_reason="stop")
    result = detect.result(reply, (width, height), ["cup"], capabilities, max_pixels=limit)
    (item,) = result.objects
    assert item.label == "cup"
    # Half a step of the grid on every side; PaliGemma has no token for the last step.
    for got, want, step in zip(
        (item.box.x1, item.box.y1, item.box.x2, item.box.y2),
        truth,
        (width / grid[0], height / grid[1]) * 2,
        strict=True,
    ):
        assert abs(got - want) <= step * (1.01 if architecture == PALIGEMMA else 0.51) + 0.01
    if min(grid) >= 1000:
        assert overlap(truth, result) >= 0.98


def test_qwen2_5_counts_pixels_of_what_it_sees_whatever_the_limits() -> None:
    capabilities = model_of(QWEN2_5, min_pixels=3136, max_pixels=12_845_056)
    reply = Reply(text='[{"bbox_2d": [0, 0, 504, 378], "label": "cup"}]', finish_reason="stop")
    whole = detect.result(reply, (4032, 3024), [], capabilities)
    small = detect.result(reply, (4032, 3024), [], capabilities, max_pixels=1_016_064)
    assert (whole.objects[0].box.x2, whole.objects[0].box.y2) == (504, 378)  # read at 4032×3024
    assert (small.objects[0].box.x2, small.objects[0].box.y2) == pytest.approx((1764, 1323), abs=20)
    unknown = replace(capabilities, min_pixels=0, max_pixels=0)  # a vLLM that was attached to doesn't tell
    assert detect.result(reply, (4032, 3024), [], unknown) == whole


@pytest.mark.parametrize(
    ("architecture", "names", "prompt"),
    [
        (QWEN2_5, ["cup", "dog"], "categories: cup, dog. Output their bbox_2d"),
        (QWEN2_5, [], "every object. Output their bbox_2d"),
        (
            INTERNVL,
            ["cup"],
            "provide the bounding box coordinate of the region this sentence describes: <ref>cup</ref>",
        ),
        (INTERNVL, ["cup", "dog"], "positions: <ref>cup</ref>, <ref>dog</ref>"),
        (
            INTERNVL,
            [],
            "Please detect and label all objects in the following image and mark their positions.",
        ),
        (GEMMA4, ["cup"], "detect cup, output only ```json"),
        (GEMMA4, ["cup", "dog", "tree"], "detect cup, dog and tree, output only ```json"),
        (GEMMA4, [], "detect all objects, output only ```json"),
        (PALIGEMMA, ["cup", "dog"], "detect cup ; dog"),
        ("", ["cup"], 'categories: "cup". Report bbox coordinates in JSON format.'),
        ("", [], "Locate every object in the image. Report bbox coordinates in JSON format."),
    ],
)
def test_each_family_is_asked_in_its_own_words(architecture: str, names: list[str], prompt: str) -> None:
    request = detect.request(PICTURE, names, model_of(architecture))
    assert prompt in prompt_of(request)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("", grammar.BOXES),
        (QWEN2_5, grammar.PIXEL_BOXES),
        (GEMMA4, grammar.Y_FIRST_BOXES),
        (INTERNVL, None),
        (PALIGEMMA, None),
    ],
)
def test_the_grammar_is_the_familys(architecture: str, expected: grammar.Grammar | None) -> None:
    assert detect.request(PICTURE, ["cup"], model_of(architecture)).grammar == expected


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForConditionalGeneration", "SmolVLMForConditionalGeneration"]
)
def test_a_family_without_boxes_says_so_before_any_work(architecture: str) -> None:
    backend = FakeBackend()
    backend.described = model_of(architecture)
    family = convention_of(backend.described).family
    with pytest.raises(RequestError, match=f"is a {family} model, which does not give boxes") as caught:
        Model(backend).detect("no-such-file.png", ["cup"])  # the file isn't even looked for
    assert caught.value.field == "model"
    assert str(caught.value).endswith(", ".join(grounding()))
    assert family not in grounding()
    assert not backend.requests


def test_paligemma_has_words_of_its_own_for_every_task() -> None:
    backend = FakeBackend(lambda request: "a cup")
    backend.described = model_of(PALIGEMMA)
    model = Model(backend)
    model.caption(PICTURE)
    model.caption(PICTURE, detail="detailed")
    model.ask(PICTURE, "What {is} it?")
    assert [prompt_of(each) for each in backend.requests] == [
        "caption en",
        "describe en",
        "answer en What {is} it?",
    ]
    with pytest.raises(RequestError, match="can't answer with a scene"):
        model.scene("no-such-file.png")
    with pytest.raises(RequestError, match="only objects that are named"):
        model.detect("no-such-file.png")
    with pytest.raises(RequestError, match="can't answer with a scene"):
        scene.request(PICTURE, backend.described)


@pytest.mark.parametrize(
    ("architecture", "name"), [(INTERNVL, "a <box>"), (INTERNVL, "cup [1]"), (PALIGEMMA, "cup ; dog")]
)
def test_a_name_that_would_be_misread_is_refused(architecture: str, name: str) -> None:
    with pytest.raises(RequestError, match="can't be asked for") as caught:
        detect.request(PICTURE, [name], model_of(architecture))
    assert caught.value.field == "objects"


TWO = [("cup", (20.0, 20.0, 60.0, 40.0)), ("dog", (0.0, 0.0, 100.0, 50.0))]


@pytest.mark.parametrize(
    ("architecture", "answer"),
    [
        (
            INTERNVL,
            "<ref>cup</ref><box>[[100, 200, 300, 400]]</box>\n<ref>dog</ref><box>[[0, 0, 500, 500]]</box>",
        ),
        (INTERNVL, "cup[[100, 200, 300, 400]]\ndog[[0, 0, 500, 500]]"),  # without its special tokens
        (
            INTERNVL,
            "Sure, I will detect and label.\n\n```\n<ref>cup</ref><box>[[100, 200, 300, 400]]</box>\n"
            "<ref>dog</ref><box>[[0, 0, 500, 500]]</box>\n```\n",
        ),
        (
            INTERNVL,
            '[{"bbox_2d": [100, 200, 300, 400], "label": "cup"}, {"bbox": [0, 0, 500, 500], "label": "dog"}]',
        ),
        (
            GEMMA4,
            '```json\n[{"box_2d": [200, 100, 400, 300], "label": "cup"}, '
            '{"box_2d": [0, 0, 500, 500], "label": "dog"}]\n```',
        ),
        (
            PALIGEMMA,
            "<loc0204><loc0102><loc0409><loc0307> cup ; <loc0000><loc0000><loc0512><loc0512> dog",
        ),
    ],
)
def test_every_notation_is_read(architecture: str, answer: str) -> None:
    result = found(answer, architecture)
    assert [item.label for item in result.objects] == [label for label, _ in TWO]
    for item, (_, corners) in zip(result.objects, TWO, strict=True):
        got = (item.box.x1, item.box.y1, item.box.x2, item.box.y2)
        assert got == pytest.approx(corners, abs=0.3)
    assert not result.truncated


def test_several_boxes_stand_under_one_name() -> None:
    two = found("<ref>cup</ref><box>[[0, 0, 500, 500], [500, 500, 1000, 1000]]</box>", INTERNVL)
    assert [(item.label, item.box.x1) for item in two.objects] == [("cup", 0), ("cup", 100)]


@pytest.mark.parametrize(
    ("architecture", "answer", "count"),
    [
        (INTERNVL, "<ref>cup</ref><box>[[100, 200, 300, 400], [500, 50", 1),
        (PALIGEMMA, "<loc0204><loc0102><loc0409><loc0307> cup ; <loc0001><loc0002>", 1),
    ],
)
def test_an_answer_that_breaks_off_keeps_what_was_complete(
    architecture: str, answer: str, count: int
) -> None:
    result = found(answer, architecture)
    assert (len(result.objects), result.truncated) == (count, True)


@pytest.mark.parametrize(
    ("architecture", "answer"),
    [(INTERNVL, "There is no cup in the image."), (INTERNVL, "<ref>cup</ref><box>[]</box>"), (PALIGEMMA, "")],
)
def test_nothing_found_is_a_result(architecture: str, answer: str) -> None:
    assert found(answer, architecture, names=("cup",)).objects == ()


@pytest.mark.parametrize("architecture", [INTERNVL, PALIGEMMA, GEMMA4, QWEN2_5])
def test_an_answer_without_boxes_is_an_error_with_its_text(architecture: str) -> None:
    with pytest.raises(OutputError, match="not in its usual form") as caught:
        found("A cup on a table.", architecture)
    assert caught.value.text == "A cup on a table."


@pytest.mark.parametrize("architecture", WRITERS)
@given(st.text() | st.text("<loc0123> refboxcup/[],;-9", max_size=60))
def test_whatever_it_says_boxes_are_inside(architecture: str, answer: str) -> None:
    try:
        result = found(answer, architecture)
    except OutputError:
        return
    for item in result.objects:
        assert 0 <= item.box.x1 < item.box.x2 <= 200
        assert 0 <= item.box.y1 < item.box.y2 <= 100
        assert math.isfinite(item.box.area)


def test_pocket_and_what_nobody_knows_are_spoken_to_as_before() -> None:
    assert convention_of(model_of("")) is UNKNOWN
    assert convention_of(model_of("SomethingNewForConditionalGeneration")) is UNKNOWN
    pocket = convention_of(model_of("Qwen3VLForConditionalGeneration"))
    assert replace(pocket, family=UNKNOWN.family, architectures=()) == UNKNOWN
    names = [name for convention in CONVENTIONS for name in convention.architectures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("architecture", "scale"),
    [("", 1000), ("Qwen3_5ForConditionalGeneration", 1000), (PALIGEMMA, 1024), (QWEN2_5, None)],
)
def test_whoever_draws_boxes_is_told_how_they_count(architecture: str, scale: int | None) -> None:
    said = grounding_of(model_of(architecture, min_pixels=0, max_pixels=1 << 20))
    assert said is not None
    assert said.keys == {"bbox_2d": "x", "bbox": "x", "box_2d": "y"}
    assert said.scale == scale
    # What the engine doesn't tell is the family's.
    assert said.resized == (None if scale else Resized(28, 3_136, 1 << 20))


def test_a_model_without_boxes_or_eyes_is_told_to_draw_none() -> None:
    assert grounding_of(model_of("Gemma3ForConditionalGeneration")) is None
    assert grounding_of(model_of("Qwen3ForCausalLM", images=False)) is None


def test_a_model_uses_its_convention_from_prompt_to_pixels() -> None:
    backend = FakeBackend(lambda request: '[{"bbox_2d": [14, 28, 56, 84], "label": "cup"}]')
    backend.described = model_of(QWEN2_5, min_pixels=3136, max_pixels=1 << 20)
    result = Model(backend).detect(
        Image.new("RGB", (224, 224)), ["cup"], sampling=SamplingParams(), max_pixels=112 * 112
    )
    (item,) = result.objects  # the model saw 112×112
    assert (item.box.x1, item.box.y1, item.box.x2, item.box.y2) == (28, 56, 112, 168)
    assert backend.requests[0].grammar == grammar.PIXEL_BOXES


def test_internvl_marks_are_ours_and_what_a_name_holds_is_not() -> None:
    part = detect.request(PICTURE, ["cup"], model_of(INTERNVL)).messages[0].content[-1]
    assert isinstance(part, Text)
    assert "<ref>cup</ref>" in part.text
    assert "<" not in part.unmarked
    assert Text("a <ref> of a user").unmarked == "a <ref> of a user"
