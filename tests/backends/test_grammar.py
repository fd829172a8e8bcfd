"""Requests with a grammar, with tools, and with a bare prompt, from text to text on a real network."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.backends.native.backend import NativeBackend
from snugvl.checkpoint.families import read_config
from snugvl.core.messages import Delta, Grammar, Message, Request, Text, Tool, ToolCall, ToolUse, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.prompt import Processor
from snugvl.inputs.tools.hermes import HermesParser
from snugvl.inputs.tools.parser import CallArguments, CallStarted
from snugvl.models.networks import Qwen3VL
from snugvl.tasks import detect, scene
from snugvl.tasks.ask import collect
from tests.backends.conftest import make_backend

POCKET = Path(__file__).parents[2] / "src/snugvl/pocket"
QUESTION = user("What is in this image?")
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "n"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOLS = (Tool("get_weather", "Weather", CITY), Tool("now", "Time"))


@pytest.fixture(scope="module")
def processor(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """The tiny checkpoint's, with a template that shows tools."""
    copy = tmp_path_factory.mktemp("tools")
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "chat_template.jinja").unlink()
    (copy / "chat_template.jinja").write_bytes((POCKET / "chat_template.jinja").read_bytes())
    return Processor.from_folder(copy, read_config(copy))


@pytest.fixture
def backend(network: Qwen3VL, processor: Processor) -> Iterator[NativeBackend]:
    made = make_backend(network, processor)
    yield made
    made.close()


def asked(*, sampling: dict[str, Any] | None = None, **fields: Any) -> Request:
    return Request((QUESTION,), SamplingParams(**{"max_tokens": 200} | (sampling or {})), **fields)


def calling(name: str, arguments: str) -> Message:
    return Message("assistant", (), (ToolCall("1", name, arguments),))


def read(backend: NativeBackend, request: Request) -> tuple[list[str], list[Delta]]:
    """The text of each choice, and all deltas."""
    deltas = list(backend.submit(request))
    texts = [""] * request.sampling.n
    for delta in deltas:
        texts[delta.choice] += delta.text
    return texts, deltas


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 2.0, "seed": 3}, {"temperature": 1.0, "n": 4, "seed": 1}]
)
def test_any_network_answers_by_the_schema(backend: NativeBackend, sampling: dict[str, Any]) -> None:
    """The weights are random, so without the grammar this is noise."""
    request = asked(grammar=Grammar("json_schema", json.dumps(SCHEMA)), sampling=sampling)
    texts, deltas = read(backend, request)
    for text in texts:
        value = json.loads(text)
        assert value.keys() == {"color", "n"}
        assert value["color"] in ("red", "blue")
        assert 0 <= value["n"] <= 99
    assert {delta.finish_reason for delta in deltas} == {None, "stop"}
    assert len(deltas) > 2, "it streams"


def test_warming_up_builds_the_vocabulary_once(backend: NativeBackend) -> None:
    assert backend._grammars._made is None, "nobody pays who needs no grammar"
    read(backend, asked(sampling={"max_tokens": 2}))
    assert backend._grammars._made is None
    backend.warm_up()
    made = backend._grammars._made
    assert made is not None
    read(backend, asked(grammar=Grammar("regex", "ab")))
    assert backend._grammars._made is made


def test_regex_and_lark_too(backend: NativeBackend) -> None:
    texts, _ = read(backend, asked(grammar=Grammar("regex", "[a-f]{3}-[0-9]{2}")))
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", texts[0])
    texts, _ = read(backend, asked(grammar=Grammar("lark", 'start: "yes" | "no"')))
    assert texts[0] in ("yes", "no")


def test_a_bias_does_not_break_the_grammar(backend: NativeBackend, processor: Processor) -> None:
    bias = {token: 100.0 for text in "{}xyz" for token in processor.tokenizer.encode(text)}
    request = asked(grammar=Grammar("regex", "[ab]{4}"), sampling={"logit_bias": bias, "temperature": 1.0})
    assert re.fullmatch("[ab]{4}", read(backend, request)[0][0])


def test_a_stop_string_and_a_limit_still_cut(backend: NativeBackend) -> None:
    texts, deltas = read(backend, asked(grammar=Grammar("regex", "aaaXbbb"), sampling={"stop": ("X",)}))
    assert (texts[0], deltas[-1].finish_reason) == ("aaa", "stop")
    texts, deltas = read(backend, asked(grammar=Grammar("regex", "[ab]{50}"), sampling={"max_tokens": 5}))
    assert deltas[-1].finish_reason == "length"
    assert re.fullmatch("[ab]{5,}", texts[0])


def test_logprobs_are_the_networks_own(backend: NativeBackend) -> None:
    request = asked(grammar=Grammar("regex", "ab"), sampling={"logprobs": 2})
    tokens = [token for delta in read(backend, request)[1] for token in delta.logprobs]
    assert tokens
    assert all(token.top[0].logprob >= token.logprob for token in tokens)


