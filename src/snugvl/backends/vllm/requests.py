"""A request of ours as the body of one of vLLM's, its pictures scaled to what the model reads.

Every sampling parameter is written out, so that no default of vLLM's or of the checkpoint's decides. Tools go
to the chat template only (`tool_choice` "none"): our server finds the calls in the text, and the grammar that
our own engine uses constrains them. Greedy choices are all the same and vLLM refuses several, so one is asked
for.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher

from snugvl.backends.child.requests import (
    SAME_NAMES,
    ServedModel,
    check,
    plain_conversation,
    png,
    refuse_control_tokens,
    refuse_oversized,
    try_grammar,
    without_control_tokens,
)
from snugvl.backends.child.settings import Facts
from snugvl.core.messages import (
    GoOn,
    Grammar,
    Message,
    Picture,
    Request,
    Text,
    Tool,
    ToolUse,
    Video,
    going_on,
)
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.inputs.chat import template_texts
from snugvl.inputs.constraints import JSON_OPTIONS, check_choices, grammar_text, tools_lark
from snugvl.inputs.tools.in_text import call_arguments, tool_json, with_calls, with_tools
from snugvl.inputs.trials import Trials

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

_KINDS: Final = {"json_schema": "json", "regex": "regex", "lark": "grammar"}


@dataclass(frozen=True, slots=True)
class VllmBody:
    """A path and the body to POST."""

    path: str
    fields: dict[str, Any]

    def encoded(self) -> bytes:
        """The body as JSON."""
        return json.dumps(self.fields, ensure_ascii=False).encode()


def body_of(request: Request, model: ServedModel, trials: Trials, go_on: GoOn = going_on) -> VllmBody:
    """The body, pictures included. Takes time for pictures and grammars: call it in a thread.

    Args:
        trials: where grammars are tried before vLLM's own process compiles them, which nothing could end.
        go_on: called now and then; it ends the work by raising.

    Raises:
        RequestError, ImageError: vLLM doesn't take it, or it contradicts itself.
    """
    check(request, model)
    fields: dict[str, Any] = {"model": model.name, **_sampling(request.sampling)}
    fields["stream"] = True
    fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    constraint = _constraint(request, model, trials, go_on)
    if constraint is not None:
        fields["structured_outputs"] = constraint
    if request.prompt is not None:
        fields["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        fields["add_special_tokens"] = False
        if request.sampling.logprobs is not None:
            fields["logprobs"] = request.sampling.logprobs
            fields["echo"] = request.sampling.prompt_logprobs  # its way to have those of the prompt
        return VllmBody(COMPLETIONS, fields)
    for where, text in template_texts(request.template):
        refuse_control_tokens(text, model.facts, where)
    if template := model.facts.thinking.template(request):
        fields["chat_template_kwargs"] = dict(template)
    tools = () if request.tools is None else request.tools.tools
    fields["messages"] = messages_json(request.messages, model, tools, go_on)
    if request.sampling.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request.sampling.logprobs}
    if request.tools is not None:
        # The markers may be special tokens, and are text for the parser.
        fields |= {**tools_json(request.tools, model), "tool_choice": "none", "skip_special_tokens": False}
    return VllmBody(CHAT, fields)


def rename_field(error: RequestError, request: Request) -> RequestError:
    """vLLM's refusal with the field of ours that is to blame, as our own engine names it."""
    text = str(error)
    prompt = "messages" if request.prompt is None else "prompt"
    if "rammar" in text or "structured_outputs" in text:
        error.field = "response_format" if request.tools is None else "tools"
    elif "logit_bias" in text:
        error.field = "logit_bias"
    elif error.field in (None, "input_tokens", "input_text", "prompt_token_ids"):
        error.field = prompt
    return error


def messages_json(
    messages: tuple[Message, ...], model: ServedModel, tools: tuple[Tool, ...] = (), go_on: GoOn = going_on
) -> list[dict[str, Any]]:
    """A conversation, pictures as data URLs. `tools`: those that stand in the prompt with it.

    What the chat template doesn't show of tools, calls and their answers is written as text.

    Raises:
        RequestError, ImageError: text with a control token, a video, a picture that can't be sent.
        RequestTooLarge: so much text that it can't fit into the context.
    """
    messages, tools = plain_conversation(messages, tools, model, go_on)
    shown: Sequence[Message] = messages
    if not model.facts.calls:
        shown = with_calls(shown)
    if tools and not model.facts.tools:
        shown = with_tools(shown, [tool_json(tool) for tool in tools])
    found = []
    for index, message in enumerate(shown):
        found.append(_message(message, index, model.facts))
        go_on()
    return found


