"""Mistral's two forms, after one marker: a list of objects, and since 2025 a marker for each call.

    [TOOL_CALLS] [{"name": "f", "arguments": {…}}, {"name": "g", "arguments": {…}}]
    [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}

Templates write ids into both (`"id": "…"`, `[CALL_ID]…`); a model's own ids are read over, and the parser's
have nine letters and digits: the templates refuse any other when the call comes back.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Final

from snugvl.core.messages import ToolUse
from snugvl.inputs.tools.grammar import arguments_rules, called, marked, marker, quoted, several
from snugvl.inputs.tools.parser import HEAD_LIMIT, NAME, ObjectParser

OPENING: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
_LIST = re.compile(r"\s*\[")
_NAMED = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{{)")
_UNNAMED = re.compile(r"[^\s\w\[\]-]")  # what no head of a call has
_ALPHABET = string.ascii_letters + string.digits


class MistralParser(ObjectParser):
    """Reads either form."""

    opening = OPENING

    def _new_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _begin(self, rest: str) -> bool:
        return self._enter(self._read_head, rest)

    def _read_head(self) -> bool:
        if found := _LIST.match(self._buffer):
            return self._await_object(OPENING + found.group(), self._buffer[found.end() :])
        head = _NAMED.match(self._buffer[:HEAD_LIMIT])
        if head and head[1] in self._names:
            return self._open_arguments(head[1], self._buffer[head.end() :], self._read_text)
        if head is None and len(self._buffer) < HEAD_LIMIT and not _UNNAMED.search(self._buffer):
            return False
        self._say(OPENING)
        return self._enter(self._read_text, self._buffer)

    def _read_after(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith(","):
            return self._await_object(",", rest[1:])
        return self._enter(self._read_text, rest[1:] if rest.startswith("]") else self._buffer)

    def _cut(self, state: Callable[[], bool], rest: str, *, lost: bool) -> None:
        if state != self._read_head:
            super()._cut(state, rest, lost=lost)
        elif not lost:
            self._say(OPENING + rest)


def list_lark(use: ToolUse, tokens: Mapping[str, int]) -> list[str]:
    """The grammar's lines for a list of objects."""
    heads = [
        quoted(f'{{"name": "{tool.name}", "arguments": ') + f" arguments_{i}"
        for i, tool in enumerate(called(use))
    ]
    more = " (/, ?/ object)*" if several(use) else ""
    return [
        *marked(use, OPENING, tokens, between=None),
        f"call: / ?\\[/ object{more} {quoted(']')}",
        f"object: ({' | '.join(heads)}) {quoted('}')}",
        *arguments_rules(use),
    ]


def args_lark(use: ToolUse, tokens: Mapping[str, int]) -> list[str]:
    """The grammar's lines for a marker before each call."""
    args = marker(ARGS, tokens)
    calls = [f"{quoted(tool.name)} {args} arguments_{i}" for i, tool in enumerate(called(use))]
    return [*marked(use, OPENING, tokens, between=""), f"call: {' | '.join(calls)}", *arguments_rules(use)]
