"""What the engine's process runs: a backend that can also be watched, and what measures its memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from snugvl.core.ledger import Ledger
from snugvl.core.messages import Backend, Delta, GoOn, Message, Request, Stream, ToolUse, going_on
from snugvl.core.service import Load, Tokens


class HostedStream(Stream, Protocol):
    """An answer that can be pushed to its reader instead of read."""

    def forward(self, put: Callable[[Delta], None], end: Callable[[Exception | None], None]) -> None:
        """Hand every delta to `put` and the end to `end`, in place of reading; both return at once."""
        ...


class HostedBackend(Backend, Protocol):
    """A backend with what the server asks of an engine besides answers."""

    def submit(self, request: Request, go_on: GoOn = going_on) -> HostedStream:
        """Start a request; raises what the backend refuses it with, or what `go_on` does."""
        ...

    def stats(self) -> Load:
        """What it is doing; counters count since it was loaded."""
        ...

    def tokenize(
        self, prompt: str | tuple[Message, ...], tools: ToolUse | None = None, go_on: GoOn = going_on
    ) -> Tokens:
        """Token ids of a text as it is, or of a conversation through the chat template.

        They may be more than the context holds, within reason: far too much text is refused.
        """
        ...

    def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        ...

    def warm_up(self) -> bool:
        """Do some work ahead of later requests, while there are none; returns whether more is left."""
        ...


class ProcessMeter(Protocol):
    """Measures the process of one backend."""

    def read(self, memory: Mapping[str, int], load: Load) -> Ledger:
        """The ledger now, from what the backend says it holds (`Backend.memory`) and does."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostedModel:
    """A loaded model and what measures it.

    Attributes:
        settled: called once, when requests are taken; returns at once.
    """

    backend: HostedBackend
    meter: ProcessMeter
    settled: Callable[[], None] = lambda: None
