"""The attacks of issue 14, and those on HTTP, JSON and forms; the rest is in the modules beside this one."""

import json
from collections.abc import Callable
from dataclasses import replace

from tests.attacks.kit import Attack, Shot, chat, form, schema

MIB = 1 << 20
LEAVE_3_S = (3.0, 3.0)
COUNT = "/v1/messages/count_tokens"
XML_PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": '\\\\/"'}}}

Shots = Callable[[], list[Shot]]


def shots(make: Callable[[], Shot], count: int = 1) -> Shots:
    """So many clients who send the same bytes."""

    def all_of_them() -> list[Shot]:
        return [make()] * count

    return all_of_them


def multiple(*numbers: int) -> bytes:
    """A number that is a multiple of one of these."""
    parts = [{"type": "integer", "multipleOf": number} for number in numbers]
    return schema(parts[0] if len(parts) == 1 else {"anyOf": parts})


def tokenize(text: str) -> Shot:
    """Count a text, whose answer nobody waits for longer than others wait for theirs."""
    return Shot("/tokenize", json.dumps({"prompt": text}).encode())


def counted(content: object) -> Shot:
    """The same in Anthropic's form."""
    body = {"model": "pocket", "messages": [{"role": "user", "content": content}]}
    return Shot(COUNT, json.dumps(body).encode())


