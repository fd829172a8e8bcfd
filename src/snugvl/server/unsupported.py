"""Fields that a body doesn't declare: the one place that says what becomes of them.

Clients' programs write requests, not people: their defaults and no-op knobs ask for nothing. So there is one
rule, for every protocol. What would change the answer and can't be done is refused, with what to do instead;
those fields stand here. What another program calls a field that there is here is read as that. Everything
else is ignored, and the answer's `Snugvl-Warning` header names it. A declared field is honoured, or only
checked (`DECLARED_ONLY`), and not in these tables. docs/api.md is written from these tables.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic_core import PydanticCustomError

from snugvl.core.messages import BESIDE_CONTENT

NEUTRAL: Final = (0, 0.0)
ONE: Final = (1, 1.0)


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that is not honoured under its own name.

    Attributes:
        verdict: "refused" where it would change the answer; "read" where it is another name for a field.
        why: of what is refused, what to do instead; of what is read, the field that it is here.
        nothing: values that ask for nothing, and pass; null always does.
        meant: of what is read, its value in that field; None: as it is.
    """

    verdict: Literal["refused", "read"]
    why: str
    nothing: tuple[object, ...] = ()
    meant: Callable[[Any], Any] | None = None

    def check(self, name: str, value: object) -> None:
        """Refuse a value that asks for what can't be done.

        Raises:
            PydanticCustomError: with what to do instead, and the name for the path of the field.
        """
        if self.verdict == "refused" and self._asks(value):
            raise PydanticCustomError(
                "unsupported_parameter", "{why}", {"why": self.why, "unsupported": (name,)}
            )

    def settle(self, name: str, values: dict[str, Any]) -> None:
        """Move a value of a body to the field that it is here; what an object has there already stays.

        Raises:
            PydanticCustomError: both are there, and differ.
        """
        meant = values[name] if self._asks(values[name]) else None
        if self.meant is not None and meant is not None:
            meant = self.meant(meant)
        there = values.get(self.why)
        if isinstance(meant, dict) and isinstance(there, dict) and "type" not in meant:  # options, not a form
            values[self.why] = {**meant, **there}
        elif there is None:
            values[self.why] = meant
        elif meant is not None and meant != there:
            raise PydanticCustomError(
                "two_names",
                "it is another name for {field}, which has another value; send one of them",
                {"field": self.why, "unsupported": (name,)},
            )

    def _asks(self, value: object) -> bool:
        """Whether a value asks for anything. True equals 1 in Python, not in JSON."""
        same = (value == good and type(value) is type(good) for good in self.nothing)
        return value is not None and not any(same)


UnsupportedFields = Mapping[str, UnsupportedField]


def refused(why: str, *nothing: object) -> UnsupportedField:
    """A field that is refused because it would change the answer.

    `why`: what to do instead; `nothing`: values that ask for nothing, and are ignored.
    """
    return UnsupportedField("refused", why, nothing)


def read(field: str, *nothing: object, meant: Callable[[Any], Any] | None = None) -> UnsupportedField:
    """Another name for a field."""
    return UnsupportedField("read", field, nothing, meant)


def settled(fields: UnsupportedFields, declared: Collection[str]) -> UnsupportedFields:
    """Unsupported fields of a body that declares these; none is read as a field that it lacks."""
    return {
        name: refused(CHAT_ALONE, *field.nothing)
        if field.verdict == "read" and field.why not in declared
        else field
        for name, field in fields.items()
        if name not in declared
    }


STATELESS: Final = "this server keeps nothing between requests"
SAMPLER: Final = "there is no such sampler here; use temperature, top_p, top_k or min_p"
CHAT_ALONE: Final = "there is none here; use /v1/chat/completions"


def thinks(value: object) -> bool:
    """Whether to think, as Ollama (true, "high"), vLLM (true) and Anthropic (`{"type": …}`) say it."""
    if isinstance(value, Mapping):
        value = value.get("type")
    return value not in ("", "false", "none", "off", "disabled", "minimal") and bool(value)


def _kwargs(value: object) -> dict[str, Any]:
    return {"enable_thinking": thinks(value)}


def _effort(value: object) -> dict[str, Any]:
    return {"effort": "medium" if thinks(value) else "none"}


def _effort_of(value: object) -> object:
    """The effort in OpenRouter's and Responses' options of reasoning; None where they say nothing of it."""
    if not isinstance(value, Mapping):
        return value
    return "none" if value.get("enabled") is False else value.get("effort")


