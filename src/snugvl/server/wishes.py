"""What becomes of every field that a client may send and that is not honoured: the one place that says it.

Clients' programs write requests, not people: their defaults and no-op knobs are no wishes. So what would
change the answer and can't be done is refused, with what to do instead; what can't change it is ignored; what
another program calls a field that there is here is read as that. A
declared field of a body is honoured, or only checked (`DECLARED_ONLY`); a name that neither a body nor its
table has is ignored and told. docs/api.md is written from these tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic_core import PydanticCustomError

NEUTRAL: Final = (0, 0.0)
ONE: Final = (1, 1.0)


@dataclass(frozen=True, slots=True)
class Wish:
    """A field that is not honoured under its own name.

    Attributes:
        verdict: "refused" where it would change the answer; "ignored" where it can't; "read" where it is
            another name for a field.
        why: of what is refused, what to do instead; of what is ignored, why it changes nothing; of what is
            read, the field that it is here.
        nothing: values of what is refused that ask for nothing, and pass; null always does.
        told: whether the answer's header names it when it is ignored: someone might care.
        meant: of what is read, its value in that field; None: it asks for nothing.
    """

    verdict: Literal["refused", "ignored", "read"]
    why: str
    nothing: tuple[object, ...] = ()
    told: bool = False
    meant: Callable[[Any], Any] | None = None

    def check(self, name: str, value: object) -> None:
        """Refuse a value that asks for what can't be done.

        Raises:
            PydanticCustomError: with what to do instead, and the name for the path of the field.
        """
        if self.verdict != "refused" or value is None:
            return
        # True equals 1 in Python, not in JSON.
        if any(value == good and type(value) is type(good) for good in self.nothing):
            return
        raise PydanticCustomError("unsupported_parameter", "{why}", {"why": self.why, "wish": (name,)})

    def settle(self, name: str, values: dict[str, Any]) -> None:
        """Move a value of a body to the field that it is here; what an object has there already stays.

        Raises:
            PydanticCustomError: both are there, and differ.
        """
        meant = values[name] if self.meant is None or values[name] is None else self.meant(values[name])
        there = values.get(self.why)
        if isinstance(meant, dict) and isinstance(there, dict) and "type" not in meant:  # options, not a form
            values[self.why] = {**meant, **there}
        elif there is None:
            values[self.why] = meant
        elif meant is not None and meant != there:
            raise PydanticCustomError(
                "two_names",
                "it is another name for {field}, which has another value; send one of them",
                {"field": self.why, "wish": (name,)},
            )


Wishes = Mapping[str, Wish]


def refused(why: str, *nothing: object) -> Wish:
    """It would change the answer."""
    return Wish("refused", why, nothing)


def ignored(why: str) -> Wish:
    """It can't change the answer, and nobody cares."""
    return Wish("ignored", why)


def read(field: str, meant: Callable[[Any], Any] | None = None) -> Wish:
    """Another name for a field."""
    return Wish("read", field, meant=meant)


def told(why: str) -> Wish:
    """It can't change the answer, but who sent it may have expected something."""
    return Wish("ignored", why, told=True)


STATELESS: Final = "this server keeps nothing between requests"
SAMPLER: Final = "there is no such sampler here; use temperature, top_p, top_k or min_p"
LLAMA_CPP: Final = "tunes llama.cpp; `snugvl plan` decides such things here"
PLACE: Final = "says where or when it runs, not what is answered"


def thinks(value: object) -> bool:
    """Whether to think, as Ollama (true, "high"), vLLM (true) and Anthropic (`{"type": …}`) say it."""
    if isinstance(value, Mapping):
        value = value.get("type")
    return value not in ("", "false", "none", "off", "disabled", "minimal") and bool(value)


def _kwargs(value: object) -> dict[str, Any]:
    return {"enable_thinking": thinks(value)}


def _effort(value: object) -> dict[str, Any]:
    return {"effort": "medium" if thinks(value) else "none"}


def _form(value: object) -> object:
    """Ollama's `format` as a `response_format`."""
    if value in ("", {}):
        return None
    if isinstance(value, Mapping) and value.get("type") not in ("text", "json_object", "json_schema"):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}
    return value if isinstance(value, Mapping) else {"type": "json_object" if value == "json" else value}