def tokenize_body(request: Request, model: ServedModel, go_on: GoOn = going_on) -> dict[str, Any]:
    """The body for vLLM's /tokenize. Takes time for pictures: call it in a thread.

    Raises:
        RequestError, RequestTooLarge, ImageError: as `messages_json`.
    """
    fields: dict[str, Any] = {"model": model.name, "add_special_tokens": False}
    prompt, tools = request.prompt, request.tools
    if isinstance(prompt, str):
        refuse_oversized(len(prompt), model, "prompt")
        return fields | {"prompt": prompt}
    shown = () if tools is None else tools.tools
    fields["messages"] = messages_json(request.messages, model, shown, go_on)
    if template := model.facts.thinking.template(request):
        fields["chat_template_kwargs"] = dict(template)
    return fields if tools is None else fields | tools_json(tools, model)


def tools_json(use: ToolUse, model: ServedModel) -> dict[str, Any]:
    """Tools for the chat template; empty where it shows none."""
    if not model.facts.tools:
        return {}
    _, tools = without_control_tokens((), use.tools, model.facts)
    return {"tools": [tool_json(tool) for tool in tools]}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(params, name) for name in SAME_NAMES} | {
        "repetition_penalty": params.repetition_penalty,
        "n": 1 if params.greedy else params.n,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
    }
    if params.special:
        fields["skip_special_tokens"] = False
    if params.max_tokens is not None:
        fields["max_tokens"] = params.max_tokens
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.seed is not None:
        fields["seed"] = params.seed if params.seed < 2**63 else params.seed - 2**64  # vLLM's are signed
    return fields


def _constraint(request: Request, model: ServedModel, trials: Trials, go_on: GoOn) -> dict[str, Any] | None:
    """`structured_outputs`: the grammar that our own engine would follow."""
    if request.tools is not None:
        form = model.facts.tool_form
        lark = tools_lark(form, request.tools, model.marker_tokens, trials, go_on)
        try_grammar(LLMatcher.grammar_from_lark(lark), "tools", "tools", trials, go_on)
        return {"grammar": lark}
    if request.grammar is None:
        return None
    kind, field = _kind(request.grammar), "response_format"
    text = grammar_text(request.grammar, field)
    try_grammar(text, request.grammar.kind, field, trials, go_on, request.grammar.source)
    check_choices(request.grammar, request.sampling.n, field)
    return {kind: _source(request.grammar)}


def _kind(grammar: Grammar) -> str:
    if grammar.kind not in _KINDS:
        raise RequestError(
            f"a grammar must be one of {', '.join(_KINDS)}, not {grammar.kind!r}", field="response_format"
        )
    return _KINDS[grammar.kind]


def _source(grammar: Grammar) -> str:
    if grammar.kind != "json_schema":
        return grammar.source
    return json.dumps({**json.loads(grammar.source), "x-guidance": JSON_OPTIONS})


def _message(message: Message, index: int, facts: Facts) -> dict[str, Any]:
    where = f"messages[{index}]"
    words = [part.text for part in message.content if isinstance(part, Text)]
    plain = len(words) == len(message.content)
    fields: dict[str, Any] = {
        "role": message.role,
        "content": "".join(words) if plain else [_part(part, where, facts) for part in message.content],
    }
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call_arguments(call, where), ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    if message.reasoning:  # as newer and as older versions call it
        fields |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _part(part: Text | Picture | Video, where: str, facts: Facts) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Video):
        raise RequestError(
            "the vllm backend takes pictures, no videos; send frames as pictures, "
            "or serve the model with --backend native",
            field=f"{where}.content",
        )
    if facts.images is False:
        raise RequestError("this model is served without images; send text only", field=f"{where}.content")
    data, _ = png(part, facts)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
