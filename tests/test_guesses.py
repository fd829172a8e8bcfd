"""The first things that somebody types who knows transformers, openai and Pillow: each works, or says what to
type instead. Every guess is made of a model here and of one on a server.

    | # | typed | before | now |
    |---|---|---|---|
    | 1 | `caption(np.asarray(image))` | AttributeError: … no attribute 'read' | the caption |
    | 2 | `caption(torch.rand(3, 48, 64))` | AttributeError | the caption |
    | 3 | `caption(None)` | AttributeError | WrongType: the image is None; give a path, … |
    | 4 | `caption(42)` | AttributeError | WrongType: the image is 42 (int); … |
    | 5 | `caption(["a.png", "b.png"])` | AttributeError | WrongType: … ask(images, question) shows several |
    | 6 | `caption("https://…/cat.jpg")` | refused | the bytes' recipe; on a server it is fetched |
    | 7 | `chat("hi")` | AttributeError | the reply |
    | 8 | `chat([{"role": "user", "content": […image_url…]}])` | AttributeError | the reply |
    | 9 | `chat([{"role": "user", "content": [{"type": "image", …}]}])` | the same | the reply |
    | 10 | `user(Path("shapes.png"), "What?")` | AttributeError, later | the picture |
    | 11 | `user("shapes.png", "What?")` | the path went as text | the picture |
    | 12 | `user("missing.png", "What?")` | the path went as text | ImageError: … doesn't exist |
    | 13 | `chat = model.chat(); chat.send("shapes.png", "What?")` | TypeError | the reply, remembered |
    | 14 | `chat([question, reply, "And?"])` | AttributeError | the reply |
    | 15 | `caption(image, max_tokens=5)`, `temperature=0.7` | TypeError | the caption |
    | 16 | `detect(image, "red circle")` | refused | found |
    | 17 | `detect(image).draw(image, "boxes.png")` | AttributeError | the picture |
    | 18 | `print(caption)`, `f"{reply}"` | the fields | the text |
    | 19 | `print(model)` | `<snugvl.model.Model object at 0x…>` | name, engine, context |
    | 20 | `ask("What is it?", image)` | AttributeError | WrongType: pictures come first |
    | 21 | `model.generate(…)`, `snugvl.caption(…)` | AttributeError | with what to type |
    | 22 | `for piece in stream_caption(image): print(piece, end="")` | the fields | the text |
    | 23 | `Message("assistant", "text")` | a tuple of characters | a message |
    | 24 | `open(path)`, bytearray, os.PathLike | AttributeError | refused by name; taken |
"""

import asyncio
import base64
import copy
import inspect
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import snugvl
from snugvl.client.calls import message_of
from snugvl.core.messages import Message, Picture, Request, Text, ToolCall
from snugvl.errors import ImageError, OutputError, RequestError, WrongType
from snugvl.inputs.given import decode
from snugvl.inputs.talk import turns
from snugvl.model import Model
from snugvl.tasks.surface import Tasks
from tests.client.conftest import ScriptedEngine
from tests.server.live import live
from tests.tasks.fake import FakeBackend

IMAGE = Image.new("RGB", (64, 48), "red")
CALL = {"id": "1", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, str]]:
    backend = FakeBackend()
    with live(ScriptedEngine(backend)) as url:
        yield backend, url


@pytest.fixture(params=["here", "server"])
def model(request: pytest.FixtureRequest, served: tuple[FakeBackend, str]) -> Iterator[Tasks]:
    """A model here, and a client of one on a server."""
    if request.param == "here":
        yield Model(FakeBackend())
        return
    with snugvl.Client(served[1]) as client:
        yield client


