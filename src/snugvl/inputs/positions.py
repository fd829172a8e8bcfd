"""Where in a JSON schema an answer stands, or the arguments of a tool that it calls. No torch.

Answers that stand at the same position share a mask.

Which tokens may come next depends on all of the answer so far. But where a schema's alternatives begin
differently, what a finished value says changes nothing any more; and of an unfinished string only the length
matters, unless a literal or a pattern is compared with it. So a `Position` keeps

    {"title": "A red ba                  the object's keys, and 8 characters of a string
    {"title": "A red ball", "tags": ["   the keys, and that the second value is a list, in its first string

and its `key` is equal for two answers only if the same tokens may follow both.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from copy import copy as shallow
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from snugvl.inputs.tools.enforceable import between_quotes, referred

Key = tuple[tuple[tuple[bytes, int], ...], bytes, int]

LONGEST: Final = 2_048  # bytes kept of an answer, about; an answer that needs more shares nothing
ALTERNATIVES: Final = 4_096  # of a schema that are looked at, each as often as a `$ref` leads there
_KNOWN: Final = frozenset(
    {"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default",
     "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "type", "properties", "required",
     "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
     "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "format", "enum",
     "const", "anyOf", "oneOf"}
)  # fmt: skip
_NESTED: Final = frozenset({"array", "object"})  # types whose values begin alike and go on differently
_NARROW: Final = b"\xe0\xed\xf0\xf4"  # first bytes of characters after which some second bytes are not UTF-8
_QUOTE_OR_ESCAPE: Final = re.compile(rb'["\\]')
_ESCAPE: Final = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|[^u])")
_ANOTHER: Final = b"*"  # in an object's frame, for properties that its schema doesn't name
# How escapes of halves of characters (surrogates) begin behind their \u.
_SURROGATES: Final = frozenset(b"d%c" % digit for digit in b"89abcdef")


@dataclass(frozen=True)
class Comparisons:
    """The texts and numbers that unfinished values of a schema are compared with.

    Attributes:
        literals: its strings, as JSON has them between the quotation marks, in order.
        names: those of its properties, in the same way.
        exact: whether patterns or formats look at every character.
        characters: the largest of its lengths of strings.
        items: the largest of its numbers of items.
    """

    literals: tuple[bytes, ...]
    names: tuple[bytes, ...]
    exact: bool
    characters: int
    items: int

    def matter(self, text: bytes, *, name: bool) -> bool:
        """Whether the characters of an unfinished string (or `name`) matter, which so far is `text`."""
        known = self.names if name else self.literals
        at = bisect_left(known, text)
        begun = at < len(known) and known[at].startswith(text)
        return begun or (self.exact and not name)


def comparisons(schema: Any) -> Comparisons | None:
    """The texts and numbers that a schema's unfinished values are compared with.

    None where finished values matter, too: where two alternatives take objects or two take arrays, and with
    keywords that speak of several values at once.
    """
    parts: list[Mapping[str, Any]] = []
    left, seen, alternatives = [schema], set[int](), count()
    while left:
        part = left.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        if not isinstance(part, Mapping) or not _is_simple(part, schema, alternatives):
            return None
        seen.add(id(part))
        parts.append(part)
        if "$ref" in part:
            left.append(referred(part["$ref"], schema))
        left += [part[key] for key in ("items", "additionalProperties") if key in part]
        left += [each for key in ("anyOf", "oneOf", "prefixItems") for each in part.get(key, ())]
        left += part.get("properties", {}).values()
    return Comparisons(
        tuple(sorted({text for part in parts for text in _literals(part)})),
        tuple(sorted({_between(name) for part in parts for name in part.get("properties", ())})),
        any({"pattern", "format"} & part.keys() for part in parts),
        max((part.get(key, 0) for part in parts for key in ("minLength", "maxLength")), default=0),
        max((_items(part) for part in parts), default=0),
    )


def _is_simple(part: Mapping[str, Any], root: Any, alternatives: Iterator[int]) -> bool:
    """Whether a part of a schema has known keywords alone, and alternatives that begin differently.

    `alternatives` counts those of the whole schema: of more than `ALTERNATIVES` nothing is found out.
    """
    numbers = [part.get(key, 0) for key in ("minLength", "maxLength", "minItems", "maxItems")]
    lists = [part.get(key, []) for key in ("anyOf", "oneOf", "prefixItems", "enum")]
    return (
        part.keys() <= _KNOWN
        and ("$ref" not in part or isinstance(part["$ref"], str))
        and isinstance(part.get("properties", {}), Mapping)
        and all(type(number) is int for number in numbers)
        and all(isinstance(each, list) for each in lists)
        and not any(isinstance(value, list | dict) for value in (*part.get("enum", ()), part.get("const")))
        and len({"$ref", "anyOf", "oneOf"} & part.keys()) <= 1
        and not (
            {"$ref", "anyOf", "oneOf"} & part.keys()
            and {"type", "properties", "items", "prefixItems"} & part.keys()
        )
        and _begin_apart(part, root, alternatives)
    )


def _begin_apart(part: Mapping[str, Any], root: Any, alternatives: Iterator[int]) -> bool:
    """Whether at most one of a part's alternatives takes objects, and at most one arrays."""
    found: list[str] = []
    left = [*part.get("anyOf", ()), *part.get("oneOf", ())]
    while left:
        each = left.pop()
        if not isinstance(each, Mapping) or next(alternatives) >= ALTERNATIVES:
            return False
        if "$ref" in each:
            left.append(referred(each["$ref"], root))
        elif "anyOf" in each or "oneOf" in each:
            left += [*each.get("anyOf", ()), *each.get("oneOf", ())]
        elif not {"enum", "const"} & each.keys():  # which have neither objects nor arrays: `_is_simple`
            kinds = each.get("type")
            if not isinstance(kinds, str | list):
                return False
            found += [kinds] if isinstance(kinds, str) else kinds
    shared = [kind for kind in found if kind in _NESTED]
    return len(shared) == len(set(shared))


