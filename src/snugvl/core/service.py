"""The engine service: all that a server needs of an engine, in this process or in a supervised child.

starting ──► ready ◄──► restarting ──► failed        draining: ready, but takes nothing new

With the time line of its start, whose steps are records of the logger "snugvl.start" at DEBUG; and with the
checks of a request that are the same for every engine.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from snugvl.core.ledger import Ledger
from snugvl.core.messages import Capabilities, Request, Stream, Text
from snugvl.errors import RequestError

Timeline = tuple[tuple[str, float], ...]
"""Steps with the `time.time()` at which each was reached, in order."""

logger = logging.getLogger("snugvl.start")
SEES: Final = "Qwen/Qwen3-VL-2B-Instruct-FP8"  # a small one, named in refusals of pictures
State = Literal["starting", "ready", "restarting", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Health:
    """The state of the engine at one moment.

    Attributes:
        detail: one sentence for people: what it is doing, or why it is not ready and what comes next.
        progress: share of loading that is done, from 0 to 1, while starting or restarting; else None.
        restarts: number of times that it came back since the server started.
        retry_after_s: seconds after which asking again makes sense, when not ready.
        timeline: what the engine's last start reached, and when.
    """

    state: State
    detail: str
    progress: float | None = None
    restarts: int = 0
    retry_after_s: float | None = None
    timeline: Timeline = ()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.state == "ready"


@dataclass(frozen=True, slots=True)
class Load:
    """Load and counters of an engine. Counters start from 0 with the engine, not with the server.

    Attributes:
        num_blocks: number of blocks of the KV cache now; fewer than `planned_blocks` while other programs
            need the memory; `planned_blocks` is 0 where the engine's cache never changes.
        encoder_queries: pictures that prompts needed; `encoder_hits` of them were encoded already.
        draft_method: how tokens are drafted, "ngram" or "mtp"; empty without speculation.
        drafted_tokens: drafts that were computed; `accepted_tokens`: those of them that were right.
        forced_tokens: tokens that a grammar left no choice of, and that took no step of their own.
        shortages: steps that ran out of memory and were tried again in parts.
        kernel_compilations: kernels that requests waited for; `graph_captures`: CUDA graphs, likewise.
        recorded: CUDA graphs of steps with prompts and of pictures that there are now.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    planned_blocks: int = 0
    block_size: int = 1
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    items_encoded: int = 0
    encoder_queries: int = 0
    encoder_hits: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    draft_method: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    faults: int = 0
    shortages: int = 0
    kernel_compilations: int = 0
    graph_captures: int = 0
    recorded: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Ledger and load of an engine at one moment; `at`: `time.time()` seconds."""

    at: float
    ledger: Ledger
    load: Load


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as the model reads it. `image_tokens` of `ids` are placeholders of pictures."""

    ids: tuple[int, ...]
    image_tokens: int = 0


class EngineService(Protocol):
    """An engine that comes and goes. All coroutines belong to the server's one event loop."""

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of the loaded model; None until it was ready once. Kept while restarting."""

    @property
    def health(self) -> Health: ...

    @property
    def snapshot(self) -> Snapshot | None:
        """The last one known (at most about half a second old), or None before the first."""

    async def start(self) -> None:
        """Begin to load and return; `health` tells how it goes."""

    async def submit(self, request: Request) -> Stream:
        """Start a request; the stream is read with `async for` and aborts the request when closed.

        Raises:
            RequestError, ImageError, QueueFull: the engine refused it; nothing was started.
            EngineUnavailable: not ready, with when to come back.
        """

    async def tokenize(self, request: Request) -> Tokens:
        """Token ids of a request's prompt: a text as it is, or a conversation through the chat template."""

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; returns whether all finished within `timeout_s`."""

    async def close(self) -> None:
        """End everything, the child process included. Safe to call twice."""


def mark(step: str) -> None:
    """Note that `step` is reached now."""
    logger.debug("%s", step)


class Recorder(logging.Handler):
    """Collects all marks of this process from now on."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._steps: list[tuple[str, float]] = []
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # they are not for the terminal
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one mark, as logging calls it."""
        self._steps.append((record.getMessage(), record.created))

    @property
    def timeline(self) -> Timeline:
        """The marks so far: (step, `time.time()` seconds) each, in their order."""
        return tuple(self._steps)


def check_combination(request: Request) -> None:
    """Refuse a request whose fields contradict one another.

    Raises:
        RequestError: names the field to change.
    """
    if request.prompt is not None and request.messages:
        raise RequestError("a request has messages or a prompt, not both", field="prompt")
    if request.prompt is not None and request.tools is not None:
        raise RequestError("tools need a conversation; a bare prompt has no place for them", field="tools")
    if request.grammar is not None and request.tools is not None:
        raise RequestError(
            "a request constrains its answer by tools or by a grammar, not by both", field="response_format"
        )


def check_pictures(request: Request, capabilities: Capabilities) -> None:
    """Refuse pictures and videos before any work: where the model doesn't see, and more than were planned.

    Raises:
        RequestError: with how many there are, how many are taken or were learned, and what to do.
    """
    places = []
    for index, message in enumerate(request.messages):
        seen = sum(not isinstance(part, Text) for part in message.content)
        if seen:
            check_sight(capabilities, f"messages[{index}].content")
        places += [f"messages[{index}].content"] * seen
    check_number(capabilities, places)


def check_number(capabilities: Capabilities, places: Sequence[str]) -> None:
    """Refuse more pictures and videos of one conversation than were planned, or than the model learned.
    `places`: the field of the request that holds each.

    Raises:
        RequestError: with how many there are, how many are taken or were learned, and what to do.
    """
    most, count = capabilities.most_images, len(places)
    learned = capabilities.training.max_images
    if learned is not None and (most is None or learned < most):
        most = learned
    if most is None or count <= most:
        return
    blamed = places[most]
    if most == learned:
        raise RequestError(
            f"the conversation has {count} pictures, and {capabilities.model} can't tell more than {learned} "
            f"apart (its training says so); send fewer, or load another model, such as {SEES}",
            field=blamed,
        )
    taken = f"at most {most} (--images {most})" if most else "none (--images 0)"
    raise RequestError(
        f"the conversation has {count} pictures, and {capabilities.model} was started to take {taken}; "
        f"send fewer, or start it with --images {count}",
        field=blamed,
    )


def check_sight(capabilities: Capabilities, field: str = "messages") -> None:
    """Raise RequestError, with a way out, if this model takes no pictures; `field` is where one was sent."""
    if capabilities.images:
        return
    if capabilities.language_only:
        raise RequestError(
            f"{capabilities.model} runs without its vision tower (--language-only) and reads text alone; "
            "start it without that option to send pictures",
            field=field,
        )
    raise RequestError(
        f"{capabilities.model} reads text alone and takes no pictures; load a model that sees, such as "
        f"{SEES}",
        field=field,
    )
