"""What clients of all kinds send to a server, and how each answer must end."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from random import Random
from struct import pack
from typing import Any, Literal
from zlib import compress, crc32

from PIL import Image, ImageDraw

Body = dict[str, Any]
Manner = Literal["whole", "stream", "leave in the stream", "leave at once", "head only"]

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "gray")
SHAPES = ("circle", "square", "triangle")
SIZES = ((96, 96), (160, 120), (224, 224), (320, 240), (512, 384))
MODEL = "pocket"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
# Without the ends of a sequence pocket talks for as long as it is let, with text in every token.
SHORT = {"max_tokens": 48}
ENDLESS = {"logit_bias": {"3584": -100, "3586": -100}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": PARAMETERS}}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    Attributes:
        weight: how often it comes, relative to the others.
        body: a new body; bytes are sent as they are.
        ended: what is wrong with an answer that ended (its JSON, or the data of its events), or None.
        status: what the answer must have.
    """

    name: str
    weight: int
    path: str
    body: Callable[[Random], Body | bytes]
    ended: Callable[[Any], str | None]
    manner: Manner = "whole"
    status: int = 200


def png(random: Random) -> bytes:
    """A picture that no other request has."""
    width, height = random.choice(SIZES)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(random.randint(1, 5)):
        left, top = random.randrange(width - 24), random.randrange(height - 24)
        side = random.randint(20, min(width, height) // 2)
        box = (left, top, left + side, top + side)
        (draw.ellipse if random.random() < 0.5 else draw.rectangle)(box, fill=random.choice(COLOURS))
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    """As a picture comes inside JSON."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def bomb() -> bytes:
    """A small file that says it is a picture of 900 megapixels."""
    head = pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        pack(">I", len(data)) + name + data + pack(">I", crc32(name + data))
        for name, data in ((b"IHDR", head), (b"IDAT", compress(bytes(1000))), (b"IEND", b""))
    )


def question(random: Random) -> str:
    """A text that few other requests have."""
    what, number = f"{random.choice(COLOURS)} {random.choice(SHAPES)}s", random.randrange(10_000)
    return f"How many {what} are there, and where is number {number}?"


def seen(random: Random, url: str | None = None) -> list[Body]:
    """OpenAI's content of a question about a picture."""
    url = url or data_url(png(random))
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question(random)}]


def chat(random: Random, content: Any = None, **fields: Any) -> Body:
    """A chat completion."""
    content = content or question(random)
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **SHORT, **fields}


def anthropic(random: Random, **fields: Any) -> Body:
    """A message with a picture, in Anthropic's form."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(random)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": question(random)}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 48, **fields}


def ollama(random: Random, **fields: Any) -> Body:
    """A conversation with a picture, in Ollama's form."""
    message = {
        "role": "user",
        "content": question(random),
        "images": [base64.b64encode(png(random)).decode()],
    }
    return {"model": MODEL, "messages": [message], "options": {"num_predict": 48}, **fields}


def response(random: Random, **fields: Any) -> Body:
    """A response of OpenAI's newer kind."""
    return {"model": MODEL, "input": question(random), "max_output_tokens": 48, **fields}


def task(random: Random, **fields: Any) -> Body:
    """One of the four tasks."""
    return {"image": data_url(png(random)), **fields}


def has(*path: str | int) -> Callable[[Any], str | None]:
    """Checks that an answer has something there."""

    def check(answer: Any) -> str | None:
        value = answer
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return f"nothing at {path}: {json.dumps(answer)[:200]}"
        return None if value is not None else f"null at {path}"

    return check


def done(events: list[str]) -> str | None:
    """OpenAI's stream: a reason, then [DONE]."""
    if not events or events[-1] != "[DONE]":
        return f"the stream ended with {events[-1:]}"
    return None if any('"finish_reason":"' in event for event in events) else "no finish_reason"


def last_has(*words: str) -> Callable[[list[str]], str | None]:
    """Checks that the last event of a stream says one of these."""

    def check(events: list[str]) -> str | None:
        good = bool(events) and any(word in events[-1] for word in words)
        return None if good else f"the stream ended with {[event[:200] for event in events[-1:]]}"

    return check


def follows_schema(text: str) -> str | None:
    """Checks a text against PARAMETERS."""
    try:
        values = json.loads(text)
    except ValueError:
        return f"no JSON: {text[:100]}"
    good = (
        values.keys() == {"city", "days"} and values["city"] in ("Paris", "Rome") and 1 <= values["days"] <= 9
    )
    return None if good else f"not of the schema: {text[:100]}"


def structured(answer: Any) -> str | None:
    """JSON by its schema."""
    return follows_schema(answer["choices"][0]["message"]["content"])


def structured_stream(events: list[str]) -> str | None:
    """JSON by its schema, in pieces."""
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return done(events) or follows_schema("".join(choice["delta"].get("content") or "" for choice in choices))


