"""The parts of the vLLM backend that compute: bodies, chunks, flags, logs, facts, pictures."""

import asyncio
import base64
import json
from dataclasses import replace
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from snugvl.backends.child.answer import reasoning_of
from snugvl.backends.child.life import environment
from snugvl.backends.child.requests import ServedModel, target_size
from snugvl.backends.child.settings import Facts, changed_flags, changed_variables, flag_value
from snugvl.backends.child.watch import GPU_BYTES, Activity, Stalled
from snugvl.backends.llamacpp.facts import LlamacppApi
from snugvl.backends.spawned import Log
from snugvl.backends.vllm.measure import FORM, read_counters, read_measurements
from snugvl.backends.vllm.requests import CHAT, COMPLETIONS, body_of
from snugvl.backends.vllm.service import VllmApi, VllmChunks
from snugvl.backends.vllm.settings import apply_limits, common_flags, max_pixels, most_images, read_facts
from snugvl.core.messages import (
    Delta,
    Grammar,
    Message,
    Picture,
    Request,
    Text,
    Tool,
    ToolCall,
    ToolUse,
    Usage,
    user,
)
from snugvl.core.sampling import SamplingParams
from snugvl.diagnose.result import Change
from snugvl.errors import EngineError, ImageError, RequestError, RequestTooLarge
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.inputs.trials import Trials, Verdict
from tests.test_layering import modules_after

LOGS = Path(__file__).parents[2] / "diagnose" / "logs"
MODEL = ServedModel("m", 100, Facts(max_pixels=65536, min_pixels=1024, pixel_factor=32))
GIB = 1 << 30


TRIALS = Trials(1)


def body(request: Request, model: ServedModel = MODEL) -> dict[str, Any]:
    """The fields of a request's body."""
    return body_of(request, model, TRIALS).fields


@pytest.mark.extended
def test_the_server_stays_without_torch() -> None:
    loaded = modules_after("import snugvl.backends.vllm.service")
    assert not {"torch", "transformers", "tokenizers", "vllm"} & loaded


class Gpus:
    """NVML's view of one GPU, of which `used` bytes are held."""

    NVMLError = RuntimeError
    used = 5 * GIB

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> "Gpus":  # noqa: N802
        return self


def test_memory_that_grows_on_a_gpu_is_progress_and_what_comes_and_goes_is_none() -> None:
    gpus = Gpus()
    activity = Activity(list, 3.0, gpus)
    for _ in range(4):
        gpus.used += GPU_BYTES
        activity.look("", 1.0)
    assert activity.idle_s == 0
    gpus.used -= 2 * GPU_BYTES
    activity.look("", 1.0)
    gpus.used += 2 * GPU_BYTES
    activity.look("", 1.0)
    assert activity.idle_s == 2
    with pytest.raises(Stalled, match="for 3 s"):
        activity.look("", 1.0)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [VllmApi, LlamacppApi])
