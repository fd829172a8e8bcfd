"""Each protocol's worst bodies: calls and answers, messages, pictures, parts, fields, prompts, schemas."""

import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

from PIL import Image

from tests.attacks.kit import Attack, Shot
from tests.attacks.requests import LEAVE_3_S, Shots

Json = dict[str, Any]
Make = Callable[[int], Json]
CLIENTS = 4
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE, COMPLETIONS = "/api/chat", "/api/generate", "/v1/completions"
USER: Json = {"role": "user", "content": "hi"}


def asked(path: str, body: Json) -> Json:
    """A body with what its protocol can't do without, and few tokens of answer."""
    most: dict[str, Json] = {
        RESPONSES: {"max_output_tokens": 5},
        OLLAMA: {"options": {"num_predict": 5}},
        GENERATE: {"options": {"num_predict": 5}},
    }
    return {"model": "pocket", **most.get(path, {"max_tokens": 5}), **body}


def sent(path: str, make: Callable[[], Json], count: int = CLIENTS) -> Shots:
    """So many clients who send the same, and leave after 3 s."""

    def shots() -> list[Shot]:
        data = json.dumps(asked(path, make())).encode()
        return [Shot(path, data, leave_s=LEAVE_3_S)] * count

    return shots


def answered_backwards(path: str, count: int, *, by: str = "c") -> Json:
    """So many calls, then their answers from the last to the first. `by`: how the ids of answers begin."""
    ids = range(count)
    calls = [_call(path, f"c{each}") for each in ids]
    answers = [_answer(path, f"{by}{each}") for each in reversed(ids)]
    if path == RESPONSES:
        return {"input": [*calls, *answers, USER]}
    return {"messages": [USER, *calls, *answers, *([USER] if path != MESSAGES else [])]}


