"""A request's record is an argument, and what reading a body finds goes into it."""

import ast
from pathlib import Path

import httpx
import pytest

import snugvl
from snugvl.server.body import LARGE_BYTES
from snugvl.server.metrics import RequestNotes
from snugvl.server.openai.chat import ChatCompletionRequest
from tests.server.fake import FakeService
from tests.server.live import live

SRC = Path(snugvl.__file__).parent


@pytest.mark.parametrize("room", ["server", "inputs", "tasks"])
def test_no_function_returns_anything_behind_its_callers_back(room: str) -> None:
    """The sandbox of chat templates has a budget that its filters draw on, and returns nothing by it."""
    for path in {*(SRC / room).rglob("*.py")} - {SRC / "inputs" / "sandbox.py"}:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"ContextVar", "contextvars", "copy_context"}, path


def test_a_body_is_validated_with_its_notes() -> None:
    body, notes = {"messages": [{"role": "user", "content": "Hi"}], "knob": 1}, RequestNotes()
    ChatCompletionRequest.model_validate(body, context=notes)
    assert notes.warnings == ["ignored knob"]
    ChatCompletionRequest.model_validate(body)  # by those that have none
    assert notes.warnings == ["ignored knob"]


@pytest.mark.parametrize("characters", [10, LARGE_BYTES])
def test_every_request_has_its_own_warnings(characters: int) -> None:
    """A large body is validated in a thread."""
    with live(FakeService()) as base, httpx.Client(base_url=base) as http:
        for name in ("one", "other"):
            body = {"messages": [{"role": "user", "content": "a" * characters}], name: 1}
            answer = http.post("/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.headers["snugvl-warning"] == f"ignored {name}"
