"""How a tokenizer writes bytes as the strings of its vocabulary: two ways, each read off its decoder.

    byte-level (GPT-2's, Qwen's, Llama 3's)      every byte is a printable character:  "Ġcaf", "Ã©"
    pieces (SentencePiece's: Llama 2, Mistral,   characters as they are, "▁" for a space, and a token
            Phi-3, Gemma)                        "<0xC3>" for each byte that has no character

Every token is a run of bytes either way, so bytes of a token, streaming and logprobs are exact. Many
tokenizers of pieces begin a text with a space of their own, which their decoder takes off again: `opening`
is a token at the beginning of a text.

One difference to the decoder of `tokenizers`: of bytes that are no UTF-8 it writes one U+FFFD for each byte
of the whole run, the right characters before them included, which no stream can.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from snugvl.errors import UnsupportedModel

_BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")


class Spelling(Protocol):
    """From a token's string to its bytes.

    `decoder`: in the form of tokenizer.json, where the file's own isn't known to llguidance; else None.
    """

    @property
    def decoder(self) -> dict[str, Any] | None: ...

    def inside(self, token: str) -> bytes:
        """The bytes a token stands for."""
        ...

    def opening(self, token: str) -> bytes:
        """Bytes of a token at the beginning of a text."""
        ...


class ByteLevel:
    """Every byte has a character."""

    decoder = None

    def __init__(self) -> None:
        self._alphabet = _byte_alphabet()

    def inside(self, token: str) -> bytes:
        """As the byte-level decoder does it: a token with any foreign character stands for itself."""
        mapped = [self._alphabet.get(character) for character in token]
        return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)

    def opening(self, token: str) -> bytes:
        """Bytes of a token at the beginning of a text: as anywhere, as a space is a character of its own."""
        return self.inside(token)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Characters, a mark for spaces, tokens of one byte.

    Attributes:
        marks: what stands for what, in order, such as ("▁", " ").
        byte_tokens: whether "<0xC3>" is a byte.
        stripped: spaces that a text loses at its beginning.
        unmarked: a mark that the first token of a text loses wherever it stands (Metaspace), or None.
    """

    marks: tuple[tuple[str, str], ...]
    byte_tokens: bool
    stripped: int = 0
    unmarked: str | None = None

    @property
    def decoder(self) -> dict[str, Any] | None:
        """A Metaspace spelled out."""
        if self.unmarked is None:
            return None
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": mark}, "content": text} for mark, text in self.marks
        ]
        if self.byte_tokens:
            steps.append({"type": "ByteFallback"})
        return {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}

    def inside(self, token: str) -> bytes:
        """The bytes a token stands for."""
        for mark, text in self.marks:
            token = token.replace(mark, text)
        byte = _BYTE.fullmatch(token) if self.byte_tokens else None
        return token.encode() if byte is None else bytes.fromhex(byte[1])

    def opening(self, token: str) -> bytes:
        """Bytes of a token at the beginning of a text, where some spaces are dropped."""
        if self.unmarked is not None:
            token = token.replace(self.unmarked, "")
        data = self.inside(token)
        spaces = len(data) - len(data.lstrip(b" "))
        return data[min(spaces, self.stripped) :]


def spelling_of(backend: tokenizers.Tokenizer, where: str) -> Spelling:
    """The spelling of this tokenizer.

    Raises:
        UnsupportedModel: a decoder that we don't know; `where` names the file.
    """
    steps = list(_steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__())))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    marks: list[tuple[str, str]] = []
    stripped, unmarked = 0, None
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)}:
                marks.append((mark, text))
            case {"type": "Metaspace", "replacement": str(mark)}:
                marks.append((mark, " "))
                unmarked = mark if step.get("prepend_scheme", "always") != "never" else None
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                stripped = start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise UnsupportedModel(
                    f"{where} decodes by {' + '.join(kinds)}, which this version doesn't read: only "
                    "byte-level tokenizers and SentencePiece's are"
                )
    if not marks:
        raise UnsupportedModel(
            f"{where} is neither a byte-level tokenizer nor one of SentencePiece's pieces, which is all that "
            "this version reads"
        )
    return Pieces(tuple(marks), "ByteFallback" in kinds, stripped, unmarked)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's steps, one after the other."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}
