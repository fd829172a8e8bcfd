"""One line a request, and nothing in it that is nobody's business."""

import logging
import re

import httpx
import pytest

from snugvl.server.settings import ServerSettings
from tests.patience import until
from tests.server.fake import FakeService, Script
from tests.server.live import live

SECRET = "the-secret-question"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}
KEYS = ServerSettings(api_keys=("the-key",))


def lines(caplog: pytest.LogCaptureFixture, name: str = "snugvl.access") -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("snugvl").propagate = True
    caplog.set_level(logging.INFO, "snugvl")


def test_a_line_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    with live(FakeService(), KEYS) as base:
        answer = httpx.post(
            base + "/v1/chat/completions?q=hidden", json=CHAT, headers={"authorization": "Bearer the-key"}
        )
        httpx.get(base + "/v1/models/hidden-name")
        httpx.get(base + "/hidden/path", headers={"x-api-key": "the-key"})
        until(lambda: len(lines(caplog)) == 3)
    done, unknown, lost = lines(caplog)
    pattern = (
        r"POST /v1/chat/completions 200 \d+\.\d ms id=req_[0-9a-f]{32} key=[0-9a-f]{8} "
        r"prompt=7 generated=2 image=2 code=-"
    )
    assert re.fullmatch(pattern, done)
    assert answer.headers["x-request-id"] in done
    assert re.search(r"GET /v1/models/\{model:path\} 401 .* key=- code=invalid_api_key", unknown)
    assert re.search(r"GET other 404 .* code=not_found", lost)
    text = " ".join(record.getMessage() for record in caplog.records)
    for hidden in (SECRET, "the-key", "hidden", "Hello"):
        assert hidden not in text


def test_polls_are_logged_at_debug_alone(caplog: pytest.LogCaptureFixture) -> None:
    polls = ("/health", "/health/live", "/memory", "/metrics")
    with live(FakeService(), KEYS) as base:
        headers = {"authorization": "Bearer the-key"}
        for path in polls:
            assert httpx.get(base + path, headers=headers).is_success
        httpx.get(base + "/memory")  # a refusal is no poll that went well
        httpx.get(base + "/version", headers=headers)
        until(lambda: len(lines(caplog)) == 2)
        caplog.set_level(logging.DEBUG, "snugvl")
        httpx.get(base + "/health")
        until(lambda: len(lines(caplog)) == 3)
    refused, version, health = lines(caplog)
    assert "code=invalid_api_key" in refused
    assert version.startswith("GET /version 200")
    assert health.startswith("GET /health 200")


def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (False, True):
        with live(FakeService(), ServerSettings(log_prompts=wanted)) as base:
            httpx.post(base + "/v1/chat/completions", json=CHAT)
    said = lines(caplog, "snugvl.prompts")
    assert len(said) == 2
    assert SECRET in said[0]
    assert "Hello there" in said[1]


def test_pictures_are_logged_by_their_kind(caplog: pytest.LogCaptureFixture, data_url: str) -> None:
    shown = [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": {"url": data_url}}]
    with live(FakeService(), ServerSettings(log_prompts=True)) as base:
        body = {"messages": [{"role": "user", "content": shown}]}
        assert httpx.post(base + "/v1/chat/completions", json=body).is_success
    (asked, _) = lines(caplog, "snugvl.prompts")
    assert asked.endswith(f"prompt: [('user', ['{SECRET}', 'Picture'])]")


def _metrics(base: str) -> str:
    return httpx.get(base + "/metrics").text


def test_a_method_that_nobody_knows_is_no_label_of_its_own() -> None:
    """Labels come from our own code: strangers would make as many series as they like."""
    with live(FakeService()) as base:
        for method in ("PROPFIND", "REPORT"):
            assert httpx.request(method, base + "/version").status_code == 405
        until(lambda: 'status="405"} 2.0' in _metrics(base) or "REPORT" in _metrics(base))
        told = _metrics(base)
    assert 'method="other"' in told
    assert "PROPFIND" not in told
    assert "REPORT" not in told


def test_answers_do_not_say_what_software_this_is() -> None:
    with live(FakeService()) as base:
        for path in ("/version", "/", "/nothing"):
            assert "server" not in httpx.get(base + path).headers


def test_a_bug_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(script=Script(refusal=ZeroDivisionError("internal detail")))
    with live(service) as base:
        answer = httpx.post(base + "/v1/chat/completions", json=CHAT)
        assert answer.status_code == 500
        assert "internal detail" not in answer.text
        assert "Traceback" not in answer.text
        assert answer.json()["error"]["code"] == "internal_error"
        assert httpx.post(base + "/v1/messages", json={}).headers["request-id"].startswith("req_")
    (bug,) = [record for record in caplog.records if record.name == "snugvl.server" and record.exc_info]
    assert answer.headers["x-request-id"] in bug.getMessage()


def test_a_bug_in_the_middle_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(script=Script(error=ZeroDivisionError("internal detail")))
    with live(service) as base:
        answer = httpx.post(base + "/v1/chat/completions", json={**CHAT, "stream": True})
        assert '"internal_error"' in answer.text
        assert "internal detail" not in answer.text
        until(lambda: len(lines(caplog)) == 1)
    (bug,) = [record for record in caplog.records if record.name == "snugvl.server" and record.exc_info]
    assert answer.headers["x-request-id"] in bug.getMessage()
    assert "200" in lines(caplog)[0]
    assert "code=internal_error" in lines(caplog)[0]
