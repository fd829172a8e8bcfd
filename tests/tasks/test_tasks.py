"""Caption, ask, scene, chat: what the model is asked and what its answer becomes."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

import snugvl
from snugvl.core.messages import Picture, Text
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, ImageError, OutputError, RequestError
from snugvl.tasks import prompts
from snugvl.tasks.results import Caption, Scene, SceneObject
from tests.patience import PATIENCE_S
from tests.tasks.fake import SCENE, FakeBackend, images_of, model, prompt_of

PICTURE = Image.new("RGB", (64, 32), "red")


def test_captions_ask_in_the_words_of_training() -> None:
    fake = model("A red field. ")
    assert fake.caption(PICTURE).text == "A red field."
    fake.caption(PICTURE, detail="detailed")
    assert [prompt_of(request) for request in fake.backend.requests] == list(prompts.CAPTION.values())
    with pytest.raises(RequestError, match="detail must be one of short, detailed"):
        fake.caption(PICTURE, detail="long")


def test_the_result_has_usage_and_says_when_it_was_cut() -> None:
    whole = model("A red field.").caption(PICTURE)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.truncated) == (3, False)
    assert model("A red", finish="length").caption(PICTURE).truncated


def test_the_image_comes_before_the_words() -> None:
    fake = model()
    fake.ask([PICTURE, PICTURE.resize((8, 8))], " Which is larger? ", max_pixels=4096)
    first, second, question = fake.backend.requests[0].messages[0].content
    assert isinstance(first, Picture)
    assert isinstance(second, Picture)
    assert (first.image.size, second.image.size, first.max_pixels) == ((64, 32), (8, 8), 4096)
    assert question == Text("Which is larger?")


def test_token_limits_suit_the_task_and_leave_room_in_a_small_context() -> None:
    fake = model()
    fake.caption(PICTURE)
    fake.detect(PICTURE)
    fake.caption(PICTURE, sampling=SamplingParams(max_tokens=7, temperature=0.5, seed=3))
    limits = [request.sampling.max_tokens for request in fake.backend.requests]
    assert limits == [128, 512, 7]  # the fake's context of 2048 leaves detection a quarter
    assert fake.backend.requests[2].sampling.seed == 3
    with pytest.raises(RequestError, match="n must be 1"):
        fake.caption(PICTURE, sampling=SamplingParams(n=2))


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(question: str) -> None:
    with pytest.raises(RequestError, match="empty"):
        model().ask(PICTURE, question)


def test_a_question_needs_an_image() -> None:
    with pytest.raises(RequestError, match="at least one image"):
        model().ask([], "What?")


def test_images_come_from_paths_bytes_files_and_pillow(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    PICTURE.save(path)
    fake = model()
    with path.open("rb") as file:
        for source in (path, str(path), path.read_bytes(), file, io.BytesIO(path.read_bytes()), PICTURE):
            assert fake.ask(source, "Size?").text == "Size? 64x32!"
    with pytest.raises(ImageError):
        fake.caption(tmp_path / "missing.png")


def test_a_pillow_image_is_turned_upright_and_made_opaque() -> None:
    turned = Image.new("RGBA", (64, 32), (255, 0, 0, 0))
    turned.getexif()[0x0112] = 6
    fake = model()
    fake.caption(turned)
    (seen,) = images_of(fake.backend.requests[0])
    assert (seen.size, seen.mode, seen.getpixel((0, 0))) == ((32, 64), "RGB", (255, 255, 255))


def test_scene_is_typed() -> None:
    scene = model(f"```json\n{SCENE}\n```").scene(PICTURE)
    assert scene.summary == "Two cups on a table."
    assert scene.objects == (SceneObject(name="cup", count=2, positions=("left", "right")),)
    assert (scene.text, scene.setting) == (("SALE",), "indoors")
    assert Scene.model_validate_json(scene.model_dump_json()) == scene
    assert Scene.model_json_schema()["required"] == ["summary"]


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ('["cup", "plate"]', [("cup", 1), ("plate", 1)]),
        ('[{"name": "cup", "count": "3"}]', [("cup", 3)]),
        ('[{"name": "cup", "count": "many"}, {"count": 2}, {"name": null}]', [("cup", 1)]),
        ('[{"label": "cup", "count": -2, "position": "left"}]', [("cup", 1)]),
        ('{"cup": 2, "plate": 1}', [("cup", 2), ("plate", 1)]),
        ("null", []),
        ('[{"name": ["a", {"b": "c"}], "count": 1e400}]', [("a, c", 1)]),
    ],
)
def test_scene_objects_in_other_forms(objects: str, expected: list[tuple[str, int]]) -> None:
    scene = model(f'{{"summary": "s", "objects": {objects}, "text": "SALE", "relations": null}}').scene(
        PICTURE
    )
    assert [(thing.name, thing.count) for thing in scene.objects] == expected
    assert (scene.text, scene.relations) == (("SALE",), ())


def test_a_scene_that_breaks_off_keeps_what_was_complete() -> None:
    scene = model(SCENE[: SCENE.index('"positions"')], finish="length").scene(PICTURE)
    assert (scene.summary, scene.objects, scene.truncated) == ("Two cups on a table.", (), True)


@pytest.mark.parametrize("answer", ["Two cups.", "[1, 2]", '{"cups": 2}', '{"summary'])
def test_an_answer_that_is_no_scene_is_an_error_with_its_text(answer: str) -> None:
    with pytest.raises(OutputError) as caught:
        model(answer).scene(PICTURE)
    assert caught.value.text == answer


def test_chat_continues_a_conversation() -> None:
    fake = model("Fine.")
    reply = fake.chat([snugvl.user(PICTURE, "How are you?")], SamplingParams(max_tokens=5))
    assert (reply.text, reply.finish_reason) == ("Fine.", "stop")
    assert fake.backend.requests[0].sampling.max_tokens == 5
    with fake.stream_chat(snugvl.user("Hi")) as stream:
        assert "".join(delta.text for delta in stream) == "Fine."


def test_streams_give_the_same_text_and_are_closed() -> None:
    fake = model("A red field.")
    with fake.stream_caption(PICTURE) as stream:
        assert [delta.text for delta in stream] == ["A", " red", " field.", ""]
    with fake.stream_ask(PICTURE, "What?") as stream:
        assert next(iter(stream)).text == "A"
    fake.caption(PICTURE)
    assert all(stream.closed for stream in fake.backend.streams)


def test_errors_of_the_engine_reach_the_caller() -> None:
    with pytest.raises(EngineError, match="boom"):
        model(EngineError("boom")).caption(PICTURE)
    slow = model("a b c d e f", delay=0.2)
    threading.Timer(0.1, slow.close).start()
    with pytest.raises(EngineError, match="aborted"):
        slow.caption(PICTURE)


def test_calls_from_threads_run_at_the_same_time() -> None:
    meeting = threading.Barrier(4, timeout=PATIENCE_S)

    def script(_: object) -> str:
        meeting.wait()
        return "together"

    together = model(script)
    with ThreadPoolExecutor(4) as pool:
        texts = [caption.text for caption in pool.map(together.caption, [PICTURE] * 4)]
    assert texts == ["together"] * 4


def test_leaving_the_model_closes_its_backend() -> None:
    backend = FakeBackend()
    with snugvl.Model(backend) as opened:
        assert opened.memory() == {"weights": 7}
        assert opened.capabilities.model == "fake"
    assert backend.closed == 1


def test_results_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        Caption(text="a").text = "b"
    with pytest.raises(ValueError):
        Caption(text="a", extra=1)