# Of any program that generates text; what OpenAI's own API has, then vLLM's, llama.cpp's and others'.
GENERATION: Final[Wishes] = {
    "audio": refused("this server answers with text only; leave it out"),
    "modalities": refused('this server answers with text only; leave it out or send ["text"]', ["text"]),
    "web_search_options": refused("this server doesn't search; offer a tool that does"),
    "moderation": refused("this server doesn't moderate; send the text to one that does"),
    "functions": refused("it is deprecated; use tools"),
    "function_call": refused("it is deprecated; use tool_choice"),
    "verbosity": refused("say in the system message how long the answer should be", "medium"),
    "best_of": refused("all choices are returned; use n and choose yourself", *ONE),
    "suffix": refused("the models served here can't fill a gap in a text", ""),
    "prediction": ignored("makes answers faster on OpenAI's servers, not other ones"),
    "store": told(STATELESS),
    "service_tier": told("this server has one tier"),
    "prompt_cache_key": ignored("beginnings of prompts are cached anyway"),
    "prompt_cache_options": ignored("beginnings of prompts are cached anyway"),
    "prompt_cache_retention": ignored("beginnings of prompts are cached anyway"),
    "min_tokens": told("an answer ends where the model ends it; with ignore_eos it has max_tokens"),
    "use_beam_search": refused("answers are sampled; use n for several", False),
    "beam_width": refused("answers are sampled; use n for several", *ONE),
    "early_stopping": refused("answers are sampled; there are no beams to stop", False),
    "length_penalty": refused("it is for beam search, which there is none of", *ONE),
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
    "vllm_xargs": told("extensions of vLLM guard against loops; repetition_penalty does so here"),
    "priority": told(PLACE),
    "request_id": ignored("the answer has an id of its own"),
    "cache_salt": ignored(PLACE),
    "kv_transfer_params": ignored(PLACE),
    "add_special_tokens": ignored("templates and prompts get what the model was trained with"),
    "spaces_between_special_tokens": ignored("nothing stands between tokens that they don't have"),
    "guided_decoding_backend": ignored("there is one"),
    "structured_outputs_backend": ignored("there is one"),
    "separate_reasoning": told("reasoning is always apart from the answer"),
    "include_reasoning": told("reasoning is always apart from the answer"),
    "typical_p": refused(SAMPLER, *ONE),
    "tfs_z": refused(SAMPLER, *ONE),
    "top_a": refused(SAMPLER, *NEUTRAL),
    "top_n_sigma": refused(SAMPLER, -1, -1.0, *NEUTRAL),
    "mirostat": refused(SAMPLER, 0),
    "dynatemp_range": refused(SAMPLER, *NEUTRAL),
    "xtc_probability": refused(SAMPLER, *NEUTRAL),
    "dry_multiplier": refused("there is no such penalty here; use repetition_penalty", *NEUTRAL),
    "samplers": refused("the order of samplers is fixed; leave it out"),
    "repeat_penalty": read("repetition_penalty", lambda value: None if value in ONE else value),
    "no_repeat_ngram_size": refused("there is no such penalty here; use repetition_penalty", 0),
    "n_predict": read("max_tokens", lambda value: None if value == -1 else value),
    "max_new_tokens": read("max_tokens"),
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
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), ignored("mirostat is off")),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
                    ignored("dry_multiplier is 0")),
    **dict.fromkeys(("dynatemp_exponent",), ignored("dynatemp_range is 0")),
    **dict.fromkeys(("xtc_threshold",), ignored("xtc_probability is 0")),
    **dict.fromkeys(("id_slot", "slot_id", "cache_prompt", "n_cache_reuse", "n_keep", "n_discard", "n_indent",
                     "t_max_predict_ms", "timings_per_token", "return_progress", "post_sampling_probs",
                     "min_keep", "repeat_last_n", "response_fields", "reasoning_format", "parse_tool_calls"),
                    ignored(LLAMA_CPP)),
    **dict.fromkeys(("keep_alive", "num_ctx"), told("the model stays as it is while the server runs")),
    **dict.fromkeys(("provider", "route", "models", "fallbacks", "api_base", "caching"), told(PLACE)),
}  # fmt: skip

PLAIN_TEXT: Final = {"type": "text"}
THINKING: Final = ("think", "enable_thinking", "thinking")
FORMS: Final = ("format", "response_format", "structured_outputs", "guided_json", "guided_regex",
                "guided_choice", "guided_grammar")  # fmt: skip

