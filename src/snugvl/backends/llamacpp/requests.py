"""A request of ours as one of llama-server's own `/completion`: token ids, or a text with pictures.

The chat template is rendered here, by the engine that our own models have, so a prompt is what it is there.
llama.cpp turns it into tokens first (`/tokenize`): so it is known how long it is before anything is computed.
With pictures it gets the text, in which a marker stands for each. Every sampling parameter is written out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llguidance import LLMatcher

from snugvl.backends.child.requests import (
    SAME_NAMES,
    ServedModel,
    check,
    plain_conversation,
    png,
    refuse_control_tokens,
    try_grammar,
)
from snugvl.backends.llamacpp.facts import GgufModel, LlamacppApi, ServedGguf
from snugvl.backends.llamacpp.gbnf import gbnf_of, left_out
from snugvl.core.messages import GoOn, Grammar, Message, Picture, Request, Text, ToolUse, Video, going_on
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.chat import ChatTemplate, template_texts
from snugvl.inputs.constraints import JSON_OPTIONS, check_choices, grammar_text, tools_lark
from snugvl.inputs.tools.enforceable import ended
from snugvl.inputs.tools.grammar import COMPACT
from snugvl.inputs.tools.in_text import tool_json
from snugvl.inputs.trials import Trials

COMPLETION: Final = "/completion"
SEEDS: Final = 1 << 32
GUIDED: Final = "%llguidance {}\n"  # what begins a grammar of llguidance's in llama.cpp
# In the order in which our own engine applies them; greedy ends after the penalties.
SAMPLERS: Final = ("penalties", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Turns requests into bodies. `guided`: whether llama.cpp has llguidance."""

    model: ServedModel
    gguf: GgufModel
    served: ServedGguf
    template: ChatTemplate | None
    guided: bool
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for llama.cpp: ids, or a text with pictures.

    Attributes:
        counted: the text with llama.cpp's placeholders in place of the markers, to count its tokens.
        pictures: base64 of each picture.
        image_tokens: tokens of all pictures; 0 where unknown.
    """

    text: str = ""
    ids: tuple[int, ...] | None = None
    counted: str = ""
    pictures: tuple[str, ...] = ()
    image_tokens: int = 0


def prompt_of(request: Request, speaker: RequestBuilder, go_on: GoOn = going_on) -> Prompt:
    """The prompt, pictures encoded. Takes time for pictures: call it in a thread.

    Raises:
        RequestError, ImageError: what can't be sent, or contradicts itself.
    """
    check(request, speaker.model)
    if isinstance(request.prompt, str):
        return Prompt(request.prompt, counted=request.prompt)
    if request.prompt is not None:
        most = speaker.served.vocabulary
        if most and not all(0 <= token < most for token in request.prompt):
            raise RequestError(f"the prompt has token ids beyond the vocabulary of {most:,}", field="prompt")
        return Prompt(ids=request.prompt)
    return conversation(request.messages, request.tools, speaker, _variables(request, speaker), go_on)


def conversation(
    messages: tuple[Message, ...],
    tools: ToolUse | None,
    speaker: RequestBuilder,
    variables: Mapping[str, Any],
    go_on: GoOn = going_on,
) -> Prompt:
    """A conversation through the chat template.

    Raises:
        RequestError, RequestTooLarge, ImageError: text with a control token, a video, a bad picture; so much
            text that it can't fit.
    """
    offered = () if tools is None else tools.tools
    messages, offered = plain_conversation(messages, offered, speaker.model, go_on)
    if speaker.template is None:
        raise RequestError("this GGUF has no chat template; send a bare prompt", field="messages")
    pictures: list[str] = []
    counts: list[int] = []
    shown = []
    for index, message in enumerate(messages):
        parts = []
        for part in message.content:
            if not isinstance(part, Text):
                data, tokens = _picture(part, f"messages[{index}].content", speaker)
                pictures.append(data)
                counts.append(tokens)
                part = Text(speaker.served.marker)
            parts.append(part)
            go_on()
        shown.append(replace(message, content=tuple(parts)))
    text = speaker.template.render(
        shown, tools=[tool_json(tool) for tool in offered] or None, extra=variables
    )
    if speaker.served.adds_bos:
        text = text.removeprefix(speaker.served.bos)
    counted = _counted(text, counts, speaker)
    return Prompt(text, counted=counted, pictures=tuple(pictures), image_tokens=sum(counts))


def _counted(text: str, counts: list[int], speaker: RequestBuilder) -> str:
    begin, placeholder, end = speaker.gguf.picture
    first, *rest = text.split(speaker.served.marker)
    whole = [first]
    for tokens, after in zip(counts, rest, strict=True):
        whole += [begin, placeholder * tokens, end, after]
    return "".join(whole)


def _picture(part: Picture | Video | Text, where: str, speaker: RequestBuilder) -> tuple[str, int]:
    if not isinstance(part, Picture):
        raise RequestError(
            "the llamacpp backend takes pictures, no videos; send frames as pictures, "
            "or serve the model with --backend native",
            field=where,
        )
    facts = speaker.model.facts
    if not facts.images:
        file = speaker.served.root or "this model"
        raise RequestError(f"{file} takes no pictures: {speaker.gguf.blind}, or send text only", field=where)
    data, (width, height) = png(part, facts)
    rule = speaker.gguf.rule
    return data, 0 if rule is None else rule.tokens(width, height)


def _variables(request: Request, speaker: RequestBuilder) -> Mapping[str, Any]:
    for where, text in template_texts(request.template):
        refuse_control_tokens(text, speaker.model.facts, where)
    return speaker.model.facts.thinking.template(request)


async def tokens_of(prompt: Prompt, api: LlamacppApi, served: ServedGguf) -> tuple[int, ...]:
    """The prompt's token ids; placeholders stand for pictures."""
    if prompt.ids is not None:
        return prompt.ids
    bare = not prompt.text  # ids of a bare text begin as they are
    return await api.tokens(prompt.counted, bos=served.adds_bos and not bare)


