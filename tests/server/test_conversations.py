"""What every protocol makes of a conversation: pictures wherever they are, bounded, in linear time."""

import asyncio
import base64
import sys
from collections.abc import Callable, Coroutine, Iterator
from io import BytesIO
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from PIL import Image

from snugvl.core.messages import Message, Picture, Text, ToolCall
from snugvl.inputs.tools import in_text
from snugvl.server import anthropic
from snugvl.server.anthropic import MessagesRequest
from snugvl.server.fields import MAX_ALL_PARTS
from snugvl.server.media.loading import MAX_MEDIA, MediaLoader, MediaRef, RequestMedia
from snugvl.server.metrics import RequestNotes, RequestRecord
from snugvl.server.ollama import request as ollama
from snugvl.server.ollama.request import ChatRequest
from snugvl.server.openai import responses_request as responses
from snugvl.server.openai.chat import ChatCompletionRequest
from snugvl.server.openai.chat_request import MAX_PARTS
from snugvl.server.openai.chat_request import conversation_of as chat_conversation
from tests.server.fake import CAPABILITIES, FakeService
from tests.server.live import live


async def nothing(*_: object) -> dict[str, Picture]:
    return {}


NOBODY: Any = SimpleNamespace(load=nothing, notes=RequestNotes())  # media of a conversation without pictures
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def service() -> FakeService:
    return FakeService()


@pytest.fixture(scope="module")
def http(service: FakeService) -> Iterator[httpx.Client]:
    with live(service) as base, httpx.Client(base_url=base, timeout=60) as client:
        yield client