def _literals(part: Mapping[str, Any]) -> Iterable[bytes]:
    for value in (*part.get("enum", ()), part.get("const")):
        if isinstance(value, str):
            yield _between(value)


def _between(text: str) -> bytes:
    return between_quotes(text).encode(errors="surrogatepass")


def _items(part: Mapping[str, Any]) -> int:
    least, most = part.get("minItems", 0), part.get("maxItems", 0)
    return int(max(least, most, len(part.get("prefixItems", ()))))


class Position:
    """Where one answer stands.

    What it can't follow it loses for good, such as blanks that its grammar doesn't have.
    """

    __slots__ = (
        "_around", "_compared", "_escape", "_frames", "_length", "_lost", "_name", "_scalar", "_string",
    )  # fmt: skip

    def __init__(self, compared: Comparisons, mark: bytes = b"") -> None:
        """`mark`: see `beginning`."""
        self._compared = compared
        # Of each value around this point its bracket with what matters behind it, and how many items it has.
        self._frames: list[tuple[bytes, int]] = [(mark, 0)]
        self._around: tuple[tuple[bytes, int], ...] | None = None  # `_frames`, until they change
        self._string: bytes | None = None  # an unfinished one; where it is counted, what isn't counted yet
        self._length: int | None = None  # its characters, an escape being one, if nothing else matters
        self._escape = b""  # an unfinished one
        self._name = False  # whether the string is the key of an object
        self._scalar = b""  # an unfinished number, or true, false, null
        self._lost = False

    def copy(self) -> "Position":
        """A position of its own, at the same point."""
        made = shallow(self)
        made._frames = [*self._frames]
        return made

    @property
    def key(self) -> Key | None:
        """Equal for two answers only if the same tokens may follow both; None where that is unknown."""
        if self._lost:
            return None
        if self._around is None:
            self._around = tuple(self._frames)
        frames = self._around
        if self._string is None:
            return frames, self._scalar, -1
        if self._length is None:
            return frames, b'"' + self._string + self._escape, -1
        most = 0 if self._name else self._compared.characters
        begun = _to_come(self._string) + self._escape if self._string or self._escape else b""
        return frames, begun, min(self._length, most)

    def count(self, characters: int) -> Key | None:
        """The key after so many characters more, in a string of which only the length matters.

        None where it stands in no such string, or `characters` is 0: it stays where it is.
        """
        if self._length is None or not characters or self._string or self._escape or self._lost:
            return None
        self._length += characters
        return self.key

    def advance(self, text: bytes) -> None:
        """Go on by the bytes of a token."""
        at, self._around = 0, None
        while at < len(text) and not self._lost:
            if self._string is None:
                self._outside(text[at : at + 1])
                at += 1
            else:
                at = self._inside(self._string, text, at)
        if self._frames and len(self._frames) * len(self._frames[-1][0]) + len(self._string or b"") > LONGEST:
            self._lost = True

    def _inside(self, string: bytes, text: bytes, at: int) -> int:
        """Take what belongs to the unfinished string; returns where the rest of `text` begins."""
        if self._escape:
            self._escape += text[at : at + 1]
            if len(self._escape) == (6 if self._escape[1:2] == b"u" else 2):
                self._end_escape(string)
            return at + 1
        found = _QUOTE_OR_ESCAPE.search(text, at)
        end = len(text) if found is None else found.start()
        self._add(string + text[at:end])
        if found is not None and found[0] == b"\\":
            self._escape = b"\\"
        elif found is not None:
            self._end_string()
        return end + 1

    def _add(self, string: bytes) -> None:
        """Go on in the string, which has `string` now: all of it, or what isn't counted yet."""
        if self._length is None and self._compared.matter(string, name=self._name):
            self._string = string
            return
        if b"\\" in string:  # of what mattered until now
            self._lost = any(each[2:4].lower() in _SURROGATES for each in _ESCAPE.findall(string))
            string = _ESCAPE.sub(b"e", string)
        end = len(string) if string.isascii() else len(string) - _unfinished(string)
        starts = end if string.isascii() else sum(byte & 0xC0 != 0x80 for byte in string[:end])
        self._length = (self._length or 0) + starts
        self._string = string[end:]

    def _end_escape(self, string: bytes) -> None:
        escape, self._escape = self._escape, b""
        if self._length is None:
            self._add(string + escape)
        elif escape[2:4].lower() in _SURROGATES:
            self._lost = True  # whether another must follow is the grammar's affair
        else:
            self._length += 1

    def _end_string(self) -> None:
        kept, count = self._frames[-1]
        if self._name and self._length is None:
            self._frames[-1] = kept + b'"%b"' % (self._string or b""), count
        elif self._name:  # of a property that the schema doesn't name
            self._frames[-1] = kept.removesuffix(_ANOTHER + b":0,") + _ANOTHER, count
        self._string = self._length = None
        if not self._name:
            self._end_value()

    def _end_value(self) -> None:
        kept, count = self._frames[-1]
        if kept[:1] == b"[":
            self._frames[-1] = b"[0", min(count + 1, self._compared.items)
        else:
            self._frames[-1] = kept + b"0", count

    def _outside(self, byte: bytes) -> None:
        """Take a byte outside strings."""
        if byte in b",]}" and self._scalar:
            self._scalar = b""
            self._end_value()
        kept, count = self._frames[-1]
        if byte in b"]}":
            self._frames.pop()
            if self._frames:
                self._end_value()
            else:
                self._lost = True
        elif byte == b",":
            self._frames[-1] = (b"[," if kept[:1] == b"[" else kept + byte), count
        elif byte == b":" or (byte == b" " and kept[-1:] in (b",", b":") and not self._scalar):
            self._frames[-1] = kept + byte, count
        elif byte.isspace():
            self._lost = True
        else:
            kept = kept.rstrip(b" ")  # whether a blank stood before it is over now
            self._frames[-1] = kept, count
            if byte == b'"':
                self._name = kept[:1] == b"{" and kept[-1:] in (b"{", b",")
                self._string, self._length = b"", None
            elif byte in b"[{":
                self._frames.append((byte, 0))
            else:
                self._scalar += byte