def check_length(request: Request, tokens: int, context: int) -> None:
    """Refuse a request that can't finish within the context, with the numbers.

    Raises:
        RequestTooLarge: what to do.
    """
    if tokens >= context:
        raise RequestTooLarge(
            f"the prompt has {tokens:,} tokens; the context holds {context:,}, answer included; send less",
            field="messages" if request.prompt is None else "prompt",
        )
    asked = request.sampling.max_tokens
    if asked is not None and tokens + asked > context:
        raise RequestTooLarge(
            f"{tokens:,} tokens of the prompt and max_tokens={asked:,} are more than the context of "
            f"{context:,}; ask for {context - tokens:,} at most",
            field="max_tokens",
        )


def bodies(
    request: Request, prompt: Prompt, ids: tuple[int, ...], form: Mapping[str, Any], speaker: RequestBuilder
) -> tuple[bytes, ...]:
    """The bodies, one for each choice that has to be computed: a greedy one is asked for once."""
    params = request.sampling
    fields = {**_sampling(params, speaker), **form}
    fields["n_predict"] = params.max_tokens or speaker.model.context_tokens - len(ids)
    fields["prompt"] = list(ids)
    if prompt.pictures:
        fields["prompt"] = {"prompt_string": prompt.text, "multimodal_data": list(prompt.pictures)}
    if request.tools is not None:  # text for the parser, even where they are control tokens
        fields["preserved_tokens"] = list(speaker.model.marker_tokens)
    made = []
    for index in range(1 if params.greedy else params.n):
        if params.seed is not None:
            fields["seed"] = (params.seed + index) % (SEEDS - 1)  # the largest draws one
        made.append(json.dumps(fields, ensure_ascii=False).encode())
    return tuple(made)