@pytest.fixture
def last(model: Tasks, served: tuple[FakeBackend, str]) -> Callable[[], Request]:
    """What the model was asked last."""
    backend = model.backend if isinstance(model, Model) else served[0]
    return lambda: backend.requests[-1]  # type: ignore[attr-defined]


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A picture in the folder where the program runs."""
    monkeypatch.chdir(tmp_path)
    IMAGE.save("shapes.png")
    Image.new("RGB", (20, 10), "blue").save("small.png")
    return "shapes.png"


def shown(request: Request, turn: int = -1) -> list[str | tuple[int, int]]:
    """Words, and sizes of pictures, of a message."""
    return [
        part.text if isinstance(part, Text) else part.image.size
        for part in request.messages[turn].content
        if isinstance(part, Text | Picture)
    ]


ARRAYS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.asarray(IMAGE),
    "grey": lambda: np.zeros((48, 64), np.uint8),
    "one channel": lambda: np.zeros((48, 64, 1), np.uint8),
    "with alpha": lambda: np.asarray(IMAGE.convert("RGBA")),
    "floats": lambda: np.asarray(IMAGE, np.float32) / 255,
    "float64": lambda: np.asarray(IMAGE) / 255,
    "channels first": lambda: np.asarray(IMAGE).transpose(2, 0, 1),
    "tensor": lambda: torch.rand(3, 48, 64),
    "tensor of bf16 that learns": lambda: torch.rand(3, 48, 64, dtype=torch.bfloat16, requires_grad=True),
    "tensor, channels last": lambda: torch.randint(0, 255, (48, 64, 3), dtype=torch.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_1_2_arrays_are_pictures(name: str, model: Tasks, last: Callable[[], Request]) -> None:
    assert model.caption(ARRAYS[name]()).text == "A picture of 64x48."
    assert shown(last())[0] == (64, 48)


def test_the_values_of_an_array_are_the_pixels() -> None:
    values = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    for given in (values, values / 255, (values / 255).astype(np.float32), torch.from_numpy(values)):
        assert np.array_equal(np.asarray(decode(given)), values)
    assert np.array_equal(np.asarray(decode(torch.from_numpy(values).permute(2, 0, 1))), values)


WRONG_ARRAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch": (lambda: torch.rand(1, 3, 48, 64), r"a batch of shape 1×3×48×64; give one picture"),
    "normalised": (
        lambda: torch.randn(3, 48, 64),
        r"values from -.* to .*; give uint8, or floats from 0 to 1",
    ),
    "floats to 255": (lambda: np.asarray(IMAGE, float), r"values from 0 to 255; give uint8, or floats"),
    "not a number": (lambda: np.full((4, 4, 3), np.nan), r"values from nan to nan"),
    "int64": (lambda: np.zeros((4, 4, 3), int), r"an array of int64; give uint8"),
    "five channels": (lambda: np.zeros((9, 9, 5), np.uint8), r"shape 9×9×5; give height × width × 3"),
    "nothing": (lambda: np.zeros((0, 4, 3), np.uint8), r"shape 0×4×3"),
    "an empty image": (lambda: Image.new("RGB", (7, 0)), r"the image is 7×0 pixels"),
    "a number": (lambda: np.float32(3), r"no dimensions"),
    "without values": (lambda: torch.zeros(4, 4, 3, device="meta"), "can't read .*; give a dense one"),
    "sparse": (lambda: torch.zeros(4, 4, 3).to_sparse(), "can't read .*; give a dense one"),
    "huge": (lambda: np.broadcast_to(np.uint8(0), (20_000, 20_000)), r"limit is 100,000,000 pixels"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_other_arrays_are_refused_with_the_reason(name: str, model: Tasks) -> None:
    make, message = WRONG_ARRAYS[name]
    with pytest.raises(ImageError, match=message):
        model.caption(make())


class Upload:
    """A file as web frameworks have it, opened as text by mistake."""

    encoding = "utf-8"

    def read(self, size: int = -1) -> str:
        return "text"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "the image is None; give a path"),
        (42, r"the image is 42 \(int\); give a path, the bytes of a file, an open file, a Pillow image"),
        ({"image": 1}, r"\(dict\); give a path"),
        (["a.png", "b.png"], r"a list of 2, and one is looked at here; .*ask\(images, question\)"),
        (Upload(), r"opened as text; open it as bytes: open\(path, 'rb'\)"),
        (print, "builtin"),
    ],
)
def test_3_4_5_what_is_no_picture_is_refused_by_name(given: Any, message: str, model: Tasks) -> None:
    for task in (model.caption, model.scene, model.detect, model.stream_caption):
        with pytest.raises(WrongType, match=message) as caught:
            task(given)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, RequestError)


def test_6_a_url_is_fetched_by_a_server_and_said_so_here(model: Tasks) -> None:
    with pytest.raises(snugvl.SnugvlError) as caught:
        model.caption("https://192.0.2.1/cat.jpg")
    if isinstance(model, Model):
        assert "urllib.request.urlopen(url).read()" in str(caught.value)
    else:
        assert "not the name or address of a public host" in str(caught.value)


def test_7_words_alone_are_a_conversation(model: Tasks, last: Callable[[], Request]) -> None:
    assert model.chat("hi").text.startswith("hi")
    assert model.chat(["hi"]).text.startswith("hi")
    assert shown(last()) == ["hi"]


def test_8_9_dicts_of_openai_and_of_transformers(
    model: Tasks, last: Callable[[], Request], shapes: str
) -> None:
    file = io.BytesIO()
    IMAGE.save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    pictures: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}", "detail": "low"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{encoded}"},
        {"type": "image", "image": IMAGE},
        {"type": "image", "image": shapes},
        {"type": "image", "path": shapes},
        {"type": "image", "base64": encoded},
        {"type": "image", "image": np.asarray(IMAGE)},
    ]
    for part in pictures:
        reply = model.chat([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [part, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A square."},
            {"role": "user", "content": "And now?"},
        ])  # fmt: skip
        assert reply.text.startswith("And now?")
        request = last()
        assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]
        assert shown(request, 1) == [(64, 48), "What?"], part
        assert shown(request, 2) == ["A square."]


def test_dicts_with_calls_of_tools_go_through(last: Callable[[], Request], model: Tasks) -> None:
    function = {"name": "look", "arguments": '{"where": "left"}'}
    model.chat([
        {"role": "user", "content": "Look left."},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a tree"},
    ])  # fmt: skip
    _, call, answer = last().messages
    assert [one.name for one in call.tool_calls] == ["look"]
    assert answer.tool_call_id == call.tool_calls[0].id == "call_1"
    assert isinstance(call.tool_calls[0], ToolCall)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "hi"}], r"messages\[0\] has the role 'robot'; roles are system"),
        ([{"content": "hi"}], r"messages\[0\] has the role None"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] is not a known part"),
        ([{"role": "user", "content": 42}], r"content is 42 \(int\)"),
        ([42], r"messages\[0\] is 42 \(int\); give words"),
        (42, r"the message is 42 \(int\); give words, snugvl.user"),
        ([], "the conversation is empty"),
        ([Path("a.png"), "What?"], r"messages\[0\] is .*; give words, snugvl.user\(picture, 'words'\)"),
        ([{"role": "assistant", "tool_calls": [{"name": "look"}]}], r"tool_calls\[0\] is not a call"),
    ],
)
def test_other_messages_are_refused_by_name(messages: Any, message: str, model: Tasks) -> None:
    with pytest.raises(RequestError, match=message):
        model.chat(messages)


def test_what_a_dict_has_beside_is_ignored_with_a_warning(model: Tasks) -> None:
    with pytest.warns(snugvl.SnugvlWarning, match=r"ignored name of messages\[0\]"):
        model.chat([{"role": "user", "name": "Ann", "content": "hi"}])


def test_10_11_a_string_that_names_a_picture_is_that_picture(
    model: Tasks, last: Callable[[], Request], shapes: str
) -> None:
    with open(shapes, "rb") as file:  # noqa: PTH123 - as people do
        forms = (shapes, Path(shapes), Path(shapes).read_bytes(), file, IMAGE, np.asarray(IMAGE))
        messages = [snugvl.user(first, "What?") for first in forms]
    for message in messages:
        model.chat(message)
        assert shown(last()) == [(64, 48), "What?"]
    model.chat(snugvl.user(shapes, "small.png", "Which is larger?"))
    assert shown(last()) == [(64, 48), (20, 10), "Which is larger?"]
    model.chat(shapes)
    assert shown(last()) == [(64, 48)]


def test_12_a_name_of_nothing_is_refused_and_words_stay_words(shapes: str) -> None:
    with pytest.raises(ImageError, match=r"missing.png doesn't exist; check the path, or .* snugvl.Text"):
        snugvl.user("missing.png", "What?")
    Path("notes.txt").write_text("words")
    with pytest.raises(
        ImageError, match=r"notes.txt is a file, and not named like a picture; .*pathlib.Path"
    ):
        snugvl.user("notes.txt", "What?")
    Path("test").write_text("a file that is named like a word")
    for words in (
        "What is in shapes.png",
        "test",
        "Describe the file photo.jpg",
        "e.g.",
        "x" * 10_000,
        "a\0b",
    ):
        assert snugvl.user(words).content == (Text(words),)
    assert snugvl.user(snugvl.Text("missing.png")).content == (Text("missing.png"),)
    for wrong in (None, 42, {"role": "user"}):
        with pytest.raises(WrongType, match="a message"):
            snugvl.user(wrong, "What?")
    with pytest.raises(RequestError, match="words or a picture"):
        snugvl.user()


def test_a_client_sends_the_file_as_it_is(served: tuple[FakeBackend, str], shapes: str) -> None:
    message = snugvl.user(shapes)
    (picture,) = message.content
    assert isinstance(picture, Picture)
    assert picture.data == Path(shapes).read_bytes()


def test_13_a_conversation_remembers(model: Tasks, last: Callable[[], Request], shapes: str) -> None:
    chat = model.chat(system="Be brief.")
    first = chat.send(shapes, "What is this?")
    assert chat("And this?", max_tokens=5, temperature=0.5).text.startswith("And this?")
    request = last()
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]
    assert shown(request, 1) == [(64, 48), "What is this?"]
    assert shown(request, 2) == [first.text]
    assert (request.sampling.max_tokens, request.sampling.temperature) == (5, 0.5)
    assert "2 turns" in repr(chat)
    assert len(chat.messages) == 5
    chat.clear()
    assert len(chat.messages) == 1


def test_a_conversation_streams_and_keeps_what_came(model: Tasks, shapes: str) -> None:
    chat = model.chat()
    with chat.stream(shapes, "one two three") as stream:
        text = "".join(map(str, stream))
    assert text.startswith("one two three")
    with chat.stream("four five six") as stream:
        for _ in stream:
            break  # somebody has read enough
    assert len(chat.messages) == 4
    with pytest.raises(ImageError):
        chat.send("missing.png", "What?")
    assert len(chat.messages) == 4


def test_a_conversation_is_as_before_after_an_error() -> None:
    def script(request: Request) -> Any:
        return OutputError("no") if len(request.messages) > 1 else "yes"

    chat = Model(FakeBackend(script)).chat()
    assert str(chat.send("one")) == "yes"
    with pytest.raises(OutputError):
        chat.send("two")
    assert len(chat.messages) == 2


def test_14_a_reply_goes_back_in(model: Tasks, last: Callable[[], Request], shapes: str) -> None:
    question = snugvl.user(shapes, "What is this?")
    reply = model.chat(question)
    model.chat([question, reply, "And its colour?"])
    assert [message.role for message in last().messages] == ["user", "assistant", "user"]
    assert shown(last(), 1) == [reply.text]
    model.chat(["What?", model.caption(IMAGE), "Why?"])  # what a task has said, too
    assert shown(last(), 1) == ["A picture of 64x48."]


def test_15_tasks_take_what_is_chosen_most_often(model: Tasks, last: Callable[[], Request]) -> None:
    calls: list[Callable[..., Any]] = [
        lambda **said: model.caption(IMAGE, **said),
        lambda **said: model.ask(IMAGE, "What?", **said),
        lambda **said: model.scene(IMAGE, **said),
        lambda **said: model.detect(IMAGE, **said),
        lambda **said: model.chat("hi", **said),
        lambda **said: list(model.stream_caption(IMAGE, **said)),
        lambda **said: list(model.stream_ask(IMAGE, "What?", **said)),
        lambda **said: list(model.stream_chat("hi", **said)),
    ]
    for call in calls:
        call(max_tokens=5, temperature=0.7)
        assert (last().sampling.max_tokens, last().sampling.temperature) == (5, 0.7)
        call(max_tokens=5, sampling=snugvl.SamplingParams(max_tokens=9, seed=3))
        assert (last().sampling.max_tokens, last().sampling.seed) == (5, 3)
        with pytest.raises(RequestError, match="max_tokens must be a whole number"):
            call(max_tokens="5")


def test_16_17_one_name_is_enough_and_boxes_draw_themselves(
    model: Tasks, last: Callable[[], Request], shapes: str, tmp_path: Path
) -> None:
    found = model.detect(shapes, "red circle")
    assert '"red circle"' in shown(last())[1]
    assert [thing.label for thing in found.objects] == ["red circle", "cup"]
    drawn = found.draw(shapes, tmp_path / "new" / "boxes.png")
    assert decode(tmp_path / "new" / "boxes.png").size == drawn.size
    assert len(np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)) > 2
    with pytest.raises(ImageError, match="found in an image of 64×48 pixels; this one has 20×10"):
        found.draw("small.png")
    with pytest.raises(snugvl.InputError, match="its name must end in"):
        found.draw(shapes, "boxes.txt")
    assert str(found).startswith("red circle: ")


def test_boxes_are_drawn_into_open_files(model: Tasks, shapes: str, tmp_path: Path) -> None:
    found, memory = model.detect(shapes, "red circle"), io.BytesIO()
    drawn = found.draw(shapes, memory)
    memory.seek(0)
    with Image.open(memory) as written:
        assert (written.format, written.size) == ("PNG", drawn.size)
    with (tmp_path / "boxes.jpg").open("wb") as file:
        found.draw(shapes, file)
    with Image.open(tmp_path / "boxes.jpg") as written:
        assert written.format == "JPEG"
    memory.close()
    with Path(shapes).open("rb") as unwritable:
        for wrong in (5, io.StringIO(), unwritable, memory):
            with pytest.raises(WrongType, match="drawn to a path, or to a file opened with 'wb', not to"):
                found.draw(shapes, wrong)  # type: ignore[arg-type]


def test_text_that_is_no_text_is_refused_before_it_is_sent(served: tuple[FakeBackend, str]) -> None:
    """As a shell gives an argument that isn't UTF-8."""
    with snugvl.Client(served[1]) as client:
        for ask in (client.ask, client.stream_ask):
            with pytest.raises(RequestError, match="text has a lone surrogate"):
                ask(IMAGE, "caf\udce9?")