def _call(path: str, name: str) -> Json:
    function = {"name": "f", "arguments": "{}"}
    match path:
        case "/v1/responses":
            return {"type": "function_call", "call_id": name, **function}
        case "/v1/messages":
            use = {"type": "tool_use", "id": name, "name": "f", "input": {}}
            return {"role": "assistant", "content": [use]}
        case "/api/chat":
            function = {"name": "f", "arguments": {}}  # type: ignore[dict-item]
    call = {"id": name, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answer(path: str, name: str) -> Json:
    match path:
        case "/v1/responses":
            return {"type": "function_call_output", "call_id": name, "output": "a"}
        case "/v1/messages":
            result = {"type": "tool_result", "tool_use_id": name, "content": "a"}
            return {"role": "user", "content": [result]}
    # Ollama's clients name the tool, where they say which call they answer.
    told = {"tool_call_id": name} if path == CHAT or name.startswith("c") else {"tool_name": name}
    return {"role": "tool", "content": "a", **told}


def many_messages(path: str, count: int) -> Json:
    """So many messages of the user's, empty where that is taken."""
    each = {"role": "user", "content": "a" if path == MESSAGES else ""}
    return {"input" if path == RESPONSES else "messages": [each] * count}


def jpeg() -> str:
    """A picture of a megapixel, in base64."""
    file = BytesIO()
    Image.effect_noise((1000, 1000), 8).convert("RGB").save(file, "JPEG", quality=20)
    return base64.b64encode(file.getvalue()).decode()


def pictures(path: str, count: int) -> Json:
    """So many pictures in one conversation, 64 of them a message."""
    data = jpeg()
    url = f"data:image/jpeg;base64,{data}"
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    if path == GENERATE:
        return {"prompt": "what?", "images": [data] * min(count, 64)}
    if path == OLLAMA:
        return {"messages": [{**USER, "images": [data] * 64}] * (count // 64)}
    forms: dict[str, Json] = {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        RESPONSES: {"type": "input_image", "image_url": url},
        MESSAGES: {"type": "image", "source": source},
    }
    turns = [{"role": "user", "content": [forms[path]] * 64}] * (count // 64)
    return {"input" if path == RESPONSES else "messages": turns}


def parts(path: str, count: int) -> Json:
    """So many parts of one letter, a thousand of them a message."""
    kind = "input_text" if path == RESPONSES else "text"
    turn = {"role": "user", "content": [{"type": kind, "text": "a"}] * 1000}
    return {"input" if path == RESPONSES else "messages": [turn] * (count // 1000)}


def results_in_results(count: int) -> Json:
    """Anthropic's results of tools, each of a thousand blocks."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    blocks = [{"type": "text", "text": "a"}] * 1000
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    calls = {"role": "assistant", "content": [use]}
    return {"messages": [USER, calls, {"role": "user", "content": [result] * (count // 1000)}]}


def fields(path: str, count: int, messages: int = 0) -> Json:
    """So many fields that nobody knows, at the top, or in each of so many messages."""
    strange = {f"k{each}": 0 for each in range(count)}
    if path in (GENERATE, COMPLETIONS):
        return {"prompt": "hi", **strange}
    turns = [{**USER, **strange}] * messages or [USER]
    return {"input" if path == RESPONSES else "messages": turns, **({} if messages else strange)}


def chained(links: int = 40, width: int = 20) -> Json:
    """Definitions of which each is an object of its own, or the next one."""
    names = {f"k{each}": {"type": "integer"} for each in range(width)}
    chain = {
        f"a{link}": {"anyOf": [{"$ref": f"#/$defs/a{link + 1}"}, {"type": "object", "properties": names}]}
        for link in range(links)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{links}": {"type": "string"}}}


def bounded(count: int) -> Json:
    """An array of so many numbers that have bounds."""
    number = {"type": "number", "minimum": -123456.789, "maximum": 987654.321}
    return {"type": "array", "items": number, "minItems": count, "maxItems": count}


def formed(path: str, schema: Json) -> Json:
    """A request for an answer in this form, in the protocol's own words."""
    form = {"type": "json_schema", "name": "a", "schema": schema}
    takes = {"type": "object", "properties": {"a": schema}, "$defs": schema.get("$defs", {})}
    tool = {"name": "f", "description": "", "input_schema": takes}
    bodies: dict[str, Json] = {
        CHAT: {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": form}},
        RESPONSES: {"input": "hi", "text": {"format": form}},
        MESSAGES: {"messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}},
        OLLAMA: {"messages": [USER], "format": schema},
        GENERATE: {"prompt": "hi", "format": schema},
    }
    return bodies[path]


NAMES = {
    CHAT: "chat", RESPONSES: "Responses", MESSAGES: "Anthropic", OLLAMA: "Ollama", GENERATE: "generate",
    COMPLETIONS: "completions",
}  # fmt: skip


def rows() -> Iterator[Attack]:
    """A row for each body of each protocol that has a place for it."""

    def row(path: str, name: str, what: str, make: Callable[[], Json], count: int = CLIENTS) -> Attack:
        return Attack(f"{NAMES[path]}: {name}", "41", what, sent(path, make, count))

    for path in (CHAT, RESPONSES, MESSAGES, OLLAMA):
        backwards = partial(answered_backwards, path)
        yield row(
            path,
            "3,000 answers backwards",
            "calls, and answers to them from the last to the first",
            partial(backwards, 3000),
        )
        yield row(
            path, "3,000 answers to nothing", "their ids are no call's", partial(backwards, 3000, by="x")
        )
        # Fewer messages than the context has tokens: the engine's process renders them all.
        yield row(path, "2,000 answers, 16 clients", "to nothing", partial(backwards, 2000, by="x"), count=16)
        yield row(path, "8,000 messages", "of the user's", partial(many_messages, path, 8000))
        yield row(
            path,
            "16,000 parts" if path != OLLAMA else "16,000 empty pictures",
            "of a letter",
            partial(parts, path, 16_000) if path != OLLAMA else partial(_empty_pictures, 16_000),
        )
    yield row(MESSAGES, "16,000 blocks of results", "of one call", partial(results_in_results, 16_000))
    for path in (CHAT, RESPONSES, MESSAGES, OLLAMA, GENERATE):
        yield row(path, "256 megapixels", "64 a message", partial(pictures, path, 256))
        yield row(
            path,
            "40 chained anyOfs",
            "each a $ref to the next, or an object",
            partial(formed, path, chained()),
        )
        yield row(path, "900 bounded numbers", "in an array", partial(formed, path, bounded(900)))
    for path in NAMES:
        yield row(path, "100,000 fields", "that nobody knows", partial(fields, path, 100_000))
        if path not in (GENERATE, COMPLETIONS):
            yield row(path, "250 fields, 500 times", "in messages", partial(fields, path, 250, 500))
    yield row(CHAT, "1,000 bounded numbers", "in an array", partial(formed, CHAT, bounded(1000)))
    for count in (128, 100_000):
        yield row(COMPLETIONS, f"{count:,} prompts", "of a word", partial(_prompts, count))


def _prompts(count: int) -> Json:
    return {"prompt": ["lorem"] * count}


def _empty_pictures(count: int) -> Json:
    return {"messages": [{**USER, "images": [""] * 64}] * (count // 64)}


PROTOCOLS = list(rows())
