"""Ollama's routes and their answers, at once or line by line: lines of JSON stream by default, as there.

What is served is told as Ollama tells it: tags, show, ps, version.
"""

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest

from snugvl.core import resources
from snugvl.core.ledger import Ledger
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Capabilities, Logprob, Request
from snugvl.errors import ModelNotServed, RequestError
from snugvl.inputs.tools.parser import CallStarted, TextPiece
from snugvl.server.body import JsonRoute
from snugvl.server.context import LATEST, Context, context_of
from snugvl.server.generation import AnswerBlock, GeneratedAnswer, ReasoningPiece, arguments_of, read_answer
from snugvl.server.media.loading import RequestMedia
from snugvl.server.metrics import RequestNotes, record_of
from snugvl.server.ollama.request import (
    ChatRequest,
    GenerateRequest,
    Generating,
    PullRequest,
    ShowRequest,
    chat_request,
    generate_request,
)
from snugvl.server.streaming import Event, line_stream, lines_document

NEVER = "9999-12-31T23:59:59Z"
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as Ollama calls them
# What the model is shown, in the order and the form of Ollama's templates: some clients look for tools in it.
TEMPLATE, TOOLS, PROMPT = "{{ .System }}", "{{ if .Tools }}{{ .Tools }}{{ end }}", "{{ .Prompt }}"
UNKNOWN = "snugvl"  # the family of a model whose engine doesn't tell


class Details(BaseModel):
    """Details of the model; empty where unknown."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    """A model in /api/tags. `size`: bytes of its weights."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(BaseModel):
    """The names that are served."""

    models: list[ListedModel]


class RunningModel(BaseModel):
    """A model in /api/ps. `size`: bytes its process holds; `size_vram`: those on a GPU."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: Details
    expires_at: str
    context_length: int


class Running(BaseModel):
    """The loaded model."""

    models: list[RunningModel]


class Shown(BaseModel):
    """A model in /api/show."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(BaseModel):
    """Version of Ollama's protocol, in digits and dots: some clients ask for one that is new enough."""

    version: str


def tags(context: Context) -> Tags:
    """Every name that is served. One model may have several."""
    capabilities, size = context.capabilities, _weight_bytes(context)
    return Tags(
        models=[
            ListedModel(
                name=name,
                model=name,
                modified_at=_since(),
                size=size,
                digest=_digest(capabilities),
                details=_details(capabilities),
            )
            for name in map(_with_tag, context.settings.names)
        ]
    )


def running_models(context: Context) -> Running:
    """The model that is loaded; none while the engine starts."""
    capabilities, snapshot = context.service.capabilities, context.service.snapshot
    if capabilities is None or not context.service.health.ready:
        return Running(models=[])
    held = snapshot.ledger.process_bytes if snapshot else 0
    name = _with_tag(context.settings.names[0])
    model = RunningModel(
        name=name,
        model=name,
        size=held,
        size_vram=held if snapshot and _on_gpu(snapshot.ledger) else 0,
        digest=_digest(capabilities),
        details=_details(capabilities),
        expires_at=NEVER,
        context_length=capabilities.context_tokens,
    )
    return Running(models=[model])


def describe(context: Context) -> Shown:
    """The engine's details of its model."""
    capabilities = context.capabilities
    family = _family(capabilities)
    pixels = {f"{family}.vision.max_pixels": capabilities.max_pixels} if capabilities.images else {}
    can = {
        "completion": True,
        "tools": capabilities.tools,
        "vision": capabilities.images,
        "thinking": capabilities.thinks,
    }
    return Shown(
        template=TEMPLATE + (TOOLS if capabilities.tools else "") + PROMPT,
        parameters=f"num_ctx {capabilities.context_tokens}",
        details=_details(capabilities),
        model_info={
            "general.architecture": family,
            "general.basename": capabilities.model,
            "general.parameter_count": capabilities.parameters,
            f"{family}.context_length": capabilities.context_tokens,
            **pixels,
        },
        capabilities=[name for name, able in can.items() if able],
        modified_at=_since(),
    )


def _with_tag(name: str) -> str:
    """The name with ":latest" where it has no tag: Ollama's clients expect one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _details(capabilities: Capabilities) -> Details:
    family = _family(capabilities)
    return Details(
        family=family,
        families=[family],
        parameter_size=_in_short(capabilities.parameters),
        quantization_level=TYPES.get(capabilities.dtype, capabilities.dtype.upper()),
    )


def _family(capabilities: Capabilities) -> str:
    """Ollama's name of an architecture: "qwen3vl" for Qwen3VLForConditionalGeneration."""
    return capabilities.architecture.partition("For")[0].lower() or UNKNOWN


def _in_short(parameters: int) -> str:
    """2.1B, 6.5M; nothing where the number is not known."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return ""


def _digest(capabilities: Capabilities) -> str:
    """Digest of a model: clients tell models apart by it, and show its first twelve digits."""
    return hashlib.sha256(f"{capabilities.model} {capabilities.dtype}".encode()).hexdigest()


def _since() -> str:
    """When this server's process began: before that it had no model."""
    began = datetime.fromtimestamp(resources.began(), UTC)
    return began.isoformat().replace("+00:00", "Z")


