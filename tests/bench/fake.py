"""A server of OpenAI's API that does what a test says, and remembers what it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.server.fake import FakeService
from tests.server.live import live

Answer = Callable[[dict[str, Any]], Response]


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def refusal(status: int, message: str, code: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)


def tokens_of(body: dict[str, Any]) -> int:
    """Of the prompt: two a word and 100 a picture."""
    content = body["messages"][0]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return sum(2 * len(part["text"].split()) if part["type"] == "text" else 100 for part in parts)


def streamed(events: list[bytes], pause_s: float = 0.0) -> Response:
    async def send() -> AsyncIterator[bytes]:
        for one in events:
            await asyncio.sleep(pause_s)
            yield one

    return StreamingResponse(send(), media_type="text/event-stream")


def answer(body: dict[str, Any], *, pieces: int | None = None, usage: bool = True) -> list[bytes]:
    """The events of a good answer of `max_tokens` tokens, in as many pieces."""
    count = body["max_tokens"]
    found = [chunk({"role": "assistant", "content": ""})]
    found += [chunk({"content": f" word{number}"}) for number in range(pieces or count)]
    found.append(chunk({}, "length"))
    if usage and (body.get("stream_options") or {}).get("include_usage"):
        found.append({"choices": [], "usage": {"prompt_tokens": tokens_of(body), "completion_tokens": count}})
    return [event(each) for each in (*found, b"[DONE]")]


@dataclass
class Fake:
    """What the server does. `requests`: bodies and headers of chat completions."""

    models: list[str] = field(default_factory=lambda: ["fake"])
    answer: Answer = lambda body: streamed(answer(body))
    key: str | None = None
    memory: list[dict[str, Any]] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    most_at_once: int = 0
    _now: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def keys(request: Request, next_: Any) -> Any:
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                return refusal(401, "the API key is wrong", "invalid_api_key")
            return await next_(request)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}

        @app.get("/memory")
        async def memory() -> Response:
            if not self.memory:
                return refusal(404, "no such path")
            return JSONResponse(self.memory.pop(0) if len(self.memory) > 1 else self.memory[0])

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            assert request.client is not None
            self.ports.add(request.client.port)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            await asyncio.sleep(0.002)
            self._now -= 1
            return self.answer(body)

        return app


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """The URL of a server that does what `fake` says."""
    with live(FakeService(), app=fake.app()) as url:
        yield url
