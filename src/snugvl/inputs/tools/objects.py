"""Calls that are JSON objects, `{"name": "f", "arguments": {…}}`, as Hermes, Llama and Mistral write them.

`ObjectParser` is for those whose end their own brackets tell:

    opening → object ──{"name": "f", "arguments": {──→ arguments ──}──→ tail ──}──→ what the form has after it
                └── no such head: read whole to its last bracket; what is no call then is shown as text
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

from snugvl.core.messages import ToolUse
from snugvl.inputs.tools.parser import HEAD_LIMIT, NAME, CallParser

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
        """The text that would close everything that is open."""
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
        self._before = ""  # of the present object: text again if it is no call
        self._nesting = Nesting()
        self._then: Callable[[], bool] = self._read_tail  # after the arguments

    @abstractmethod
    def _read_after(self) -> bool:
        """What follows a call: another one, or text."""

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

    def _cut(self, state: Callable[[], bool], rest: str) -> None:
        if state == self._read_object:
            self._say(self._before + rest)
        elif state == self._read_after:
            self._say(rest)


def call_of(body: str) -> tuple[str, str] | None:
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