async def test_a_server_that_counts_no_tokens_is_another_program(
    kind: type[VllmApi | LlamacppApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> dict[str, object]:
        return {"tokens": "5"}

    api = kind("http://127.0.0.1:9")
    monkeypatch.setattr(api, "call", answer)
    why = f"what answers at http://127.0.0.1:9 is not a {api.name} server: POST /tokenize"
    with pytest.raises(EngineError, match=why):
        await api.text_tokens("hello")


def test_every_sampling_parameter_is_written_out() -> None:
    params = SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, logit_bias={3: -5.0}, stop=("x",), stop_token_ids=(9,),
        seed=2**63, logprobs=2, n=3, ignore_eos=True,
    )  # fmt: skip
    fields = body(Request((user("hi"),), params))
    expected = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logit_bias": {"3": -5.0}, "stop": ["x"], "stop_token_ids": [9], "seed": -(2**63), "logprobs": True,
        "top_logprobs": 2, "n": 3, "ignore_eos": True,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    defaults = body(Request((user("hi"),)))
    assert (defaults["temperature"], defaults["top_p"], defaults["top_k"]) == (0.0, 1.0, 0)
    assert "max_tokens" not in defaults


def test_a_bare_prompt_is_a_completion() -> None:
    made = body_of(Request(prompt=(1, 2), sampling=SamplingParams(logprobs=0)), MODEL, TRIALS)
    assert made.path == COMPLETIONS
    assert (made.fields["prompt"], made.fields["logprobs"]) == ([1, 2], 0)
    assert made.fields["add_special_tokens"] is False


def test_a_conversation_with_calls_and_pictures() -> None:
    call = ToolCall("c1", "f", '{"x":1}')
    picture = Picture(Image.new("RGB", (640, 320), "red"), max_pixels=20000)
    messages = (
        Message("system", (Text("be "), Text("brief"))),
        user("look", picture),
        Message("assistant", tool_calls=(call,)),
        Message("tool", (Text("42"),), tool_call_id="c1"),
    )
    made = body_of(Request(messages), MODEL, TRIALS)
    assert made.path == CHAT
    system, question, assistant, tool = made.fields["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert question["content"][0] == {"type": "text", "text": "look"}
    url = question["content"][1]["image_url"]["url"]
    image = Image.open(BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert image.size == (192, 96)  # sides are whole tokens, the area below 20,000 pixels
    assert image.getpixel((9, 9)) == (255, 0, 0)
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "c1", "42")


def test_grammars_in_their_dialects() -> None:
    schema = body(Request((user("x"),), grammar=Grammar("json_schema", '{"type":"object"}')))
    made = json.loads(schema["structured_outputs"]["json"])
    assert made["x-guidance"]["whitespace_flexible"] is False
    assert body(Request((user("x"),), grammar=Grammar("regex", "a+")))["structured_outputs"] == {
        "regex": "a+"
    }
    lark = body(Request((user("x"),), grammar=Grammar("lark", "start: /a/")))
    assert lark["structured_outputs"] == {"grammar": "start: /a/"}
    with pytest.raises(RequestError, match="JSON"):
        body(Request((user("x"),), grammar=Grammar("json_schema", "{")))


def test_control_tokens_are_asked_for() -> None:
    assert "skip_special_tokens" not in body(Request((user("x"),)))
    fields = body(Request((user("x"),), SamplingParams(special=True)))
    assert fields["skip_special_tokens"] is False


@pytest.mark.parametrize("marker_tokens", [{}, {"<tool_call>": 7, "</tool_call>": 8}])
def test_tools_are_shown_and_calls_constrained(marker_tokens: dict[str, int]) -> None:
    use = ToolUse((Tool("f", "does f", {"properties": {"x": {"type": "integer"}}}),), "required")
    fields = body(Request((user("x"),), tools=use), ServedModel("m", 9, Facts(), marker_tokens))
    assert fields["tools"][0]["function"]["name"] == "f"
    assert fields["tool_choice"] == "none"  # nobody but us reads the calls
    assert fields["skip_special_tokens"] is False
    opening = "<[7]>" if marker_tokens else '"<tool_call>"'
    assert fields["structured_outputs"]["grammar"].startswith(f"start: {opening} call")


def chunk(index: int = 0, text: str = "", **choice: Any) -> dict[str, Any]:
    """A chat's chunk with one choice."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    return {"choices": [{"index": index, "delta": {"content": text}, **choice}], "usage": usage}


def test_the_last_end_waits_for_the_usage() -> None:
    chunks = VllmChunks(SamplingParams(n=2, temperature=1.0))
    assert chunks.read(chunk(0, "a")) == [Delta("a", completion_tokens=1)]
    assert chunks.read(chunk(1, "b", finish_reason="stop")) == []
    assert not chunks.ended(0)
    (end,) = chunks.read(chunk(0, "c", finish_reason="length"))
    assert end == Delta("b", 1, finish_reason="stop", completion_tokens=2)
    assert chunks.ended(0)
    assert chunks.read({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}) == []
    assert chunks.end() == [Delta("c", 0, finish_reason="length", usage=Usage(3, 3), completion_tokens=2)]


def test_reasoning_is_told_from_the_answer() -> None:
    sampling = SamplingParams(n=2, temperature=1.0)
    request = Request((user("hi"),), sampling)
    chunks = VllmChunks(sampling, reasoning_of(request, Facts(reasoning=True)))
    assert chunks.read(chunk(0, "hm")) == [Delta("", reasoning="hm", completion_tokens=1)]
    (both,) = chunks.read(chunk(1, "so</think>\n\nYes"))
    assert both == Delta("Yes", 1, reasoning="so", completion_tokens=2)
    assert chunks.read(chunk(0, " <", finish_reason="length")) == []
    (end,) = chunks.read(chunk(1, "!", finish_reason="stop"))
    assert (end.text, end.reasoning, end.finish_reason) == ("", " <", "length")
    assert reasoning_of(request, Facts()) is None
    assert reasoning_of(replace(request, grammar=Grammar("regex", "a")), Facts(reasoning=True)) is None


def test_a_server_that_reads_reasoning_itself() -> None:
    """With --reasoning-parser, which an attached vLLM may have."""
    chunks = VllmChunks(SamplingParams(), reasoning_of(Request((user("hi"),)), Facts(reasoning=True)))
    told = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}
    assert chunks.read(told) == [Delta("", reasoning="hm")]
    assert chunks.read(chunk(0, "Yes")) == [Delta("Yes", completion_tokens=1)]


def test_the_template_says_whether_answers_begin_with_reasoning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_facts("pocket").reasoning is None
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    for end, expected in (("<think>\n", True), ("<think>\n\n</think>\n\n", False)):
        (tmp_path / "chat_template.jinja").write_text(f"</think>{{{{ messages[0].role }}}}{end}")
        assert read_facts(str(tmp_path)).reasoning is expected


def test_the_model_is_told_whether_to_think_and_its_answer_is_read_so(tmp_path: Path) -> None:
    """As Qwen3.5's template has it: it opens the reasoning unless it is told not to."""
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "model_type": "qwen3_5"}')
    told = "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' }}"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}" + told)
    facts = read_facts(str(tmp_path))
    assert facts.thinking == ThinkingDefault(pictures=False)
    seen = Request((Message("user", (Picture(Image.new("RGB", (64, 64))), Text("What is it?"))),))
    asked = replace(seen, template={"enable_thinking": True})
    for request, kwargs, begun in (
        (Request((user("hi"),)), None, True),
        (seen, {"enable_thinking": False}, False),
        (asked, {"enable_thinking": True}, True),
    ):
        body = body_of(request, ServedModel("m", 4096, replace(facts, images=True)), Trials())
        assert body.fields.get("chat_template_kwargs") == kwargs
        reasoning = reasoning_of(request, facts)
        assert reasoning is not None
        assert reasoning.opened is begun
    assert not reasoning_of(asked, replace(facts, reasoning_asked=False)).opened  # type: ignore[union-attr]