CHAT: Final[Wishes] = {
    **GENERATION,
    **dict.fromkeys(THINKING, read("chat_template_kwargs", _kwargs)),
    "format": read("response_format", _form),
    "reasoning": told("reasoning_effort says it"),
    "prompt": refused("send it as a user's message, or to /v1/completions"),
    "input": refused("send messages, or to /v1/responses"),
    "system": refused("send it as a message of role system"),
    "max_output_tokens": refused("send max_completion_tokens"),
    "instructions": refused("send them as a message of role system"),
}
COMPLETIONS: Final[Wishes] = {
    **GENERATION,
    "reasoning": told("a bare prompt says where thinking begins"),
    "mm_processor_kwargs": told("a bare prompt has no pictures"),
    "reasoning_effort": told("a bare prompt says where thinking begins"),
    "messages": refused("send them to /v1/chat/completions"),
    "max_completion_tokens": read("max_tokens"),
    **dict.fromkeys(THINKING, told("a bare prompt says where thinking begins")),
    **dict.fromkeys(FORMS, refused("a bare prompt has no form; use /v1/chat/completions", "", PLAIN_TEXT)),
    "tools": refused("a bare prompt has no place for tools; use /v1/chat/completions", []),
    "tool_choice": refused("a bare prompt has no place for tools; use /v1/chat/completions", "none", "auto"),
    "chat_template_kwargs": refused("a bare prompt has no template; use /v1/chat/completions", {}),
}  # fmt: skip
RESPONSES: Final[Wishes] = {
    **GENERATION,
    "reasoning_effort": read("reasoning", lambda value: {"effort": value}),
    **dict.fromkeys(THINKING, read("reasoning", _effort)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"),
                    read("max_output_tokens")),
    **dict.fromkeys(FORMS, refused("send it as text.format", "", PLAIN_TEXT)),
    "background": refused(f"{STATELESS}; wait for the answer, or stream it", False),
    "truncation": refused("leave it out or send 'disabled', and shorten input yourself", "disabled"),
    "previous_response_id": refused(f"{STATELESS}; send the earlier input and output items again in input"),
    "conversation": refused(f"{STATELESS}; send the earlier input and output items again in input"),
    "prompt": refused(f"{STATELESS}, so it knows no prompts; send instructions and input"),
    "context_management": refused("shorten input yourself", []),
    "messages": refused("send them as input, or to /v1/chat/completions"),
    "stop": refused("responses have no stop strings; use /v1/chat/completions", []),
    "n": refused("a response is one answer; use /v1/chat/completions", 1),
    **dict.fromkeys(("seed", "random_seed"), refused("responses have no seed; use /v1/chat/completions")),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), refused("use /v1/chat/completions", *ONE)),
    "min_p": refused("use /v1/chat/completions", *NEUTRAL),
    "skip_special_tokens": refused("use /v1/chat/completions", True),
    "mm_processor_kwargs": refused("use /v1/chat/completions", {}),
    "stop_token_ids": refused("use /v1/chat/completions", []),
    "ignore_eos": refused("use /v1/chat/completions", False),
    "logprobs": refused("send include: [\"message.output_text.logprobs\"]", False),
    "top_k": refused("use /v1/chat/completions", 0, -1),
    "presence_penalty": refused("use /v1/chat/completions", *NEUTRAL),
    "frequency_penalty": refused("use /v1/chat/completions", *NEUTRAL),
    "logit_bias": refused("use /v1/chat/completions", {}),
    "max_tool_calls": ignored("it bounds calls of OpenAI's own tools, which there are none of"),
}  # fmt: skip
REASONING: Final[Wishes] = {
    **dict.fromkeys(("summary", "generate_summary"), told("responses leave the reasoning out")),
    "context": ignored("what was thought isn't shown to the model again"),
    "mode": ignored("there is one"),
}
STREAM_OPTIONS: Final[Wishes] = {"include_obfuscation": ignored("nothing is added to chunks")}
WRITTEN: Final[Wishes] = {
    "audio": refused("send what was said as text of content"),
    "function_call": refused("it is deprecated; send tool_calls"),
}
TEXT_FORM: Final[Wishes] = {
    "verbosity": refused("say in instructions how long the answer should be", "medium")
}
ITEM: Final[Wishes] = {"item_reference": refused(f"{STATELESS}; send the item itself, not its id")}
INPUT_IMAGE: Final[Wishes] = {"file_id": refused(f"{STATELESS}; send image_url")}
RESPONSE_TOOL: Final[Wishes] = {
    "defer_loading": refused("every tool is shown to the model; leave it out", False),
    "allowed_callers": refused("this server runs no code; leave it out"),
}