def _switch(value: object) -> dict[str, Any]:
    return {"type": "enabled" if thinks(value) else "disabled"}


def _form(value: object) -> object:
    """Ollama's `format` as a `response_format`."""
    if isinstance(value, Mapping) and value.get("type") not in ("text", "json_object", "json_schema"):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}
    return value if isinstance(value, Mapping) else {"type": "json_object" if value == "json" else value}


PLAIN_TEXT: Final = {"type": "text"}
THINKING: Final = ("think", "enable_thinking", "thinking")
FORMS: Final = ("format", "response_format", "structured_outputs", "guided_json", "guided_regex",
                "guided_choice", "guided_grammar")  # fmt: skip


def _in(place: str) -> UnsupportedFields:
    """Pictures beside the messages, or beside the content of one: unseen, they would change every answer."""
    return dict.fromkeys(BESIDE_CONTENT, refused(f"pictures go into {place}", "", []))


PICTURE_PART: Final = _in('a message\'s content, as {"type": "image_url", "image_url": {"url": "data:…"}}')
INPUT_PICTURE: Final = _in('a message\'s content, as {"type": "input_image", "image_url": "data:…"}')
PICTURE_BLOCK: Final = _in('a message\'s content, as {"type": "image", "source": {"type": "base64", …}}')
OLLAMA_PICTURES: Final = _in("images, a list of base64, of the message (of the prompt on /api/generate)")

# Of any program that generates text; what OpenAI's own API has, then vLLM's, llama.cpp's and others'.
GENERATION: Final[UnsupportedFields] = {
    "audio": refused("this server answers with text only; leave it out"),
    "modalities": refused('this server answers with text only; leave it out or send ["text"]', ["text"]),
    "web_search_options": refused("this server doesn't search; offer a tool that does"),
    "moderation": refused("this server doesn't moderate; send the text to one that does"),
    "functions": refused("it is deprecated; use tools", []),
    "function_call": refused("it is deprecated; use tool_choice", "none", "auto"),
    "verbosity": refused("say in the system message how long the answer should be", "medium"),
    "best_of": refused("all choices are returned; use n and choose yourself", *ONE),
    "suffix": refused("the models served here can't fill a gap in a text", ""),
    "use_beam_search": refused("answers are sampled; use n for several", False),
    "beam_width": refused("answers are sampled; use n for several", *ONE),
    "early_stopping": refused("answers are sampled; there are no beams to stop", False),
    "length_penalty": refused("it is for beam search, which there is none of", *ONE),
    "num_beams": refused("answers are sampled; use n for several", *ONE),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), refused("an answer has no least length here", 0)),
    "do_sample": refused("set temperature: 0 is greedy, any other samples"),
    "bad_words": refused("use logit_bias of -100 for the tokens that must not come", []),
    "allowed_token_ids": refused("use response_format or structured_outputs to say what may come", []),
    "logits_processors": refused("requests bring no code; use logit_bias", []),
    "include_stop_str_in_output": refused("stop strings are never part of an answer; add it yourself", False),
    "truncate_prompt_tokens": refused("shorten the prompt yourself; nothing is cut silently"),
    "prompt_logprobs": refused("use /v1/completions with echo and logprobs", 0),
    "return_token_ids": refused("POST /tokenize gives ids of a text", False),
    "return_tokens_as_token_ids": refused("POST /tokenize gives ids of a text", False),
    "logits_to_keep": refused("there is no such output; use logprobs"),
    "chat_template": refused("the model's own template is used; serve a checkpoint with another one"),
    "documents": refused("put the documents into a message", []),
    "continue_final_message": refused("end with a user's message; an answer can't be continued", False),
    "add_generation_prompt": refused("leave it out; an answer is always generated", True),
    "media_io_kwargs": refused("scale pictures yourself, or start with --max-pixels", {}),
    "guided_whitespace_pattern": refused("white space of structured answers is fixed; leave it out"),
    "typical_p": refused(SAMPLER, *ONE),
    "tfs_z": refused(SAMPLER, *ONE),
    "top_a": refused(SAMPLER, *NEUTRAL),
    "top_n_sigma": refused(SAMPLER, -1, -1.0, *NEUTRAL),
    "mirostat": refused(SAMPLER, 0),
    "dynatemp_range": refused(SAMPLER, *NEUTRAL),
    "xtc_probability": refused(SAMPLER, *NEUTRAL),
    "dry_multiplier": refused("there is no such penalty here; use repetition_penalty", *NEUTRAL),
    "samplers": refused("the order of samplers is fixed; leave it out"),
    "repeat_penalty": read("repetition_penalty", *ONE),
    "no_repeat_ngram_size": refused(CHAT_ALONE, 0),
    **dict.fromkeys(("n_predict", "num_predict"), read("max_tokens", -1)),
    "stop_sequences": read("stop", []),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_output_tokens"), read("max_tokens")),
    "random_seed": read("seed"),
    "grammar": refused("grammars of llama.cpp aren't read; use response_format or structured_outputs", ""),
    "json_schema": refused("send it in response_format"),
    "n_probs": refused("send logprobs", 0),
    "lora": refused("no adapters are loaded; serve a merged checkpoint", []),
    "image_data": refused("send pictures as image_url parts of a message", []),
    "safe_prompt": refused("write the system message that you want", False),
    "thinking_budget": refused("send max_tokens, which bounds reasoning and answer together"),
    "options": refused("that is Ollama's; send its values as fields of the request itself", {}),
    "extra_body": refused("its fields belong into the request itself", {}),
    "plugins": refused("this server has none; offer tools", []),
    "transforms": refused("shorten the conversation yourself; nothing is cut silently", []),
    # What chat completions have, of protocols that don't.
    **dict.fromkeys(THINKING, read("chat_template_kwargs", meant=_kwargs)),
    "format": read("response_format", "", meant=_form),
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                     "guided_grammar"), refused(CHAT_ALONE, "", PLAIN_TEXT)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), refused(CHAT_ALONE, *NEUTRAL)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "mm_processor_kwargs"), refused(CHAT_ALONE, {})),
    **dict.fromkeys(("stop", "tools", "stop_token_ids"), refused(CHAT_ALONE, [])),
    **dict.fromkeys(("logprobs", "ignore_eos"), refused(CHAT_ALONE, False)),
    **dict.fromkeys(("top_logprobs", "top_k"), refused(CHAT_ALONE, 0, -1)),
    "n": refused(CHAT_ALONE, 1),
    "seed": refused(CHAT_ALONE),
    "top_p": refused(CHAT_ALONE, *ONE),
    "temperature": refused(CHAT_ALONE),
    "repetition_penalty": refused(CHAT_ALONE, *ONE),
    "skip_special_tokens": refused(CHAT_ALONE, True),
    "max_tokens": refused(CHAT_ALONE),
    "tool_choice": refused(CHAT_ALONE, "none", "auto"),
}  # fmt: skip

