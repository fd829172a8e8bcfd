"""One answer, read as text and tool calls."""

import json
from collections.abc import AsyncIterator
from typing import Any

from snugvl.backends.protocol import Logprob
from snugvl.errors import EngineError
from snugvl.inputs.tools.parser import CallParser, TextPiece, ToolEvent
from snugvl.server.generation import Generation
from snugvl.tasks.parse import find_json


class Reader:
    """The events of an answer with one choice, read once; afterwards, how it ended.

    Whoever reads it does so within `async with reader.generation`, which aborts what is not finished.

    Attributes:
        stop: the stop string that ended it, if one did.
    """

    def __init__(self, generation: Generation, parser: CallParser | None) -> None:
        """`parser`: finds the calls in the text; None where it can't hold any."""
        self.generation = generation
        self._parser = parser
        self.stop: str | None = None
        self._logprobs: list[Logprob] = []
        self._finish_reason: str | None = None

    @property
    def length(self) -> bool:
        """Whether it ended at its token limit."""
        return self._finish_reason == "length"

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._parser is None else self._parser.calls

    async def __aiter__(self) -> AsyncIterator[ToolEvent]:
        async for delta in self.generation:
            self._logprobs += delta.logprobs
            self._finish_reason = delta.finish_reason or self._finish_reason
            self.stop = delta.stop
            for event in self._split(delta.text):
                yield event
        if self._finish_reason in (None, "abort") or self.generation.usage is None:
            raise EngineError("the request was aborted before its answer was complete")
        if self._parser is not None:
            for event in self._parser.flush():
                yield event

    def take_logprobs(self) -> list[Logprob]:
        """Log-probabilities that came since they were taken last."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _split(self, text: str) -> list[ToolEvent]:
        if self._parser is not None:
            return self._parser.push(text)
        return [TextPiece(text)] if text else []


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; of a text that was cut, as far as it goes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        found = find_json(text)
        value = found[0].value if found else {}
    return value if isinstance(value, dict) else {}