def _weight_bytes(context: Context) -> int:
    snapshot = context.service.snapshot
    rows = snapshot.ledger.rows if snapshot else ()
    return sum(row.measured_bytes or row.planned_bytes or 0 for row in rows if row.kind.group is Kind.WEIGHTS)


def _on_gpu(ledger: Ledger) -> bool:
    return ledger.device not in ("host memory", "CPU")


class Pulled(BaseModel):
    """The model is there."""

    status: Literal["success"] = "success"


class CalledFunction(BaseModel):
    """A function with the arguments that the model chose."""

    index: int
    name: str
    arguments: dict[str, Any]


class MadeCall(BaseModel):
    """A call that the model made."""

    id: str
    function: CalledFunction


class LogprobAlternative(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class LineLogprob(LogprobAlternative):
    """A generated token, with the most likely alternatives."""

    top_logprobs: list[LogprobAlternative] | None = None


class AnswerMessage(BaseModel):
    """The assistant's message, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | None = None
    tool_calls: list[MadeCall] | None = None


class AnswerLine(BaseModel):
    """The common fields of answers. Durations are in nanoseconds; counts and durations come with the last
    line."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[LineLogprob] | None = None
    total_duration: int | None = None
    load_duration: int | None = Field(
        default=None, description="0: the model is loaded before the server is ready"
    )
    prompt_eval_count: int | None = Field(default=None, description="tokens of the prompt, pictures included")
    prompt_eval_duration: int | None = Field(default=None, description="until the first token")
    eval_count: int | None = Field(default=None, description="tokens of the answer")
    eval_duration: int | None = Field(default=None, description="from the first token to the last")


class ChatLine(AnswerLine):
    """An answer of /api/chat."""

    message: AnswerMessage


class GenerateLine(AnswerLine):
    """An answer of /api/generate."""

    response: str
    thinking: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A part of an answer."""

    text: str = ""
    thinking: str = ""
    calls: tuple[MadeCall, ...] = ()
    logprobs: Sequence[Logprob] = ()


Shape = Callable[..., AnswerLine]  # (piece, **fields of AnswerLine) → a line of chat or generate
BodyT = TypeVar("BodyT", bound=Generating)
Make = Callable[[RequestMedia, Capabilities, BodyT], Awaitable[Request]]


def chat_line(piece: AnswerPiece, **fields: Any) -> ChatLine:
    """A line of /api/chat."""
    message = AnswerMessage(
        content=piece.text, thinking=piece.thinking or None, tool_calls=list(piece.calls) or None
    )
    return ChatLine(message=message, **fields)


def generate_line(piece: AnswerPiece, **fields: Any) -> GenerateLine:
    """A line of /api/generate."""
    return GenerateLine(response=piece.text, thinking=piece.thinking or None, **fields)


@dataclass(slots=True)
class LineAnswer:
    """One answer, written in lines by `shape`, and timed from `started_ns`."""

    model: str
    answer: GeneratedAnswer
    shape: Shape
    started_ns: int
    _first_ns: int | None = None

    async def whole(self) -> AnswerLine:
        """Everything in one line."""
        async with self.answer.generation:
            async for _ in self._pieces():
                pass
        choice = self.answer.choices[0]
        calls = tuple(_made(block) for block in choice.blocks if block.call)
        piece = AnswerPiece(choice.text, choice.reasoning, calls, choice.logprobs)
        return self._line(piece, **self._end())

    async def lines(self) -> AsyncGenerator[Event]:
        """A line for each piece, and one for the end."""
        async with self.answer.generation:
            async for piece in self._pieces():
                yield Event(self._line(piece, done=False).model_dump_json(exclude_none=True))
        yield Event(self._line(AnswerPiece(), **self._end()).model_dump_json(exclude_none=True))

    def _line(self, piece: AnswerPiece, **fields: Any) -> AnswerLine:
        logprobs = [_line_logprob(each) for each in piece.logprobs] or None
        return self.shape(piece, model=self.model, created_at=now(), logprobs=logprobs, **fields)

    def _end(self) -> dict[str, Any]:
        end = time.perf_counter_ns()
        first = self._first_ns or end
        usage = self.answer.generation.usage
        return {
            "done": True,
            "done_reason": "length" if self.answer.choices[0].finish_reason == "length" else "stop",
            "total_duration": end - self.started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self.started_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": end - first,
        }

    async def _pieces(self) -> AsyncIterator[AnswerPiece]:
        """Text as it comes; a call when its arguments are complete, since Ollama sends them as an object."""
        blocks = iter(self.answer.choices[0].blocks)  # which grow meanwhile
        calls: tuple[AnswerBlock, ...] = ()  # the one that is not complete yet
        logprobs: Sequence[Logprob] = ()
        async for step in self.answer:
            if step.logprobs:
                logprobs = (*logprobs, *step.logprobs)
            for begins, event in step.events:
                self._first_ns = self._first_ns or time.perf_counter_ns()
                block = next(blocks) if begins else None
                if block is not None and calls:
                    yield AnswerPiece(calls=tuple(map(_made, calls)), logprobs=logprobs)
                    calls, logprobs = (), ()
                if isinstance(event, TextPiece):
                    yield AnswerPiece(event.text, logprobs=logprobs)
                    logprobs = ()
                elif isinstance(event, ReasoningPiece):
                    yield AnswerPiece(thinking=event.text, logprobs=logprobs)
                    logprobs = ()
                elif block is not None:
                    calls = (block,)
        if calls or logprobs:
            yield AnswerPiece(calls=tuple(map(_made, calls)), logprobs=logprobs)


def now() -> str:
    """This moment, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _made(block: AnswerBlock) -> MadeCall:
    """The call of a block that is one."""
    assert isinstance(block.first, CallStarted), "others aren't sent as calls"
    started, arguments = block.first, arguments_of(block.text)
    function = CalledFunction(index=started.index, name=started.name, arguments=arguments)
    return MadeCall(id=started.id, function=function)


def _line_logprob(logprob: Logprob) -> LineLogprob:
    top = [LogprobAlternative(token=t.token, logprob=t.logprob, bytes=list(t.bytes)) for t in logprob.top]
    return LineLogprob(
        token=logprob.token, logprob=logprob.logprob, bytes=list(logprob.bytes), top_logprobs=top or None
    )


router = APIRouter(prefix="/api", tags=["Ollama"], route_class=JsonRoute)

PROTOCOL: Final = "0.6.4"  # of Ollama, whose fields and routes are here; VS Code asks for this one at least


@router.post(
    "/chat",
    response_model=ChatLine,
    response_model_exclude_none=True,
    responses={200: {"content": lines_document("ChatLine")}},
)
async def post_chat(http: HttpRequest, body: ChatRequest) -> Any:
    """Continue a conversation, with pictures and tools."""
    return await _answer(http, body, chat_line, chat_request if body.messages else None)


@router.post(
    "/generate",
    response_model=GenerateLine,
    response_model_exclude_none=True,
    responses={200: {"content": lines_document("GenerateLine")}},
)
async def post_generate(http: HttpRequest, body: GenerateRequest) -> Any:
    """Answer a prompt, with pictures."""
    return await _answer(http, body, generate_line, generate_request if body.prompt or body.images else None)


async def _answer(http: HttpRequest, body: BodyT, shape: Shape, make: Make[BodyT] | None) -> Any:
    """An answer of `make`'s request, in one line or several; of none, that the model is loaded."""
    context, record, started_ns = context_of(http), record_of(http.scope), time.perf_counter_ns()
    name, capabilities = context.check_model(body.model), context.capabilities
    if make is None:
        return _load_answer(body, name, shape, record.notes)
    request = make(RequestMedia(context.media, record), capabilities, body)
    answer = LineAnswer(
        name, await read_answer(context, record, await request, ceiling=True), shape, started_ns
    )
    return await answer.whole() if body.stream is False else line_stream(context, answer.lines())


@router.get("/tags", response_model=Tags)
async def get_tags(http: HttpRequest) -> Any:
    """The names that are served."""
    return tags(context_of(http))


@router.get("/ps", response_model=Running)
async def get_ps(http: HttpRequest) -> Any:
    """The model that is loaded, and what it holds."""
    return running_models(context_of(http))


@router.post("/show", response_model=Shown)
async def post_show(http: HttpRequest, body: ShowRequest) -> Any:
    """Details of a model."""
    context, name = context_of(http), body.model or body.name
    if name is None:
        raise RequestError("model is missing", field="model")
    context.check_model(name)
    return describe(context)


@router.post("/pull", response_model=Pulled)
async def post_pull(http: HttpRequest, body: PullRequest) -> Any:
    """Confirm that a model is there; only the served one is. `snugvl pull` downloads others."""
    context, name = context_of(http), body.model or body.name
    if name is None:
        raise RequestError("model is missing", field="model")
    try:
        context.check_model(name)
    except ModelNotServed as error:
        raise ModelNotServed(f"{error}; download models with `snugvl pull`") from None
    return Pulled()  # one line, streamed or not


@router.get("/version", response_model=Version)
async def get_version() -> Any:
    """The version of Ollama whose protocol this is, for clients that ask for one that is new enough."""
    return Version(version=PROTOCOL)


def _load_answer(body: Generating, name: str, shape: Shape, notes: RequestNotes) -> AnswerLine:
    """The answer to a request that only wants the model loaded, which it is, or unloaded, which it isn't."""
    gone = body.keep_alive in (0, "0", "0s", "0m") and body.keep_alive is not False
    if gone:
        notes.warn("ignored keep_alive: the model stays as long as the server runs")
    reason = "unload" if gone else "load"  # clients wait for this word
    return shape(AnswerPiece(), model=name, created_at=now(), done=True, done_reason=reason)