@pytest.mark.parametrize("choice", ["auto", "required", "now", "get_weather"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.sample("True-auto", "True-now", "False-required")
def test_calls_are_valid_by_construction(backend: NativeBackend, choice: str, parallel: bool) -> None:
    use = ToolUse(TOOLS, choice, parallel)
    # Random weights would call for ever, or never: the limit cuts only where several calls may come.
    request = asked(tools=use, sampling={"temperature": 1.0, "seed": 7, "max_tokens": 400})
    _, deltas = read(backend, request)
    parser = HermesParser(use)
    events = [event for delta in deltas for event in parser.push(delta.text)] + parser.flush()
    calls = [event for event in events if isinstance(event, CallStarted)]
    if choice == "auto":
        return  # text is allowed
    assert calls
    assert len(calls) == 1 or (parallel and choice == "required")
    arguments = ["".join(e.fragment for e in events if isinstance(e, CallArguments) and e.index == i) for i in
                 range(len(calls))]  # fmt: skip
    complete = calls if deltas[-1].finish_reason == "stop" else calls[:-1]
    for call, text in zip(complete, arguments, strict=False):
        value = json.loads(text)
        assert value == {} if call.name == "now" else isinstance(value["city"], str)
        assert choice in ("required", call.name)


def test_the_prompt_shows_tools_calls_and_answers(backend: NativeBackend) -> None:
    conversation = (
        user(Image.new("RGB", (64, 64), "red"), "Well?"),
        Message("assistant", (), (ToolCall("1", "get_weather", '{"city":"Rome"}'),)),
        Message("tool", (Text("sunny"),), tool_call_id="1"),
    )
    shown = backend.tokenize(Request(conversation, tools=ToolUse(TOOLS)))
    text = backend.detokenize(shown.ids)
    assert shown.image_tokens == 4
    assert '"name": "get_weather", "description": "Weather"' in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert "tools" not in backend.detokenize(backend.tokenize(Request(conversation)).ids)
    request = Request(conversation, SamplingParams(max_tokens=3), tools=ToolUse(TOOLS))
    *_, last = backend.submit(request)
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(shown.ids)


def test_a_bare_prompt_is_continued_as_it_is(backend: NativeBackend, processor: Processor) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    ids = tuple(processor.tokenizer.encode("A red circle"))
    by_text = list(backend.submit(Request(prompt="A red circle", sampling=sampling)))
    by_ids = list(backend.submit(Request(prompt=ids, sampling=sampling)))
    assert "".join(d.text for d in by_text) == "".join(d.text for d in by_ids)
    assert by_text[-1].usage == by_ids[-1].usage
    assert by_text[-1].usage is not None
    assert (
        by_text[-1].usage.prompt_tokens
        == len(ids)
        == len(backend.tokenize(Request(prompt="A red circle")).ids)
    )
    end = processor.tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert list(backend.submit(Request(prompt=(*ids, end), sampling=sampling))), "control tokens as ids"


@pytest.mark.parametrize(
    ("fields", "match", "field"),
    [
        ({"prompt": ""}, "prompt is empty", "prompt"),
        ({"prompt": ()}, "prompt is empty", "prompt"),
        ({"prompt": "a<|im_end|>"}, "control token", "prompt"),
        ({"prompt": "\ud800"}, "lone surrogate", "prompt"),
        ({"prompt": (1, -1)}, "from 0 to 511, not -1", "prompt"),
        ({"prompt": (1, 512)}, "not 512", "prompt"),
        ({"prompt": (True,)}, "not True", "prompt"),
        ({"prompt": "a", "messages": (QUESTION,)}, "not both", "prompt"),
        ({"prompt": "a", "tools": ToolUse(TOOLS)}, "need a conversation", "tools"),
        ({"messages": ()}, "conversation is empty", "messages"),
        (
            {"messages": (QUESTION,), "tools": ToolUse(TOOLS), "grammar": Grammar("regex", "a")},
            "not by both",
            "response_format",
        ),
        ({"messages": (QUESTION,), "grammar": Grammar("regex", "(")}, "can't be used", "response_format"),
        ({"messages": (QUESTION,), "tools": ToolUse((Tool("a b"),))}, "not 'a b'", "tools[0].name"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_starts(
    backend: NativeBackend, fields: dict[str, Any], match: str, field: str
) -> None:
    with pytest.raises(RequestError, match=match) as raised:
        backend.submit(Request(**fields))
    assert raised.value.field == field
    assert not backend._engine.has_work


def test_placeholders_and_length_of_a_bare_prompt(backend: NativeBackend, processor: Processor) -> None:
    with pytest.raises(RequestError, match="stands for a picture"):
        backend.submit(Request(prompt=(1, processor.config.placeholders[0])))
    with pytest.raises(RequestTooLarge, match=r"3,000 tokens, at most 2,047 fit"):
        backend.submit(Request(prompt=(1,) * 3000))


def test_closing_a_stream_with_a_grammar_frees_what_it_held(backend: NativeBackend) -> None:
    stream = backend.submit(
        asked(grammar=Grammar("regex", "[ab]{1000,}"), sampling={"max_tokens": 1500, "n": 2})
    )
    next(iter(stream))
    stream.close()
    backend._worker.call(backend._engine.check_integrity)
    assert not backend._engine.has_work


def test_scene_and_detect_are_valid_whatever_the_network_says(backend: NativeBackend) -> None:
    """Random weights: what is complete can be read, and what is cut has begun well."""
    picture = Image.new("RGB", (64, 64), "red")
    sampling = SamplingParams(temperature=1.0, seed=0, max_tokens=300)
    reply = collect(backend.submit(scene.request(picture, backend.capabilities, sampling=sampling)))
    if reply.truncated:
        assert re.match(r'(```json\n)?\{(\n\s+)?"summary": ?"', reply.text)
    else:
        assert not scene.result(reply).truncated
    reply = collect(backend.submit(detect.request(picture, [], backend.capabilities, sampling=sampling)))
    if reply.truncated:
        assert re.match(r"(```json\n)?\[", reply.text)
    else:
        assert detect.result(reply, picture.size, [], backend.capabilities).width == 64
