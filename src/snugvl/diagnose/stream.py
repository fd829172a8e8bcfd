"""Logs as blocks of whole lines in bounded memory: any size, any bytes, lines of any length.

Nothing is decoded before a line is interesting. UTF-16, which PowerShell writes, is turned into UTF-8.
"""

import codecs
import re
from collections.abc import Iterator
from typing import Final, Protocol

BLOCK_BYTES: Final = 1 << 18
LINE_BYTES: Final = 1 << 15  # the longest real line, vLLM's configuration, has about 8 KiB
EXCERPT: Final = 220
_ANSI: Final = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")


class Source(Protocol):
    """What can be read: an open binary file, standard input, BytesIO."""

    def read(self, size: int = -1, /) -> bytes: ...


def blocks(source: Source) -> Iterator[bytes]:
    """Whole lines in blocks of about BLOCK_BYTES. Of a line beyond LINE_BYTES only the beginning is kept."""
    pending = b""
    skipping = False  # inside the rest of a line that was too long
    for chunk in _utf8(source):
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk, skipping = chunk[end:], False
        pending += chunk
        end = pending.rfind(b"\n")
        while end > 0 and pending[end - 1 : end] == b"\\":  # a command that goes on stays in one piece
            end = pending.rfind(b"\n", 0, end)
        if end >= 0:
            yield _without_escapes(pending[: end + 1])
            pending = pending[end + 1 :]
        if len(pending) > LINE_BYTES:
            pending, skipping = pending[:LINE_BYTES], True
    if pending:
        yield _without_escapes(pending)


def _utf8(source: Source) -> Iterator[bytes]:
    first = source.read(BLOCK_BYTES)
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if first.startswith(mark):
            decoder = codecs.getincrementaldecoder(name)(errors="replace")
            chunk = first[len(mark) :]
            while chunk:
                yield decoder.decode(chunk).encode("utf-8", "replace")
                chunk = source.read(BLOCK_BYTES)
            return
    chunk = first.removeprefix(codecs.BOM_UTF8)
    while chunk:
        yield chunk
        chunk = source.read(BLOCK_BYTES)


def _without_escapes(block: bytes) -> bytes:
    return _ANSI.sub(b"", block) if b"\x1b" in block else block


def clean(text: str) -> str:
    """Without anything that moves a cursor, rings, hides or reorders text on a terminal."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " if char in "\t\r\n" else "" for char in text)
    return text.strip()


def decode(raw: bytes) -> str:
    """A line as clean text."""
    return clean(raw[:LINE_BYTES].decode("utf-8", "replace"))


def excerpt(text: str, start: int = 0) -> str:
    """At most EXCERPT characters of a line, from a little before `start` if it is long."""
    if len(text) <= EXCERPT:
        return text
    begin = max(0, min(start - 40, len(text) - EXCERPT))
    head, tail = "…" if begin else "", "…" if begin + EXCERPT < len(text) else ""
    return f"{head}{text[begin : begin + EXCERPT].strip()}{tail}"