def _sampling(params: SamplingParams, speaker: RequestBuilder) -> dict[str, Any]:
    if params.prompt_logprobs:
        raise RequestError(
            "llama.cpp has no log-probabilities of a prompt's tokens (echo with logprobs); use --backend "
            "native, or leave one of them out",
            field="logprobs",
        )
    most = speaker.served.vocabulary
    beyond = next((token for token in params.logit_bias if not 0 <= token < (most or SEEDS)), None)
    if beyond is not None:
        raise RequestError(
            f"logit_bias has the token {beyond:,}; the vocabulary has {most:,}", field="logit_bias"
        )
    return {name: getattr(params, name) for name in SAME_NAMES} | {
        "stream": True,
        "return_tokens": True,
        "cache_prompt": speaker.prefix_cache,
        "samplers": list(SAMPLERS),
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": speaker.model.context_tokens,
        "logit_bias": [[token, bias] for token, bias in params.logit_bias.items()],
        "stop": list(params.stop),
        "n_probs": 0 if params.logprobs is None else max(params.logprobs, 1),
    }


def form_of(
    request: Request, speaker: RequestBuilder, trials: Trials, go_on: GoOn = going_on
) -> Mapping[str, Any]:
    """The field that constrains the answer as our own engine would; none where nothing does.

    Takes time: call it in a thread.

    Raises:
        RequestError: it can't be used; or this llama.cpp has nothing for it.
    """
    if request.tools is not None:
        lark = tools_lark(speaker.model.facts.tool_form, request.tools, speaker.model.marker_tokens, trials)
        try_grammar(LLMatcher.grammar_from_lark(lark), "tools", "tools", trials, go_on)
        if speaker.guided:
            return {"grammar": GUIDED + _literal(lark)}
        if request.tools.choice == "auto" and request.tools.form is None:
            return {}  # calls are found in the text all the same
        raise _beyond("calls of tools", "tools")
    if request.grammar is None:
        return {}
    field = "response_format"
    text = grammar_text(request.grammar, field)
    try_grammar(text, request.grammar.kind, field, trials, go_on, request.grammar.source)
    check_choices(request.grammar, request.sampling.n, field)
    if speaker.guided:
        return {"grammar": GUIDED + lark_of(request.grammar.kind, request.grammar.source)}
    return _own_form(request.grammar, field)


def _own_form(grammar: Grammar, field: str) -> Mapping[str, Any]:
    """The field for a llama-server without llguidance: a JSON schema, or GBNF."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.source)
        if missing := left_out(schema):
            raise _beyond(", ".join(missing), field)
        return {"json_schema": json.loads(_compact(schema))}
    made = gbnf_of(grammar.source) if grammar.kind == "lark" else None
    if made is None:
        kinds = {"regex": "regular expressions", "lark": "Lark grammars beyond rules, literals and groups"}
        raise _beyond(kinds[grammar.kind], field)
    return {"grammar": made}


def _beyond(what: str, field: str) -> RequestError:
    return RequestError(
        f"this llama-server may have no llguidance, and its own grammars (GBNF) can't enforce {what}; use "
        "the wheel (pip install 'snugvl[llamacpp]', and no --llamacpp-command), or ask without that",
        field=field,
    )


def lark_of(kind: str, source: str) -> str:
    """A grammar of kind `kind` (lark, regex or JSON schema) as the Lark text that llama.cpp reads."""
    if kind == "lark":
        return source
    if kind == "regex":
        return f"start: /{source.replace('/', chr(92) + '/')}/"
    return f"start: %json {_compact(json.loads(source))}"


def _compact(schema: Mapping[str, Any]) -> str:
    """A schema that lets llguidance write no white space without end; others don't read that."""
    return _literal(json.dumps({**ended(schema), "x-guidance": JSON_OPTIONS}))


def _literal(lark: str) -> str:
    """Separators of JSON as texts: the llguidance in llama.cpp reads no patterns there."""
    for name, pattern in COMPACT.items():
        if isinstance(pattern, str):
            read, literal = (json.dumps({name: text})[1:-1] for text in (pattern, pattern.rstrip("?")))
            lark = lark.replace(read, literal)
    return lark