def test_what_stopped_it() -> None:
    chunks = VllmChunks(SamplingParams(stop=("x",), stop_token_ids=(7,)))
    chunks.read(chunk(0, "a", finish_reason="stop", stop_reason="x"))
    assert chunks.end()[0].stop == "x"
    chunks = VllmChunks(SamplingParams(stop_token_ids=(7,)))
    chunks.read(chunk(0, "a", finish_reason="stop", stop_reason=7))
    assert chunks.stop_token == 7

    class Tokenizer(VllmApi):
        async def call(self, path: str, body: Any = None, *, timeout_s: float = 0) -> dict[str, Any]:
            return {"prompt": "seven"}

    asyncio.run(chunks.settle(Tokenizer("http://x")))
    assert chunks.end()[0].stop == "seven"
    chunks = VllmChunks(SamplingParams())
    chunks.read(chunk(0, "a", finish_reason="stop", stop_reason=2))  # the end of the sequence
    assert chunks.stop_token is None
    assert chunks.end()[0].stop is None


def test_logprobs_of_both_apis() -> None:
    top = [{"token": token, "logprob": -1.0, "bytes": None} for token in "abc"]
    item = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": top}
    end = {"token": "<end>", "logprob": 0.0, "bytes": None, "top_logprobs": []}
    chunks = VllmChunks(SamplingParams(logprobs=2))
    (delta,) = chunks.read(chunk(0, "é", logprobs={"content": [item]}))
    (logprob,) = delta.logprobs
    assert (logprob.token, logprob.bytes, logprob.logprob) == ("é", "é".encode(), -0.5)
    assert [token.token for token in logprob.top] == ["a", "b"]
    # The token that ends an answer is no text and has no log-probability.
    chunks.read(chunk(0, "", finish_reason="stop", logprobs={"content": [end]}))
    assert chunks.end()[0].logprobs == ()
    chunks = VllmChunks(SamplingParams(logprobs=1))
    value = {"tokens": ["x"], "token_logprobs": [-2.0], "top_logprobs": [{"x": -2.0, "y": -1.0}]}
    (delta,) = chunks.read({"choices": [{"index": 0, "text": "x", "logprobs": value}]})
    assert [token.token for token in delta.logprobs[0].top] == ["y"]


