"""What goes wrong between a client and a server: the same exceptions as with a loaded model."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from PIL import Image

import snugvl
from snugvl import AsyncClient, Client, Message, SamplingParams, errors, user
from snugvl.cli.app import run
from snugvl.client import connection
from snugvl.client.connection import Sockets, address_of
from snugvl.core.messages import Picture, Text, Video
from snugvl.core.service import Health
from snugvl.server.settings import ServerSettings
from tests.client.conftest import RawServer, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.live import live

PICTURE = Image.new("RGB", (16, 12), "red")

RAISED = [
    errors.RequestTooLarge("needs 9,000 tokens; the context has 2,048", field="messages"),
    errors.RequestError("temperature is wrong", field="temperature"),
    errors.ImageError("not a picture"),
    errors.ImageTooLarge("too many pixels"),
    errors.BodyTooLarge("too many bytes"),
    errors.Unauthorized("the key is wrong"),
    errors.ModelNotServed("not served here"),
    errors.RateLimited("slower", retry_after_s=120),
    errors.QueueFull("9 requests are waiting"),
    errors.DeadlineExceeded("too late"),
    errors.EngineUnavailable("restarting", retry_after_s=120),
    errors.EngineError("the engine failed"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_refusal_is_the_same_exception(
    engine: ScriptedEngine, scripted: str, error: snugvl.SnugvlError
) -> None:
    def refuse(_: object) -> str:
        raise error

    async def asked() -> None:
        async with AsyncClient(scripted, max_retries=0) as client:
            await client.caption(PICTURE)

    engine.backend._script = refuse
    with Client(scripted, max_retries=0) as client:
        for call in (client.caption, client.stream_caption, client.detect, client.scene):
            check(error, lambda call=call: call(PICTURE))
        check(error, lambda: client.chat(user("hello")))
        check(error, lambda: client.stream_chat(user("hello")))
    check(error, lambda: asyncio.run(asked()))


def check(wanted: snugvl.SnugvlError, call: Callable[[], Any]) -> None:
    with pytest.raises(snugvl.SnugvlError) as caught:
        call()
    assert type(caught.value) is type(wanted)
    if type(wanted) is not errors.EngineError:  # a server doesn't tell strangers about its faults
        said = str(caught.value)
        if isinstance(wanted, errors.RequestTooLarge):  # it begins in the words that clients look for
            said = said.partition("tokens. ")[2]
        assert said == str(wanted)
    for name in ("field", "retry_after_s"):
        assert getattr(caught.value, name, None) == getattr(wanted, name, None)


@pytest.mark.parametrize("error", [errors.EngineError("the engine failed"), errors.DeadlineExceeded("late")])
def test_an_error_in_the_middle_of_a_stream(
    engine: ScriptedEngine, scripted: str, error: snugvl.SnugvlError
) -> None:
    async def read() -> None:
        async with AsyncClient(scripted) as client, await client.stream_chat(user("hello")) as stream:
            async for _ in stream:
                pass

    engine.backend._script = lambda _: error
    with Client(scripted) as client:
        check(error, lambda: list(client.stream_caption(PICTURE)))
        check(error, lambda: list(client.stream_chat(user("hello"))))
    check(error, lambda: asyncio.run(read()))


def test_an_answer_that_is_not_what_the_task_asked_for(engine: ScriptedEngine, scripted: str) -> None:
    engine.backend._script = lambda _: "no idea"
    with Client(scripted) as client, pytest.raises(snugvl.OutputError, match="no idea"):
        client.scene(PICTURE)
    assert len(engine.backend.requests) == 1  # asked again it would say the same


def test_keys_and_names(engine: ScriptedEngine) -> None:
    with live(engine, ServerSettings(names=("a", "b"), api_keys=("secret",))) as base:
        with Client(base, api_key="secret", model="b") as client:
            assert client.caption(PICTURE).text == "A picture of 16x12."
            assert client.models() == ("a", "b")
        with Client(base) as client, pytest.raises(snugvl.Unauthorized, match=f"^{base} wants an API key$"):
            client.caption(PICTURE)
        wrong = pytest.raises(snugvl.Unauthorized, match="API key is wrong")
        with Client(base, api_key="guess") as client, wrong:
            client.models()
        with (
            Client(base, api_key="secret", model="c") as client,
            pytest.raises(snugvl.ModelNotServed, match="'a' or 'b'"),
        ):
            client.caption(PICTURE)


def test_busy_is_tried_again_when_the_server_says(raw: RawServer) -> None:
    error = {"error": {"message": "full", "type": "", "param": None, "code": "queue_full"}}
    raw.says(429, json.dumps(error).encode(), Retry_After="0.01")
    raw.says(503, b"{}", Retry_After="0.01")
    raw.says(200, b'{"text": "x"}')
    with Client(raw.url) as client:
        assert client.caption(PICTURE).text == "x"
    assert len({asked.body for asked in raw.asked}) == 1
    assert len(raw.asked) == 3


def test_busy_is_told_after_the_last_try(raw: RawServer) -> None:
    raw.says(503, b"{}", Retry_After="0.01")
    with Client(raw.url, max_retries=1) as client, pytest.raises(snugvl.EngineUnavailable, match="503"):
        client.caption(PICTURE)
    assert len(raw.asked) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 502, 504, 507])
def test_nothing_else_is_tried_again(raw: RawServer, status: int) -> None:
    async def asked() -> None:
        async with AsyncClient(raw.url) as client:
            await client.caption(PICTURE)

    raw.says(status)
    with Client(raw.url) as client, pytest.raises(snugvl.SnugvlError, match=f"answered {status}"):
        client.caption(PICTURE)
    assert len(raw.asked) == 1
    with pytest.raises(snugvl.SnugvlError, match=f"answered {status}"):
        asyncio.run(asked())
    assert len(raw.asked) == 2


def test_https_where_there_is_none() -> None:
    error = connection.httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    sdks = openai.APIConnectionError(request=connection.httpx.Request("GET", "https://box:8123/health"))
    sdks.__cause__ = error
    said = str(connection.translated(sdks, address_of("https://box:8123")))
    assert said == "what answers at https://box:8123 doesn't speak https; use http://box:8123"


def test_nobody_there(unused_url: str) -> None:
    async def asked() -> None:
        async with AsyncClient(unused_url, max_retries=0) as client:
            await client.health()

    port = unused_url.rpartition(":")[2]
    wanted = (
        rf"no server answers at {unused_url} \([^\[]*refused\); start one with `snugvl serve --port {port}`"
    )
    with Client(unused_url, max_retries=0) as client:
        for call in (client.health, client.memory, client.models, lambda: client.caption(PICTURE)):
            with pytest.raises(snugvl.EngineUnavailable, match=wanted):
                call()
    with pytest.raises(snugvl.EngineUnavailable, match="snugvl serve"):
        asyncio.run(asked())


def test_a_server_that_takes_too_long(raw: RawServer) -> None:
    with (
        Client(raw.url, timeout=0.1, max_retries=0) as client,
        pytest.raises(snugvl.DeadlineExceeded, match="in time"),
    ):
        client.caption(PICTURE)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<html>hello</html>", "text/html"),
        (b"[]", "application/json"),
        (b'{"text": 3}', "application/json"),
        (b"{}", "application/json"),
    ],
)
def test_something_that_is_no_snugvl_server(raw: RawServer, body: bytes, kind: str) -> None:
    raw.says(200, body, Content_Type=kind)
    with Client(raw.url) as client:
        calls = (client.health, client.memory, client.models, lambda: client.chat(user("x")))
        for call in (*calls, lambda: client.caption(PICTURE)):
            with pytest.raises(snugvl.EngineError, match="is it a snugvl server"):
                call()


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b'data: {"delta": "A"}\n\n', 999),  # the connection ends before the body does
        (b'data: {"delta": "A"}\n\ndata: {"del\n\n', None),
        (b'data: {"delta": "A"}\n\ndata: [1]\n\n', None),
    ],
)
def test_a_stream_that_breaks_off(raw: RawServer, body: bytes, length: int | None) -> None:
    raw.says(200, body, Content_Type="text/event-stream", Content_Length=str(length or len(body)))

    async def read() -> None:
        async with AsyncClient(raw.url) as client, await client.stream_caption(PICTURE) as stream:
            async for _ in stream:
                pass

    with Client(raw.url) as client, client.stream_caption(PICTURE) as stream:
        pieces = iter(stream)
        assert next(pieces).text == "A"
        with pytest.raises(snugvl.EngineError):
            next(pieces)
    with pytest.raises(snugvl.EngineError):
        asyncio.run(read())


def test_closing_ends_what_waits_in_another_thread(raw: RawServer) -> None:
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            client.caption(PICTURE)
        except BaseException as error:
            raised.append(error)

    client = Client(raw.url, max_retries=0)
    threads = [threading.Thread(target=ask) for _ in range(8)]  # some are still on their way
    for thread in threads:
        thread.start()
    assert raw.held.wait(PATIENCE_S)
    client.close()
    client.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert [isinstance(error, snugvl.EngineError) for error in raised] == [True] * 8
    with pytest.raises(snugvl.EngineError, match="client is closed"):
        client.models()


def test_a_socket_that_opens_while_its_client_closes_is_shut() -> None:
    request, sockets = connection.httpx.Request("GET", "http://a"), Sockets()
    sockets.watch(request)
    sockets.shut()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)  # it was shut when the call returned
        opened = Mock(get_extra_info={"socket": ours}.get)
        request.extensions["trace"]("connection.connect_tcp.complete", {"return_value": opened})
        assert theirs.recv(1) == b""


def test_nothing_of_openai_leaves_for_the_server(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", "private")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://192.0.2.1/v1")
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:1")
    raw.says(200, b'{"text": "x"}')
    with Client(raw.url) as client:
        client.caption(PICTURE)
        assert isinstance(client.openai, openai.OpenAI)

    async def asked() -> None:
        async with AsyncClient(raw.url) as client:
            await client.caption(PICTURE)

    raw.says(200, b'{"text": "x"}')
    asyncio.run(asked())
    assert len(raw.asked) == 2
    for each in raw.asked:
        assert "private" not in str(each.headers)


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://a b", "http://x?y", "//x", "http://x:port"]
)
def test_a_wrong_address_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(snugvl.RequestError, match="not the address of a server"):
            kind(url)


@pytest.mark.parametrize(
    "options", [{"api_key": ""}, {"api_key": "a\nb"}, {"api_key": "ö"}, {"timeout": 0}, {"max_retries": -1}]
)
def test_a_wrong_option_is_refused(options: dict[str, Any]) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(snugvl.RequestError) as caught:
            kind(**options)
        assert [caught.value.field] == list(options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.caption(PICTURE, detail="long"), "detail must be one of"),
        (lambda c: c.ask([], "What?"), "at least one image"),
        (lambda c: c.ask(PICTURE, " "), "question is empty"),
        (lambda c: c.detect(PICTURE, ["a, b"]), "its own name"),
        (lambda c: c.detect(PICTURE, 42), "objects must be names, not 42"),
        (lambda c: c.caption(PICTURE, sampling=SamplingParams(n=2)), "n must be 1"),
        (lambda c: c.chat(Message("assistant", (Picture(PICTURE),))), "holds text only"),
        (lambda c: c.chat(user(Picture(PICTURE, 4096))), "max_pixels"),
        (lambda c: c.chat(user(Video((PICTURE,), (0.0,)))), "sends videos as files"),
        (lambda c: c.caption(PICTURE, sampling=SamplingParams(top_k=3)), "top_k"),
    ],
)
def test_what_a_server_can_not_do_is_refused(
    engine: ScriptedEngine, scripted: str, call: Callable[[Client], Any], message: str
) -> None:
    with Client(scripted) as client, pytest.raises(snugvl.RequestError, match=message):
        call(client)
    assert engine.backend.requests == []


def test_a_server_that_is_starting_is_not_ready(engine: ScriptedEngine, scripted: str) -> None:
    engine.health = Health("starting", "loading the weights", 0.25, retry_after_s=3.0)
    with Client(scripted) as client:
        health = client.health()
    assert (health.state, health.detail, health.progress) == ("starting", "loading the weights", 0.25)


def test_text_parts_are_joined(engine: ScriptedEngine, scripted: str) -> None:
    with Client(scripted) as client:
        client.chat((Message("system", (Text("a"), Text("b"))), user("x")))
    assert "".join(part.text for part in engine.backend.requests[0].messages[0].content) == "ab"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, snugvl.Unauthorized),
        (403, snugvl.Unauthorized),
        (413, errors.BodyTooLarge),
        (429, errors.RateLimited),
        (502, snugvl.EngineUnavailable),
        (503, snugvl.EngineUnavailable),
        (504, errors.DeadlineExceeded),
        (500, errors.EngineError),
        (400, snugvl.RequestError),
    ],
)
def test_a_proxys_answer_is_told_by_its_status(
    raw: RawServer, status: int, kind: type[snugvl.SnugvlError]
) -> None:
    raw.says(status, b"<html>whatever</html>")
    with Client(raw.url, max_retries=0) as client, pytest.raises(snugvl.SnugvlError) as caught:
        client.caption(PICTURE)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8123", "http://127.0.0.1:8123"), (":8000/v1", "http://127.0.0.1:8000"),
        ("HTTPS://box/v1/", "https://box"), ("http://[::1]:80", "http://[::1]:80"),
        *((wrong, None) for wrong in ("http://127.0.0.1:99999", "http://127.0.0.1:0", "http://[::1", "http://:80",
          "http://a b", "http://h/?x=1", "ftp://h", "localhost", "")),
    ],
)  # fmt: skip
def test_what_is_a_servers_address(given: str, url: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Port 99999 had been tried, and `snugvl serve --port 99999` recommended."""
    if url is not None:
        assert address_of(given).root == url
        return
    with pytest.raises(snugvl.RequestError, match="is not the address of a server; give one such as http"):
        address_of(given)
    if given:  # as a variable that is empty, it stands for none
        assert run(["caption", "x.png", "--server", given]) == 2
        assert "is not the address of a server" in capsys.readouterr().err
