"""A real vLLM on the CPU behind `VllmEngine`, serving pocket: what our own engine answers, it answers.

One test, as one start takes most of the time: every step below runs on the same server.
"""

import asyncio
import json
import math

import pytest
from PIL import Image, ImageDraw

import snugvl
from snugvl.backends.vllm.service import VllmEngine
from snugvl.core.messages import Delta, Grammar, Part, Request, Tool, ToolUse, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, EngineUnavailable, RequestError, RequestTooLarge
from snugvl.inputs.tools.hermes import HermesParser
from snugvl.inputs.tools.parser import CallStarted
from tests.backends.children import processes
from tests.backends.vllm.helpers import engine, read
from tests.backends.vllm.real.install import pocket

# Beyond the contract of all backends (tests/backends/contract/test_real_vllm.py).
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(900)]
START_S = 240.0
QUESTION = "Describe this picture."
TOOL = Tool("move", "Moves", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})


def picture() -> Image.Image:
    """A red circle, larger than pocket's limit and of no even size."""
    image = Image.new("RGB", (643, 477), "white")
    ImageDraw.Draw(image).ellipse((100, 80, 380, 360), fill="red")
    return image


async def until_ready(service: VllmEngine) -> None:
    """A real start takes its time."""
    async with asyncio.timeout(START_S):
        while not service.health.ready:
            assert service.health.state != "failed", service.health.detail
            await asyncio.sleep(0.1)


async def ask(
    service: VllmEngine,
    *parts: Part | str | Image.Image,
    tools: ToolUse | None = None,
    grammar: Grammar | None = None,
    **sampling: object,
) -> list[Delta]:
    """All deltas of an answer."""
    params = SamplingParams(**({"max_tokens": 40} | sampling))  # type: ignore[arg-type]
    return await read(await service.submit(Request((user(*parts),), params, tools=tools, grammar=grammar)))


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    """The text of a choice."""
    return "".join(delta.text for delta in deltas if delta.choice == choice)


async def test_a_real_vllm() -> None:
    async with engine(pocket()) as service:
        await until_ready(service)
        assert service.capabilities is not None
        assert service.capabilities.images
        assert service.capabilities.context_tokens == 2048
        await same_as_our_engine(service)
        await grammars_hold(service)
        await tools_are_called(service)
        await answers_stop(service)
        await refusals_name_their_reason(service)
        await tokens_are_those_of_the_model(service)
        await a_closed_stream_frees_its_place(service)
        await a_killed_engine_comes_back(service)


async def same_as_our_engine(service: VllmEngine) -> None:
    """Greedy tokens, log-probabilities, counts of tokens: vLLM in float32 against our engine in float32."""
    with snugvl.load("pocket", device="cpu", dtype="float32") as model:
        request = Request((user(picture(), QUESTION),), SamplingParams(max_tokens=40, logprobs=2))
        ours = await asyncio.to_thread(lambda: list(model.backend.submit(request)))
    theirs = await read(await service.submit(request))
    assert text_of(theirs) == text_of(ours)
    assert theirs[-1].finish_reason == ours[-1].finish_reason == "stop"
    assert theirs[-1].usage == ours[-1].usage
    pairs = list(zip(logprobs_of(theirs), logprobs_of(ours), strict=True))
    assert len(pairs) > 5
    for mine, other in pairs:
        assert mine[0] == other[0]
        assert math.isclose(mine[1], other[1], rel_tol=1e-3, abs_tol=2e-3)
    greedy = await ask(service, picture(), QUESTION, n=2)
    assert text_of(greedy, 0) == text_of(greedy, 1) == text_of(ours)
    drawn = await ask(service, picture(), QUESTION, n=2, temperature=1.5, seed=7, max_tokens=12)
    again = await ask(service, picture(), QUESTION, n=2, temperature=1.5, seed=7, max_tokens=12)
    assert [text_of(drawn, choice) for choice in (0, 1)] == [text_of(again, choice) for choice in (0, 1)]


