"""Bytes and their times to what happened."""

import json

import pytest

from snugvl.bench.load import Exchange, events, read
from tests.bench.fake import chunk, event


def exchange(*chunks: tuple[float, bytes], status: int = 200) -> Exchange:
    return Exchange(1.0, 9.0, status, chunks)


def test_an_answer() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    found = read(
        exchange(
            (2.0, event(chunk({"role": "assistant", "content": ""}))),
            (3.0, event(chunk({"content": "a"})) + event(chunk({"content": "b"}))),
            (4.0, event(chunk({"content": "c"}))),
            (5.0, event(chunk({}, "length"))),
            (5.5, event(usage) + event(b"[DONE]")),
        )
    )
    assert found.pieces_s == (3.0, 3.0, 4.0)
    assert (found.sent_s, found.ended_s) == (1.0, 9.0)
    assert (found.prompt_tokens, found.output_tokens, found.counted_by) == (7, 5, "usage")
    assert (found.finish_reason, found.finished_s) == ("length", 5.0)
    assert found.error is None


def test_without_usage_pieces_are_counted() -> None:
    found = read(
        exchange((2.0, event(chunk({"content": "a"}))), (3.0, event(chunk({"content": "b"}, "stop"))))
    )
    assert (found.output_tokens, found.counted_by, found.prompt_tokens) == (2, "pieces", None)
    assert found.error is None


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    data = event(chunk({"content": "ü"}))
    pieces = tuple((float(at), data[at : at + 1]) for at in range(len(data)))
    found = list(events(pieces))
    assert [json.loads(value)["choices"][0]["delta"]["content"] for _, value in found] == ["ü"]
    assert found[0][0] == len(data) - 2  # the first of the two line ends


def test_lines_may_end_in_crlf_and_hold_comments() -> None:
    assert list(events(((1.0, b": ping\r\ndata: {}\r\n\r\nevent: x\r\n"),))) == [(1.0, b"{}")]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls", "content"])
def test_every_kind_of_text_is_a_token(name: str) -> None:
    found = read(exchange((2.0, event(chunk({name: "x"}))), (3.0, event(chunk({}, "stop")))))
    assert found.pieces_s == (2.0,)


def test_a_token_whose_text_is_held_back_is_one() -> None:
    found = read(
        exchange((2.0, event(chunk({"content": ""}))), (3.0, event(chunk({"content": "x"}, "stop"))))
    )
    assert found.pieces_s == (2.0, 3.0)


@pytest.mark.parametrize(
    ("chunks", "status", "error", "message"),
    [
        ([b'{"error": {"message": "too many", "code": "queue_full"}}'], 429, "429 queue_full", "too many"),
        ([b'{"error": {"message": "no", "type": "server_error"}}'], 500, "500 server_error", "no"),
        ([b'{"error": {"message": "no", "code": 400}}'], 400, "400", "no"),
        ([b'{"error": "plain"}'], 404, "404", "plain"),
        ([b'["odd"]'], 400, "400", ""),
        ([b"<html>  Bad\nGateway"], 502, "502", "<html> Bad Gateway"),
        ([event({"error": {"message": "died", "code": "engine_error"}})], 200, "stream engine_error", "died"),
        ([event(chunk({"content": "a"}))], 200, "broke off", "ended before"),
        ([event(chunk({}, "stop")), event(b"[DONE]")], 200, "no tokens", "empty"),
        ([event(b"{oh")], 200, "not JSON", "{oh"),
        ([event([1])], 200, "not JSON", "[1]"),
        ([event(b"[" * 100_000)], 200, "not JSON", "[[["),
        ([b"[" * 100_000], 400, "400", "[[["),
        ([b'{"choices": [{"message": {}}]}'], 200, "broke off", "ended before"),
    ],
)
def test_what_goes_wrong(chunks: list[bytes], status: int, error: str, message: str) -> None:
    found = read(exchange(*((2.0, data) for data in chunks), status=status))
    assert found.error == error
    assert message in (found.message or "")


def test_the_network_fails() -> None:
    found = read(Exchange(0.0, 3.0, None, (), ("timeout", "no bytes for 3 s")))
    assert (found.error, found.message, found.latency_s) == ("timeout", "no bytes for 3 s", 3.0)
    begun = Exchange(0.0, 3.0, 200, ((1.0, event(chunk({"content": "a"}))),), ("connection", "reset"))
    assert read(begun).error == "connection"
    assert read(begun).pieces_s == (1.0,)