def test_18_results_print_their_text(model: Tasks) -> None:
    assert str(model.caption(IMAGE)) == "A picture of 64x48."
    assert f"{model.ask(IMAGE, 'What?')}" == "What? 64x48!"
    assert f"{model.chat('hi')}".startswith("hi")
    assert str(model.scene(IMAGE)) == "Two cups on a table."
    caption = model.caption(IMAGE)
    assert pickle.loads(pickle.dumps(caption)) == caption
    assert "text='A picture of 64x48.'" in repr(caption)


def test_19_a_model_says_what_it_is(model: Tasks) -> None:
    if isinstance(model, Model):
        assert repr(model) == "<snugvl.Model fake: text and images, context of 2,048 tokens, native>"
    else:
        assert repr(model).startswith("<snugvl.Client http://127.0.0.1:")


def test_20_pictures_come_first(model: Tasks) -> None:
    with pytest.raises(WrongType, match=r"pictures come first: ask\(images, question\)"):
        model.ask("What is it?", IMAGE)  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="the question is of type int"):
        model.ask(IMAGE, 42)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("beside", [{}, {"content": None}])
def test_a_message_without_content_is_refused_as_a_server_does(
    model: Tasks, role: str, beside: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\] has no content; give a text, or a list of parts"):
        model.chat(["hi", {"role": role, **beside}])
    assert turns([{"role": "assistant", "content": None, "tool_calls": [CALL]}])[0].tool_calls


