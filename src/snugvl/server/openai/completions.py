"""POST /v1/completions: bare prompts, continued as they are."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from math import isnan
from typing import Annotated, Any, ClassVar, cast

from fastapi import APIRouter
from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.core.messages import Delta, Logprob, Request
from snugvl.errors import RequestError
from snugvl.server.body import JsonRoute
from snugvl.server.context import Context, context_of
from snugvl.server.fields import WHOLE, together
from snugvl.server.forms import TopLogprobs
from snugvl.server.generation import AnswerUsage, GeneratedAnswer, Generation, generate, read_answer
from snugvl.server.metrics import RequestRecord, record_of
from snugvl.server.openai.common import (
    EVENTS_DOCUMENT,
    LOWEST,
    MAX_TOKENS,
    ChunkWriter,
    Completion,
    SamplingFields,
    StreamOptions,
    head,
    json_answer,
    no_limit,
    rename_fields,
    sampling_of,
    stream_options_of,
    usage_of,
)
from snugvl.server.streaming import Event, event_stream
from snugvl.server.unsupported import COMPLETIONS, UnsupportedFields

router = APIRouter(tags=["openai"], route_class=JsonRoute)

MAX_PROMPTS = 128
HEAD = ("cmpl-", "text_completion")
AT_ONCE = 4  # prompts of one request that the engine has
MAX_CHOICES = 128  # of all prompts together
MAX_CHARACTERS = 16 << 20  # of all prompts together: 32,000 tokens of English in each of 128

# What the engine calls a field of its own request, and what this protocol calls it.
NAMES = {"prompt_ids|vision|messages": "prompt"}

TokenId = Annotated[int, Field(ge=0, le=2**31), WHOLE]


def _kind(prompt: object) -> str:
    """Which of the four forms a prompt is meant to have; its first element decides."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "lists of ids"
    return "texts" if isinstance(first, str) else "ids"


TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[
        list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists of ids")
    ],
    Discriminator(_kind),
]


EchoedTokens = Annotated[
    Annotated[
        int,
        Field(ge=0, le=MAX_TOKENS, description="at most; null and -1: what the context leaves; 0 with echo"),
        WHOLE,
    ]
    | None,
    BeforeValidator(no_limit),
]


class CompletionRequest(SamplingFields):
    """A continuation of one or several prompts."""

    unsupported: ClassVar[UnsupportedFields] = COMPLETIONS

    prompt: Prompt
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    max_tokens: EchoedTokens = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = Field(
        None, description="the answer starts with the prompt; with logprobs, also with those of its tokens"
    )
    best_of: Annotated[int, WHOLE] | None = Field(None, description="only as many as n")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


@router.post("/v1/completions", response_model=Completion, responses={200: EVENTS_DOCUMENT})
async def create_completion(body: CompletionRequest, http: HttpRequest) -> Response:
    """Continue prompts; choice `prompt · n + k` is the k-th of that prompt."""
    context, record = context_of(http), record_of(http.scope)
    model = context.check_model(body.model)
    options = stream_options_of(body.stream, body.stream_options)
    prompts = _prompts(body)
    with rename_fields(NAMES):
        requests = _requests(body, prompts)
        echoed = await _echo_texts(body, context, prompts)
        scored = requests[0].sampling.prompt_logprobs
        about = PromptBatch(model, body.n or 1, echoed, scored=scored, generates=body.max_tokens != 0)
        if body.stream:
            generations = await _start_all(context, record, requests)
            return event_stream(context, stream(generations, about, options))
        turns = asyncio.Semaphore(AT_ONCE)  # so many prompts are no more than one client's share

        async def complete_in_turn(request: Request) -> GeneratedAnswer:
            async with turns:
                answer = await read_answer(context, record, request)
                await answer.complete()
                return answer

        answers = await together(complete_in_turn(request) for request in requests)
    return json_answer(completion(about, answers))


def _prompts(body: CompletionRequest) -> list[str | tuple[int, ...]]:
    """One entry a prompt."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if _kind(body.prompt) == "ids":
        return [tuple(cast("list[int]", body.prompt))]
    several = cast("list[str] | list[list[int]]", body.prompt)
    return [item if isinstance(item, str) else tuple(item) for item in several]


def _requests(body: CompletionRequest, prompts: list[str | tuple[int, ...]]) -> list[Request]:
    """The requests for the engine, one a prompt.

    Raises:
        RequestError: with the field to blame.
    """
    n = body.n or 1
    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if characters > MAX_CHARACTERS and len(prompts) > 1:  # the context bounds a single one
        raise RequestError(
            f"{len(prompts)} prompts have {characters:,} characters; at most {MAX_CHARACTERS:,} fit in one "
            "request, so send them in several",
            field="prompt",
        )
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(
            "max_tokens is 0, which leaves no answer; ask for more, or send echo to have the prompt back",
            field="max_tokens",
        )
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of is {body.best_of}, but n {n}; all choices are returned, so leave best_of out",
            field="best_of",
        )
    if len(prompts) * n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n={n} make {len(prompts) * n} choices; at most {MAX_CHOICES} fit "
            "in one request",
            field="n",
        )
    most = 1 if body.max_tokens == 0 else body.max_tokens  # the engine always makes a token
    sampling = sampling_of(body, max_tokens=most, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=True)
    return [Request(prompt=prompt, sampling=sampling) for prompt in prompts]


async def _echo_texts(
    body: CompletionRequest, context: Context, prompts: list[str | tuple[int, ...]]
) -> tuple[str, ...]:
    """The text that each prompt's choices start with (`echo`)."""
    if not body.echo:
        return ("",) * len(prompts)
    try:
        texts = [
            prompt if isinstance(prompt, str) else await context.service.detokenize(prompt)
            for prompt in prompts
        ]
    except RequestError as error:
        error.field = "prompt"
        raise
    return tuple(texts)


