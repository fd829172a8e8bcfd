"""What every protocol refuses alike, each in its own form: one contract, with the exact words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from snugvl.errors import EngineUnavailable, OutOfMemory, QueueFull, RequestTooLarge, SnugvlError
from tests.server.live import asking
from tests.server.openai.scripted import Scripted

HI = [{"role": "user", "content": "hi"}]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Protocol:
    """How a protocol says what all of them have.

    Attributes:
        body: the least that it takes.
        form: of its errors; takes the answer's JSON and gives the message.
        tool: makes a tool of a name; None where there are none. `tool_at`: the path of the first one.
        choice: makes the choice of a tool by its name; None where there is none.
        sampling: where its sampling fields are: "" for the body itself.
        stop: what it calls stop strings; None where it has none.
        needed: a field that can't be left out, and its whole error.
    """

    path: str
    body: dict[str, Any]
    form: Callable[[Any], str]
    tool: Callable[[str], dict[str, Any]] | None = None
    tool_at: str = "tools[0]"
    choice: Callable[[str], dict[str, Any]] | None = None
    sampling: str = ""
    hottest: int = 2
    stop: str | None = "stop"
    needed: str = "messages"

    def sampled(self, **fields: Any) -> dict[str, Any]:
        return {self.sampling: fields} if self.sampling else fields

    def at(self, field: str) -> str:
        """The path of a sampling field."""
        return f"{self.sampling}.{field}".lstrip(".")


def openai(value: Any) -> str:
    assert value.keys() == {"error"}
    assert value["error"].keys() == {"message", "type", "param", "code"}
    return str(value["error"]["message"])


def anthropic(value: Any) -> str:
    assert (value.keys(), value["type"]) == ({"type", "error", "request_id"}, "error")
    assert value["error"].keys() == {"type", "message"}
    return str(value["error"]["message"])


def ollama(value: Any) -> str:
    assert value.keys() == {"error"}
    return str(value["error"])


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions", {"messages": HI}, openai,
        function, "tools[0].function",
        lambda name: {"type": "function", "function": {"name": name}},
    ),
    "completions": Protocol("/v1/completions", {"prompt": "hi"}, openai, needed="prompt"),
    "responses": Protocol(
        "/v1/responses", {"input": "hi"}, openai,
        lambda name: {"type": "function", "name": name, "parameters": {"type": "object"}},
        choice=lambda name: {"type": "function", "name": name}, stop=None, needed="input",
    ),
    "messages": Protocol(
        "/v1/messages", {"model": "pocket", "max_tokens": 4, "messages": HI}, anthropic,
        lambda name: {"name": name, "input_schema": {"type": "object"}},
        choice=lambda name: {"type": "tool", "name": name}, hottest=1, stop="stop_sequences",
    ),
    "ollama": Protocol(
        "/api/chat", {"model": "pocket", "messages": HI, "stream": False}, ollama,
        function, "tools[0].function", sampling="options", needed="model",
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
WITH_TOOLS = pytest.mark.parametrize(
    "protocol",
    [each for each in PROTOCOLS.values() if each.tool],
    ids=[n for n, p in PROTOCOLS.items() if p.tool],
)


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def http(scripted: Scripted) -> Iterator[httpx.Client]:
    with asking(scripted) as client:
        yield client


@pytest.fixture
def refused(http: httpx.Client, scripted: Scripted) -> Callable[..., str]:
    """The message of a request with these fields, which must not reach the engine."""

    def ask(protocol: Protocol, status: int = 400, **fields: Any) -> str:
        scripted.requests.clear()
        answer = http.post(protocol.path, json={**protocol.body, **fields})
        assert answer.status_code == status, answer.text
        assert not scripted.requests
        return protocol.form(answer.json())

    return ask


@EVERY
def test_another_model(protocol: Protocol, refused: Callable[..., str]) -> None:
    message = refused(protocol, 404, model="other")
    assert message == "the model 'other' is not served here; use 'pocket'"


@EVERY
@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("temperature", 3, "must be at most {hottest}, not 3"),
        ("temperature", "0", "must be a number, not '0'"),
        ("temperature", True, "must be a number, not true"),
        ("top_p", -1, "must be at least 0, not -1"),
        ("top_p", 1.5, "must be at most 1, not 1.5"),
    ],
)
def test_sampling(
    protocol: Protocol, refused: Callable[..., str], field: str, value: object, why: str
) -> None:
    message = refused(protocol, **protocol.sampled(**{field: value}))
    assert message == f"{protocol.at(field)} {why.format(hottest=protocol.hottest)}"


@EVERY
def test_an_empty_stop_string(protocol: Protocol, refused: Callable[..., str]) -> None:
    if protocol.stop is None:
        message = refused(protocol, stop="x")
        assert message == "stop is not supported: there is none here; use /v1/chat/completions"
    else:
        message = refused(protocol, **protocol.sampled(**{protocol.stop: [""]}))
        assert message == f"{protocol.at(protocol.stop)}[0] must not be empty"


@EVERY
def test_what_needs_to_be_there(protocol: Protocol, http: httpx.Client, refused: Callable[..., str]) -> None:
    body = {name: value for name, value in protocol.body.items() if name != protocol.needed}
    answer = http.post(protocol.path, json=body)
    assert (answer.status_code, protocol.form(answer.json())) == (400, f"{protocol.needed} is missing")


@EVERY
def test_what_is_no_request(protocol: Protocol, http: httpx.Client) -> None:
    bodies = {
        b"[]": "the body must be an object",
        b'{"a": }': "the body is not valid JSON: Expecting value at line 1, column 7",
        b'{"a": NaN}': "the body holds NaN, which is not JSON; numbers must be finite",
        b'{"a": 1, "a": 2}': "the key 'a' is in one object of the body twice",
    }
    for body, message in bodies.items():
        answer = http.post(protocol.path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, protocol.form(answer.json())) == (400, message)


@WITH_TOOLS
def test_tools(protocol: Protocol, refused: Callable[..., str]) -> None:
    assert protocol.tool is not None
    tool = protocol.tool
    twice = refused(protocol, tools=[tool("add"), tool("add")])
    assert twice == "tools[1]: the name 'add' is there twice; use another"
    many = refused(protocol, tools=[tool(f"f{number}") for number in range(129)])
    assert many == "tools must have at most 128 in it"
    odd = refused(protocol, tools=[tool("a b")])
    assert odd == f"{protocol.tool_at}.name must match ^[a-zA-Z0-9_-]{{1,128}}$, not 'a b'"


@WITH_TOOLS
def test_a_choice_that_is_not_offered(protocol: Protocol, refused: Callable[..., str]) -> None:
    assert protocol.tool is not None
    if protocol.choice is None:
        return
    tools, choice = [protocol.tool("add")], protocol.choice("sub")
    expected = "tool_choice names 'sub', which tools doesn't have ('add')"
    assert refused(protocol, tools=tools, tool_choice=choice) == expected
    expected = "tool_choice names 'sub', which tools doesn't have (no tools)"
    assert refused(protocol, tool_choice=choice) == expected
    # A choice reaches the engine as a word or a name: a tool called like a word can't be chosen by it.
    expected = "tools[0]: the name 'auto' is a word of tool_choice; use another"
    tools, choice = [protocol.tool("auto")], protocol.choice("auto")
    assert refused(protocol, tools=tools, tool_choice=choice) == expected


ERRORS: list[tuple[SnugvlError, int, str | None]] = [
    (QueueFull("too many requests wait"), 429, None),
    (EngineUnavailable("the engine starts", retry_after_s=3.2), 503, "4"),
    (OutOfMemory("no block is free"), 503, None),
]


@EVERY
@pytest.mark.parametrize(
    ("error", "status", "after"), ERRORS, ids=[type(each[0]).__name__ for each in ERRORS]
)
def test_what_the_engine_refuses(
    protocol: Protocol,
    http: httpx.Client,
    scripted: Scripted,
    error: SnugvlError,
    status: int,
    after: str | None,
) -> None:
    def refuse(_: object) -> Any:
        raise error

    scripted.answer, before = refuse, scripted.answer
    try:
        answer = http.post(protocol.path, json=protocol.body)
    finally:
        scripted.answer = before
    assert (answer.status_code, protocol.form(answer.json())) == (status, str(error))
    assert after is None or answer.headers["retry-after"] == after


@EVERY
def test_a_prompt_beyond_the_context(protocol: Protocol, http: httpx.Client, scripted: Scripted) -> None:
    def refuse(_: object) -> Any:
        raise RequestTooLarge("the prompt has 600 tokens", field="prompt_ids")

    scripted.answer, before = refuse, scripted.answer
    try:
        answer = http.post(protocol.path, json=protocol.body)
    finally:
        scripted.answer = before
    message = "This model's maximum context length is 512 tokens. the prompt has 600 tokens"
    prefix = "prompt is too long: " if protocol.form is anthropic else ""  # what its clients look for
    assert protocol.form(answer.json()) == prefix + message
    if protocol.form is openai:
        assert answer.json()["error"]["param"] == protocol.needed
