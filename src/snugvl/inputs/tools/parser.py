"""Shared parts of the parsers of all forms: events, the text around calls, and calls that are JSON objects.

`{"name": "f", "arguments": {…}}` is what Hermes, Llama and Mistral write. `ObjectParser` is for those whose
end their own brackets tell:

    opening → object ──{"name": "f", "arguments": {──→ arguments ──}──→ tail ──}──→ what the form has after it
                └── no such head: read whole to its last bracket; what is not a call then is shown as text
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from snugvl.core.folders import json_object
from snugvl.core.messages import ToolUse

NAME: Final = "[A-Za-z0-9_-]{1,128}"
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
    heads: ClassVar[str] = "{"  # characters with which a call may begin behind the opening

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

    def flush(self, *, cut: bool = False) -> list[ToolEvent]:
        """The text or events that were held back, at the end of the answer. `cut`: whether a limit or a stop
        string ended it: the beginning of a call is then no text."""
        rest, state = self._buffer, self._state
        self._enter(self._read_text, "")
        if state != self._read_text:
            self._cut(state, rest, lost=cut)
        elif not (cut and (self._calls or len(rest) > 1)):  # one character alone is mostly text
            self._say(rest)
        if self._space and not self._calls:
            self._events.append(TextPiece(self._space))
        self._space = ""
        return self._taken()

    @abstractmethod
    def _begin(self, rest: str) -> bool:
        """`opening` has come, and `rest` after it: enter the state that reads on."""

    @abstractmethod
    def _cut(self, state: Callable[[], bool], rest: str, *, lost: bool) -> None:
        """The answer ended in `state`, which is not that of text; `lost`: a call's beginning isn't shown."""

    def _may_call(self, rest: str) -> bool:
        """Whether what stands behind the opening may be the beginning of a call."""
        return not rest.strip() or rest.lstrip()[0] in self.heads

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


HEAD: Final = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'"name"\s*:\s*"({NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_CLOSERS = {"{": "}", "[": "]"}


class Nesting:
    """Follows the brackets and strings of one JSON object until it ends."""

    def __init__(self, *, within: str = "", marker: str = "") -> None:
        """`within`: brackets that are open already; `marker`: a character that ends it outside of strings."""
        self._open = list(within)
        self._marker = marker
        self._in_string = self._escaped = False

    @property
    def closers(self) -> str:
        """Text that would close everything that is open."""
        return "".join(_CLOSERS[bracket] for bracket in reversed(self._open))

    def advance(self, text: str) -> int | None:
        """Where in `text` the object ends, or the marker comes; None: not yet."""
        for index, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._open.append(character)
            elif character in "}]":
                self._open.pop()
                if not self._open:
                    return index + 1
            elif character == self._marker:
                return index
        return None


class ObjectParser(CallParser):
    """A parser of calls that end with their last bracket; what may follow one is the form's affair."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._before = ""  # of the present object: text again if it is not a call
        self._nesting = Nesting()
        self._then: Callable[[], bool] = self._read_tail  # after the arguments

    @abstractmethod
    def _read_after(self) -> bool:
        """Read on behind a call, where another one may follow, or text."""

    def _await_object(self, before: str, rest: str) -> bool:
        self._before, self._nesting = before, Nesting()
        return self._enter(self._read_object, rest)

    def _read_object(self) -> bool:
        start = len(self._buffer) - len(self._buffer.lstrip())
        if start == len(self._buffer) and start < HEAD_LIMIT:
            return False
        if start >= HEAD_LIMIT or self._buffer[start] != "{":
            return self._no_call(0)
        match = HEAD.match(self._buffer[:HEAD_LIMIT])
        if match and match[1] in self._names:
            return self._open_arguments(match[1], self._buffer[match.end() :], self._read_tail)
        end = self._nesting.advance(self._buffer[self._searched :])
        if end is None:
            self._searched = len(self._buffer)
            return False
        end += self._searched
        call = call_of(self._buffer[:end])
        if call is None or call[0] not in self._names:
            return self._no_call(end)
        self._start(call[0])
        self._argue(call[1])
        return self._enter(self._read_after, self._buffer[end:])

    def _open_arguments(self, name: str, rest: str, then: Callable[[], bool]) -> bool:
        """`name` is called, and its arguments begin; `then` is the state after them."""
        self._start(name)
        self._nesting, self._then = Nesting(), then
        return self._enter(self._read_arguments, rest)

    def _read_arguments(self) -> bool:
        end = self._nesting.advance(self._buffer)
        self._argue(self._buffer[:end])
        if end is None:
            self._buffer = ""
            return False
        return self._enter(self._then, self._buffer[end:])

    def _read_tail(self) -> bool:
        """The closing bracket, or keys after the arguments, which say nothing to us."""
        rest = self._buffer.lstrip()
        if rest.startswith(","):
            self._nesting = Nesting(within="{")
            return self._enter(self._skip, rest)
        if rest:
            return self._enter(self._read_after, rest.removeprefix("}"))
        self._buffer = ""
        return False

    def _skip(self) -> bool:
        end = self._nesting.advance(self._buffer)
        if end is None:
            self._buffer = ""
            return False
        return self._enter(self._read_after, self._buffer[end:])

    def _no_call(self, end: int) -> bool:
        """Characters to `end`, and what stood before them, are text."""
        before, self._before = self._before, ""
        self._say(before + self._buffer[:end])
        return self._enter(self._read_text, self._buffer[end:])

    def _cut(self, state: Callable[[], bool], rest: str, *, lost: bool) -> None:
        if state == self._read_object:
            if not (lost and self._may_call(rest)):
                self._say(self._before + rest)
        elif state == self._read_after:
            self._say(rest)


def call_of(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call in any order of keys, or None if it isn't one."""
    value = json_object(body) or {}
    if not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = json_object(arguments)
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
