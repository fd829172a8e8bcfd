"""`options` of Ollama's requests: how tokens are chosen."""

from typing import Annotated, ClassVar

from pydantic import Field

from snugvl.backends.protocol import Capabilities
from snugvl.errors import RequestError
from snugvl.sampling import MAX_STOP, SamplingParams
from snugvl.server.fields import WHOLE, Exact, Harmless

UNLIMITED = (-1, -2)  # of num_predict: without end, and until the context is full


class Options(Exact):
    """What Ollama's options mean here. Those that tune llama.cpp (num_gpu, num_thread, …) are refused."""

    # The last ones say what is so anyway: penalties look at all tokens, and nothing is shifted out.
    harmless: ClassVar[Harmless] = {
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "num_keep": (0,),
        "repeat_last_n": (-1,),
    }

    temperature: Annotated[float, Field(ge=0, le=2, description="0, the default, is greedy")] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31, description="0 is off"), WHOLE] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    num_predict: (
        Annotated[int, Field(ge=-2, lt=2**31, description="new tokens at most; -1 and -2: what fits"), WHOLE]
        | None
    ) = None
    num_ctx: Annotated[int, Field(ge=1, description="at most the context that is served"), WHOLE] | None = (
        None
    )
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None


def sampling_of(options: Options | None, logprobs: int | None, capabilities: Capabilities) -> SamplingParams:
    """The sampling parameters behind `options`; `logprobs` as in `SamplingParams`.

    Raises:
        RequestError: a context larger than the one served, or an answer of no tokens.
    """
    options = options or Options()
    if options.num_ctx is not None and options.num_ctx > capabilities.context_tokens:
        raise RequestError(
            f"options.num_ctx is {options.num_ctx}, but {capabilities.context_tokens} tokens of context are "
            "served; ask for no more, or start the server with a larger context",
            field="options.num_ctx",
        )
    if options.num_predict == 0:
        raise RequestError(
            "options.num_predict is 0, which leaves no answer; -1 is what fits", field="options.num_predict"
        )
    return SamplingParams(
        max_tokens=None if options.num_predict in UNLIMITED else options.num_predict,
        temperature=options.temperature or 0.0,
        top_p=1.0 if options.top_p is None else options.top_p,
        top_k=options.top_k or 0,
        min_p=options.min_p or 0.0,
        repetition_penalty=1.0 if options.repeat_penalty is None else options.repeat_penalty,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        stop=tuple(options.stop or ()),
        seed=None if options.seed == -1 else options.seed,
        logprobs=logprobs,
    )
