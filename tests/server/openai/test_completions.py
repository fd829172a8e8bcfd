"""Completions: prompts in all forms, choices in order, echo, log-probabilities, streams."""

import math
from concurrent.futures import ThreadPoolExecutor
from math import nan
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI
from openai.types import Completion

from snugvl.core.messages import Delta, Request, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError
from snugvl.server.openai import common as document
from snugvl.server.openai import completions
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService, Script
from tests.server.live import live
from tests.server.openai.scripted import Scripted, says, strict, token
from tests.server.openai.test_chat import events


def parrot(request: Request) -> list[Delta]:
    """Each choice says its prompt and its number."""
    n = request.sampling.n
    answers = [says(f"{request.prompt}/{k}", choice=k, last=k == n - 1) for k in range(n)]
    return [delta for answer in answers for delta in answer]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        ("", [""]),
    ],
)
def test_prompts_in_every_form(
    http: httpx.Client, scripted: Scripted, prompt: Any, prompts: list[Any]
) -> None:
    assert http.post("/completions", json={"prompt": prompt}).status_code == 200
    asked = sorted(scripted.requests, key=lambda request: prompts.index(request.prompt))
    assert asked == [
        Request(prompt=each, deadline_s=request.deadline_s)
        for each, request in zip(prompts, asked, strict=True)
    ]