PROCESSOR: Final[Wishes] = {
    "min_pixels": told("small pictures are scaled as the checkpoint says"),
    "size": told("send max_pixels: the same size means pixels to one model and an edge to another"),
    **dict.fromkeys(("use_fast", "device"), ignored("says how pictures are scaled, not what is seen")),
}

MESSAGES: Final[Wishes] = {
    "container": refused("this server runs no code"),
    "mcp_servers": refused("this server calls no other servers; run their tools in your program", []),
    "stop": refused("send stop_sequences", []),
    "max_completion_tokens": refused("send max_tokens"),
    "response_format": refused("send output_config.format"),
    "n": refused("a message is one answer; use /v1/chat/completions", 1),
    "seed": refused("messages have no seed; use /v1/chat/completions"),
    "context_management": told("the conversation is read as it is sent"),
    "diagnostics": ignored("nothing is diagnosed"),
    "inference_geo": told(PLACE),
    "service_tier": told("this server has one tier"),
    "speed": told("this server has one speed"),
    "betas": ignored("they are headers' affair"),
    "anthropic_version": ignored("they are headers' affair"),
    "anthropic_beta": ignored("they are headers' affair"),
}
OUTPUT_CONFIG: Final[Wishes] = {"effort": told("the models served here have one effort")}
CLIENT_TOOL: Final[Wishes] = {
    "allowed_callers": refused("this server runs no code; leave it out", ["direct"]),
    "defer_loading": refused("every tool is shown to the model; leave it out", False),
    "input_examples": refused("put the examples into the description", []),
    "eager_input_streaming": ignored("arguments stream anyway"),
}

OLLAMA: Final[Wishes] = {
    "truncate": ignored("nothing is cut; a prompt that is too long is refused"),
    "shift": ignored("nothing is shifted out of the context"),
    "suffix": refused("the models served here can't fill a gap in a text", ""),
    "template": refused("the model's own template is used; use raw with a prompt of your own", ""),
    "context": refused("send the conversation to /api/chat", []),
    "max_tokens": refused("send options.num_predict"),
    "temperature": refused("send options.temperature"),
    "seed": refused("send options.seed"),
    "response_format": refused("send format"),
    "tool_choice": refused("Ollama's protocol has none; use /v1/chat/completions", "auto"),
    "grammar": refused("send a JSON schema in format", ""),
}
OLLAMA_OPTIONS: Final[Wishes] = {
    "mirostat": refused(SAMPLER, 0),
    "tfs_z": refused(SAMPLER, *ONE),
    "typical_p": refused(SAMPLER, *ONE),
    "repeat_last_n": refused("penalties look at all tokens; send -1 or leave it out", -1, 64),
    "penalize_newline": refused("penalties look at all tokens; leave it out", True),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), ignored("mirostat is off")),
    "num_keep": ignored("nothing is shifted out of the context"),
    **dict.fromkeys(("num_gpu", "num_thread", "num_batch", "main_gpu", "low_vram", "use_mmap", "use_mlock",
                     "numa", "f16_kv", "vocab_only", "logits_all", "embedding_only", "rope_frequency_base",
                     "rope_frequency_scale", "num_gqa"), ignored(LLAMA_CPP)),
}  # fmt: skip
OLLAMA_SHOW: Final[Wishes] = {
    name: ignored("the model is described as it is served") for name in ("system", "template", "options")
}
TOKENIZE: Final[Wishes] = {
    "add_special_tokens": ignored("templates and prompts get what the model was trained with"),
    "add_generation_prompt": refused("leave it out; it is always there", True),
    "return_token_strs": refused("POST /detokenize gives texts of ids", False),
}
DECLARED_ONLY: Final[Mapping[str, str]] = {
    "metadata": "nothing is kept",
    "user": "requests are told apart by API key",
    "safety_identifier": "requests are told apart by API key",
    "cache_control": "beginnings of prompts are cached anyway",
    "keep_alive": "the model stays as long as the server runs",
    "verbose": "everything is told anyway",
    "best_of": "only as many as n",
}
"""Fields that bodies declare to check their form, and that are otherwise without effect."""


def listed(wishes: Wishes, declared: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of a body's fields by what becomes of them: honoured, checked, refused, told, ignored."""
    found: dict[str, list[str]] = {
        "honoured": [name for name in declared if name not in DECLARED_ONLY],
        "checked": [name for name in declared if name in DECLARED_ONLY],
    }
    for name, wish in wishes.items():
        kind = "told" if wish.told else wish.verdict
        found.setdefault(kind, []).append(f"{name} ({wish.why})" if kind == "read" else name)
    return found