CHAT: Final[UnsupportedFields] = {
    **GENERATION,
    "reasoning": read("reasoning_effort", meant=_effort_of),
    **PICTURE_PART,
    "prompt": refused("send it as a user's message, or to /v1/completions"),
    "input": refused("send messages, or to /v1/responses"),
    "system": refused("send it as a message of role system"),
    "instructions": refused("send them as a message of role system"),
}
COMPLETIONS: Final[UnsupportedFields] = {
    **{name: field for name, field in GENERATION.items() if name not in ("mm_processor_kwargs", *THINKING)},
    **_in("a message of /v1/chat/completions"),
    "messages": refused("send them to /v1/chat/completions"),
}
RESPONSES_PROMPT: Final[UnsupportedFields] = {
    **INPUT_PICTURE,
    "truncation": refused("leave it out or send 'disabled', and shorten input yourself", "disabled"),
    "previous_response_id": refused(f"{STATELESS}; send the earlier input and output items again in input"),
    "conversation": refused(f"{STATELESS}; send the earlier input and output items again in input"),
    "prompt": refused(f"{STATELESS}, so it knows no prompts; send instructions and input"),
    "context_management": refused("shorten input yourself", []),
    "messages": refused("send them as input, or to /v1/chat/completions"),
    "reasoning_effort": read("reasoning", meant=lambda value: {"effort": value}),
    **dict.fromkeys(THINKING, read("reasoning", meant=_effort)),
}
RESPONSES: Final[UnsupportedFields] = {
    **GENERATION,
    **RESPONSES_PROMPT,
    **dict.fromkeys(("n_predict", "num_predict"), read("max_output_tokens", -1)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), read("max_output_tokens")),
    "response_format": refused("send it as text.format", PLAIN_TEXT),
    "format": refused("send it as text.format", ""),
    "logprobs": refused('send include: ["message.output_text.logprobs"]', False),
    "background": refused(f"{STATELESS}; wait for the answer, or stream it", False),
}
WRITTEN: Final[UnsupportedFields] = {
    "audio": refused("send what was said as text of content"),
    "function_call": refused("it is deprecated; send tool_calls"),
}
TEXT_FORM: Final[UnsupportedFields] = {
    "verbosity": refused("say in instructions how long the answer should be", "medium")
}
ITEM: Final[UnsupportedFields] = {"item_reference": refused(f"{STATELESS}; send the item itself, not its id")}
INPUT_IMAGE: Final[UnsupportedFields] = {"file_id": refused(f"{STATELESS}; send image_url")}
RESPONSE_TOOL: Final[UnsupportedFields] = {
    "defer_loading": refused("every tool is shown to the model; leave it out", False),
    "allowed_callers": refused("this server runs no code; leave it out"),
}