def logprobs_of(deltas: list[Delta]) -> list[tuple[str, float]]:
    """Tokens with their log-probabilities, and those of the alternatives."""
    flat = [logprob for delta in deltas for logprob in delta.logprobs]
    return [(token.token, token.logprob) for logprob in flat for token in (logprob, *logprob.top[:1])]


async def grammars_hold(service: VllmEngine) -> None:
    """Each kind, in llguidance's dialect, compact as our engine makes it."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer = text_of(await ask(service, "hi", grammar=Grammar("json_schema", json.dumps(schema))))
    assert set(json.loads(answer)) == {"a", "b"}
    assert "\n" not in answer
    assert text_of(await ask(service, "hi", grammar=Grammar("regex", "[ab]{3}"))) in {
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    }
    assert text_of(await ask(service, "hi", grammar=Grammar("lark", 'start: "yes" | "no"'))) in ("yes", "no")
    with pytest.raises(RequestError, match="unknown name"):
        await ask(service, "hi", grammar=Grammar("lark", "start: nothing"))


async def tools_are_called(service: VllmEngine) -> None:
    """The template shows them, the grammar makes the call, and our parser finds it in the text."""
    use = ToolUse((TOOL,), "move")
    parser = HermesParser(use)
    events = parser.push(text_of(await ask(service, "hi", tools=use, max_tokens=80))) + parser.flush()
    assert [event.name for event in events if isinstance(event, CallStarted)] == ["move"]


async def answers_stop(service: VllmEngine) -> None:
    """At a string, at a token, at a number of tokens."""
    deltas = await ask(service, picture(), QUESTION, stop=("circle",))
    assert "circle" not in text_of(deltas)
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", "circle")
    (circle,) = (await service.tokenize(Request(prompt=" red"))).ids
    deltas = await ask(service, picture(), QUESTION, stop_token_ids=(circle,))
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", " red")
    deltas = await ask(service, "hi", max_tokens=3, ignore_eos=True)
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 3


async def refusals_name_their_reason(service: VllmEngine) -> None:
    """Before anything is computed."""
    with pytest.raises(RequestTooLarge, match="2048"):
        await ask(service, "hi " * 3000)
    with pytest.raises(RequestError, match="control token"):
        await ask(service, "<|im_end|>")


async def tokens_are_those_of_the_model(service: VllmEngine) -> None:
    """There and back; those of a picture are counted."""
    ids = (await service.tokenize(Request(prompt="a red circle"))).ids
    assert await service.detokenize(ids) == "a red circle"
    counted = await service.tokenize(Request((user(picture(), "hi"),)))
    assert 0 < counted.image_tokens < len(counted.ids)
    bare = await read(await service.submit(Request(prompt=ids, sampling=SamplingParams(logprobs=1))))
    assert bare[-1].usage is not None
    assert bare[-1].usage.prompt_tokens == len(ids)


async def a_closed_stream_frees_its_place(service: VllmEngine) -> None:
    """vLLM aborts what nobody reads."""
    endless = SamplingParams(max_tokens=1900, ignore_eos=True)
    stream = await service.submit(Request((user("hi"),), endless))
    await running(service, 1)
    stream.close()
    await running(service, 0)


async def running(service: VllmEngine, number: int) -> None:
    """Wait until vLLM itself says that it runs so many requests."""
    async with asyncio.timeout(60):
        while service.snapshot is None or service.snapshot.load.running != number:
            await asyncio.sleep(0.02)


async def a_killed_engine_comes_back(service: VllmEngine) -> None:
    """`kill -9` of EngineCore: what runs ends with an error, nothing is left, and it serves again."""
    family = processes(service)
    core = next(process for process in family if "EngineCor" in process.name())
    endless = SamplingParams(max_tokens=1900, ignore_eos=True)
    stream = await service.submit(Request((user("hi"),), endless))
    core.kill()
    with pytest.raises(EngineError, match=r"vLLM.*it is starting again"):
        await read(stream)
    with pytest.raises(EngineUnavailable):
        await ask(service, "hi")
    await until_ready(service)
    assert service.health.restarts == 1
    assert not [process for process in family if process.is_running()]
    assert text_of(await ask(service, picture(), QUESTION))