def pictures(count: int, side: int) -> list[dict[str, object]]:
    """So many pictures in Anthropic's form."""
    import base64
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.effect_noise((side, side), 90).convert("RGB").save(file, "JPEG")
    data = base64.b64encode(file.getvalue()).decode()
    return [{"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}] * count


def objects_of_commas() -> Shot:
    """/v1/vision/detect with 60 MB of commas as names of objects."""
    body, kind = form(('name="objects"', b"," * 60_000_000), ('name="image"', b"data:,"))
    return Shot("/v1/vision/detect", body, kind)


def tool(index: int, parameters: object, description: str = "A tool.") -> dict[str, object]:
    """A tool of a chat completion."""
    function = {"name": f"f{index}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def text(content: str, count: int = 1, **shot: object) -> Shots:
    """A chat with this text."""
    made: Shots = shots(lambda: replace(Shot(body=chat(content)), **shot), count)  # type: ignore[arg-type]
    return made


ISSUE = [
    Attack("multipleOf 99999999", "1", "four schemas of 60 bytes, clients leave after 3 s",
           shots(lambda: Shot(body=multiple(99_999_999), leave_s=LEAVE_3_S), 4)),
    Attack("multipleOf 1000003", "1", "the same, smaller",
           shots(lambda: Shot(body=multiple(1_000_003), leave_s=LEAVE_3_S), 4)),
    Attack("four multipleOf in one anyOf", "1", "their product counts",
           shots(lambda: Shot(body=multiple(9973, 9967, 9949, 9941), leave_s=LEAVE_3_S), 4)),
    Attack("deadline while compiling", "1", "--deadline 3: each request has its 504, or is refused before",
           shots(lambda: Shot(body=multiple(99_999_999)), 2), ("--deadline", "3"), 5.0),
    Attack("1 MB of white space", "2", "no token, says the lower bound", text(" " * 1_000_000)),
    Attack("4 MB of white space", "2", "the same", text("\n \t " * 1_000_000)),
    Attack("62 MB of white space", "2", "up to the limit of a body", text(" " * 62_000_000)),
    Attack("62 MB of <|", "2", "what looks for control tokens reads all of it", text("<|" * 31_000_000)),
    Attack("tokenize 8 MB", "3", "/tokenize of words", shots(lambda: tokenize("lorem ipsum " * 666_667))),
    Attack("count_tokens 8 MB", "3", "of words", shots(lambda: counted("lorem ipsum " * 666_667))),
    Attack("count_tokens of pictures", "3", "64 pictures of a megapixel, cut into patches to be counted",
           shots(lambda: counted(pictures(64, 1000)))),
    Attack("stop strings of 8 MB", "4", "n = 4",
           shots(lambda: Shot(body=chat(stop=["a" * 8_000_000], n=4, max_tokens=8)))),
    Attack("const of 100,000", "5", "n = 64: masks of the engine's thread",
           shots(lambda: Shot(body=schema({"const": "x" * 100_000}, n=64, max_tokens=60)))),
    Attack("const of 100,000, n = 12", "5", "the same within the 16 slots: beside the stream, not after it",
           shots(lambda: Shot(body=schema({"const": "x" * 100_000}, n=12, max_tokens=60)))),
    Attack("forty leave, four let in", "6", "--max-concurrent 4, forty texts of 300 kB, left after 0.4 s",
           shots(lambda: Shot(body=chat("lorem ipsum " * 25_000), leave_s=(0.4, 0.4), times=10), 4),
           ("--max-concurrent", "4")),
    Attack("forty leave at once", "6", "--max-concurrent 4, forty texts of 60 kB at once, left after 0.4 s",
           shots(lambda: Shot(body=chat(" a" * 30_000), leave_s=(0.4, 0.4)), 40), ("--max-concurrent", "4")),
    Attack("24 MB of {},", "7", "8,000,000 objects are made, then counted",
           shots(lambda: Shot(body=b"[" + b"{}," * 8_000_000 + b"{}]"))),
    Attack("60 MB of commas", "7", "the form field objects of /v1/vision/detect", shots(objects_of_commas)),
    Attack("a pattern with \\/", "9", "closes the literal of a tool's grammar",
           shots(lambda: Shot(body=chat(tools=[tool(0, XML_PATTERN)], tool_choice="required",
                                        max_tokens=50)))),
    Attack("60 bodies held back", "9", "16 MiB each but for the last byte",
           shots(lambda: Shot(body=b" " * (16 * MIB), hold=True), 60)),
]  # fmt: skip


def part_errors() -> bytes:
    """290,000 parts of messages that are all wrong."""
    content = "[" + "0," * 999 + "0]"
    messages = ",".join([f'{{"role":"user","content":{content}}}'] * 290)
    return f'{{"messages":[{messages}]}}'.encode()


def many_keys() -> bytes:
    """140,000 fields that nobody knows."""
    return ("{" + ",".join(f'"k{i}":0' for i in range(140_000)) + "}").encode()


def call_bomb() -> bytes:
    """A call of a tool with 24 MB of `{},` as the text of its arguments."""
    arguments = '{"a":[' + "{}," * 8_000_000 + "{}]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()


def many_parts() -> Shot:
    """200,000 parts of a form."""
    body, kind = form(*[(f'name="p{i}"', b"") for i in range(200_000)])
    return Shot(body=body, kind=kind)


def uploads(count: int, data: bytes, path: str = "/v1/vision/ask") -> Shot:
    """Files of a form."""
    body, kind = form(*[('name="image"; filename="a"', data)] * count, ('name="question"', b"what?"))
    return Shot(path, body, kind)


def around_form(before: bytes, after: bytes, boundary: str = "b0und") -> Shot:
    """Rubbish before the first part of a form and behind its last."""
    body, kind = form(('name="request"', b"{}"), boundary=boundary)
    return Shot(body=before + body + after, kind=kind)


def long_part_head() -> Shot:
    """A part whose head never ends."""
    body = b'--b0und\r\nContent-Disposition: form-data; name="' + b"a" * 60_000_000
    return Shot(body=body, kind="multipart/form-data; boundary=b0und")


CHUNKED = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n{}\r\n"
AS_JSON = "Content-Type: application/json\r\n"


def chunked(rest: bytes, headers: str = AS_JSON) -> bytes:
    """A request whose body is these chunks."""
    return CHUNKED.format("/v1/chat/completions", headers).encode() + rest


HTTP = [
    Attack("deep JSON", "own", "60 MB of [", shots(lambda: Shot(body=b"[" * 60_000_000))),
    Attack("numbers of 4,000 digits", "own", "15,000 of them",
           shots(lambda: Shot(body=b"[" + (b"7" * 4000 + b",") * 15_000 + b"1]"))),
    Attack("one float of 60 MB", "own", "float() of 60,000,000 digits",
           shots(lambda: Shot(body=b'{"a":0.' + b"1" * 60_000_000 + b"}"))),
    Attack("1e400", "own", "a million of 0.1, then infinity",
           shots(lambda: Shot(body=b"[" + b"0.1," * 1_000_000 + b"1e400]"))),
    Attack("10 million \\u0000", "own", "one string of escapes",
           shots(lambda: Shot(body=chat("@").replace(b"@", b"\\u0000" * 10**7)))),
    Attack("a key of 60 MB", "own", "an unknown field, named in the answer",
           shots(lambda: Shot(body=b'{"' + b"k" * 60_000_000 + b'":1}'))),
    Attack("one key 8,000,000 times", "own", "pairs are made before they are compared",
           shots(lambda: Shot(body=b"{" + b'"a":1,' * 8_000_000 + b'"a":1}'))),
    Attack("140,000 unknown fields", "own", "of one object", shots(lambda: Shot(body=many_keys()))),
    Attack("290,000 wrong parts", "own", "each an error of its own, all told to be shown fifty",
           shots(lambda: Shot(body=part_errors()))),
    Attack("24 MB of {}, in arguments", "own", "JSON within a string of JSON: no limit of values there",
           shots(lambda: Shot(body=call_bomb()))),
    Attack("a model's name of 60 MB", "own", "that isn't served",
           shots(lambda: Shot(body=chat(model="m" * 60_000_000)))),
    Attack("4 million chunks of a byte", "own", "Transfer-Encoding: chunked",
           shots(lambda: Shot(raw=chunked(b"1\r\n \r\n" * 4_000_000 + b"0\r\n\r\n")))),
    Attack("60 chunked bodies held back", "own", "16 MiB each, of a length that nobody announced",
           shots(lambda: Shot(raw=chunked(b""), body=(b"%x\r\n" % MIB + b" " * MIB + b"\r\n") * 16,
                              hold=True), 60)),
    Attack("60 MB of trailers", "own", "header lines behind the body, which nobody counts",
           shots(lambda: Shot(raw=chunked(b"1\r\n \r\n0\r\n"), body=b"a: b\r\n" * 10_000_000))),
    Attack("trailers without end", "own", "eight clients, 4 million lines each, clients stay",
           shots(lambda: Shot(raw=chunked(b"1\r\n \r\n0\r\n"), body=b"a: b\r\n" * 4_000_000), 8)),
    Attack("a chunk's extension of 60 MB", "own", "of the first chunk",
           shots(lambda: Shot(raw=chunked(b"1;" + b"a" * 60_000_000 + b"\r\n \r\n0\r\n\r\n")))),
    Attack("10,000 requests in one go", "own", "pipelined over each of four connections",
           shots(lambda: Shot(raw=b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000,
                              leave_s=(8.0, 8.0)), 4)),
    Attack("30,000 pipelined, unread", "own", "eight connections whose answers nobody reads",
           shots(lambda: Shot(raw=b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30_000,
                              read=False, leave_s=(10.0, 10.0)), 8)),
    Attack("100 header lines", "own", "of 600 bytes, 16 clients, 100 times each",
           shots(lambda: Shot("/health", method="GET", headers=[f"x-{i}: {'a' * 600}" for i in range(96)],
                              times=100), 16)),
    Attack("1,000 connections", "own", "that never say anything", shots(
        lambda: Shot(raw=b"P", leave_s=(6.0, 6.0)), 1000)),
    Attack("a flood of HEAD and OPTIONS", "own", "16 clients, 200 times each",
           lambda: [Shot("/v1/models", method=method, times=200) for method in ("HEAD", "OPTIONS") * 8]),
    Attack("/metrics, /memory, /openapi.json", "own", "16 clients, 60 times each",
           lambda: [Shot(path, method="GET", times=60)
                    for path in ("/metrics", "/memory", "/openapi.json", "/") * 4]),
    Attack("200,000 parts of a form", "own", "64 are taken", shots(many_parts)),
    Attack("a part's head of 60 MB", "own", "a name without end", shots(long_part_head)),
    Attack("60 MB before a form", "own", "line ends before the first part",
           shots(lambda: around_form(b"\r\n" * 30_000_000, b""))),
    Attack("60 MB behind a form", "own", "line ends behind the last part",
           shots(lambda: around_form(b"", b"\r\n" * 30_000_000))),
    Attack("a boundary of 60 kB", "own", "and a part that looks like it again and again",
           shots(lambda: around_form(b"", b"", "b" * 60_000))),
    Attack("a form that is nearly boundaries", "own", "60 MB of \\r\\n--b0un",
           shots(lambda: uploads(1, b"\r\n--b0un" * 7_500_000))),
    Attack("64 files of no picture", "own", "900 kB each, four clients",
           shots(lambda: uploads(64, b"GIF8" * 225_000), 4)),
    Attack("requests that leave", "own", "32 clients, each leaves within 0.3 s, 200 times",
           shots(lambda: Shot(body=chat("Tell me more.", stream=True, max_tokens=500), leave_s=(0.0, 0.3),
                              times=200), 32)),
    Attack("streams that nobody reads", "own", "100 of them, n = 4",
           shots(lambda: Shot(body=chat("Tell me more.", stream=True, ignore_eos=True, n=4, logprobs=True,
                                        top_logprobs=20, max_tokens=1000), read=False), 100)),
]  # fmt: skip