MESSAGES_PROMPT: Final[UnsupportedFields] = {
    "container": refused("this server runs no code"),
    "mcp_servers": refused("this server calls no other servers; run their tools in your program", []),
    **dict.fromkeys(("think", "enable_thinking"), read("thinking", meant=_switch)),
}
MESSAGES: Final[UnsupportedFields] = {
    **GENERATION,
    **PICTURE_BLOCK,
    **MESSAGES_PROMPT,
    "stop": refused("send stop_sequences", []),
    "response_format": refused("send output_config.format", PLAIN_TEXT),
    "format": refused("send output_config.format", ""),
}
CLIENT_TOOL: Final[UnsupportedFields] = {
    "allowed_callers": refused("this server runs no code; leave it out", ["direct"]),
    "defer_loading": refused("every tool is shown to the model; leave it out", False),
    "input_examples": refused("put the examples into the description", []),
}

OLLAMA: Final[UnsupportedFields] = {
    **GENERATION,
    **OLLAMA_PICTURES,
    **dict.fromkeys(("enable_thinking", "thinking"), read("think", meant=thinks)),
    "suffix": refused("the models served here can't fill a gap in a text", ""),
    "template": refused("the model's own template is used; use raw with a prompt of your own", ""),
    "context": refused("send the conversation to /api/chat", []),
    **dict.fromkeys(("max_tokens", "num_predict"), refused("send options.num_predict")),
    **{name: refused(f"send options.{name}") for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    **dict.fromkeys(("stop", "stop_sequences"), refused("send options.stop", [])),
    "repeat_penalty": refused("send options.repeat_penalty", *ONE),
    "presence_penalty": refused("send options.presence_penalty", *NEUTRAL),
    "frequency_penalty": refused("send options.frequency_penalty", *NEUTRAL),
    "response_format": refused("send format", PLAIN_TEXT),
    "tool_choice": refused("Ollama's protocol has none; use /v1/chat/completions", "auto"),
    "grammar": refused("send a JSON schema in format", ""),
}
OLLAMA_OPTIONS: Final[UnsupportedFields] = {
    "mirostat": refused(SAMPLER, 0),
    "tfs_z": refused(SAMPLER, *ONE),
    "typical_p": refused(SAMPLER, *ONE),
    "penalize_newline": refused("penalties look at all tokens; leave it out", True),
}  # fmt: skip
TOKENIZE: Final[UnsupportedFields] = {
    "add_generation_prompt": refused("leave it out; it is always there", True),
    "return_token_strs": refused("POST /detokenize gives texts of ids", False),
    **dict.fromkeys(THINKING, read("chat_template_kwargs", meant=_kwargs)),
}
DECLARED_ONLY: Final[Mapping[str, str]] = {
    "metadata": "nothing is kept",
    "user": "requests are told apart by API key",
    "safety_identifier": "requests are told apart by API key",
    "cache_control": "beginnings of prompts are cached anyway",
    "keep_alive": "the model stays as long as the server runs",
    "verbose": "everything is shown anyway",
    "best_of": "only as many as n",
    "repeat_last_n": "penalties look at all tokens",
}
"""Fields that bodies declare to check their form, and that are otherwise without effect."""


def listed(fields: UnsupportedFields, declared: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of a body's fields by what becomes of them: honoured, checked, read, refused."""
    found: dict[str, list[str]] = {
        "honoured": [name for name in declared if name not in DECLARED_ONLY],
        "checked": [name for name in declared if name in DECLARED_ONLY],
    }
    for name, field in fields.items():
        shown = f"{name} ({field.why})" if field.verdict == "read" else name
        found.setdefault(field.verdict, []).append(shown)
    return found
