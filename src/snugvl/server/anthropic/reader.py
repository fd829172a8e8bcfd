"""One answer, read as text and tool calls."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from snugvl.backends.protocol import Logprob, ToolUse
from snugvl.errors import EngineError
from snugvl.inputs.tools import TextPiece, ToolCallParser, ToolEvent
from snugvl.server.anthropic.stops import StopMatcher
from snugvl.server.generation import Generation
from snugvl.tasks.parse import find_json


class Reader:
    """The events of an answer with one choice, read once; afterwards, how it ended.

    Whoever reads it does so within `async with reader.generation`, which aborts what is not finished.

    Args:
        stops: sequences that end the answer here, because the engine wasn't told them.
    """

    def __init__(self, generation: Generation, tools: ToolUse | None, stops: Sequence[str] = ()) -> None:
        self.generation = generation
        self._parser = None if tools is None else ToolCallParser(tools)
        self._matcher = StopMatcher(stops) if stops else None
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

    @property
    def stop_sequence(self) -> str | None:
        """The one of `stops` that ended it."""
        return None if self._matcher is None else self._matcher.matched

    async def __aiter__(self) -> AsyncIterator[ToolEvent]:
        async for delta in self.generation:
            self._logprobs += delta.logprobs
            self._finish_reason = delta.finish_reason or self._finish_reason
            for event in self._split(delta.text):
                yield event
            if self.stop_sequence is not None:
                break
        aborted = self._finish_reason in (None, "abort") or self.generation.usage is None
        if aborted and self.stop_sequence is None:
            raise EngineError("the request was aborted before its answer was complete")
        for event in self._rest():
            yield event

    def take_logprobs(self) -> list[Logprob]:
        """Log-probabilities that came since they were taken last."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _split(self, text: str) -> list[ToolEvent]:
        text = text if self._matcher is None else self._matcher.push(text)
        if self._parser is not None:
            return self._parser.push(text)
        return [TextPiece(text)] if text else []

    def _rest(self) -> list[ToolEvent]:
        """What was held back until the end."""
        held = "" if self._matcher is None else self._matcher.flush()
        if self._parser is not None:
            return [*self._parser.push(held), *self._parser.flush()]
        return [TextPiece(held)] if held else []


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; of a text that was cut, as far as it goes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        found = find_json(text)
        value = found[0].value if found else {}
    return value if isinstance(value, dict) else {}
