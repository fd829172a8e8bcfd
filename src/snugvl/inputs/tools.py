"""Tool calls in a model's text, as they stream: `<tool_call>{"name": …, "arguments": …}</tool_call>`.

The form is that of the Hermes models, which Qwen's chat templates use.
"""

from dataclasses import dataclass

from snugvl.backends.protocol import ToolUse


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call whose name is known. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


ToolEvent = TextPiece | CallStarted | CallArguments


class ToolCallParser:
    """Splits one choice's text into text and calls, without ever showing half a marker as text."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use

    def push(self, text: str) -> list[ToolEvent]:
        """What `text` adds."""
        return [TextPiece(text)] if text else []

    def flush(self) -> list[ToolEvent]:
        """What was held back, at the end of the answer."""
        return []

    @property
    def calls(self) -> int:
        """Calls so far. An answer with calls finishes with "tool_calls" instead of "stop"."""
        return 0
