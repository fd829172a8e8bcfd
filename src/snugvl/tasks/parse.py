"""Finds JSON in a model's text, whatever is around it.

Models wrap JSON in ```json fences or in prose, use single quotes, Python's True and None, bare keys,
trailing or missing commas, and stop in the middle when their token limit comes. `find_json` reads all of
these and never raises: it returns the JSON containers it found, each marked complete or not.

The complete part of a container that breaks off is kept: every finished element of a list, every finished
value of an object, and the finished part of an unfinished list or object under a key. A number or string that
ends with the text is not finished (45 may have become 456).
"""

import re
from dataclasses import dataclass
from typing import Any

from snugvl.errors import OutputError

_MAX_DEPTH = 32  # a nested list of the deepest task is 4
_MAX_FAILURES = 200  # brackets in prose that lead nowhere; bounds the work on hostile text
_FENCE = re.compile(r"```[A-Za-z0-9]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_OPENING = re.compile(r"[\[{]")
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TOKEN = re.compile(r"[-+.\w]*")  # a number or a bare word, whole or not
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
    "NaN": None,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@dataclass(frozen=True, slots=True)
class Found:
    """A list or object in a text. `complete` is false when it breaks off."""

    value: list[Any] | dict[str, Any]
    complete: bool


def answer_text(text: str) -> str:
    """The answer without the reasoning that a thinking model writes before it.

    Raises:
        OutputError: there is no answer.
    """
    before, mark, after = text.rpartition("</think>")
    answer = (after if mark else before + after).strip()
    if answer.startswith("<think>"):
        raise OutputError("the answer ended while the model was still thinking; allow more tokens", text=text)
    if not answer:
        raise OutputError(
            "the model gave an empty answer; one that thinks before it answers may need more tokens",
            text=text,
        )
    return answer


def find_json(text: str) -> list[Found]:
    """Every outermost list and object in `text`, from code fences if there are any."""
    for block in _FENCE.findall(text):
        if found := _scan(block):
            return found
    return _scan(text)


def _scan(text: str) -> list[Found]:
    found: list[Found] = []
    position = failures = 0
    while failures < _MAX_FAILURES and (opening := _OPENING.search(text, position)):
        reader = _Reader(text, opening.start())
        value = reader.value(0)
        if not reader.broken():
            found.append(Found(value, complete=True))
            position = reader.position
        elif value or reader.position >= len(text):
            # At the end of the text even nothing is an answer: what an unfinished list has begun isn't one.
            found.append(Found(value, complete=False))
            position = reader.position
        else:
            failures += 1  # and look inside: "[see {"a": 1}]"
            position = opening.end()
    return found


class _Reader:
    """Reads one value, up to where the text ends or stops making sense."""

    def __init__(self, text: str, position: int) -> None:
        self._text = text
        self.position = position
        self._broken = False

    def broken(self) -> bool:
        """Whether the value broke off."""
        return self._broken

    def value(self, depth: int) -> Any:
        """The value at the position; None where nothing of it was complete."""
        character = self._next()
        if character == "[" and depth < _MAX_DEPTH:
            return self._list(depth + 1)
        if character == "{" and depth < _MAX_DEPTH:
            return self._object(depth + 1)
        if character in ('"', "'"):
            return self._string(character)
        return self._number_or_word()

    def _next(self) -> str:
        """The next character that isn't space, not taken; empty at the end."""
        match = _SPACE.match(self._text, self.position)
        assert match is not None  # the pattern matches the empty string
        self.position = match.end()
        return self._text[self.position : self.position + 1]

    def _list(self, depth: int) -> list[Any]:
        self.position += 1
        items: list[Any] = []
        while (character := self._next()) != "]":
            if character == ",":
                self.position += 1
                continue
            item = self.value(depth)
            if self.broken():
                return items
            items.append(item)
        self.position += 1
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        self.position += 1
        fields: dict[str, Any] = {}
        while (character := self._next()) != "}":
            if character == ",":
                self.position += 1
                continue
            key = self._string(character) if character in ('"', "'") else self._bare_key()
            if self._next() != ":":
                self._broken = True
            if self.broken():
                return fields
            self.position += 1
            value = self.value(depth)
            if self.broken():
                if isinstance(value, list | dict):
                    fields[key] = value
                return fields
            fields[key] = value
        self.position += 1
        return fields

    def _bare_key(self) -> str:
        if match := _WORD.match(self._text, self.position):
            self.position = match.end()
            return match.group()
        self._broken = True
        return ""

    def _string(self, quote: str) -> str:
        """A quote closes a string only where something can follow it, so an apostrophe doesn't."""
        characters: list[str] = []
        position = self.position + 1
        while position < len(self._text):
            character = self._text[position]
            if character == "\\":
                decoded, position = self._escape(position + 1)
                characters.append(decoded)
                continue
            position += 1
            if character == quote and self._closes(position):
                self.position = position
                return _whole("".join(characters))
            characters.append(character)
        self.position = position
        self._broken = True
        return ""

    def _closes(self, position: int) -> bool:
        match = _SPACE.match(self._text, position)
        assert match is not None
        return self._text[match.end() : match.end() + 1] in ("", ",", ":", "]", "}")

    def _escape(self, position: int) -> tuple[str, int]:
        code = self._text[position : position + 1]
        digits = self._text[position + 1 : position + 5]
        if code == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            return chr(int(digits, 16)), position + 5
        return _ESCAPES.get(code, code), position + 1

    def _number_or_word(self) -> Any:
        match = _TOKEN.match(self._text, self.position)
        assert match is not None  # the pattern matches the empty string
        token = match.group()
        number = _NUMBER.fullmatch(token)
        if match.end() == len(self._text):
            self.position = match.end()
            self._broken = True
        elif not number and token not in _WORDS:
            self._broken = True
        if self._broken:
            return None
        self.position = match.end()
        return _number(token) if number else _WORDS[token]


def _number(digits: str) -> float | int:
    whole = digits.lstrip("+-").isdigit() and len(digits) < 19
    return int(digits) if whole else float(digits)


def _whole(text: str) -> str:
    """The text with surrogate pairs from escapes joined; a lone one can't be printed and becomes U+FFFD."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