def test_an_echoed_prompt_is_told_apart_from_its_answer() -> None:
    """`echo` is vLLM's way to judge a prompt: its text and tokens come before the first piece."""
    value = {
        "tokens": ["h", "i", "!"],
        "token_logprobs": [None, -2.0, -0.5],
        "top_logprobs": [None, {"i": -2.0, "a": -1.0}, {"!": -0.5}],
    }
    piece = {"index": 0, "text": "hi!", "logprobs": value, "finish_reason": "stop", "stop_reason": None}
    sampling = SamplingParams(logprobs=1, prompt_logprobs=True, n=2)
    chunks = VllmChunks(sampling, prompt="hi")
    assert not chunks.read({"choices": [piece], "usage": {"prompt_tokens": 2, "completion_tokens": 1}})
    first, second = chunks.end()
    assert [delta.text for delta in (first, second)] == ["!", "!"]
    assert [[token.token for token in delta.prompt_logprobs] for delta in (first, second)] == [["h", "i"], []]
    assert isnan(first.prompt_logprobs[0].logprob)
    assert [token.token for token in first.prompt_logprobs[1].top] == ["a"]
    assert [[token.token for token in delta.logprobs] for delta in (first, second)] == [["!"], ["!"]]
    assert (first.completion_tokens, second.usage and second.usage.completion_tokens) == (2, 2)
    body = body_of(Request(prompt="hi", sampling=sampling), MODEL, TRIALS)
    assert (body.fields["echo"], body.fields["logprobs"]) == (True, 1)


@pytest.mark.parametrize(
    "bad", [{"choices": [{}]}, {"choices": [{"index": "x"}]}, {"usage": {}}, {"choices": 3}]
)
def test_a_chunk_of_another_form_is_an_error(bad: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="don't understand"):
        VllmChunks(SamplingParams()).read(bad)


def test_vllms_errors_are_ours() -> None:
    def made(message: str, code: int) -> object:
        return VllmApi("http://x").error_of({"error": {"message": message, "code": code, "param": "p"}}, 200)

    assert isinstance(made("bad", 400), RequestError)
    assert made("bad", 400).field == "p"  # type: ignore[attr-defined]
    assert isinstance(made("maximum context length is 4", 400), RequestTooLarge)
    assert isinstance(made("oh", 500), EngineError)
    assert "API key" in str(VllmApi("http://x").refusal(401, b'{"error": "Unauthorized"}'))
    assert "<html>" in str(VllmApi("http://x").refusal(502, b"<html>"))


