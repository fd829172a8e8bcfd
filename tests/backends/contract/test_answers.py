"""What every engine answers: text, pictures, streams, ends, forms, tools; equal where it is greedy."""

import asyncio
import json
import re

import pytest

from snugvl.core.messages import Delta, Grammar, Message, Request, Text, ToolUse, user
from snugvl.core.sampling import SamplingParams
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.hermes import HermesParser
from snugvl.inputs.tools.parser import CallArguments, CallStarted
from tests.backends.contract.differences import as_shown
from tests.backends.contract.engines import CONTEXT, Running, read
from tests.backends.contract.requests import (
    QUESTION,
    SCHEMA,
    TOOLS,
    asked,
    constrained,
    logprobs,
    picture,
    texts,
)

CONVERSATION = (
    Message("system", (Text("A red circle."),)),
    user(picture(), "What is in this image?"),
    Message("assistant", (Text("two blue squares."),)),
    user("A circle?"),
)
REQUESTS = {
    "text": asked(),
    "one picture": asked(picture(), QUESTION),
    "two pictures": asked(picture(), "and", picture((64, 160), "blue"), "What?"),
    "a conversation": Request(CONVERSATION, SamplingParams(max_tokens=24, ignore_eos=True)),
    "a bare text": Request(
        prompt="A red circle, two", sampling=SamplingParams(max_tokens=24, ignore_eos=True)
    ),
    "unusual characters": asked("Ünï – 红 🙂 \t\n  x"),
}


def test_capabilities(running: Running) -> None:
    found = running.capabilities
    assert found.engine == running.name
    assert found.context_tokens == CONTEXT
    assert found.images
    assert found.tools
    assert found.min_pixels == 4096 < found.max_pixels <= 1 << 20
    assert found.architecture == (
        "qwen3vl" if running.name == "llamacpp" else "Qwen3VLForConditionalGeneration"
    )
    assert found.parameters > 100_000
    assert "float32" in found.dtype
    assert found.device == "CPU"


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.sample(
    "transformers-two pictures",
    "transformers-a conversation",
    "native-one picture",
    "native-unusual characters",
    "llamacpp-one picture",
    "llamacpp-a bare text",
    "llamacpp-text",
)
def test_greedy_answers_are_equal(name: str, running: Running, reference: Running) -> None:
    deltas = running.ask(REQUESTS[name])
    expected = reference.ask(REQUESTS[name])
    shown = [as_shown(running.name, text) for text in texts(expected)]
    assert [as_shown(running.name, text) for text in texts(deltas)] == shown
    assert deltas[-1].usage == expected[-1].usage
    assert running.text(REQUESTS[name]) == texts(deltas)[0]


def test_a_stream_comes_in_pieces_and_ends_with_its_reason_and_usage(running: Running) -> None:
    deltas = running.ask(asked(max_tokens=100))  # a busy machine takes several together
    assert len([delta for delta in deltas if delta.text]) > 3
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].stop is None
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 100


def test_the_prompts_tokens_are_known_before_the_first_delta(running: Running) -> None:
    async def test() -> tuple[int, list[Delta]]:
        stream = await running.service.submit(REQUESTS["one picture"])
        told = stream.prompt_tokens
        return told, await read(stream)

    told, deltas = running.run(test())
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == told > usage.image_tokens == 4 * 3


def test_a_stop_string_ends_the_text_before_it(running: Running) -> None:
    whole = running.text(asked())
    for start in (3, 9, 14):
        stop = whole[start : start + 3]
        deltas = running.ask(asked(stop=(stop,)))
        assert texts(deltas) == [whole[: whole.index(stop)]]
        assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", stop)


def test_a_stop_token_ends_the_answer_and_is_counted(running: Running, tokenizer: Tokenizer) -> None:
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    tokens = [token.bytes for token in logprobs(running.ask(asked(logprobs=0)))]
    wanted = next(token for token in tokens[5:] if token.isascii() and token.strip())
    deltas = running.ask(asked(stop_token_ids=(ids[wanted],), ignore_eos=False))
    assert texts(deltas) == [b"".join(tokens[: tokens.index(wanted)]).decode("utf-8", "replace")]
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", wanted.decode())
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == tokens.index(wanted) + 1


