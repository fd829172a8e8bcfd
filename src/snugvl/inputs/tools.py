"""Tool calls in a model's text, as they stream: `<tool_call>{"name": …, "arguments": …}</tool_call>`.

The form is that of the Hermes models, which Qwen's chat templates use. A parser is in one of four states:

    text ──<tool_call>──→ head ──{"name": "f", "arguments": {──→ arguments ──}──→ tail ──</tool_call>──→ text
                            └──── no such head: the body is read whole at </tool_call>, ────────────────↗
                                  and what is no call then is shown as the text it was

The grammar of a request with tools (`inputs/tool_grammar.py`) allows nothing but calls of this form; the
rest is for text that was made without it.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from snugvl.backends.protocol import ToolUse

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
_MARKER = re.compile("</?tool_call>")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_LIMIT = 512  # characters in which a head must end; bounds the work on endless space
_CLOSERS = {"{": "}", "[": "]"}


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
    """Splits one choice's text into text and calls, without ever showing half a marker as text.

    White space before a call, and after the last one, belongs to neither and is dropped.
    """

    def __init__(self, use: ToolUse) -> None:
        self._names = frozenset(tool.name for tool in use.tools)
        self._state: Callable[[], bool] = self._read_text
        self._events: list[ToolEvent] = []
        self._buffer = ""
        self._space = ""  # white space that is text only if text follows
        self._searched = 0  # characters of the buffer that hold no marker
        self._arguments = _Nesting()
        self._calls = 0

    @property
    def calls(self) -> int:
        """Calls so far. An answer with calls finishes with "tool_calls" instead of "stop"."""
        return self._calls

    def push(self, text: str) -> list[ToolEvent]:
        """What `text` adds."""
        self._buffer += text
        while self._state():
            pass
        return self._taken()

    def flush(self) -> list[ToolEvent]:
        """What was held back, at the end of the answer."""
        rest, state = self._buffer, self._state
        self._enter(self._read_text, "")
        if state == self._read_head:
            self._whole(rest, closing="")
        elif state == self._read_tail:
            rest = rest.lstrip(" \t\r\n}")
            self._say("" if CLOSING.startswith(rest) else rest)
        elif state == self._read_text:
            self._say(rest)
        if self._space and not self._calls:
            self._events.append(TextPiece(self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _enter(self, state: Callable[[], bool], buffer: str) -> bool:
        self._state, self._buffer, self._searched = state, buffer, 0
        return True

    def _read_text(self) -> bool:
        text, marker, rest = self._buffer.partition(OPENING)
        if marker:
            self._say(text)
            return self._enter(self._read_head, rest)
        held = next(n for n in range(len(OPENING) - 1, -1, -1) if text.endswith(OPENING[:n]))
        cut = len(text) - held
        self._say(text[:cut])
        self._buffer = text[cut:]
        return False

    def _read_head(self) -> bool:
        match = _HEAD.match(self._buffer[:_HEAD_LIMIT])
        if match and match[1] in self._names:
            self._start(match[1])
            self._arguments = _Nesting()
            return self._enter(self._read_arguments, self._buffer[match.end() :])
        end = self._buffer.find(CLOSING, self._searched)
        if end < 0:
            self._searched = max(0, len(self._buffer) - len(CLOSING))
            return False
        self._whole(self._buffer[:end], closing=CLOSING)
        return self._enter(self._read_text, self._buffer[end + len(CLOSING) :])

    def _read_arguments(self) -> bool:
        end = self._arguments.advance(self._buffer)
        if end is None:
            self._argue(self._buffer)
            self._buffer = ""
            return False
        # The closers are empty unless a marker came before the object was complete.
        self._argue(self._buffer[:end] + self._arguments.closers)
        return self._enter(self._read_tail, self._buffer[end:])

    def _read_tail(self) -> bool:
        marker = _MARKER.search(self._buffer, self._searched)
        if marker is None:
            self._searched = max(0, len(self._buffer) - len(CLOSING))
            return False
        state = self._read_text if marker.group() == CLOSING else self._read_head
        return self._enter(state, self._buffer[marker.end() :])

    def _whole(self, body: str, *, closing: str) -> None:
        """A body that is complete: a call, or else the text it was."""
        call = _call_of(body)
        if call is None or call[0] not in self._names:
            self._say(OPENING + body + closing)
        else:
            self._start(call[0])
            self._argue(call[1])

    def _say(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(TextPiece(kept))

    def _start(self, name: str) -> None:
        self._space = ""
        self._events.append(CallStarted(self._calls, f"call_{secrets.token_hex(12)}", name))
        self._calls += 1

    def _argue(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(self._calls - 1, fragment))


class _Nesting:
    """Follows the brackets and strings of one JSON object until it ends."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = False

    @property
    def closers(self) -> str:
        """What would close everything that is open."""
        return "".join(_CLOSERS[bracket] for bracket in reversed(self._open))

    def advance(self, text: str) -> int | None:
        """Where in `text` the object ends, or a `<` that no JSON has outside strings; None: not yet."""
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
            elif character == "<":
                return index
        return None


def _call_of(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call in any order of keys, or None if it isn't one."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
