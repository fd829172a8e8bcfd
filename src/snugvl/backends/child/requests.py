"""Common parts of child engines' requests: checks in our own engine's words, pictures scaled and encoded."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import sqrt
from typing import Final

from PIL import Image

from snugvl.backends.child.settings import Facts
from snugvl.checkpoint.image_rules import smart_resize
from snugvl.checkpoint.locate import training_of
from snugvl.core.messages import (
    Capabilities,
    GoOn,
    Message,
    Picture,
    Request,
    Tool,
    characters,
    named_in_errors,
)
from snugvl.core.sampling import check_scores
from snugvl.core.service import check_combination
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.chat import refuse_marks, texts
from snugvl.inputs.constraints import refused
from snugvl.inputs.defusing import broken_up, defused, pattern_of
from snugvl.inputs.image import to_rgb
from snugvl.inputs.trials import Trials

NO_RUNS: Final = ("no_repeat_ngram_size", "no_repeat_ngram_size: this engine has no such rule")
TOKEN_CHARACTERS: Final = 256  # of the longest token there is in a vocabulary that people use: 128
# Fields of sampling that other programs' servers call as we do.
SAME_NAMES: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a child server, with all facts that requests to it depend on. `name`: its name in
    requests; `marker_tokens`: ids of the markers of tool calls that are tokens of their own."""

    name: str
    context_tokens: int
    facts: Facts
    marker_tokens: Mapping[str, int] = field(default_factory=dict)


def capabilities_of(
    model: str,
    context_tokens: int,
    facts: Facts,
    engine: str,
    ignores: tuple[tuple[str, str], ...] = (),
    vague_limits: bool = False,
) -> Capabilities:
    """Capabilities of a served model. Where it isn't known whether it sees, the engine refuses pictures."""
    return Capabilities(
        model=model,
        context_tokens=context_tokens,
        images=facts.images is not False,
        video=False,
        max_pixels=facts.max_pixels,
        min_pixels=facts.min_pixels,
        engine=engine,
        device=facts.device,
        dtype=facts.dtype,
        weights=facts.weights,
        architecture=facts.architecture,
        parameters=facts.parameters,
        tools=facts.tools,
        tool_form=facts.tool_form,
        thinks=facts.reasoning is not None,
        exact_forms=facts.exact_forms,
        most_characters=context_tokens * TOKEN_CHARACTERS,
        training=training_of(model),
        plan=facts.plan,
        counts_by_size=False,
        ignores=ignores,
        vague_limits=vague_limits,
    )


def refuse_oversized(count: int, model: ServedModel, field: str) -> None:
    """Raise RequestTooLarge if no text of so many characters fits into the context.

    The tokenizer is the engine's: what is not known here is how long its longest token is.
    """
    if count > model.context_tokens * TOKEN_CHARACTERS:
        raise RequestTooLarge(
            f"the prompt has {count:,} characters; the context holds {model.context_tokens:,} tokens of at "
            f"most {TOKEN_CHARACTERS} characters each; send less text",
            field=field,
        )


def refuse_control_tokens(text: str, facts: Facts, field: str) -> None:
    """Raise RequestError if text holds a control token, by which it could speak as the system.

    It is known which those are where the checkpoint is on this machine.
    """
    refuse_marks(text, facts.control_tokens, "a control token of this model", field)


def without_control_tokens(
    messages: Sequence[Message], tools: Sequence[Tool], facts: Facts
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """A conversation and its tools, in which each control token that content spells is broken up.

    Raises:
        RequestError: the arguments of a call are not a JSON object.
    """
    marks = pattern_of(tuple(facts.control_tokens))
    return defused(messages, tools, lambda text: broken_up(text, marks))


def plain_conversation(
    messages: Sequence[Message], tools: Sequence[Tool], model: ServedModel, go_on: GoOn
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """A conversation and its tools, in which each control token that content spells is broken up.

    Raises:
        RequestError: text with a control token that can't be; the arguments of a call are not a JSON object.
        RequestTooLarge: so much text that it can't fit into the context.
    """
    refuse_oversized(characters(messages, tools), model, "messages")
    messages, tools = without_control_tokens(messages, tools, model.facts)
    for where, text in texts(messages, tools):
        refuse_control_tokens(text, model.facts, where)
        go_on()
    return messages, tools


def check(request: Request, model: ServedModel) -> None:
    """Refuse a request that contradicts itself, in the words of our own engine."""
    known = len(request.prompt) if isinstance(request.prompt, tuple) else 0
    check_scores(request.sampling, None if request.prompt is None else known)
    check_combination(request)
    if request.prompt is None and not request.messages:
        raise RequestError("the conversation is empty; send at least one message", field="messages")
    if request.prompt is not None and not request.prompt:
        raise RequestError("the prompt is empty; send at least one token", field="prompt")
    if isinstance(request.prompt, str):
        refuse_oversized(len(request.prompt), model, "prompt")
        refuse_control_tokens(request.prompt, model.facts, "prompt")


def try_grammar(text: str, kind: str, field: str, trials: Trials, go_on: GoOn, source: str = "") -> None:
    """Refuse a grammar that can't be compiled, or not within the time limit. `source`: as in `refused`."""
    if error := trials.check(text, go_on).error:
        raise refused(error, kind, field, source)


FAST: Final = 1  # of zlib's levels; the bytes go to this very machine


def png(picture: Picture, facts: Facts) -> tuple[str, tuple[int, int]]:
    """(PNG of the scaled picture in base64, its size). Takes time: call it in a thread.

    Raises:
        RequestError, ImageError: it can't be scaled as asked.
    """
    image = to_rgb(picture.image)
    with named_in_errors(picture):
        size = target_size(image.size, picture.max_pixels, facts)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    buffer = BytesIO()
    image.save(buffer, "PNG", compress_level=FAST)
    return b64encode(buffer.getbuffer()).decode(), size


def target_size(size: tuple[int, int], wished: int | None, facts: Facts) -> tuple[int, int]:
    """(width, height) in pixels at which a picture is sent.

    Where the model's rule is known (sides are multiples of `pixel_factor`, the area within two limits) it is
    applied here, as the model's own processor would: what the engine gets it need not scale again. Otherwise
    only what is larger than the limits is scaled down, with its aspect ratio.

    Args:
        wished: most pixels of this picture, or None.

    Raises:
        RequestError: fewer pixels than one token has.
        ImageError: one side is more than 200 times the other.
    """
    limits = [limit for limit in (wished, facts.max_pixels) if limit]
    if not limits:
        return size
    most = min(limits)
    width, height = size
    factor = facts.pixel_factor
    if factor:
        if most < factor**2:
            raise RequestError(
                f"max_pixels is {most}; at least {factor**2} are needed ({factor}×{factor}, one token)",
                field="max_pixels",
            )
        least = min(facts.min_pixels, most)
        new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
        return new_width, new_height
    if width * height <= most:
        return size
    shrink = sqrt(most / (width * height))
    return max(1, int(width * shrink)), max(1, int(height * shrink))
