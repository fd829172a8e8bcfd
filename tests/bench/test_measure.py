"""A whole measurement of a scripted server."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import Response

from snugvl.bench import measure
from snugvl.bench.measure import BenchmarkRun, BenchmarkSettings, free_port
from snugvl.bench.report import BenchmarkReport, report
from snugvl.bench.result import BenchmarkResult, load, to_json
from snugvl.bench.workload import Workload
from snugvl.errors import (
    EngineError,
    EngineUnavailable,
    InputError,
    ModelNotServed,
    RequestError,
    RequestTooLarge,
    SnugvlWarning,
    Unauthorized,
)
from snugvl.tasks.training import FEW, PHOTOGRAPH, VIDEO
from tests.bench.fake import Fake, answer, event, refusal, serving, streamed
from tests.patience import PATIENCE_S

WORK = Workload(image=(48, 32), prompt_tokens=None, max_tokens=4, same_image=False, seed=0)
SETTINGS = BenchmarkSettings(
    server=None,
    api_key=None,
    model=None,
    serve_options=(),
    levels=((1, 3), (4, 8)),
    workload=WORK,
    repeat=1,
    warmup=1,
    timeout_s=PATIENCE_S,
)
GIB = 1 << 30


def measured(fake: Fake, **changes: Any) -> BenchmarkResult:
    with serving(fake) as url:
        measurement = BenchmarkRun(replace(SETTINGS, server=url, **changes), lambda text: None)
        measurement.run()
    assert measurement.result is not None
    return measurement.result


def notes(result: BenchmarkResult) -> str:
    found: BenchmarkReport = report(result)
    return "\n".join(found.notes)


def test_levels_clients_and_counts() -> None:
    fake = Fake()
    result = measured(fake)
    assert [(run.clients, len(run.records)) for run in result.runs] == [(1, 3), (4, 8)]
    assert all(record.error is None for record in result.records)
    assert {record.output_tokens for record in result.records} == {4}
    assert {len(record.pieces_s) for record in result.records} == {4}
    assert {record.counted_by for record in result.records} == {"usage"}
    assert len(fake.requests) == 1 + (1 + 3) + (4 + 8)  # found out, warm-up, measured
    assert 2 <= fake.most_at_once <= 4
    for record in result.records:
        assert 0 <= record.sent_s <= record.pieces_s[0] <= record.pieces_s[-1] <= record.ended_s
    assert result.server.url.startswith("http://127.0.0.1:")
    assert result.start is None


def test_connections_are_reused() -> None:
    fake = Fake()
    measured(fake)
    assert len(fake.ports) <= 1 + 4 + 1  # of finding out, of the clients


def test_no_two_requests_are_alike() -> None:
    fake = Fake()
    measured(fake, repeat=2)
    contents = [str(body["messages"]) for body in fake.requests]
    assert len(set(contents)) == len(contents) == 1 + 2 * (1 + 3 + 4 + 8)


def test_repeats_are_kept_apart_and_summed_up() -> None:
    result = measured(Fake(), repeat=3, levels=((2, 4),), warmup=0)
    assert [(run.clients, run.repeat) for run in result.runs] == [(2, 0), (2, 1), (2, 2)]
    level = result.levels[0]
    assert (level.repeats, level.requests) == (3, 12)
    assert level.output_tokens_per_s is not None
    assert level.output_tokens_per_s.count == 3
    assert any("least – most" in row[0] for row in report(result).tables[0].rows)


def test_the_key_goes_along_with_every_request() -> None:
    fake = Fake(key="secret")
    result = measured(fake, api_key="secret", levels=((1, 1),))
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer secret"}
    assert "secret" not in to_json(result)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key(key: str | None) -> None:
    with pytest.raises(Unauthorized, match="key is wrong" if key else "wants an API key"):
        measured(Fake(key="secret"), api_key=key)


def test_a_model_that_is_not_served() -> None:
    fake = Fake(models=["one", "two"])
    with pytest.raises(ModelNotServed, match=r"'three'.*one, two"):
        measured(fake, model="three")
    assert not fake.requests
    assert measured(fake, model="two", levels=((1, 1),)).server.manner.model == "two"
    assert {body["model"] for body in fake.requests} == {"two"}


def test_nothing_is_there() -> None:
    with serving(Fake()) as url:
        pass
    measurement = BenchmarkRun(replace(SETTINGS, server=url), lambda text: None)
    with pytest.raises(EngineUnavailable, match="no server answers"):
        measurement.run()
    assert measurement.result is None


def test_no_model_at_all() -> None:
    with pytest.raises(EngineUnavailable, match="serves no model"):
        measured(Fake(models=[]))


@pytest.mark.parametrize(
    ("refused", "ignore_eos", "usage"),
    [
        ({"ignore_eos"}, False, True),
        ({"stream_options"}, True, False),
        ({"ignore_eos", "stream_options"}, False, False),
    ],
)
def test_fields_that_are_refused_are_left_out(refused: set[str], ignore_eos: bool, usage: bool) -> None:
    def choosy(body: dict[str, Any]) -> Any:
        bad = refused & set(body)
        return refusal(400, f"unknown {bad}") if bad else streamed(answer(body))

    fake = Fake(answer=choosy)
    result = measured(fake, levels=((1, 2),))
    assert (result.server.manner.ignore_eos, result.server.manner.usage) == (ignore_eos, usage)
    assert all(record.error is None for record in result.records)
    assert ("refuses ignore_eos" in notes(result)) is not ignore_eos
    assert ("pieces" in notes(result)) is not usage
    assert {record.counted_by for record in result.records} == {"usage" if usage else "pieces"}


def test_a_request_that_is_refused_whatever_is_left_out() -> None:
    with pytest.raises(RequestError, match="never"):
        measured(Fake(answer=lambda body: refusal(400, "never")))


def test_a_request_that_is_too_large_is_not_tried_again() -> None:
    fake = Fake(answer=lambda body: refusal(413, "too many tokens", "context_length_exceeded"))
    with pytest.raises(RequestTooLarge, match="too many tokens"):
        measured(fake)
    assert len(fake.requests) == 1


def test_a_usage_that_is_asked_for_but_does_not_come() -> None:
    result = measured(Fake(answer=lambda body: streamed(answer(body, usage=False))), levels=((1, 2),))
    assert {record.counted_by for record in result.records} == {"pieces"}
    assert "2 answers came without a count of tokens" in notes(result)
    assert "doesn't count tokens in streams" in notes(result)


def test_tokens_that_come_together() -> None:
    result = measured(Fake(answer=lambda body: streamed(answer(body, pieces=2))), levels=((1, 2),))
    assert "8 tokens came in 4 pieces" in notes(result)


def test_the_text_is_as_long_as_wished() -> None:
    fake = Fake()
    result = measured(fake, workload=replace(WORK, image=None, prompt_tokens=120), levels=((1, 2),))
    assert result.server.manner.tokens_per_word == 2.0  # the fake counts two a word
    assert {record.prompt_tokens for record in result.records} == {120}
    blind = Fake(answer=lambda body: streamed(answer(body, usage=False)))
    result = measured(blind, workload=replace(WORK, prompt_tokens=120), levels=((1, 1),))
    assert result.server.manner.tokens_per_word == 1.0
    assert "one word stands for one token" in notes(result)


def test_errors_are_counted_by_code() -> None:
    calls = iter(range(100))

    def busy(body: dict[str, Any]) -> Any:
        return refusal(429, "the queue is full", "queue_full") if next(calls) % 2 else streamed(answer(body))

    result = measured(Fake(answer=busy), levels=((1, 6),), warmup=0)
    level = result.levels[0]
    assert level.errors == {"429 queue_full": 3}
    assert (level.requests, level.failed) == (6, 3)
    assert "3 × 429 queue_full: the queue is full" in notes(result)


def test_a_level_without_any_answer_is_the_last() -> None:
    calls = iter(range(100))

    def dying(body: dict[str, Any]) -> Any:
        if next(calls) == 0:
            return streamed(answer(body))
        return streamed([event({"error": {"message": "the engine died", "code": "engine_error"}})])

    result = measured(Fake(answer=dying), warmup=0)
    assert [run.clients for run in result.runs] == [1]
    assert result.levels[0].errors == {"stream engine_error": 3}
    assert "the engine died" in notes(result)


def test_silence_fails_a_request() -> None:
    calls = iter(range(100))

    def silent(body: dict[str, Any]) -> Any:
        return streamed(answer(body), pause_s=0.0 if next(calls) == 0 else PATIENCE_S)

    result = measured(Fake(answer=silent), levels=((2, 2),), warmup=0, timeout_s=0.3)
    assert result.levels[0].errors == {"timeout": 2}


def test_memory_of_a_snugvl_server() -> None:
    readings = [ledger(used=1), ledger(used=3), ledger(used=2)]
    result = measured(Fake(memory=readings))
    memory = result.runs[-1].memory
    assert memory is not None
    assert memory.ledger is not None
    assert memory.ledger.device == "a GPU"
    row = memory.ledger.row("workspace")
    assert row is not None
    assert row.planned_bytes == 4 * GIB
    table = next(table for table in report(result).tables if "a GPU" in table.title)
    assert table.rows[0][:2] == ("workspace", "4.00 GiB")
    assert measured(Fake(), levels=((1, 1),)).runs[0].memory is not None


def ledger(used: int) -> dict[str, Any]:
    row = {"name": "workspace", "planned_bytes": 4 * GIB, "measured_bytes": used * GIB, "used_bytes": None}
    health = {"ready": True, "state": "ready", "detail": "", "progress": None, "restarts": 0}
    held = {"total_bytes": 8 * GIB, "free_bytes": 2 * GIB, "process_bytes": (used + 1) * GIB}
    ledger = {"device": "a GPU", "rows": [row], "cap_bytes": None, **held}
    return {"at": 1.0, "ledger": ledger, "load": {}, "health": {**health, "retry_after_s": None}}


def test_a_saved_result_is_the_same(tmp_path: Path) -> None:
    result = measured(Fake(memory=[ledger(1)]))
    path = tmp_path / "a.json"
    path.write_text(to_json(result))
    again = load(path)
    assert (again.server, again.workload, again.machine) == (result.server, result.workload, result.machine)
    assert [run.memory for run in again.runs] == [run.memory for run in result.runs]
    assert len(again.records) == 11
    for one, other in zip(again.records, result.records, strict=True):
        assert one.pieces_s == pytest.approx(other.pieces_s, abs=1e-6)
    path.write_text(to_json(again))
    assert load(path) == again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read"),
        (b"\xff\xfe", "not text"),
        (b"", "not a result of"),
        (b"[]", "not a result of"),
        (b"{}", "Field required"),
    ],
)
def test_what_is_no_result(tmp_path: Path, text: bytes | None, said: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(InputError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_result_of_another_format(tmp_path: Path) -> None:
    result = replace(measured(Fake(), levels=((1, 1),)), format=2)
    path = tmp_path / "a.json"
    path.write_text(to_json(result))
    with pytest.raises(InputError, match=r"format 2.*reads 1"):
        load(path)


def test_short_answers_have_no_decode_rate_and_a_note_says_so() -> None:
    said = "answers of fewer than 8 tokens are too short for a decode rate"
    assert said in notes(measured(Fake()))
    assert said not in notes(measured(Fake(), workload=replace(WORK, max_tokens=8)))


def test_what_a_model_never_learned_is_no_news_about_random_pictures(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def warned(text: str) -> Fake:
        def respond(body: dict[str, Any]) -> Response:
            response = streamed(answer(body))
            response.headers["snugvl-warning"] = text
            return response

        return Fake(answer=respond)

    for unlearned in (PHOTOGRAPH, VIDEO, FEW.format(least=1, count="none")):
        measured(warned(unlearned))
        assert not recwarn.list
    with pytest.warns(SnugvlWarning, match="ignored top_k"):
        measured(warned("ignored top_k"))


def test_a_servers_port_is_free_and_nobody_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems give away those from 32,768 on, or from 49,152."""
    port = free_port()
    other = next(each for each in iter(free_port, None) if each != port)
    assert all(20_000 <= each < 32_768 for each in (port, other))
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(measure.random, "sample", lambda *_: [port, other])
        assert free_port() == other
        monkeypatch.setattr(measure.random, "sample", lambda *_: [port])
        with pytest.raises(EngineError, match="none of 100 ports"):
            free_port()