def beginning(schema: Any, mark: bytes = b"") -> Position | None:
    """The position at which JSON of a schema begins; None where `comparisons` has nothing to say.

    `mark`: tells positions in it from those in other schemas.
    """
    compared = comparisons(schema)
    return None if compared is None else Position(compared, mark)


class Calls:
    """The positions at which arguments of tools begin, in an answer that may call them."""

    def __init__(self, begun: Mapping[bytes, Position]) -> None:
        """`begun`: by the text before the arguments, which nothing else in an answer holds, nor any JSON."""
        self._begun = begun
        self._heads = re.compile(b"|".join(map(re.escape, begun)))
        self._longest = max(map(len, begun))

    def find(self, text: bytes) -> tuple[bytes, Position | None]:
        """The end of a text, for the next look at what follows it, and the position if it is in arguments."""
        found = self._heads.search(text)
        if found is None:
            return text[-self._longest :], None
        position = self._begun[found[0]].copy()
        position.advance(text[found.end() :])
        return b"", position


def _unfinished(text: bytes) -> int:
    """Number of bytes at the end of a text in UTF-8 that begin a character without ending it."""
    for back in range(1, min(len(text), 3) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character
            return back if back < _bytes_of(byte) else 0
    return 0


def _bytes_of(first: int) -> int:
    """Number of bytes of a character in UTF-8 that begins with this one."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _to_come(begun: bytes) -> bytes:
    """A key for an unfinished character in UTF-8: equal for two of them only if the same bytes may follow."""
    if not begun or (len(begun) == 1 and begun[0] in _NARROW):
        return begun
    return b"%d" % (_bytes_of(begun[0]) - len(begun))
