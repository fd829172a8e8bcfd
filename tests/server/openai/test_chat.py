"""Chat completions: what is asked reaches the engine, what it says reaches the client, whole and streamed."""

import asyncio
import base64
import json
from io import BytesIO
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from PIL import Image
from pydantic import BaseModel

from snugvl.core.messages import Delta, Grammar, Message, Picture, Request, Text, ToolCall, Usage, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, QueueFull
from tests.server.openai.scripted import Scripted, says, strict, token

HI: list[Any] = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[Any]:
    """The data of server-sent events, without [DONE], which must be the last."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def seeing(data_url: str, question: str = "Describe this image.") -> list[Any]:
    part = {"type": "image_url", "image_url": {"url": data_url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


def test_pocket_describes_a_picture(client: OpenAI, data_url: str) -> None:
    answer = client.chat.completions.create(model="pocket", messages=seeing(data_url))
    content = answer.choices[0].message.content
    assert content is not None
    assert "red" in content
    assert "blue" in content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens > answer.usage.prompt_tokens_details.image_tokens > 0  # type: ignore[attr-defined]


def test_a_stream_says_the_same(client: OpenAI, data_url: str) -> None:
    whole = client.chat.completions.create(model="pocket", messages=seeing(data_url))
    stream = client.chat.completions.create(
        model="pocket", messages=seeing(data_url), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_sdk_streams(url: str, data_url: str) -> None:
    async def read() -> str:
        async with AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="pocket", messages=seeing(data_url), stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert "red" in asyncio.run(read())


def test_reasoning_is_no_answer(http: httpx.Client, scripted: Scripted) -> None:
    """As DeepSeek's API and vLLM with a parser have it; an answer cut while the model thinks is empty."""
    scripted.answer = lambda request: [
        Delta("", reasoning="It is"),
        Delta("", reasoning=" round"),
        *says("Yes"),
    ]
    body = {"messages": HI}
    message = http.post("/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is round", "Yes")
    streamed = events(http.post("/chat/completions", json=body | {"stream": True}).text)
    deltas = [part["choices"][0]["delta"] for part in streamed]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is round"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"
    again = [*HI, message, *HI]
    assert http.post("/chat/completions", json={"messages": again}).status_code == 200

    scripted.answer = lambda request: [Delta("", reasoning="It is"), *says(finish="length")]
    (choice,) = http.post("/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"] == "It is"


