"""Fields that say how tokens are chosen, the same in chat completions and completions."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.server import forms
from snugvl.server.fields import WHOLE, Body, Part, at_most
from snugvl.server.forms import Stop, stops_of

MAX_TOKENS = 2**31


def no_limit(value: object) -> object:
    """What clients send who want as many tokens as there is room for: null, or -1."""
    return None if type(value) is int and value == -1 else value


Temperature = Annotated[float, Field(ge=0, le=2, description="0, the default, is greedy")]
TopP = Annotated[float, Field(ge=0, le=1, description="0 is greedy")]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MaxTokens = Annotated[
    Annotated[
        int, Field(ge=1, le=MAX_TOKENS, description="at most; null and -1: what the context leaves"), WHOLE
    ]
    | None,
    BeforeValidator(no_limit),
]
MAX_BIASES = 1024  # OpenAI takes 300
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    at_most(MAX_BIASES),
]


class StreamOptions(Part):
    """What a stream tells besides its text."""

    tells: ClassVar[bool] = True
    place: ClassVar[str] = "stream_options."

    include_usage: bool = Field(
        False, description="one more chunk at the end, with the tokens of the request"
    )
    continuous_usage_stats: bool = Field(
        False, description="with include_usage, every chunk has the tokens so far"
    )


NgramSize = Annotated[
    int,
    Field(ge=0, le=256, description="so many tokens in a row come once, of the prompt's, too; 0 is off"),
    WHOLE,
]


class ProcessorArguments(Part):
    """Arguments of vLLM's logits processors: those of document models' windows of repetition."""

    tells: ClassVar[bool] = True
    place: ClassVar[str] = "vllm_xargs."

    no_repeat_ngram_size: NgramSize | None = None
    ngram_size: NgramSize | None = Field(None, description="another name of no_repeat_ngram_size")
    window_size: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="of how many tokens before; 0: of all"
    )


class SamplingFields(Body):
    """OpenAI's sampling fields, and vLLM's additions from `top_k` on."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    stop: Stop | None = None
    max_tokens: MaxTokens = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS, description="0 and -1 are off"), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    no_repeat_ngram_size: NgramSize | None = None
    vllm_xargs: ProcessorArguments | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0), WHOLE]], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(
        None, description="false: control tokens that don't end the answer are part of it"
    )


def sampling_of(fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The parameters of a request."""
    sizes, window = [fields.no_repeat_ngram_size], None
    if (extra := fields.vllm_xargs) is not None:
        sizes += [extra.no_repeat_ngram_size, extra.ngram_size]
        window = extra.window_size
    return forms.sampling_of(
        fields,
        *("temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "min_p"),
        *("repetition_penalty", "ignore_eos", "seed"),
        max_tokens=max_tokens,
        logprobs=logprobs,
        no_repeat_ngram_size=next((size for size in sizes if size is not None), None),
        no_repeat_window=window,
        special=fields.skip_special_tokens is False,
        stop=stops_of(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        top_k=max(fields.top_k or 0, 0),
        logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
    )


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the engine speak of fields of its own requests: here they get the names of the protocol.

    Args:
        names: by pattern of the whole field, as `re.sub` takes them; the first that matches is used.
    """
    try:
        yield
    except RequestError as error:
        for pattern, name in names.items():
            if error.field is not None and re.fullmatch(pattern, error.field):
                error.field = re.sub(pattern, name, error.field)
                break
        raise
