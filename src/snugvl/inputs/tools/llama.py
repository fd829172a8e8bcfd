"""`{"name": "f", "parameters": {…}}`: the form of Llama 3.1 to 4, with or without `<|python_tag|>` before it.

Meta's prompt format also has `"type": "function"` before the name. No marker begins such a call, so it is one
where the tag stands before it, or where its head opens a line and names a tool; several are separated by `;`.
An answer in JSON that is no such head stays text.

    text ──<|python_tag|>──→ object → arguments → tail → after ──;──→ object …
      └──head at the beginning of a line──→ ↗                └─────→ text
"""

import re
from collections.abc import Mapping
from typing import Final

from snugvl.core.messages import ToolUse
from snugvl.inputs.tools.grammar import ANY, arguments_rules, called, form_rule, marker, quoted, several
from snugvl.inputs.tools.parser import HEAD, HEAD_LIMIT, ObjectParser, held

TAG: Final = "<|python_tag|>"
_CANDIDATE = re.compile(re.escape(TAG) + r"|\{")
_ANY_SPACE = "\\s*"
_SPACE = "[ \\t\\n]{0,8}"  # bounded: a small model could write it for ever


class LlamaParser(ObjectParser):
    """Reads calls after the tag, and those whose head begins a line."""

    opening = TAG

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._blank = True  # whether the line of text so far is white space
        # What a head looks like without white space.
        self._heads = tuple(
            f'{{{kind}"name":"{name}","{key}":'
            for kind in ("", '"type":"function",')
            for name in self._names
            for key in ("parameters", "arguments")
        )

    def _begin(self, rest: str) -> bool:
        return self._await_object(TAG, rest)

    def _start(self, name: str) -> None:
        super()._start(name)
        self._blank = False

    def _read_text(self) -> bool:
        """A call begins with the tag anywhere, or with its head at the beginning of a line."""
        end = len(self._buffer) - held(self._buffer, TAG)
        for found in _CANDIDATE.finditer(self._buffer):
            start = found.start()
            if found.group() == TAG:
                self._show(start)
                return self._begin(self._buffer[len(TAG) :])
            if not self._begins_line(start):
                continue
            head = HEAD.match(self._buffer[start : start + HEAD_LIMIT])
            if head and head[1] in self._names:
                self._show(start)
                return self._open_arguments(head[1], self._buffer[head.end() :], self._read_tail)
            if self._may_be_head(self._buffer[start : start + HEAD_LIMIT]):
                end = min(end, start)
                break
        self._show(end)
        return False

    def _show(self, end: int) -> None:
        """Take text to `end` out of the buffer."""
        text = self._buffer[:end]
        self._blank = self._begins_line(end)
        self._say(text)
        self._buffer = self._buffer[end:]

    def _begins_line(self, position: int) -> bool:
        line = self._buffer[:position].rpartition("\n")
        return not line[2].strip() and bool(line[1] or self._blank)

    def _may_be_head(self, text: str) -> bool:
        """Whether more text could make it one."""
        plain = "".join(text.split())
        return len(text) < HEAD_LIMIT and any(head.startswith(plain) for head in self._heads)

    def _read_after(self) -> bool:
        rest = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(rest)]
        self._say(space)
        self._buffer = rest
        if rest.startswith(";"):
            return self._await_object(";", rest[1:])
        self._blank = self._blank or "\n" in space
        return bool(rest) and self._enter(self._read_text, rest)


def lark(use: ToolUse, tokens: Mapping[str, int]) -> list[str]:
    """Lines of the Lark grammar of an answer with calls. Text can't begin a line with the head of a call."""
    tools = called(use)
    heads = [f'{_begun(tool.name, "", _SPACE)},{_SPACE}"parameters":' for tool in tools]
    rest = [f"SPACE? arguments_{i} {quoted('}')}" for i in range(len(tools))]
    calls = [f"head_{i} {each}" for i, each in enumerate(rest)]
    more = f" ({quoted('; ')} call)*" if several(use) else ""
    tag = marker(TAG, tokens) if TAG in tokens else ""
    lines = [f"call: {' | '.join(calls)}", *(f"head_{i}: /{head}/" for i, head in enumerate(heads))]
    lines += ["SPACE: /[ \\t\\n]{1,8}/", *arguments_rules(use)]
    if use.choice != "auto":
        return [f"start: {tag and tag + '? '}call{more}", *lines]
    if use.form is not None:
        # Only after the tag: the lexer, which is greedy, can't tell the head of a call from other JSON.
        return [f"start: answer | {marker(TAG, tokens)} call{more}", form_rule(use.form), *lines]
    led = " | ".join(f"lead_{i} {each}{more}" for i, each in enumerate(rest))
    names = "|".join(tool.name for tool in tools)
    any_head = _begun(f"({names})", _ANY_SPACE, _ANY_SPACE)  # of those that the parser would take
    tagged = f" | TEXT {tag} call{more}" if tag else ""
    return [
        f"start: TEXT | {led}{tagged}",
        # Lazy: the text ends where the head does, the first time it is complete.
        *(f"lead_{i}[lazy]: /({ANY}\\n)?[ \\t]*{head}/" for i, head in enumerate(heads)),
        f"TEXT: /{ANY}/ & ~/({ANY}\\n)?\\s*{any_head}{ANY}/",
        *lines,
    ]


def _begun(name: str, before: str, after: str) -> str:
    """A head as far as its name, with that space `before` and `after` commas and colons."""
    kind = f'"type"{before}:{after}"function"{before},{after}'
    return f'\\{{{after}({kind})?"name"{before}:{after}"{name}"'