def test_the_whole_answer_has_openais_shape(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: [
        Delta("Hi", logprobs=(token("Hi", -0.5, ("Hi", -0.5), ("Ho", float("-inf"))),)),
        *says(finish="length"),
    ]
    body = {"model": "also", "messages": HI, "logprobs": True, "top_logprobs": 2}
    answer = strict(ChatCompletion, http.post("/chat/completions", json=body).json())
    assert answer.model == "also"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hi",
        "length",
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    shown = choice.logprobs.content[0]
    assert (shown.token, shown.bytes, shown.logprob) == ("Hi", [72, 105], -0.5)
    assert [(other.token, other.logprob) for other in shown.top_logprobs] == [("Hi", -0.5), ("Ho", -9999.0)]


def test_every_chunk_has_openais_shape(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: [
        Delta("b", 1, logprobs=(token("b", -1.0),)),
        Delta("a", 0, logprobs=(token("a", -2.0),)),
        *says(choice=1, last=False),
        *says(choice=0),
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": True}
    answer = http.post("/chat/completions", json={"messages": HI, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    raw = events(answer.text)
    assert all("usage" in chunk for chunk in raw)
    chunks = [strict(ChatCompletionChunk, chunk) for chunk in raw]
    heads = [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks[:2]]
    assert heads == [(0, "assistant"), (1, "assistant")]
    said = [(c.choices[0].index, c.choices[0].delta.content, c.choices[0].logprobs) for c in chunks[2:4]]
    assert [(index, text) for index, text, _ in said] == [(1, "b"), (0, "a")]
    assert [logprobs.content[0].logprob for _, _, logprobs in said] == [-1.0, -2.0]  # type: ignore[union-attr,index]
    ends = [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in chunks[4:6]]
    assert ends == [(1, "stop"), (0, "stop")]
    assert chunks[6].usage is not None
    assert chunks[6].usage.total_tokens == 7


def test_no_usage_unless_asked(http: httpx.Client) -> None:
    chunks = events(http.post("/chat/completions", json={"messages": HI, "stream": True}).text)
    assert not any("usage" in chunk for chunk in chunks)


def test_the_sdks_helper_puts_choices_together(sdk: OpenAI, scripted: Scripted) -> None:
    scripted.answer = lambda request: [
        Delta("second", 1),
        Delta("first", 0),
        *says(choice=0, last=False),
        *says(choice=1),
    ]
    with sdk.chat.completions.stream(model="pocket", messages=HI, n=2) as stream:
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["first", "second"]


def test_every_sampling_field_reaches_the_engine(http: httpx.Client, scripted: Scripted) -> None:
    body = {
        "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["a", "b"], "max_tokens": 9, "seed": 3,
        "presence_penalty": -1, "frequency_penalty": 1.5, "logit_bias": {"5": -100}, "top_k": 4,
        "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [8], "ignore_eos": True,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    scripted.answer = lambda request: says("x", choice=0, last=False) + says("y", choice=1)
    assert http.post("/chat/completions", json={"messages": HI, **body}).status_code == 200
    assert scripted.last.sampling == SamplingParams(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=-1.0, frequency_penalty=1.5, logit_bias={5: -100.0}, stop=("a", "b"),
        stop_token_ids=(8,), seed=3, logprobs=3, n=2, ignore_eos=True,
    )  # fmt: skip


def test_by_default_it_is_greedy_and_as_long_as_fits(http: httpx.Client, scripted: Scripted) -> None:
    empty = dict.fromkeys(["temperature", "stop", "logit_bias", "n", "seed", "tools", "response_format"])
    assert http.post("/chat/completions", json={"messages": HI, **empty}).status_code == 200
    assert scripted.last.sampling == SamplingParams()


@pytest.mark.parametrize(
    "field",
    [
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ],
)
def test_both_names_of_max_tokens(http: httpx.Client, scripted: Scripted, field: dict[str, int]) -> None:
    assert http.post("/chat/completions", json={"messages": HI, **field}).status_code == 200
    assert scripted.last.sampling.max_tokens == 5


def test_what_asks_for_nothing_passes(http: httpx.Client) -> None:
    harmless = {
        "store": False, "functions": None, "modalities": ["text"], "service_tier": "auto", "user": "me",
        "metadata": {"a": "b"}, "parallel_tool_calls": True, "reasoning_effort": None, "audio": None,
        "prompt_cache_key": "k", "safety_identifier": "s", "tool_choice": "auto", "top_k": -1,
    }  # fmt: skip
    empty = {
        "functions": [],
        "function_call": "none",
        "top_logprobs": 0,
        "min_tokens": 0,
        "stop_sequences": [],
    }
    nulls = {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    for fields in (harmless, empty, nulls, {"logprobs": False, "top_logprobs": 0}):
        answer = http.post("/chat/completions", json={"messages": HI, **fields})
        assert answer.status_code == 200, answer.text


def test_names_of_other_programs_are_read(http: httpx.Client, scripted: Scripted) -> None:
    for fields in ({"reasoning": {"effort": "low"}}, {"reasoning": {"enabled": False}}):
        body = {"messages": HI, "stop_sequences": ["x"], "num_predict": 5, **fields}
        assert http.post("/chat/completions", json=body).status_code == 200
        effort = fields["reasoning"].get("effort", "none")
        assert scripted.last.template == {"reasoning_effort": effort}
        assert (scripted.last.sampling.stop, scripted.last.sampling.max_tokens) == (("x",), 5)


def test_an_effort_is_told_to_the_template(http: httpx.Client, scripted: Scripted) -> None:
    for effort in ("none", "high"):
        body = {"messages": HI, "reasoning_effort": effort}
        assert http.post("/chat/completions", json=body).status_code == 200
        assert scripted.last.template == {"reasoning_effort": effort}
    own = {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}
    assert http.post("/chat/completions", json={**body, **own}).status_code == 200
    assert scripted.last.template == own["chat_template_kwargs"]
    refused = http.post("/chat/completions", json={"messages": HI, "reasoning_effort": "much"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "reasoning_effort"
    assert "'none'" in refused.json()["error"]["message"]


def test_messages_of_every_role(http: httpx.Client, scripted: Scripted) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, empty],
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "43"}]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
        {"role": "assistant", "content": None, "tool_calls": []},  # an answer without a word
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert http.post("/chat/completions", json={"messages": messages}).status_code == 200
    assert scripted.last.messages == (
        Message("system", (Text("be brief"),)),
        Message("system", (Text("be kind"),)),
        Message("user", (Text("hi"),)),
        Message("assistant", (), (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))),
        Message("tool", (Text("42"),), tool_call_id="c1"),
        Message("tool", (Text("43"),), tool_call_id="c2"),
        Message("assistant", (Text("done"),)),
        Message("assistant", (Text("no"),)),
        Message("assistant", (Text("never"),)),
        Message("assistant"),
        Message("user", (Text("a"), Text("b"))),
    )


def sizes(request: Request) -> list[Any]:
    """Size of each picture, number of frames of each video, text of each text."""
    found: list[Any] = []
    for part in request.messages[0].content:
        match part:
            case Picture(image=image):
                found.append(image.size)
            case Video(frames=frames):
                found.append(len(frames))
            case Text(text=text):
                found.append(text)
    return found


def test_pictures_stay_in_order(http: httpx.Client, scripted: Scripted, data_urls: list[str]) -> None:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": each}} for each in data_urls]
    parts.insert(1, {"type": "text", "text": "between"})
    parts.append({"type": "image_url", "image_url": data_urls[0]})
    answer = http.post("/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 200, answer.text
    assert sizes(scripted.last) == [(64, 32), "between", (32, 64), (48, 48), (64, 32)]


def test_low_detail_means_fewer_pixels(http: httpx.Client, scripted: Scripted, data_url: str) -> None:
    for detail, limit in (("low", 512 * 512), ("auto", None), ("high", None), ("original", None)):
        part = {"type": "image_url", "image_url": {"url": data_url, "detail": detail}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        assert http.post("/chat/completions", json=body).status_code == 200
        picture = scripted.last.messages[0].content[0]
        assert isinstance(picture, Picture)
        assert picture.max_pixels == limit


def test_a_video_of_frames(http: httpx.Client, scripted: Scripted, data_url: str) -> None:
    part = {"type": "video", "video": [data_url] * 3, "fps": 2}
    answer = http.post("/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 200, answer.text
    assert sizes(scripted.last) == [3]


def test_an_animation_is_a_video(http: httpx.Client, scripted: Scripted) -> None:
    file = BytesIO()
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "green", "blue", "white")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    url = "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode()
    for value in (url, {"url": url}, {"url": url, "fps": 2}):
        body = {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": value}]}]}
        answer = http.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert sizes(scripted.last) == [4]
    part = {"type": "video_url", "video_url": "attachment:clip"}
    form: Any = {
        "clip": ("clip.gif", file.getvalue()),
        "request": (None, json.dumps({"messages": [{"role": "user", "content": [part]}]})),
    }
    assert http.post("/chat/completions", files=form).status_code == 200
    assert sizes(scripted.last) == [4]


def test_formats_become_grammars(http: httpx.Client, scripted: Scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[tuple[dict[str, Any], Grammar | None]] = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            Grammar("json_schema", json.dumps({**schema, "additionalProperties": False})),
        ),
    ]
    for wanted, grammar in formats:
        body = {"messages": HI, "response_format": wanted}
        assert http.post("/chat/completions", json=body).status_code == 200
        assert scripted.last.grammar == grammar


class Point(BaseModel):
    x: int
    y: int


def test_the_sdks_parse_helper(sdk: OpenAI, scripted: Scripted) -> None:
    scripted.answer = lambda request: says('{"x": 1, ', '"y": 2}')
    answer = sdk.chat.completions.parse(model="pocket", messages=HI, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=1, y=2)
    assert scripted.last.grammar is not None
    assert json.loads(scripted.last.grammar.source)["required"] == ["x", "y"]


@pytest.mark.parametrize("error", [EngineError("the GPU fell over"), ZeroDivisionError()])
def test_an_error_in_the_middle_ends_the_stream(sdk: OpenAI, scripted: Scripted, error: Exception) -> None:
    scripted.answer = lambda request: [Delta("Hel"), error]
    seen: list[ChatCompletionChunk] = []
    with pytest.raises(APIError) as caught:
        seen += sdk.chat.completions.create(model="pocket", messages=HI, stream=True)
    assert [chunk.choices[0].delta.content for chunk in seen] == ["", "Hel"]
    shown = "the GPU fell over" if isinstance(error, EngineError) else "the server failed"
    assert shown in caught.value.message
    assert not scripted.open


def test_an_aborted_answer_is_an_error(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: says("Hel", finish="abort")
    assert http.post("/chat/completions", json={"messages": HI}).status_code == 500
    text = http.post("/chat/completions", json={"messages": HI, "stream": True}).text
    assert json.loads(text.strip().split("data: ")[-1])["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HI}),
        ("/completions", {"prompt": "a"}),
        ("/responses", {"input": "a"}),
    ],
)
def test_a_stream_that_just_ends_is_an_error(
    http: httpx.Client, scripted: Scripted, path: str, body: dict[str, Any]
) -> None:
    scripted.answer = lambda request: [Delta("Hel")]
    assert http.post(path, json=body).status_code == 500
    text = http.post(path, json={**body, "stream": True}).text
    assert "the request ended before its answer was complete" in text
    assert "[DONE]" not in text


def test_an_error_before_the_stream_is_a_status(http: httpx.Client, scripted: Scripted) -> None:
    def refuse(request: Request) -> list[Delta]:
        raise QueueFull("too many requests are waiting")

    scripted.answer = refuse
    answer = http.post("/chat/completions", json={"messages": HI, "stream": True})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


def test_usage_counts_the_whole_request(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: [
        Delta("x", finish_reason="stop", usage=Usage(100, 5, 64), cached_tokens=32)
    ]
    usage = http.post("/chat/completions", json={"messages": HI}).json()["usage"]
    assert usage == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"image_tokens": 64, "cached_tokens": 32},
    }


@pytest.mark.parametrize("drafts", [(0, 0), (3, 4), (0, 2)])
def test_usage_has_guessed_tokens_where_there_were_any(
    http: httpx.Client, scripted: Scripted, drafts: tuple[int, int]
) -> None:
    scripted.answer = lambda request: [Delta("x", finish_reason="stop", usage=Usage(100, 5), drafts=drafts)]
    usage = http.post("/chat/completions", json={"messages": HI}).json()["usage"]
    guessed = dict(zip(("accepted_prediction_tokens", "rejected_prediction_tokens"), drafts, strict=True))
    assert usage.get("completion_tokens_details") == (
        {"reasoning_tokens": 0, **guessed} if any(drafts) else None
    )


def test_every_chunk_has_the_tokens_so_far_where_asked(http: httpx.Client, scripted: Scripted) -> None:
    scripted.answer = lambda request: [
        Delta("one", completion_tokens=1),
        Delta(" two three", completion_tokens=3),
        Delta("", finish_reason="stop", usage=Usage(7, 4), completion_tokens=4),
    ]
    asked: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "stream": True, "stream_options": asked}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = [
        tuple(chunk["usage"][name] for name in names)
        for chunk in events(http.post("/chat/completions", json=body).text)
    ]
    assert counts == [(7, 0, 7), (7, 1, 8), (7, 3, 10), (7, 4, 11), (7, 4, 11)]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", {"messages": HI}), ("completions", {"prompt": "a"})]
)
def test_usage_that_is_not_wanted_does_not_come(
    http: httpx.Client, path: str, prompt: dict[str, Any], options: dict[str, Any]
) -> None:
    asked = {"stream": True, "stream_options": {**options, "continuous_usage_stats": True}}
    chunks = events(http.post(f"/{path}", json={**prompt, **asked}).text)
    assert chunks
    assert not any("usage" in chunk for chunk in chunks)


def test_a_whole_number_may_have_a_point(http: httpx.Client, scripted: Scripted) -> None:
    body = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5.0, "temperature": 1}'
    answer = http.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert scripted.last.sampling == SamplingParams(max_tokens=5, temperature=1.0)
