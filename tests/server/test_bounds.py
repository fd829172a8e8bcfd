"""No request makes the server do unbounded work, and each keeps its place until its work has ended."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from select import select
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import FormData, UploadFile

from snugvl.core.messages import Request
from snugvl.inputs.pixels import ImagePreprocessor
from snugvl.server import body as body_module
from snugvl.server import connection, fields
from snugvl.server import run as run_module
from snugvl.server.body import MAX_VALUES, count_values, parse_json
from snugvl.server.errors import InvalidRequest
from snugvl.server.media.loading import MediaLoader
from snugvl.server.receiving import SMALL_BYTES, BodyBudget
from snugvl.server.settings import ServerSettings
from tests.draws import draws
from tests.patience import PATIENCE_S, until
from tests.server.fake import CAPABILITIES, FakeService, FakeStream
from tests.server.live import live
from tests.server.raw import connect, head, read_all

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LONG_S = 60.0  # until a test has failed


class Stubborn(FakeService):
    """Prepares until it is let go, whoever has left meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.preparing = 0

    async def submit(self, request: Request) -> FakeStream:
        self.preparing += 1
        work = asyncio.ensure_future(asyncio.to_thread(self.go.wait, LONG_S))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
        finally:
            self.preparing -= 1
        return await super().submit(request)


def test_the_deadline_holds_while_a_prompt_is_prepared() -> None:
    for deadline_s in (0.3, 3.0, 30.0):  # a busy machine may need more than the first until it is prepared
        service = Stubborn()
        with live(service, ServerSettings(deadline_s=deadline_s, max_concurrent=1)) as base:
            answer = httpx.post(base + "/v1/chat/completions", json=CHAT, timeout=LONG_S)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            if not service.preparing:
                continue
            # The work goes on, so its place is taken.
            assert httpx.post(base + "/v1/chat/completions", json=CHAT, timeout=LONG_S).status_code == 429
            service.go.set()
            while service.preparing:
                time.sleep(0.01)
            while httpx.post(base + "/v1/chat/completions", json=CHAT, timeout=LONG_S).status_code != 200:
                pass
            return
    raise AssertionError("the prompt was never prepared")


def test_whoever_left_keeps_the_place_until_the_work_has_ended() -> None:
    service = Stubborn()
    data = json.dumps(CHAT).encode()
    with live(service, ServerSettings(max_concurrent=2)) as base:
        links = [connect(base, head(len(data), "/v1/chat/completions") + data) for _ in range(2)]
        until(lambda: service.preparing == 2)
        for link in links:
            link.close()
        for _ in range(5):
            assert httpx.post(base + "/v1/chat/completions", json=CHAT).status_code == 429
        service.go.set()
        until(lambda: not service.preparing)
        until(lambda: httpx.post(base + "/v1/chat/completions", json=CHAT).status_code == 200)


def test_a_body_that_comes_too_slowly_meets_the_deadline() -> None:
    with live(FakeService(), ServerSettings(deadline_s=0.3)) as base, connect(base, head(100)) as link:
        assert read_all(link).startswith(b"HTTP/1.1 504")


def test_bytes_of_bodies_are_counted_while_they_are_held() -> None:
    held = BodyBudget(3 * SMALL_BYTES)
    held.add(2 * SMALL_BYTES, 2 * SMALL_BYTES)
    held.add(SMALL_BYTES, SMALL_BYTES)
    held.add(SMALL_BYTES, SMALL_BYTES)  # a small one always has room
    with pytest.raises(Exception, match="requests that are under way hold 4,194,304 of 3,145,728 bytes"):
        held.add(1, SMALL_BYTES + 1)
    held.remove(2 * SMALL_BYTES)
    held.add(1, SMALL_BYTES + 1)


def test_too_many_large_bodies_at_once_are_refused_and_room_comes_back() -> None:
    size = 3 * SMALL_BYTES
    with live(FakeService(), ServerSettings(max_body_bytes=size)) as base:
        links = [connect(base, head(size) + b" " * (size - 1)) for _ in range(3)]
        assert refused(links) == 1, "two of the largest are held at once"
        for link in links:
            link.close()
        text = json.dumps({"prompt": "x" * (size - 100)})
        until(lambda: httpx.post(base + "/tokenize", content=text, headers=JSON).status_code == 200)


