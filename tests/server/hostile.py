"""What the tests of hostile inputs share: every protocol's route, a server, and what it says."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService
from tests.server.live import live

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
ASK, DETECT, TOKENIZE = "/v1/vision/ask", "/v1/vision/detect", "/tokenize"
EVERY = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA, GENERATE, ASK, DETECT, TOKENIZE)
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
MIB = 1024 * 1024


def said(answer: httpx.Response) -> str:
    """What a program is told: OpenAI's code, Anthropic's type; Ollama has only a message."""
    error = answer.json()["error"]
    if isinstance(error, str):
        return error
    return str(error.get("code") or error["type"])


def of(path: str, code: str, words: str) -> str:
    """What a route says that others answer with `code`."""
    if path == MESSAGES:
        return "invalid_request_error"
    return words if path.startswith("/api/") else code


@contextmanager
def attacked(read_timeout_s: float = PATIENCE_S) -> Iterator[str]:
    """The base URL of a server; at the end it must still answer."""
    settings = ServerSettings(max_body_bytes=4 * MIB, read_timeout_s=read_timeout_s, names=("pocket",))
    with live(FakeService(), settings) as base:
        yield base
        assert httpx.get(f"{base}/health").status_code == 200
        answer = httpx.post(base + CHAT, json={"messages": HI})
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there"