def called(answer: Any) -> str | None:
    """A call by its schema."""
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return follows_schema(calls[0]["function"]["arguments"]) if calls else "no call"


def any_end(_: Any) -> str | None:
    """Nothing to check: the client does not stay."""
    return None


REFUSED = has("error", "message")
STREAM: Mapping[str, Any] = {"stream": True}
REQUIRED: Mapping[str, Any] = {
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
}
FORMAT: Mapping[str, Any] = {"response_format": SCHEMA, "max_tokens": 200}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

KINDS = (
    Kind("chat", 10, CHAT, chat, has("choices", 0, "finish_reason")),
    Kind("chat, stream", 16, CHAT, lambda r: chat(r, **STREAM), done, "stream"),
    Kind("chat, image", 8, CHAT, lambda r: chat(r, seen(r)), has("choices", 0, "finish_reason")),
    Kind("chat, image, stream", 10, CHAT, lambda r: chat(r, seen(r), **STREAM), done, "stream"),
    Kind(
        "chat, sampled, n=3, stream",
        3,
        CHAT,
        lambda r: chat(r, n=3, temperature=1.0, logprobs=True, top_logprobs=2, **STREAM),
        done,
        "stream",
    ),
    Kind("chat, JSON schema", 4, CHAT, lambda r: chat(r, **FORMAT), structured),
    Kind(
        "chat, JSON schema, stream",
        4,
        CHAT,
        lambda r: chat(r, **FORMAT, **STREAM),
        structured_stream,
        "stream",
    ),
    Kind("chat, tool", 4, CHAT, lambda r: chat(r, **REQUIRED), called),
    Kind("chat, tool, stream", 4, CHAT, lambda r: chat(r, **REQUIRED, **STREAM), done, "stream"),
    Kind(
        "completion",
        4,
        "/v1/completions",
        lambda r: {"prompt": question(r), "max_tokens": 32},
        has("choices", 0, "text"),
    ),
    Kind(
        "completions, two, stream",
        3,
        "/v1/completions",
        lambda r: {"prompt": [question(r), question(r)], "max_tokens": 32, **STREAM},
        done,
        "stream",
    ),
    Kind("response", 3, RESPONSES, response, has("output", 0)),
    Kind(
        "response, stream",
        5,
        RESPONSES,
        lambda r: response(r, **STREAM),
        last_has("response.completed", "response.incomplete"),
        "stream",
    ),
    Kind("anthropic, image", 3, MESSAGES, anthropic, has("content", 0)),
    Kind(
        "anthropic, image, stream",
        4,
        MESSAGES,
        lambda r: anthropic(r, **STREAM),
        last_has("message_stop"),
        "stream",
    ),
    Kind("ollama, image", 3, "/api/chat", lambda r: ollama(r, stream=False), has("message", "content")),
    Kind("ollama, image, stream", 4, "/api/chat", ollama, last_has('"done":true'), "stream"),
    Kind("caption", 3, "/v1/vision/caption", task, has("text")),
    Kind(
        "caption, stream",
        3,
        "/v1/vision/caption",
        lambda r: task(r, **STREAM),
        last_has('"result"'),
        "stream",
    ),
    Kind("ask", 3, "/v1/vision/ask", lambda r: task(r, question=question(r)), has("text")),
    Kind("scene", 1, "/v1/vision/scene", task, has("objects")),
    Kind("detect", 2, "/v1/vision/detect", task, has("objects")),
    Kind("tokenize", 2, "/tokenize", lambda r: {"prompt": question(r)}, has("tokens", 0)),
    Kind(
        "left in the stream",
        8,
        CHAT,
        lambda r: chat(r, seen(r), max_tokens=600, **ENDLESS, **STREAM),
        any_end,
        "leave in the stream",
    ),
    Kind(
        "left at once",
        8,
        CHAT,
        lambda r: chat(r, seen(r), max_tokens=600, **ENDLESS, stream=r.random() < 0.5),
        any_end,
        "leave at once",
    ),
    Kind("bad: no JSON", 2, CHAT, lambda r: b'{"messages": [', REFUSED, status=400),
    Kind("bad: a wish", 2, CHAT, lambda r: chat(r, modalities=["audio"]), REFUSED, status=400),
    Kind("bad: no image", 2, CHAT, lambda r: chat(r, seen(r, data_url(png(r)[:60]))), REFUSED, status=400),
    Kind("bad: bomb", 2, CHAT, lambda r: chat(r, seen(r, data_url(bomb()))), REFUSED, status=413),
    Kind("bad: unknown model", 2, CHAT, lambda r: {**chat(r), "model": "gpt-9"}, REFUSED, status=404),
    Kind("bad: too many answers", 2, CHAT, lambda r: chat(r, n=100_000), REFUSED, status=400),
    Kind("bad: long prompt", 1, CHAT, lambda r: chat(r, "red " * 9000), REFUSED, status=400),
    Kind("bad: 1 GiB announced", 1, CHAT, lambda r: b"", any_end, "head only", 413),
)