async def _start_all(context: Context, record: RequestRecord, requests: list[Request]) -> list[Generation]:
    """Start all requests, or none: the first refusal ends the others."""
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(await generate(context, record, request)) for request in requests
        ]
        stack.pop_all()  # from here on the stream ends them
        return started


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Facts of the prompts that are needed to write their answers.

    Attributes:
        model: the name that the request used.
        n: choices of each prompt.
        echoed: what the choices of each prompt start with.
        scored: whether that comes with log-probabilities.
        generates: whether anything else is wanted.
    """

    model: str
    n: int
    echoed: tuple[str, ...]
    scored: bool = False
    generates: bool = True

    def choices(self, prompt: int) -> range:
        """The indices of a prompt's choices."""
        return range(prompt * self.n, (prompt + 1) * self.n)

    def counted(self, generations: Iterable[Generation]) -> AnswerUsage:
        """The tokens of all of them together."""
        usage = sum((generation.usage for generation in generations), AnswerUsage(0, 0))
        return usage if self.generates else replace(usage, completion_tokens=0)


def completion(prompts: PromptBatch, answers: Sequence[GeneratedAnswer]) -> dict[str, Any]:
    """The whole answer to all prompts."""
    choices = []
    for prompt, answer in enumerate(answers):
        for index, choice in zip(prompts.choices(prompt), answer.choices, strict=True):
            text, finish = (choice.text, choice.finish_reason) if prompts.generates else ("", "length")
            choices.append(_choice(index, prompts.echoed[prompt] + text, finish))
            made = choice.logprobs if prompts.generates else ()
            if logprobs := [*choice.prompt_logprobs, *made]:
                choices[-1]["logprobs"] = LogprobLists().add(logprobs)
    usage = prompts.counted(answer.generation for answer in answers)
    return {**head(*HEAD, prompts.model), "choices": choices, "usage": usage_of(usage)}


class LogprobLists:
    """Log-probabilities in the form that completions have: four lists of equal length."""

    def __init__(self) -> None:
        self._offset = 0  # characters of the answer so far

    def add(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        """The lists of the next tokens."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists: dict[str, list[Any]] = {name: [] for name in names}
        for token in tokens:
            lists["tokens"].append(token.token)
            first = isnan(token.logprob)  # of a prompt: nothing predicts it
            # The token itself is always there: among the likeliest, or beside them.
            own = max(token.logprob, LOWEST)
            known = {other.token: max(other.logprob, LOWEST) for other in token.top} | {token.token: own}
            lists["token_logprobs"].append(None if first else own)
            lists["top_logprobs"].append(None if first else known)
            lists["text_offset"].append(self._offset)
            self._offset += len(token.token)
        return lists


async def stream(
    generations: Sequence[Generation], prompts: PromptBatch, options: StreamOptions
) -> AsyncGenerator[Event]:
    """The events of a streamed completion: those of all prompts as they come, told apart by their index."""
    chunks = ChunkWriter(head(*HEAD, prompts.model), options)
    logprobs = [LogprobLists() for _ in range(len(generations) * prompts.n)]
    finish = None if prompts.generates else "length"
    async with AsyncExitStack() as stack:
        for generation in generations:
            await stack.enter_async_context(generation)
        for prompt, text in enumerate(prompts.echoed):
            if text and not prompts.scored:
                for index in prompts.choices(prompt):
                    yield chunks.event(_choice(index, text, finish), generations[prompt].prompt_tokens, 0)
        deltas = await stack.enter_async_context(aclosing(interleave(generations)))
        async for prompt, delta in deltas:
            tokens = generations[prompt].prompt_tokens
            for index in prompts.choices(prompt) if delta.prompt_logprobs else ():
                entry = _choice(index, prompts.echoed[prompt], finish)
                entry["logprobs"] = logprobs[index].add(delta.prompt_logprobs)
                yield chunks.event(entry, tokens, 0)
            if not prompts.generates:
                continue
            index = prompt * prompts.n + delta.choice
            entry = _choice(index, delta.text, delta.finish_reason)
            if delta.logprobs:
                entry["logprobs"] = logprobs[index].add(delta.logprobs)
            yield chunks.event(entry, tokens, delta.completion_tokens)
    for event in chunks.end(prompts.counted(generations)):
        yield event


def _choice(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


async def interleave(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of all generations as they come, each with the number of its generation.

    The first error ends the others and is raised.
    """
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(number: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await queue.put((number, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(*item)) for item in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
