"""`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: the form of Hermes, and of Qwen2.5 to Qwen3-VL.

    text ──<tool_call>──→ head ──{"name": "f", "arguments": {──→ arguments ──}──→ tail ──</tool_call>──→ text
                            └──── no such head: the body is read whole at </tool_call>, ────────────────↗
                                  and what is not a call then is shown as the text it was

The grammar:

    auto        text ─┬─ end
                      └─ <tool_call> call </tool_call> ─ \\n<tool_call> call </tool_call> … ─ end
    required    <tool_call> call </tool_call> ─ …
    a name      <tool_call> call of that tool </tool_call> ─ end
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from snugvl.core.messages import ToolUse
from snugvl.inputs.tools.grammar import arguments_rules, called, marked, marker, quoted
from snugvl.inputs.tools.parser import HEAD, HEAD_LIMIT, CallParser, Nesting, call_of

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
_END = quoted("}\n")
_MARKER = re.compile("</?tool_call>")


class HermesParser(CallParser):
    """Reads calls between the two markers; a bracket or the closing marker may be missing."""

    opening = OPENING

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._arguments = Nesting()

    def _begin(self, rest: str) -> bool:
        return self._enter(self._read_head, rest)

    def _cut(self, state: Callable[[], bool], rest: str, *, lost: bool) -> None:
        if state == self._read_head:
            self._whole(rest, closing="", lost=lost and self._may_call(rest))
        elif state == self._read_tail:
            rest = rest.lstrip(" \t\r\n}")
            self._say("" if CLOSING.startswith(rest) else rest)

    def _read_head(self) -> bool:
        match = HEAD.match(self._buffer[:HEAD_LIMIT])
        if match and match[1] in self._names:
            self._start(match[1])
            self._arguments = Nesting(marker="<")
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

    def _whole(self, body: str, *, closing: str, lost: bool = False) -> None:
        """A body that is complete: a call, or else the text it was, or nothing where it is `lost`."""
        call = call_of(body)
        if call is None or call[0] not in self._names:
            self._say("" if lost else OPENING + body + closing)
        else:
            self._start(call[0])
            self._argue(call[1])


def before_arguments(name: str) -> str:
    """The text of a call up to its arguments, as the grammar has it."""
    return f'{OPENING}\n{{"name": "{name}", "arguments": '


def lark(use: ToolUse, tokens: Mapping[str, int]) -> list[str]:
    """Lines of the Lark grammar of an answer with calls."""
    heads = [
        f"{quoted(before_arguments(tool.name).removeprefix(OPENING))} arguments_{i}"
        for i, tool in enumerate(called(use))
    ]
    return [
        *marked(use, OPENING, tokens, between="\n"),
        f"call: ({' | '.join(heads)}) {_END} {marker(CLOSING, tokens)}",
        *arguments_rules(use),
    ]
