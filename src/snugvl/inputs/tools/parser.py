"""What the parsers of all forms share: events, and the text around calls."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from snugvl.core.messages import ToolUse

NAME: Final = "[A-Za-z0-9_-]{1,64}"
HEAD_LIMIT: Final = 512  # characters in which a call's head must end; bounds the work on endless space


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


class CallParser(ABC):
    """Splits one choice's text into text and calls, without ever showing half a marker as text.

    White space before a call, and after the last one, belongs to neither and is dropped. A parser's state is
    a method that reads from the buffer, may set the next state, and returns whether to go on.
    """

    opening: ClassVar[str]  # what begins calls

    def __init__(self, use: ToolUse) -> None:
        self._names = frozenset(tool.name for tool in use.tools)
        self._state: Callable[[], bool] = self._read_text
        self._events: list[ToolEvent] = []
        self._buffer = ""
        self._space = ""  # white space that is text only if text follows
        self._searched = 0  # characters of the buffer that were looked at
        self._calls = 0

    @property
    def calls(self) -> int:
        """Calls so far. An answer with calls finishes with "tool_calls" instead of "stop"."""
        return self._calls

    def push(self, text: str) -> list[ToolEvent]:
        """The events that new text adds."""
        self._buffer += text
        while self._state():
            pass
        return self._taken()

    def flush(self) -> list[ToolEvent]:
        """The text or events that were held back, at the end of the answer."""
        rest, state = self._buffer, self._state
        self._enter(self._read_text, "")
        if state == self._read_text:
            self._say(rest)
        else:
            self._cut(state, rest)
        if self._space and not self._calls:
            self._events.append(TextPiece(self._space))
        self._space = ""
        return self._taken()

    @abstractmethod
    def _begin(self, rest: str) -> bool:
        """`opening` has come, and `rest` after it: enter the state that reads on."""

    @abstractmethod
    def _cut(self, state: Callable[[], bool], rest: str) -> None:
        """The answer ended in `state`, which is not that of text."""

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _read_text(self) -> bool:
        text, marker, rest = self._buffer.partition(self.opening)
        if marker:
            self._say(text)
            return self._begin(rest)
        cut = len(text) - held(text, self.opening)
        self._say(text[:cut])
        self._buffer = text[cut:]
        return False

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _enter(self, state: Callable[[], bool], buffer: str) -> bool:
        self._state, self._buffer, self._searched = state, buffer, 0
        return True

    def _say(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(TextPiece(kept))

    def _start(self, name: str) -> None:
        self._space = ""
        self._events.append(CallStarted(self._calls, self._new_id(), name))
        self._calls += 1

    def _argue(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(self._calls - 1, fragment))


def held(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that may be the beginning of `marker`."""
    return next(n for n in range(len(marker) - 1, -1, -1) if text.endswith(marker[:n]))