ARGUMENTS: dict[str, tuple[Callable[[Tasks], Any], str]] = {
    "max_new_tokens": (
        lambda model: model.caption(IMAGE, max_new_tokens=5),
        "caption takes no max_new_tokens; max_",
    ),  # type: ignore[call-arg]
    "prompt": (
        lambda model: model.caption(IMAGE, prompt="What?"),
        r"no prompt; ask\(images, question\) asks",
    ),  # type: ignore[call-arg]
    "stream": (
        lambda model: model.ask(IMAGE, "What?", stream=True),
        "ask takes no stream; stream_caption, stream_",
    ),  # type: ignore[call-arg]
    "top_p": (lambda model: model.stream_chat("hi", top_p=1), "stream_chat takes no top_p; temperature=0"),  # type: ignore[call-arg]
    "of a conversation": (lambda model: model.chat().send("hi", do_sample=True), "send takes no do_sample"),  # type: ignore[call-arg]
    "device_map": (lambda _: snugvl.load(device_map="auto"), "load takes no device_map; device='cuda'"),  # type: ignore[call-arg]
    "torch_dtype": (lambda _: snugvl.load(torch_dtype="auto"), "load takes no torch_dtype; dtype='bfloat16'"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_other_libraries_say_what_to_type(model: Tasks, name: str) -> None:
    call, said = ARGUMENTS[name]
    with pytest.raises(TypeError, match=said):
        call(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        model.caption(IMAGE, nonsense=1)  # type: ignore[call-arg]


ATTRIBUTES: dict[str, tuple[Callable[[Tasks], Any], str]] = {
    "from_pretrained": (
        lambda _: snugvl.Model.from_pretrained("x"),
        r"'from_pretrained'; snugvl.load\(name\) loads",
    ),  # type: ignore[attr-defined]
    "pipeline": (lambda _: snugvl.pipeline("x"), r"'pipeline'; snugvl.load\(name\) loads"),
    "xyxy": (lambda model: next(iter(model.detect(IMAGE))).box.xyxy, r"'Box' .* 'xyxy'; tuple\(box\) is x1"),  # type: ignore[attr-defined]
    "bbox": (lambda model: next(iter(model.detect(IMAGE))).bbox, "'bbox'; box is where it is"),  # type: ignore[attr-defined]
    "content": (lambda model: model.chat("hi").content, "'Reply' .* 'content'; the words are its text"),  # type: ignore[attr-defined]
    "history": (
        lambda model: model.chat().history,
        "'Conversation' .* 'history'; messages has what was said",
    ),  # type: ignore[attr-defined]
    "nonsense": (lambda model: model.chat("hi").nonsense, "'Reply' object has no attribute 'nonsense'$"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_other_libraries_say_what_to_type(model: Tasks, name: str) -> None:
    look, said = ATTRIBUTES[name]
    with pytest.raises(AttributeError, match=said):
        look(model)


def test_21_other_libraries_names_say_what_to_type(model: Tasks) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'generate'; chat\(messages\) continues"):
        model.generate()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        model.nonsense  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match=r"a model has it: snugvl.load\(\).caption"):
        snugvl.caption  # noqa: B018
    assert not hasattr(model, "__len__")


def test_22_pieces_print_their_text(model: Tasks) -> None:
    with model.stream_caption(IMAGE) as stream:  # type: ignore[attr-defined]
        assert "".join(f"{piece}" for piece in stream) == "A picture of 64x48."


def test_23_messages_take_strings_and_pictures() -> None:
    assert Message("assistant", "text").content == (Text("text"),)  # type: ignore[arg-type]
    words, picture = Message("user", ["What?", IMAGE]).content  # type: ignore[arg-type]
    assert (words, type(picture)) == (Text("What?"), Picture)


def test_24_files_in_every_form(model: Tasks, shapes: str) -> None:
    data = Path(shapes).read_bytes()
    path = PurePosixPath(shapes)
    for source in (bytearray(data), memoryview(data), io.BytesIO(data), path, Path(shapes), shapes):
        assert model.caption(source).text == "A picture of 64x48."


def test_the_three_have_the_same_surface_and_say_all_of_it() -> None:
    """Arguments and documentation of a model's, a client's and an asynchronous client's methods."""
    for name in ("caption", "ask", "scene", "detect", "chat", "stream_caption", "stream_ask", "stream_chat"):
        there = [
            list(inspect.signature(getattr(kind, name)).parameters)
            for kind in (Tasks, Model, snugvl.Client, snugvl.AsyncClient)
        ]
        assert all(one == there[0] for one in there), name
        for kind in (Model, snugvl.Client, snugvl.AsyncClient):
            text = inspect.getdoc(getattr(kind, name)) or ""
            assert text == inspect.getdoc(getattr(Tasks, name))
            if not name.startswith("stream_"):
                assert all(f"\n{part}:\n" in text for part in ("Args", "Returns", "Raises", "Example")), name


def test_an_asynchronous_client_talks_streams_and_gathers(
    served: tuple[FakeBackend, str], shapes: str
) -> None:
    backend, url = served

    async def talk() -> None:
        async with snugvl.AsyncClient(url) as client:
            captions = await asyncio.gather(*(client.caption(one) for one in (shapes, np.asarray(IMAGE))))
            assert [str(caption) for caption in captions] == ["A picture of 64x48."] * 2
            found = await client.detect(shapes, "red circle", max_tokens=50)
            assert found.draw(shapes).width
            chat = client.chat(system="Be brief.")
            assert (await chat.send(shapes, "What?")).text == "What? 64x48!"
            async with await chat.stream("one two") as stream:
                assert "".join([str(delta) async for delta in stream]).startswith("one two")
            assert len(chat.messages) == 5
            assert [message.role for message in backend.requests[-1].messages] == [
                "system", "user", "assistant", "user",
            ]  # fmt: skip
            assert (await client.chat("hi")).text.startswith("hi")
            async with await client.stream_caption(shapes, max_tokens=7) as stream:
                assert "".join([str(delta) async for delta in stream]) == "A picture of 64x48."
            with pytest.raises(WrongType, match="the image is None"):
                await client.caption(None)  # type: ignore[arg-type]
            assert repr(client).startswith("<snugvl.AsyncClient http://")
            with pytest.raises(TypeError, match="caption takes no max_new_tokens; max_tokens is"):
                await client.caption(shapes, max_new_tokens=5)  # type: ignore[call-arg]
            with pytest.raises(AttributeError, match="no attribute 'generate'; chat"):
                client.generate()  # type: ignore[attr-defined]

    asyncio.run(talk())


def test_conversations_side_by_side(model: Tasks) -> None:
    def talk(number: int) -> list[str]:
        chat = model.chat()
        return [str(chat.send(f"{number} {turn}")).strip("! ") for turn in range(3)]

    with ThreadPoolExecutor(8) as pool:
        for number, answers in enumerate(pool.map(talk, range(8))):
            assert answers == [f"{number} {turn}" for turn in range(3)]


def test_a_closed_model_still_prints() -> None:
    model = Model(FakeBackend())
    model.backend.described = replace(model.backend.described, images=False)  # type: ignore[attr-defined]
    model.close()
    assert "text alone" in repr(model)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_what_a_model_thought_is_kept_in_a_conversation(
    key: str, model: Tasks, last: Callable[[], Request]
) -> None:
    """As vLLM and others write it; null is nothing, and no reason for a warning."""
    model.chat([
        "What?",
        {"role": "assistant", "content": "A cat.", key: "It has whiskers."},
        "Sure?",
        {"role": "assistant", "content": "Yes.", key: None},
        "Why?",
    ])  # fmt: skip
    assert [message.reasoning for message in last().messages] == ["", "It has whiskers.", "", "", ""]


def test_a_client_sends_what_a_model_thought() -> None:
    said = [{"role": "assistant", "content": "A cat.", "reasoning": "It has whiskers."}, "Sure?"]
    first, second = (message_of(turn) for turn in turns(said))
    assert first == {"role": "assistant", "content": "A cat.", "reasoning_content": "It has whiskers."}
    assert "reasoning_content" not in second


@pytest.mark.parametrize(
    "call",
    [
        lambda model, words: model.chat(IMAGE, words),
        lambda model, words: model.stream_chat(IMAGE, words),
        lambda model, words: model.caption(IMAGE, sampling=words),
        lambda model, words: model.ask(IMAGE, "What?", sampling=words),
        lambda model, words: model.scene(IMAGE, sampling=words),
        lambda model, words: model.detect(IMAGE, sampling=words),
        lambda model, words: model.chat().send("hi", sampling=words),
    ],
)
def test_25_words_in_the_place_of_the_sampling_say_how_they_go_with_a_picture(
    call: Callable[[Any, Any], Any], model: Tasks
) -> None:
    with pytest.raises(WrongType, match=r"not 'What is it\?'; a picture and words are one message"):
        call(model, "What is it?")
    with pytest.raises(WrongType, match=r"its fields are arguments of it: snugvl\.SamplingParams\(\*\*\{"):
        call(model, {"temperature": 0.5})


@pytest.mark.parametrize("key", ["images", "image", "image_url", "videos"])
def test_26_a_picture_beside_the_content_is_never_left_unseen(key: str, model: Tasks) -> None:
    """Ollama's clients put it there; ignored, the question would be answered without it."""
    with pytest.raises(RequestError, match=rf"messages\[0\] has {key} beside its content; put it there"):
        model.chat([{"role": "user", "content": "How many?", key: ["shapes.png"]}])
    model.chat([{"role": "user", "content": "How many?", key: None, "images": []}])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.chat("hi", system=5), "system takes words, not 5"),
        (lambda model: model.chat(system=5), "system takes words, not 5"),
        (lambda model: model.caption(IMAGE, max_pixels="big"), "max_pixels"),
        (lambda _: snugvl.Client(8123), "such as 'http://127.0.0.1:8123'"),  # type: ignore[arg-type]
        (lambda _: snugvl.AsyncClient(None), "the address is None"),  # type: ignore[arg-type]
        (lambda _: snugvl.Client(api_key=5), "an API key must be a string"),  # type: ignore[arg-type]
        (lambda _: snugvl.Client(timeout="5"), "timeout must be a number"),  # type: ignore[arg-type]
        (lambda _: snugvl.Client(max_retries="5"), "max_retries must be a number"),  # type: ignore[arg-type]
        (lambda _: snugvl.Model("pocket"), r"snugvl\.load\('pocket'\)"),  # type: ignore[arg-type]
        (lambda _: snugvl.load(None), "no model was named"),  # type: ignore[arg-type]
        (lambda _: snugvl.load("pocket", context="4k"), "context is a whole number"),  # type: ignore[arg-type]
        (lambda _: snugvl.SamplingParams(stop=None), "stop takes strings"),  # type: ignore[arg-type]
        (lambda _: snugvl.SamplingParams(logit_bias=[1]), "logit_bias takes"),  # type: ignore[arg-type]
        (lambda _: snugvl.SamplingParams(top_k=None), "top_k must be"),  # type: ignore[arg-type]
    ],
)
def test_27_other_types_are_refused_by_name(call: Callable[[Any], Any], message: str, model: Tasks) -> None:
    with pytest.raises(RequestError, match=message):
        call(model)


def test_28_one_stop_string_is_one_not_its_letters() -> None:
    assert snugvl.SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_29_results_are_gone_through_as_what_they_hold(model: Tasks) -> None:
    """By pydantic each would be its fields' names and values: silently nothing that anybody looks for."""
    found = snugvl.Detections(
        width=9,
        height=9,
        objects=(snugvl.Detection(label="cup", box=snugvl.Box(x1=1, y1=2, x2=3, y2=4)),),
    )
    assert [item.label for item in found] == ["cup"]
    assert snugvl.Detections(width=9, height=9)  # finding nothing is an answer, too
    x1, y1, x2, y2 = found.objects[0].box
    assert (x1, y1, x2, y2) == tuple(found.objects[0].box) == (1, 2, 3, 4)
    assert snugvl.Detections.model_validate_json(found.model_dump_json()) == found
    caption = model.caption(IMAGE)
    assert caption.text[:3] in caption
    assert "no such words" not in caption


def test_a_model_of_another_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork the engine's thread isn't there: it was waited for, for ever."""
    backend = FakeBackend()
    monkeypatch.setattr(backend, "submit", pytest.fail)
    monkeypatch.setattr(backend, "close", pytest.fail)
    model = snugvl.Model(backend)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    for call in (lambda: model.caption(IMAGE), lambda: model.stream_chat("hi")):
        with pytest.raises(snugvl.EngineError, match=f"process {here} and can't be used in {here + 1}"):
            call()
    model.close()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_model_is_neither_pickled_nor_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"neither pickled nor copied; load it in each process"):
        copied(snugvl.Model(FakeBackend()))


def test_files_that_are_closed_addresses_of_files_and_base64_are_told(model: Tasks, shapes: str) -> None:
    with Path(shapes).open("rb") as file, Image.open(shapes) as picture:
        path = str(Path(shapes).resolve())
    picture.close()
    text = base64.b64encode(Path(shapes).read_bytes() * 9).decode()
    for given, said in (
        (file, "can't be read: read of closed file; open it again"),
        (picture, r"can't be decoded \(Operation on closed image\); open it again, and leave it open"),
        (Path(path).as_uri(), f"is a URL; give the path: {re.escape(path)}"),
        (text, r"is text in base64; give the bytes: base64.b64decode\(text\)"),
    ):
        with pytest.raises(ImageError, match=said):
            model.caption(given)