def test_a_large_body_has_room_for_all_of_it_or_is_refused_while_little_came() -> None:
    size = 3 * SMALL_BYTES
    with live(FakeService(), ServerSettings(max_body_bytes=size)) as base:
        little = head(size) + b" " * (SMALL_BYTES + 1)
        links = [connect(base, little) for _ in range(3)]
        assert refused(links) == 1, "the third would have no room"
        for link in links:
            link.close()


def test_the_parser_is_fed_in_small_pieces_but_for_what_is_sure_to_be_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece may hold as many requests as fit; a body of announced length holds none."""
    pieces: list[int] = []
    parse = connection.BoundedProtocol._parse

    def noting(protocol: connection.BoundedProtocol, piece: memoryview) -> None:
        pieces.append(len(piece))
        parse(protocol, piece)

    monkeypatch.setattr(connection.BoundedProtocol, "_parse", noting)
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    behind = (get + b"\r\n") * 99 + get + b"Connection: close\r\n\r\n"
    size = 900_000
    body = b'{"prompt":""' + b" " * (size - 13) + b"}"
    chunk = b"%x\r\n" % size + body + b"\r\n0\r\n\r\n"
    chunked = head(size).replace(b"Content-Length: %d" % size, b"Transfer-Encoding: chunked")
    assert b"chunked" in chunked
    with live(FakeService()) as base:
        for data, whole in ((head(size) + body, True), (chunked + chunk, False)):
            pieces.clear()
            with connect(base, data + behind) as link:
                assert read_all(link).count(b"HTTP/1.1 200") == 101
            assert (max(pieces) > connection.BODY_PIECE_BYTES) == whole, pieces
            assert all(piece <= connection.BODY_PIECE_BYTES for piece in pieces[-2:])


JSON = {"content-type": "application/json"}


def refused(links: Sequence[socket.socket]) -> int:
    """How many of several requests are refused: one has to be, others within a moment."""
    assert select(links, (), (), PATIENCE_S)[0]
    time.sleep(0.3)
    return sum(link.recv(12).endswith(b"429") for link in select(links, (), (), 0)[0])


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/messages/count_tokens"]
)
def test_text_that_cannot_fit_never_goes_to_the_engine(path: str) -> None:
    service = FakeService(capabilities=replace(CAPABILITIES, most_characters=1000))
    text = " " * 1001
    body = (
        {"prompt": text}
        if path in ("/v1/completions", "/tokenize")
        else {"messages": [{"role": "user", "content": text}]}
    )
    if path.endswith("count_tokens"):
        body["model"] = "pocket"
    with live(service) as base:
        answer = httpx.post(base + path, json=body)
    assert answer.status_code == 400
    assert "1,001 characters" in answer.text
    assert not service.requests


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


def separators(value: object) -> int:
    """Commas, brackets and braces of a value's JSON."""
    if not isinstance(value, list | dict):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(len(items) - 1, 0) + sum(map(separators, items))


@draws(300)
@given(value=VALUES, plain=st.booleans(), piece=st.integers(1, 40))
def test_values_are_counted_without_parsing(value: object, plain: bool, piece: int) -> None:
    data = json.dumps(value, ensure_ascii=plain).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_PIECE_BYTES", piece)
        assert count_values(data) == 1 + separators(value)