def test_the_models_own_end_is_a_stop_without_a_name(running: Running, tokenizer: Tokenizer) -> None:
    end = min(tokenizer.eos_ids)
    deltas = running.ask(asked(ignore_eos=False, logit_bias={end: 100.0}))
    assert (texts(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ([""], "stop", None)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 1


def test_choices_come_apart_and_each_ends(running: Running) -> None:
    deltas = running.ask(asked(n=3, temperature=1.0, seed=5))
    assert len(set(texts(deltas))) == 3
    for choice in range(3):
        ends = [delta.finish_reason for delta in deltas if delta.choice == choice and delta.finish_reason]
        assert ends == ["length"]
    assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 3 * 24


def test_greedy_choices_are_all_the_same(running: Running) -> None:
    deltas = running.ask(asked(n=2))
    assert texts(deltas) == [running.text(asked())] * 2


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", SCHEMA),
        Grammar("regex", "[a-f]{3}-[0-9]{2}"),
        Grammar("lark", 'start: "yes" | "no"'),
    ],
    ids=lambda grammar: grammar.kind,
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.sample("llamacpp-sampled-lark", "transformers-greedy-regex", "native-sampled-json_schema")
def test_an_answer_has_the_form_that_was_asked_for(
    running: Running, grammar: Grammar, sampling: dict[str, float]
) -> None:
    """The weights are random: without the grammar this is noise."""
    deltas = running.ask(constrained(grammar, **sampling))
    (text,) = texts(deltas)
    assert deltas[-1].finish_reason == "stop"
    match grammar.kind:
        case "json_schema":
            value = json.loads(text)
            assert value["color"] in ("red", "blue")
            assert 0 <= value["n"] <= 99
        case "regex":
            assert re.fullmatch(grammar.source, text)
        case "lark":
            assert text in ("yes", "no")


def test_calls_of_tools_are_valid(running: Running) -> None:
    request = Request((user(QUESTION),), SamplingParams(max_tokens=200, temperature=1.0, seed=7), tools=TOOLS)
    parser = HermesParser(TOOLS)
    deltas = running.ask(request)
    events = [event for delta in deltas for event in parser.push(delta.text)] + parser.flush()
    (call,) = [event for event in events if isinstance(event, CallStarted)]
    arguments = json.loads("".join(event.fragment for event in events if isinstance(event, CallArguments)))
    assert arguments == {} if call.name == "now" else isinstance(arguments["city"], str)


def test_a_conversation_and_a_text_have_the_tokens_of_our_own_engine(
    running: Running, reference: Running
) -> None:
    async def tokens(service: Running) -> list[object]:
        use = ToolUse(TOOLS.tools)
        return [
            await service.service.tokenize(Request(prompt="A red circle, two blue squares.")),
            await service.service.tokenize(Request(CONVERSATION)),
            await service.service.tokenize(Request((user("hello"),), tools=use)),
        ]

    assert running.run(tokens(running)) == reference.run(tokens(reference))


def test_tokens_become_the_text_again(running: Running) -> None:
    text = "A red circle – 🙂 <0.5 seconds>"

    async def test() -> str:
        return await running.service.detokenize((await running.service.tokenize(Request(prompt=text))).ids)

    assert running.run(test()) == text


def test_a_bare_prompt_is_text_or_the_same_as_ids(running: Running) -> None:
    async def ids() -> tuple[int, ...]:
        return (await running.service.tokenize(Request(prompt="A red circle, two"))).ids

    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    as_ids = Request(prompt=running.run(ids()), sampling=sampling)
    assert running.text(as_ids) == running.text(REQUESTS["a bare text"])


def test_several_at_once_answer_as_alone(running: Running) -> None:
    requests = [*REQUESTS.values(), asked(max_tokens=40), asked(temperature=1.0, seed=9)]

    async def together() -> list[list[Delta]]:
        streams = await asyncio.gather(*(running.service.submit(request) for request in requests))
        return list(await asyncio.gather(*map(read, streams)))

    alone = [texts(running.ask(request)) for request in requests]
    assert [texts(answer) for answer in running.run(together())] == alone