def test_flags_are_looked_up_and_changed() -> None:
    words = ("--max-model-len", "8", "--enforce-eager", "--seed=-3", "--max-model-len=9")
    assert flag_value(words, "--max-model-len") == "9"
    changes = (
        Change("--max-model-len", None, "4", ""),
        Change("--enforce-eager", "", None, ""),
        Change("--cudagraph-capture-sizes", None, "1 2", ""),
        Change("VLLM_X", None, "1", ""),
    )
    changed = changed_flags(words, changes)
    assert changed == ("--seed=-3", "--max-model-len", "4", "--cudagraph-capture-sizes", "1", "2")
    assert changed_variables(changes) == (("VLLM_X", "1"),)
    assert most_images(("--limit-mm-per-prompt", '{"image":{"count":3}}')) == 3
    assert max_pixels(("--mm-processor-kwargs", "no json")) is None


def test_sleeping_needs_a_flag() -> None:
    assert "--enable-sleep-mode" in common_flags("m", "/s", sleep=True)
    assert "--enable-sleep-mode" not in common_flags("m", "/s", sleep=False)


def test_stages_of_a_start() -> None:
    line = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<?]"
    stage = FORM.stage_of(line)
    assert stage is not None
    assert (stage.detail, round(stage.progress, 2)) == ("loading the weights (50 %)", 0.4)
    log = Log(FORM)
    assert log.feed("Starting to load model m\rLoading saf") == ["Starting to load model m"]
    assert log.feed("etensors checkpoint shards: 100% Completed\nStarting to load model m\n")[-1].endswith(
        "m"
    )
    assert log.stage is not None
    assert round(log.stage.progress, 2) == 0.6  # a second rank doesn't turn it back


def test_a_log_keeps_its_ends_and_what_is_new() -> None:
    log = Log(FORM)
    log.feed("".join(f"line {number}\n" for number in range(5000)))
    assert log.lines[0] == "line 0"
    assert log.last == "line 4999"
    assert len(log.lines) < 1000
    log.all_is_well()
    log.all_is_well()
    log.feed("(APIServer pid=1) ERROR 11-21 10:12:43 [a.py:1] new\n")
    assert log.fresh[-1].endswith("new")
    assert len(log.fresh) <= 2
    assert log.last == "new"


def test_figures_of_a_real_log() -> None:
    lines = (LOGS / "healthy_vllm033_q2bfp8_4060_wsl2.log").read_text().splitlines()
    found = read_measurements(tuple(lines))
    assert found.loaded is not None
    assert found.kv is not None
    assert 2 * GIB < found.loaded < 5 * GIB
    assert found.kv_tokens is not None
    assert read_measurements(()).loaded is None


def test_counters_of_several_engines_are_added() -> None:
    text = "\n".join(
        f'vllm:num_requests_running{{engine="{engine}"}} 2.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} 0.5\n'
        f'vllm:cache_config_info{{engine="{engine}",num_gpu_blocks="100",block_size="16"}} 1.0'
        for engine in (0, 1)
    )
    found = read_counters(text)
    assert (found.load.running, found.load.num_blocks, found.load.free_blocks) == (4, 200, 100)
    assert found.load.block_size == 16
    assert read_counters("").load.num_blocks == 0


def test_facts_of_a_checkpoint() -> None:
    facts = read_facts("pocket")
    assert facts.images
    assert (facts.pixel_factor, facts.max_pixels) == (32, 73728)
    assert "<|im_end|>" in facts.control_tokens
    assert facts.image_token == 3596
    assert read_facts("nobody/knows-this") == Facts() == read_facts("")
    assert apply_limits(facts, ("--language-model-only",)).images is False


