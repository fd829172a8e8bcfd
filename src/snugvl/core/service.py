"""The engine service: all that a server needs of an engine, in this process or in a supervised child.

starting ──► ready ◄──► restarting ──► failed        draining: ready, but takes nothing new
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from snugvl.core.ledger import Ledger
from snugvl.core.messages import Capabilities, Message, Request, Stream, ToolUse
from snugvl.core.timeline import Timeline

State = Literal["starting", "ready", "restarting", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Health:
    """Where the engine stands.

    Attributes:
        detail: one sentence for people: what it is doing, or why it is not ready and what comes next.
        progress: of loading, from 0 to 1, while starting or restarting.
        restarts: number of times that it came back since the server started.
        retry_after_s: seconds after which asking again makes sense, when not ready.
        timeline: how the engine's last start went.
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
        num_blocks: of the KV cache now. Fewer than `planned_blocks` while other programs need the memory;
            `planned_blocks` is 0 where the engine's cache never changes.
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
        ...

    @property
    def health(self) -> Health: ...

    @property
    def snapshot(self) -> Snapshot | None:
        """The last one known (at most about half a second old), or None before the first."""
        ...

    async def start(self) -> None:
        """Begin to load and return; `health` tells how it goes."""
        ...

    async def submit(self, request: Request) -> Stream:
        """Start a request; the stream is read with `async for` and aborts the request when closed.

        Raises:
            RequestError, ImageError, QueueFull: the engine refused it; nothing was started.
            EngineUnavailable: not ready, with when to come back.
        """
        ...

    async def tokenize(self, prompt: str | tuple[Message, ...], tools: ToolUse | None = None) -> Tokens:
        """Token ids of a text as it is, or of a conversation through the chat template."""
        ...

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; returns whether all finished within `timeout_s`."""
        ...

    async def close(self) -> None:
        """End everything, the child process included. Safe to call twice."""
        ...