@draws(200)
@given(data=st.text('"\\,[{a', max_size=60).map(str.encode), piece=st.integers(1, 9))
def test_pieces_do_not_change_the_count(data: bytes, piece: int) -> None:
    whole = count_values(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_PIECE_BYTES", piece)
        assert count_values(data) == whole


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"[" + b"{}," * MAX_VALUES + b"1]", "more than 300,000 values"),
        (b"{" + b'"a":1,' * MAX_VALUES + b'"a":1}', "more than 300,000 values"),
        (b"[" + b"9" * 401 + b"]", "more than 400 digits"),
    ],
)
def test_json_that_would_take_long_is_not_parsed(data: bytes, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        parse_json(data)


def test_commas_in_a_string_are_text() -> None:
    assert parse_json(json.dumps({"a": "," * (2 * MAX_VALUES)}).encode()) == {"a": "," * (2 * MAX_VALUES)}


def test_names_of_a_form_are_counted_before_they_are_split() -> None:
    with live(FakeService()) as base:
        answer = httpx.post(base + "/v1/vision/detect", data={"objects": "," * 1000}, files={"image": b"x"})
    assert answer.status_code == 400
    assert "objects has 1,001 names; at most 200" in answer.json()["error"]["message"]


def test_arguments_of_a_call_are_counted_before_they_are_parsed() -> None:
    arguments = '{"a": [' + "{}," * 20_000 + "1]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    with live(FakeService()) as base:
        answer = httpx.post(base + "/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "more than 10,000 values" in answer.json()["error"]["message"]


def test_pictures_are_counted_by_their_sizes(pocket: object, url: str, data_url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url}}
    text = {"type": "text", "text": "Describe."}
    messages = [{"role": "user", "content": [part, text]}]
    with patch.object(ImagePreprocessor, "prepare", side_effect=AssertionError("cut into patches")):
        counted = httpx.post(url + "/tokenize", json={"messages": messages}, timeout=LONG_S).json()
    asked = {"messages": messages, "max_tokens": 1}
    answered = httpx.post(url + "/v1/chat/completions", json=asked, timeout=LONG_S).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    assert counted["image_tokens"] == answered["usage"]["prompt_tokens_details"]["image_tokens"] > 0


@pytest.mark.parametrize("count", [250, 257])
@pytest.mark.parametrize("where", ["the body", "a message"])
def test_fields_of_an_object_are_counted(where: str, count: int) -> None:
    strange = {f"k{each}": 0 for each in range(count)}
    messages = [{**CHAT["messages"][0], **(strange if where == "a message" else {})}]
    body = {"messages": messages, **(strange if where == "the body" else {})}
    with live(FakeService()) as base:
        answer = httpx.post(base + "/v1/chat/completions", json=body)
    assert answer.status_code == (200 if count == 250 else 400)
    if count > 256:
        assert "fields; at most 256" in answer.json()["error"]["message"]


def many_messages(path: str, count: int) -> dict[str, Any]:
    """A body of the protocol that has this path, of more than `LARGE_BYTES`."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": "a" * 200} for i in range(count)]
    if path == "/v1/responses":
        return {"input": turns}
    return {"model": "pocket", "messages": turns} | ({} if path == "/api/chat" else {"max_tokens": 5})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_large_body_is_checked_beside_the_event_loop_and_worked_at_in_turns(path: str) -> None:
    threads, turns, sleep = set[str](), [], asyncio.sleep
    check = fields._check_names

    def noted(values: dict[str, Any]) -> None:
        if not {"role", "messages", "input"}.isdisjoint(values):
            threads.add(threading.current_thread().name.partition("_")[0])
        check(values)

    async def counted(seconds: float, *more: Any) -> None:
        turns.append(seconds)
        await sleep(seconds)

    body = many_messages(path, 501)
    with live(FakeService()) as base, patch.object(fields, "_check_names", noted):
        with patch.object(fields.asyncio, "sleep", counted):
            answer = httpx.post(base + path, json={**body, "nobody_knows": 1}, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        assert "nobody_knows" in answer.headers["Snugvl-Warning"], "the thread knows the request"
        assert threads == {"snugvl-json"}
        loops = 3 if path == "/v1/messages" else 2  # over all messages
        assert turns.count(0) >= loops * (501 // fields.TURN)
        key = "input" if "input" in body else "messages"
        wrong = {**body, key: [*body[key], {"role": "user", "content": 7}]}
        large = httpx.post(base + path, json=wrong, timeout=LONG_S).json()
        small = httpx.post(base + path, json={**body, key: wrong[key][-1:]}, timeout=LONG_S).json()
        assert json.dumps(large["error"]).replace("[501]", "[0]") == json.dumps(small["error"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_more_messages_than_the_context_has_tokens_never_reach_the_engine(path: str) -> None:
    service = FakeService()
    with live(service) as base:
        answer = httpx.post(base + path, json=many_messages(path, 513), timeout=LONG_S)
        assert answer.status_code == 400
        assert "513 messages" in answer.text
        assert "maximum context length is 512 tokens" in answer.text
        assert not service.requests


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{DOT}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DOT}
ANTHROPIC = [{"type": "image", "source": SOURCE}] * 3
THREE_PICTURES: dict[str, tuple[dict[str, Any], str | None]] = {  # bodies, and the field of the third
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}] * 3}]},
        "messages[0].content[2]",
    ),
    "/v1/responses": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}] * 3}]},
        "input[0].content[2]",
    ),
    "/v1/messages": (
        {"model": "pocket", "max_tokens": 5, "messages": [{"role": "user", "content": ANTHROPIC}]},
        None,
    ),
    "/api/chat": (
        {"model": "pocket", "messages": [{"role": "user", "content": "a", "images": [DOT] * 3}]},
        None,
    ),
    "/api/generate": ({"model": "pocket", "prompt": "a", "images": [DOT] * 3}, None),
    "/v1/vision/ask": ({"question": "a", "images": [URL] * 3}, "images[2]"),
}


@pytest.mark.parametrize("path", THREE_PICTURES)
def test_more_pictures_than_the_model_takes_are_refused_before_one_is_fetched(path: str) -> None:
    service, fetched = FakeService(), []
    service.capabilities = replace(CAPABILITIES, most_images=2)

    async def noted(*given: Any, **named: Any) -> None:
        fetched.append(named)

    body, field = THREE_PICTURES[path]
    with live(service) as base, patch.object(MediaLoader, "_bytes", noted):
        answer = httpx.post(base + path, json=body, timeout=LONG_S)
    assert answer.status_code == 400
    assert "the conversation has 3 pictures, and fake was started to take at most 2" in answer.text
    assert field is None or answer.json()["error"]["param"] == field
    assert not fetched


def test_pictures_that_are_only_counted_may_be_more() -> None:
    service = FakeService()
    service.capabilities = replace(CAPABILITIES, most_images=2)
    body = {key: value for key, value in THREE_PICTURES["/v1/messages"][0].items() if key != "max_tokens"}
    with live(service) as base:
        answer = httpx.post(f"{base}/v1/messages/count_tokens", json=body, timeout=LONG_S)
        assert answer.status_code == 200, answer.text


def test_threads_of_a_server_let_its_event_loop_go_on_soon() -> None:
    """Each time it waits for Python's lock while a large body is read."""
    seen: list[float] = []

    def noted(serving: Coroutine[Any, Any, int]) -> int:
        serving.close()
        seen.append(sys.getswitchinterval())
        return 0

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)  # as Python has it, whatever ran here before
    try:
        with patch("uvloop.run", noted), patch.object(run_module, "hide"), socket.socket() as listener:
            run_module.run(FakeService(), ServerSettings(), listener, lambda _: None)
    finally:
        sys.setswitchinterval(before)
    assert seen == [pytest.approx(run_module.SWITCH_S)]
    assert seen[0] < 0.005


@pytest.mark.parametrize("path", ["/v1/vision/ask", "/v1/chat/completions"])
def test_files_of_a_form_are_there_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the form has of a file is gone as soon as it was read, not only when the form ends."""
    kept: list[bool] = []
    close = FormData.close

    async def noted(form: FormData) -> None:
        kept.extend(not entry.file.closed for _, entry in form.multi_items() if isinstance(entry, UploadFile))
        await close(form)

    monkeypatch.setattr(FormData, "close", noted)
    files: Any = [("image", ("a.png", b"no picture")), ("request", (None, json.dumps(CHAT)))]
    with live(FakeService()) as base:
        httpx.post(base + path, files=files, timeout=LONG_S)
    assert kept == [False]