def test_sizes_of_pictures() -> None:
    rule = Facts(pixel_factor=32, min_pixels=4096, max_pixels=65536)
    assert target_size((1000, 500), None, rule) == (352, 160)
    assert target_size((352, 160), None, rule) == (352, 160)
    assert target_size((10, 10), None, rule) == (64, 64)
    with pytest.raises(RequestError, match="one token"):
        target_size((100, 100), 1000, rule)
    with pytest.raises(ImageError, match="200 times"):
        target_size((1000, 2), None, rule)
    assert target_size((1000, 500), 5000, Facts()) == (100, 50)
    assert target_size((1000, 500), None, Facts()) == (1000, 500)


def test_no_secret_reaches_the_child() -> None:
    seen = environment({"OPENAI_API_KEY": "s", "HF_TOKEN": "h", "HOME": "/"}, {"VLLM_API_KEY": "ours"})
    assert "OPENAI_API_KEY" not in seen
    assert (seen["HF_TOKEN"], seen["HOME"], seen["VLLM_API_KEY"]) == ("h", "/", "ours")


def test_a_validations_messages_are_what_was_raised() -> None:
    """pydantic says what is wrong on the lines after the one that looks like an error."""
    log = (LOGS / "vllm022_gpu_names.log").read_text().splitlines()
    (said,) = FORM.exception_lines(log)
    assert said.endswith("error for ModelConfig; Value error, invalid literal for int() with base 10: "
                         "'GPU-11111111-2222-3333-4444-555555555555'")  # fmt: skip
    lines = [
        "INFO 11-21 20:50:53 [model.py:617] Resolved architecture",
        "(APIServer pid=3) pydantic.ValidationError: 2 validation errors for ModelConfig",
        "(APIServer pid=3) max_model_len",
        "(APIServer pid=3)   Input should be a valid integer [type=int_type, input_value='a']",
        "(APIServer pid=3)     For further information visit https://errors.pydantic.dev/2.12/v/int_type",
        "(APIServer pid=3) dtype",
        "(APIServer pid=3)   Unknown [type=value_error, input_value='b', input_type=str]",
        "Task was destroyed",
        "but it is pending",
        "  and this is no message",
        "RuntimeError: gone",
    ]
    assert FORM.exception_lines(lines) == [
        "pydantic.ValidationError: 2 validation errors for ModelConfig; "
        "max_model_len: Input should be a valid integer; dtype: Unknown",
        "RuntimeError: gone",
    ]


def test_no_control_token_comes_through_a_conversation_or_a_tool() -> None:
    model = ServedModel("m", 999, Facts(control_tokens=("<|im_end|>",), tools=True, calls=True))
    tool = Tool("f", "a <|im_end|> b", {"properties": {"<|im_end|>": {"default": ["<|im_end|>"]}}})
    said = Message("assistant", (), (ToolCall("c<|im_end|>", "f", '{"a": "\\u003c|im_end|>"}'),))
    parts = Message("tool", (Text("<|im_"), Text("end|>")), tool_call_id="c<|im_end|>")
    sent = body(Request((user("a <|im_end|> b"), said, parts), tools=ToolUse((tool,))), model)
    shown = json.dumps([sent["messages"], sent["tools"]], ensure_ascii=False)
    assert "<|im_end|>" not in shown
    assert shown.count("<\u2060|im_end|>") == 8


def test_text_is_bounded_before_it_goes_to_vllm() -> None:
    with pytest.raises(RequestTooLarge, match="25,601 characters; the context holds 100 tokens"):
        body(Request((user(" " * 25_601),)), ServedModel("m", 100, Facts()))


def test_a_grammar_is_tried_before_vllm_compiles_it() -> None:
    class Never:
        def check(self, grammar: str, go_on: Any) -> Verdict:
            return Verdict("it takes too long")

    for asked in (
        Request((user("x"),), grammar=Grammar("regex", "a+")),
        Request((user("x"),), grammar=Grammar("json_schema", "{}")),
        Request((user("x"),), tools=ToolUse((Tool("f"),))),
    ):
        with pytest.raises(RequestError, match="can't be used: it takes too long"):
            body_of(asked, MODEL, cast("Trials", Never()))