def bodies(count: int, image: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A conversation with so many pictures in each protocol that has a place for them."""
    url = f"data:image/png;base64,{image}"
    source = {"type": "base64", "media_type": "image/png", "data": image}
    block, part = {"type": "image", "source": source}, {"type": "image_url", "image_url": {"url": url}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block] * (count - 1)}
    each = [{**USER, "images": [image] * len(range(at, min(at + 64, count)))} for at in range(0, count, 64)]
    head = {"model": "pocket", "max_tokens": 3}
    return {
        "anthropic": ("/v1/messages", {**head, "messages": [{"role": "user", "content": [block] * count}]}),
        "anthropic, counted": ("/v1/messages/count_tokens", {"model": "pocket", "messages": [
            {"role": "user", "content": [block] * count}]}),
        "anthropic, of a tool": ("/v1/messages", {**head, "messages": [
            USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result, block]}]}),
        "ollama": ("/api/chat", {"model": "pocket", "messages": each}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part] * count}]}),
        "responses": ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": url}] * count}]}),
    }  # fmt: skip


@pytest.mark.parametrize("name", bodies(1, ""))
def test_more_pictures_than_are_taken_are_refused_before_one_is_looked_at(
    name: str, http: httpx.Client
) -> None:
    path, body = bodies(MAX_MEDIA + 1, "aaaa")[name]
    looked: list[str] = []

    async def look(self: MediaLoader, url: str, *_: Any) -> bytes:
        looked.append(url)
        raise AssertionError("too late")

    with patch.object(MediaLoader, "_bytes", look):
        answer = http.post(path, json=body)
    assert (answer.status_code, looked) == (400, [])
    assert f"{MAX_MEDIA + 1} pictures and videos; at most {MAX_MEDIA}" in answer.text


def test_as_many_pictures_as_are_taken_are_taken() -> None:
    async def load(refs: dict[str, MediaRef], *_: object, **__: object) -> dict[str, Picture]:
        return {path: Picture(Image.new("RGB", (1, 1))) for path in refs}

    places = [f"messages[0].content[{part}]" for part in range(MAX_MEDIA)]
    loader: Any = SimpleNamespace(load=load, before_all=lambda _: None)
    wanted = {place: MediaRef("data:,a", place) for place in places}
    assert asyncio.run(RequestMedia(loader, RequestRecord("1")).load(wanted)).keys() == wanted.keys()


def test_frames_are_pictures_too(http: httpx.Client) -> None:
    video = {"type": "video", "video": ["data:,a"] * 600}
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [video] * 2}]})
    assert answer.status_code == 400
    assert f"1,200 frames; at most {MAX_PARTS:,}" in answer.text


def test_ollama_takes_pictures_of_every_role(
    http: httpx.Client, service: FakeService, picture: bytes
) -> None:
    image = {"images": [base64.b64encode(picture).decode()]}
    call = {"function": {"name": "look", "arguments": {}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind.", **image},
        {**USER, **image},
        {"role": "assistant", "content": "This.", "tool_calls": [call], **image},
        {"role": "tool", "content": "seen", "tool_name": "look", **image},
    ]
    answer = http.post("/api/chat", json={"model": "pocket", "messages": turns})
    assert answer.status_code == 200, answer.text
    shown = [(each.role, [type(part) for part in each.content]) for each in service.requests[-1].messages]
    assert shown == [
        ("system", [Text]),
        ("user", [Picture, Picture, Text]),
        ("assistant", [Text]),
        ("tool", [Picture, Picture, Text]),
    ]
    assert "showed messages[0].images with the next turn" in answer.headers["snugvl-warning"]
    answer = http.post("/api/chat", json={"model": "pocket", "messages": turns[:1]})
    assert answer.status_code == 200, answer.text
    last = service.requests[-1].messages[-1]
    assert (last.role, [type(part) for part in last.content]) == ("user", [Picture])


def many(count: int) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """The worst conversations that we know, of so many messages, ready to be read."""
    call = {"id": "c", "function": {"name": "f"}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    # Matches no call, matches the last one, comes in the other order.
    strange = [{"role": "tool", "content": "a", "tool_name": "g"}] * count
    ids = [f"c{number}" for number in range(count)]
    ask = [{**asks, "tool_calls": [{**call, "id": each}]} for each in ids]
    answers = [{"role": "tool", "content": "a", "tool_call_id": each} for each in reversed(ids)]
    chats = {"matching nothing": [asks] * count + strange, "in the other order": ask + answers}
    made = {
        name: ChatRequest.model_validate({"model": "m", "messages": each}) for name, each in chats.items()
    }
    head = {"model": "m", "max_tokens": 1}
    turns = MessagesRequest.model_validate({**head, "messages": [USER] * count})
    uses = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": each, "name": "f", "input": {}}]}
        for each in ids
    ]
    results = [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": each, "content": "a"}]}
        for each in reversed(ids)
    ]
    answered = MessagesRequest.model_validate({**head, "messages": [USER, *uses, *results]})
    item = responses.FunctionCallItem(type="function_call", call_id="c", name="f", arguments="{}")
    items: list[Any] = [item.model_copy(update={"call_id": each}) for each in ids]
    items += [
        responses.FunctionCallOutput(type="function_call_output", call_id=each, output="a")
        for each in reversed(ids)
    ]
    function = {"name": "f", "arguments": "{}"}
    said = ChatCompletionRequest.model_validate({"messages": [
        *({"role": "assistant", "content": None, "tool_calls": [{"id": each, "function": function}]}
          for each in ids),
        *({"role": "tool", "tool_call_id": each, "content": "a"} for each in reversed(ids)),
    ]})  # fmt: skip
    return {
        **{
            f"ollama, {name}": lambda each=each: ollama.chat_request(NOBODY, CAPABILITIES, each)  # type: ignore[misc]
            for name, each in made.items()
        },
        "anthropic": lambda: anthropic.request_of(NOBODY, turns),
        "anthropic, in the other order": lambda: anthropic.request_of(NOBODY, answered),
        "responses": lambda: responses.conversation_of([item] * count, None, NOBODY),
        "responses, in the other order": lambda: responses.conversation_of(items, None, NOBODY),
        "chat, in the other order": lambda: chat_conversation(said.messages, NOBODY),
        "a template without calls": lambda: _in_text(count),
    }


def test_a_call_is_answered_once() -> None:
    """By its id, its name, or its place; whichever answered it, the next answer is another call's."""

    def call(name: str, **more: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}, **more}

    def result(**of: str) -> dict[str, Any]:
        return {"role": "tool", "content": "a", **of}

    calls = [call("f", id="a"), call("g", id="b"), call("f", id="c"), call("g"), call("f")]
    answers = [
        result(tool_call_id="a"),
        result(tool_name="f"),
        result(),
        result(tool_name="g"),
        result(),
        result(tool_name="f"),
        result(tool_call_id="b"),
    ]
    asked = {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": calls}, *answers]}
    request = asyncio.run(ollama.chat_request(NOBODY, CAPABILITIES, ChatRequest.model_validate(asked)))
    ids = [message.tool_call_id for message in request.messages if message.role == "tool"]
    # The last two answer what was answered before: their own id, or none.
    assert ids == ["a", "c", "b", "call_1_3", "call_1_4", None, "b"]


async def _in_text(count: int) -> object:
    said = Message("assistant", (), (ToolCall("c", "f", "{}"),))
    return in_text.with_calls([said, *[Message("tool", (Text("a"),), (), "c")] * count])


def steps(work: Coroutine[Any, Any, object]) -> int:
    """Lines of Python that run, and parts of messages that are made: no clock, as machines are busy."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += 1
        if event == "call" and frame.f_code is Message.__init__.__code__:
            count += len(frame.f_locals["content"]) + len(frame.f_locals["tool_calls"])
        if event == "call" and frame.f_code is Text.__init__.__code__:
            count += len(frame.f_locals["text"])
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        asyncio.run(work)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", many(1))
@pytest.mark.sample("ollama, matching nothing", "anthropic", "responses", "chat, in the other order")
def test_reading_is_linear(name: str) -> None:
    few, more = (steps(many(count)[name]()) for count in (150, 600))
    assert more < 6 * few


@pytest.mark.parametrize("kind", ["calls", "pictures", "parts of results"])
def test_whatever_messages_have_many_of_is_counted_first(kind: str, http: httpx.Client) -> None:
    half = MAX_ALL_PARTS // 128 + 1
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text, shown = {"type": "text", "text": "a"}, {**USER, "images": [""] * 64}
    head = {"model": "pocket", "max_tokens": 3}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text] * 1024}
    path, body = {
        "calls": ("/v1/chat/completions", {"messages": [
            {"role": "assistant", "content": None, "tool_calls": [call] * 128}] * half}),
        "pictures": ("/api/chat", {"model": "pocket", "messages": [shown] * 2 * half}),
        "parts of results": ("/v1/messages", {**head, "messages": [
            {"role": "user", "content": [result] * 17}]}),
    }[kind]  # fmt: skip
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert f"parts in all; at most {MAX_ALL_PARTS}" in answer.text


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "pocket", "max_tokens": 3, "messages": [USER]},
    "/api/chat": {"model": "pocket", "messages": [USER]},
    "/api/generate": {"model": "pocket", "prompt": "Hi"},
}


@pytest.mark.parametrize("path", ROUTES)
def test_no_share_of_the_tokens_is_the_likeliest(path: str, http: httpx.Client, service: FakeService) -> None:
    asked: dict[str, Any] = {"top_p": 0, "temperature": 0.7}
    body = {**ROUTES[path], **({"options": asked} if path.startswith("/api") else asked)}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    sampling = service.requests[-1].sampling
    assert (sampling.greedy, sampling.top_p) == (True, 1.0), "not every engine takes 0"


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_no_part_is_no_text(role: str, http: httpx.Client, service: FakeService) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": role, "content": [], **({"tool_call_id": "c"} if role == "tool" else {})}
    asks = [{"role": "assistant", "content": None, "tool_calls": [call]}] if role == "tool" else []
    answer = http.post("/v1/chat/completions", json={"messages": [USER, *asks, turn, USER]})
    assert answer.status_code == 200, answer.text
    assert service.requests[-1].messages[-2].content == ()
    if role == "tool":
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": []}
        answer = http.post("/v1/responses", json={"input": [USER, item, output]})
    else:
        answer = http.post("/v1/responses", json={"input": [turn, USER]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("text", "images", "shown"), [
    ("a [img] b [img] c", 2, ["a ", 0, " b ", 1, " c"]),
    ("[img][img]", 2, [0, 1]),
    ("a [img] b", 2, [1, "a ", 0, " b"]),
    ("a [img] b [img]", 1, ["a ", 0, " b [img]"]),
    ("a [img]", 0, ["a [img]"]),
    ("a", 2, [0, 1, "a"]),
])  # fmt: skip
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_markers_say_where_pictures_stand(
    path: str, text: str, images: int, shown: list[Any], http: httpx.Client, service: FakeService
) -> None:
    """Its rule: the next picture stands where the next marker does; those without one stand first."""
    pictures = [base64.b64encode(png((8 + each, 8))).decode() for each in range(images)]
    said = {"images": pictures, "prompt" if path == "/api/generate" else "content": text}
    body = said if path == "/api/generate" else {"messages": [{"role": "user", **said}]}
    answer = http.post(path, json={"model": "pocket", **body})
    assert answer.status_code == 200, answer.text
    content = service.requests[-1].messages[-1].content
    found = [each.image.width - 8 if isinstance(each, Picture) else each.text for each in content]  # type: ignore[union-attr]
    assert found == shown


def png(size: tuple[int, int]) -> bytes:
    file = BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


def test_no_detail_is_any(http: httpx.Client, service: FakeService, data_url: str) -> None:
    chat = {"type": "image_url", "image_url": {"url": data_url, "detail": None}}
    items = {"type": "input_image", "image_url": data_url, "detail": None}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [chat]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [items]}]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (picture,) = service.requests[-1].messages[0].content
        assert isinstance(picture, Picture)
        assert picture.max_pixels is None