def test_prompts_that_are_too_much_together_are_refused(
    http: httpx.Client, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_CHARACTERS", 10)
    refused = http.post("/completions", json={"prompt": ["a" * 6, "b" * 5]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "2 prompts have 11 characters; at most 10 fit" in refused.json()["error"]["message"]
    assert not scripted.requests
    assert http.post("/completions", json={"prompt": ["a" * 5, "b" * 5]}).status_code == 200
    assert http.post("/completions", json={"prompt": "a" * 11}).status_code == 200  # the context bounds one


def test_the_engine_has_four_prompts_of_a_request_at_once() -> None:
    """More would be more than one client's share of the engine."""
    service = FakeService(script=Script(wait_s=math.inf))
    with live(service) as base, ThreadPoolExecutor(1) as threads:
        body = {"prompt": [f"{i}" for i in range(11)]}
        answer = threads.submit(httpx.post, f"{base}/v1/completions", json=body, timeout=PATIENCE_S)
        for had in (4, 8, 11):
            until(lambda had=had: len(service.requests) >= had)  # type: ignore[misc]
            httpx.get(f"{base}/health")  # whatever else would be submitted is by now
            assert len(service.requests) == had
            script, service.script = service.script, Script(wait_s=math.inf)
            assert isinstance(script, Script)
            script.wait_s = 0.0
            for stream in tuple(service.running):
                stream.go_on()
        assert answer.result().status_code == 200
        assert len(answer.result().json()["choices"]) == 11


def test_choices_are_numbered_prompt_by_prompt(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = parrot
    body = {"prompt": ["a", "b"], "n": 2, "model": "also"}
    answer = strict(Completion, http.post("/completions", json=body).json())
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a/0"), (1, "a/1"), (2, "b/0"), (3, "b/1"),
    ]  # fmt: skip
    assert answer.model == "also"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 2)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_choices_stream_with_their_numbers(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = parrot
    body = {"prompt": ["a", "b"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = [strict_chunk(chunk) for chunk in events(http.post("/completions", json=body).text)]
    texts = dict.fromkeys(range(4), "")
    finished = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == {0: "a/0", 1: "a/1", 2: "b/0", 3: "b/1"}
    assert sorted(finished) == [0, 1, 2, 3]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 16


def strict_chunk(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk is a completion, but its finish_reason may be null, which OpenAI's type does not say."""
    filled = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    strict(Completion, {**chunk, "choices": filled})
    return chunk


def test_echo(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says("!")
    for prompt, text in ((["hi", "ho"], ["hi!", "ho!"]), ([104, 105], ["hi!"])):
        body: dict[str, Any] = {"prompt": prompt, "echo": True}
        choices = http.post("/completions", json=body).json()["choices"]
        assert [choice["text"] for choice in choices] == text
        streamed = [""] * len(text)
        for chunk in events(http.post("/completions", json={**body, "stream": True}).text):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == text


def test_logprobs_in_the_form_of_completions(http: httpx.Client, scripted: Scripted) -> None:
    red, car = token("red", -0.5, ("red", -0.5), ("blue", -1.0)), token(" car", float("-inf"))
    scripted.answer = lambda request: [
        Delta("red", logprobs=(red,)),
        Delta(" car", logprobs=(car,), finish_reason="length", usage=Usage(1, 2)),
    ]
    expected = {
        "tokens": ["red", " car"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"red": -0.5, "blue": -1.0}, {" car": -9999.0}],
        "text_offset": [0, 3],
    }
    body = {"prompt": "a", "logprobs": 2}
    answer = strict(Completion, http.post("/completions", json=body).json())
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.model_dump() == expected
    assert scripted.last.sampling == SamplingParams(logprobs=2)
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in events(http.post("/completions", json={**body, "stream": True}).text)
    ]
    assert {key: parts[0][key] + parts[1][key] for key in expected} == expected


def scored(request: Request) -> list[Delta]:
    """Two prompt tokens and one or two choices of a token each."""
    prompt = (token("h", nan), token("i", -2.0, ("a", -0.5))) if request.sampling.prompt_logprobs else ()
    answers = []
    for choice in range(request.sampling.n):
        last = choice == request.sampling.n - 1
        answers.append(
            Delta(
                "!",
                choice,
                logprobs=(token("!", -0.25, ("?", -0.1)),),
                finish_reason="length",
                usage=Usage(2, 2) if last else None,
                prompt_logprobs=() if choice else prompt,
            )
        )
    return answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs(http: httpx.Client, scripted: Scripted, stream: bool, most: int, n: int) -> None:
    """As lm-eval asks for the likelihood of a text; the first token has none."""
    scripted.answer = scored
    body: dict[str, Any] = {
        "prompt": "hi",
        "echo": True,
        "logprobs": 1,
        "max_tokens": most,
        "n": n,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = http.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole = {
        "tokens": ["h", "i", "!"],
        "token_logprobs": [None, -2.0, -0.25],
        "top_logprobs": [None, {"a": -0.5, "i": -2.0}, {"?": -0.1, "!": -0.25}],
        "text_offset": [0, 1, 2],
    }
    expected = {name: values[: 2 + most] for name, values in whole.items()}
    parts = events(answer.text) if stream else [answer.json()]
    if not stream:
        document.Completion.model_validate(parts[0])  # OpenAI's types don't know its nulls
    for index in range(n):
        mine = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == ("hi!" if most else "hi")
        assert mine[-1]["finish_reason"] == "length"
        told = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        assert {name: [value for each in told for value in each[name]] for name in expected} == expected
    assert parts[-1]["usage"]["completion_tokens"] == (2 if most else 0)
    assert scripted.last.sampling == SamplingParams(max_tokens=1, n=n, logprobs=1, prompt_logprobs=True)


def test_an_error_of_one_prompt_ends_all(sdk: OpenAI, scripted: Scripted) -> None:
    def answer(request: Request) -> list[Delta | Exception]:
        return [Delta("a"), EngineError("out of luck")] if request.prompt == "a" else list(says("b"))

    scripted.answer = answer
    with pytest.raises(APIError, match="out of luck"):
        list(sdk.completions.create(model="pocket", prompt=["a", "b"], stream=True))
    with pytest.raises(APIError, match="out of luck"):
        sdk.completions.create(model="pocket", prompt=["a", "b"])
    assert not scripted.open


def test_if_one_prompt_is_refused_none_runs(http: httpx.Client, scripted: Scripted) -> None:
    def answer(request: Request) -> list[Delta]:
        if request.prompt == "b":
            raise EngineError("no room")
        return says("a")

    scripted.answer = answer
    answer_ = http.post("/completions", json={"prompt": ["a", "b"], "stream": True})
    assert answer_.status_code == 500
    assert not scripted.open


WRONG = [
    ({"prompt": None}, "prompt", ""),
    ({"prompt": []}, "prompt", "not be empty"),
    ({"prompt": [[]]}, "prompt[0]", "not be empty"),
    ({"prompt": 5}, "prompt", "string"),
    ({"prompt": ["a", 5]}, "prompt[1]", "5"),
    ({"prompt": [5, "a"]}, "prompt[1]", "a"),
    ({"prompt": [-1]}, "prompt[0]", "0"),
    ({"prompt": [True]}, "prompt[0]", "integer"),
    ({"prompt": ["a"] * 129}, "prompt", "128"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "130 choices"),
    ({"suffix": "end"}, "suffix", "gap"),
    ({"best_of": 3}, "best_of", "n 1"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"messages": []}, "messages", "not supported"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": -2, "echo": True}, "max_tokens", "0"),
]


@pytest.mark.parametrize(("extra", "param", "word"), WRONG)
def test_it_is_refused_by_name(
    http: httpx.Client, scripted: Scripted, extra: dict[str, Any], param: str, word: str
) -> None:
    answer = http.post("/completions", json={"prompt": "a", **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert word in error["message"], error
    assert not scripted.requests


def test_harmless_fields_pass(http: httpx.Client) -> None:
    body = {"prompt": "a", "suffix": None, "best_of": 1, "user": "me", "echo": False}
    assert http.post("/completions", json=body).status_code == 200
