"""Attacks on grammars, tools, sampling, texts and pictures; `ALL` has every attack there is."""

import base64
import json
import zlib
from dataclasses import replace
from io import BytesIO
from multiprocessing.connection import Connection
from random import Random
from struct import pack
from typing import Any
from zlib import compress, crc32

from PIL import Image

from tests.attacks.kit import Address, Attack, Shot, act, chat, schema
from tests.attacks.protocols import PROTOCOLS
from tests.attacks.requests import HTTP, ISSUE, LEAVE_3_S, counted, shots, text, tokenize, tool, uploads
from tests.server.client_requests import data_url

STRING = {"type": "string"}


def grammar(value: Any, count: int = 4, **fields: Any) -> Any:
    """Clients who want answers in this form and leave after 3 s."""
    return shots(lambda: Shot(body=schema(value, **fields), leave_s=LEAVE_3_S), count)


def pattern(text: str, **fields: Any) -> Any:
    """The same for a string that matches."""
    return grammar(STRING | {"pattern": text}, **fields)


def fan(word: str, depth: int = 30) -> Any:
    """Definitions of which each names the next twice."""
    links = {f"a{i}": {word: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{depth}": STRING}}


def nested(depth: int = 25) -> Any:
    """Objects of two objects each, by reference."""
    links: Any = {}
    for i in range(depth):
        below = {"$ref": f"#/$defs/a{i + 1}"}
        links[f"a{i}"] = {"type": "object", "properties": {"x": below, "y": below}, "required": ["x", "y"]}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{depth}": STRING}}


def product(factors: int = 7, terms: int = 10) -> Any:
    """allOf of anyOfs."""
    return {"allOf": [
        {"anyOf": [{"properties": {f"k{f}": {"const": t}}} for t in range(terms)]} for f in range(factors)
    ]}  # fmt: skip


def patterned(count: int = 60) -> Any:
    """An object whose keys match many patterns."""
    patterns = {f"a.*{chr(97 + i % 26)}{i}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": STRING}


def optional(count: int = 1000) -> Any:
    """An object of properties that all may be left out."""
    return {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(count)}}


def many_tools() -> bytes:
    """As many tools as the context holds, each with patterns."""
    properties = {f"k{i}": STRING | {"pattern": "[a-z]{1,400}@"} for i in range(2)}
    tools = [tool(i, {"type": "object", "properties": properties}, "") for i in range(16)]
    return chat(tools=tools, max_tokens=20)


GRAMMARS = [
    Attack("maxLength 1,000,000,000", "own", "of a string", grammar(STRING | {"maxLength": 10**9})),
    Attack("minLength 1,000,000", "own", "of a string", grammar(STRING | {"minLength": 10**6})),
    Attack("minItems 1,000,000", "own", "of an array", grammar({"type": "array", "minItems": 10**6})),
    Attack("minimum of 4,000 digits", "own", "and a maximum",
           grammar({"type": "integer", "minimum": -(10**4000), "maximum": 10**4000})),
    Attack("minimum 1e-300", "own", "a range of floats",
           grammar({"type": "number", "minimum": 1e-300, "maximum": 1.7e308, "multipleOf": 1e-9})),
    Attack("counted repeats", "own", "(a|b|ab){1,1000}{1,1000}", pattern("^((a|b|ab){1,1000}){1,1000}$")),
    Attack("repeats of repeats", "own", "three deep", pattern("^(([a-z]{1,200} ?){1,200}\\n){1,200}$")),
    Attack("patterns of 2^18 states", "own", "(a|b)*a(a|b){18}, n = 3, made while the answer is",
           pattern("^(a|b)*a(a|b){18}$", n=3)),
    Attack("dots in a row", "own", ".*a.*b…", pattern(".*".join("abcdefghijklmnopqrstuvwxyz"), n=3)),
    Attack("\\w and \\p", "own", "Unicode classes, counted", pattern("^(\\w{1,500}\\s){1,500}$")),
    Attack("an anyOf of multipleOf and ranges", "own", "remainders times digits",
           grammar({"type": "integer", "multipleOf": 9973, "minimum": 10**30, "maximum": 10**60})),
    Attack("enum of 12,000 values", "own", "128 kB of them, n = 3", grammar(
        {"enum": [f"v{i}" for i in range(12_000)]}, n=3)),
    Attack("60 long constants", "own", "2,000 characters each, n = 6",
           grammar({"enum": [f"{i}" + "y" * 2000 for i in range(60)]}, 2, n=6)),
    Attack("$ref fans", "own", "anyOf, allOf and objects that double 25 to 30 times", lambda: [
        Shot(body=schema(value), leave_s=LEAVE_3_S) for value in (fan("anyOf"), fan("oneOf"), nested())]),
    Attack("allOf fan", "own", "of $refs, 2^30 of them", grammar(fan("allOf"), 4)),
    Attack("a product of anyOfs", "own", "10^7 objects", grammar(product(), 4)),
    Attack("60 patternProperties", "own", "beside additionalProperties", grammar(patterned())),
    Attack("1,000 optional properties", "own", "n = 3", grammar(optional(), n=3)),
    Attack("x-guidance", "own", "white space by a pattern of the client's",
           grammar({"type": "object", "x-guidance": {"whitespace_pattern": "((\\s{1,500}){1,500}){1,500}"}})),
    Attack("16 tools", "own", "each schema compiled, then all together",
           shots(lambda: Shot(body=many_tools(), leave_s=LEAVE_3_S), 4)),
    Attack("a tool's description of 40 MB", "own", "words", shots(
        lambda: Shot(body=chat(tools=[tool(0, {}, "lorem ipsum " * 3_300_000)])))),
]  # fmt: skip


def ids(count: int, seed: int) -> list[int]:
    """Tokens of nothing."""
    random = Random(seed)
    return [random.randrange(10, 3000) for _ in range(count)]


def prompts(value: Any, **fields: Any) -> Shot:
    """A completion of prompts."""
    return Shot("/v1/completions", json.dumps({"prompt": value, "max_tokens": 1, **fields}).encode())


def other(path: str, body: dict[str, Any]) -> Any:
    """One client of another protocol."""
    return shots(lambda: Shot(path, json.dumps({"model": "pocket", **body}).encode()))


def history(calls: int) -> bytes:
    """A conversation with so many calls of tools."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    messages += [{"role": "assistant", "content": "", "tool_calls": [call] * 200}] * (calls // 200)
    return json.dumps({"messages": messages}).encode()


def parts(texts: list[str], messages: int) -> bytes:
    """Messages of these parts each."""
    content = [{"type": "text", "text": each} for each in texts]
    return json.dumps({"messages": [{"role": "user", "content": content}] * messages}).encode()


def biased(n: int, **fields: Any) -> bytes:
    """Choices with as many biases as are taken."""
    return chat(n=n, logit_bias={str(i): -1 for i in range(1024)}, ignore_eos=True, max_tokens=300, **fields)


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A white picture, with chunks before its pixels."""
    row = b"\0" + b"\xff" * (width // 8 + 1)
    pixels = zlib.compressobj(9)
    data = b"".join(pixels.compress(row[: 1 + (width + 7) // 8]) for _ in range(height)) + pixels.flush()
    head = pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    found = [(b"IHDR", head), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        pack(">I", len(data)) + name + data + pack(">I", crc32(name + data)) for name, data in found
    )


LEAVE_5_S = (5.0, 5.0)
# pocket's longest token, of 139 bytes: each of these letters may cost as little as a 139th of a token.
DENSE = "".join(sorted('{"summary": "...", "setting": "...", "objects": [{"name": "...", "count": 1, '
                       '"positions": ["..."]}], "text": ["..."], "relations": ["..."]}'))  # fmt: skip
SAMPLING = [
    Attack("n = 128", "own", "60 tokens of each, which wait for slots; clients leave after 5 s", shots(
        lambda: Shot(body=chat(n=128, ignore_eos=True, max_tokens=60), leave_s=LEAVE_5_S))),
    Attack("n = 15 with logprobs 20", "own", "all slots, streamed", shots(
        lambda: Shot(body=chat(n=15, ignore_eos=True, max_tokens=300, logprobs=True, top_logprobs=20,
                               stream=True), leave_s=LEAVE_5_S))),
    Attack("n = 15 with 1,024 biases", "own", "15,360 biases in every step", shots(
        lambda: Shot(body=biased(15), leave_s=LEAVE_5_S))),
    Attack("100,000 biases", "own", "1,024 are taken", shots(
        lambda: Shot(body=chat(logit_bias={str(i): 1 for i in range(100_000)})))),
    Attack("300,000 stop strings", "own", "16 are taken", shots(
        lambda: Shot(body=chat(stop=["a"] * 299_000)))),
    Attack("128 prompts of 2,000 ids", "own", "all different", shots(
        lambda: prompts([ids(2000, i) for i in range(128)]), 1)),
    Attack("262,144 ids", "own", "in one prompt, four clients", shots(lambda: prompts(ids(262_144, 0)), 4)),
    Attack("128 echoed prompts", "own", "of 400 kB of white space", shots(
        lambda: prompts([" " * 400_000] * 128, echo=True))),
    Attack("41 echoed prompts", "own", "of 400 kB of white space, as many as are taken", shots(
        lambda: prompts([" " * 400_000] * 41, echo=True))),
    Attack("29 echoed dense prompts", "own", "of 560 kB, the longest token's letters in another order", shots(
        lambda: prompts([DENSE * 4000] * 29, echo=True))),
    Attack("count 560 kB of dense text", "own", "/tokenize, four clients, ten times", shots(
        lambda: replace(tokenize(DENSE * 4000), times=10), 4)),
    Attack("the prefix cache", "own", "8 clients, prompts of 3,900 ids that no other has", lambda: [
        Shot("/v1/completions", json.dumps({"prompt": ids(3900, i), "max_tokens": 1}).encode(), times=3)
        for i in range(8)]),
    Attack("detokenize 262,144 ids", "own", "four clients, ten times", shots(
        lambda: Shot("/detokenize", json.dumps({"tokens": ids(262_144, 0)}).encode(), times=10), 4)),
    Attack("8,192 empty messages", "own", "four clients", shots(lambda: Shot(body=json.dumps(
        {"messages": [{"role": "user", "content": ""}] * 8192}).encode()), 4)),
    Attack("10,000 calls of tools", "own", "in a history", shots(lambda: Shot(body=history(10_000)))),
    Attack("200,000 parts of a character", "own", "in a hundred messages",
           shots(lambda: Shot(body=parts(["a"] * 490, 100)), 4)),
    Attack("control tokens in parts", "own", "<|im_ and end|>, 500 times in each of 90 messages",
           shots(lambda: Shot(body=parts(["<|im_", "end| >"] * 250, 90)), 4)),
]  # fmt: skip
TEXTS = [
    Attack("a word of 1 MB", "own", "without a break", text("a" * 1_000_000)),
    Attack("a word of 65,000", "own", "below the length at which tokens are estimated; 16 clients",
           text("ab" * 32_500, 16)),
    Attack("white space of 65,000", "own", "16 clients, 4 times", text(" " * 65_000, 16, times=4)),
    Attack("1 MB of combining marks", "own", "for NFC", text("e" + "\u0301\u0323" * 500_000)),
    Attack("1 MB of emoji", "own", "joined ones", text("\U0001f468\u200d\U0001f469\u200d" * 250_000)),
    Attack("1 MB of U+3000 and U+00A0", "own", "white space of other kinds", text("\u3000\u00a0" * 500_000)),
    Attack("4 MB of control characters", "own", "U+001C to U+001F are white space for Python alone",
           text("\x1c\x1d\x1e\x1f" * 1_000_000)),
    Attack("Ollama, 2 MB of white space", "own", "/api/generate", other(
        "/api/generate", {"prompt": " " * 2_000_000})),
    Attack("Anthropic, 2 MB of white space", "own", "as the system's", other("/v1/messages", {
        "max_tokens": 5, "system": " \n" * 10**6, "messages": [{"role": "user", "content": "hi"}]})),
    Attack("Responses, 2 MB of white space", "own", "/v1/responses", other(
        "/v1/responses", {"input": " " * 2_000_000})),
    Attack("a question of 2 MB of white space", "own", "/v1/vision/ask", other(
        "/v1/vision/ask", {"question": "what" + "\t" * 2_000_000 + "?", "image": data_url(png(8, 8))})),
    Attack("tokenize 65 kB", "own", "16 clients, 8 times", shots(
        lambda: Shot("/tokenize", tokenize("ab" * 32_500).body, times=8), 16)),
]  # fmt: skip


def gif(frames: int) -> bytes:
    """An animation."""
    pictures = [Image.new("L", (64, 64), i % 256) for i in range(frames)]
    file = BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=20)
    return file.getvalue()


def seen(data: bytes, count: int = 1, kind: str = "image_url") -> bytes:
    """A chat about these pictures."""
    url = {"url": "data:;base64," + base64.b64encode(data).decode()}
    return chat([{"type": kind, kind: url}] * count + [{"type": "text", "text": "what?"}], max_tokens=5)


def text_chunks() -> bytes:
    """A picture with 200 texts of a megabyte each, packed."""
    return png(8, 8, *[(b"zTXt", b"k\0\0" + compress(bytes(1 << 20)))] * 200)


def percent() -> bytes:
    """A data URL of 60 MB, each byte written as %00."""
    return chat([{"type": "image_url", "image_url": {"url": "data:," + "%00" * 20_000_000}}])


PICTURES = [
    Attack("256 pictures of a pixel", "own", "four clients",
           shots(lambda: Shot(body=seen(png(1, 1), 256)), 4)),
    Attack("a picture of 1 × 60,000", "own", "and its like, scaled up to tokens", lambda: [
        Shot(body=seen(png(*size), 16)) for size in ((1, 60_000), (60_000, 1), (2, 30_000))]),
    Attack("20 pictures of 64 megapixels", "own", "10 kB each", shots(
        lambda: Shot(body=seen(png(8000, 8000), 5)), 4)),
    Attack("256 pictures to count", "own", "count_tokens, four clients", shots(lambda: counted([
        {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                     "data": base64.b64encode(png(256, 256)).decode()}}] * 256), 4)),
    Attack("a PNG of texts", "own", "200 of a megabyte", shots(lambda: Shot(body=seen(text_chunks(), 4)), 4)),
    Attack("an animation of 3,000 frames", "own", "as a picture and as a video", lambda: [
        Shot(body=seen(gif(3000), 4, kind)) for kind in ("image_url", "video_url")]),
    Attack("percent-encoded 60 MB", "own", "a data URL of %00", shots(lambda: Shot(body=percent()))),
    Attack("base64 of 60 MB with line breaks", "own", "which are taken out", shots(lambda: Shot(body=chat(
        [{"type": "image_url", "image_url": {"url": "data:;base64," + "AAAA\n" * 9_500_000}}])))),
    Attack("a URL of 60 MB", "own", "https, 8,192 are taken", shots(lambda: Shot(body=chat(
        [{"type": "image_url", "image_url": {"url": "https://a/" + "é" * 9_500_000}}])))),
    Attack("64 uploads of 4 megapixels", "own", "/v1/vision/ask, four clients",
           shots(lambda: uploads(64, png(2000, 2000)), 4)),
]  # fmt: skip

NOTHING = [
    Attack("nothing", "control", "nobody attacks", list),
    Attack("nothing, at the end", "control", "nobody attacks", list),
]
ALL = [NOTHING[0], *ISSUE, *HTTP, *GRAMMARS, *SAMPLING, *TEXTS, *PICTURES, *PROTOCOLS, NOTHING[1]]


def act_out(name: str, address: Address, pipe: Connection) -> None:
    """The attackers' process."""
    act(next(attack for attack in ALL if attack.name == name), address, pipe)
