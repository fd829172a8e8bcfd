"""Token ids to text: the bytes of each token, and the streaming text of one choice.

A tokenizer writes bytes as the strings of its vocabulary in one of two ways, each read off its decoder:

    byte-level (GPT-2's, Qwen's, Llama 3's)      every byte is a printable character:  "Ġcaf", "Ã©"
    pieces (SentencePiece's: Llama 2, Mistral,   characters as they are, "▁" for a space, and a token
            Phi-3, Gemma)                        "<0xC3>" for each byte that has no character

Every token is a run of bytes either way, so bytes of a token, streaming and logprobs are exact. Many
tokenizers of pieces begin a text with a space of their own, which their decoder takes off again: `opening`
is a token at the beginning of a text.

One difference to the decoder of `tokenizers`: of bytes that are not UTF-8 it writes one U+FFFD for each byte
of the whole run, the right characters before them included, which no stream can.

Text is held back only while it may still become something else: an incomplete UTF-8 character, or a
beginning of a stop string. The result doesn't depend on how the text is split into tokens: the stop string
that is complete first ends the text (of several at once, the longest). Time is linear in the text.

    tokens    "He" "llo" "\\n" "\\nQ" ":"      stop "\\nQ:"
    pushed    He   llo   ""   \\n    ""         the first newline came out when the second made it plain text
"""

import codecs
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Protocol

import tokenizers

from snugvl.errors import RequestError

SPELLED = 1 << 14  # tokens whose bytes are kept: those that came lately
_IDS = 1 << 32  # ids that the Rust side can be asked for


class Spelling(Protocol):
    """From a token's string to its bytes."""

    def inside(self, token: str) -> bytes:
        """The bytes a token stands for."""

    def opening(self, token: str) -> bytes:
        """Bytes of a token at the beginning of a text."""


class ByteLevel:
    """Every byte has a character."""

    def __init__(self) -> None:
        self._alphabet = _byte_alphabet()

    def inside(self, token: str) -> bytes:
        """The bytes a token stands for; a token with a character outside the alphabet stands for itself."""
        mapped = [self._alphabet.get(character) for character in token]
        return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)

    def opening(self, token: str) -> bytes:
        """Bytes of a token at the beginning of a text: as anywhere, as a space is a character of its own."""
        return self.inside(token)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _token(backend: tokenizers.Tokenizer, token_id: int) -> str | None:
    """A token's string; None for an unknown id. (A table of all tokens takes too long to make at a start.)"""
    return backend.id_to_token(token_id) if 0 <= token_id < _IDS else None


def _spell(backend: tokenizers.Tokenizer, spelling: Spelling, token_id: int) -> bytes:
    token = _token(backend, token_id)
    return b"" if token is None else spelling.inside(token)


class Vocabulary:
    """The bytes of each token. `special_ids`: control tokens, which are not text."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling | None = None) -> None:
        """`spelling`: how its tokens are written; byte-level by default."""
        self._backend = backend
        self._spelling = spelling or ByteLevel()
        self._spelled = lru_cache(SPELLED)(partial(_spell, backend, self._spelling))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty outside the vocabulary."""
        return self._spelled(token_id)

    def opening_bytes(self, token_id: int) -> bytes:
        """The bytes it stands for at the beginning of a text, where some tokenizers write one space less."""
        if isinstance(self._spelling, ByteLevel):
            return self.token_bytes(token_id)
        token = _token(self._backend, token_id)
        return b"" if token is None else self._spelling.opening(token)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, with U+FFFD for bytes that are only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class Detokenizer:
    """Tokens in, text out.

    `shown`: special tokens that are text nevertheless. `continues`: the text goes on where a prompt ended, so
    that a space at its beginning is its own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        shown: frozenset[int] = frozenset(),
        continues: bool = False,
    ) -> None:
        if not all(stop):
            raise RequestError("a stop string is empty", field="stop")
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids - shown
        self._opening = not continues  # no token with text has come yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._incomplete = False  # whether the decoder remembers the beginning of a character
        self._held = ""
        self._decoded = 0  # characters that came out of the decoder
        self._emitted = 0  # characters handed out
        self._ends: deque[int] = deque()  # where the text of each token not yet covered ends
        self._covered = 0
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stop is not None

    @property
    def covered(self) -> int:
        """Number of pushed tokens, from the first on, whose text was handed out in full.

        A token that holds any part of a stop string never is. Tokens without text count with the text
        before them.
        """
        return self._covered

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now, often empty. Nothing after `stopped`."""
        if self.stopped:
            return ""
        text = self._text(self._bytes(token_id))
        # A character that is still incomplete belongs to this token too.
        self._ends.append(self._decoded + len(text) + self._incomplete)
        return self._emit(text)

    def flush(self) -> str:
        """The end: returns what was held back. U+FFFD stands for a character that never was completed."""
        if self.stopped:
            return ""
        text = self._emit(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + self._hand_out(rest)

    def _text(self, raw: bytes) -> str:
        """Text complete with these bytes: mostly all, which needs no decoder that remembers the rest."""
        if not self._incomplete:
            try:
                return raw.decode()
            except UnicodeDecodeError:
                self._incomplete = True  # or broken: the decoder knows
        text = self._decoder.decode(raw)
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        if not self._opening:
            return self._vocabulary.token_bytes(token_id)
        self._opening = not self._vocabulary.token_bytes(token_id)
        return self._vocabulary.opening_bytes(token_id)

    def _emit(self, text: str) -> str:
        """Take new text through the stop strings; returns what can be handed out."""
        self._decoded += len(text)
        if not self._stops:
            return self._hand_out(text)
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            # The longest stop string is the largest of those complete at the same character.
            complete = [m.stop for m in self._stops if m.advance(character)]
            if complete:
                self.stop, self._held = max(complete, key=len), ""
                return self._hand_out(pending[: position - len(self.stop)])
        keep = max(m.matched for m in self._stops)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return self._hand_out(pending[:cut])

    def _hand_out(self, text: str) -> str:
        self._emitted += len(text)
        while self._ends and self._ends[0] <= self._emitted:
            self._ends.popleft()
            self._covered += 1
        return text


class _Matcher:
    """Knuth-Morris-Pratt: how much of the beginning of one stop string the text now ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._failure = _failure(stop)

    def advance(self, character: str) -> bool:
        """Add a character; True when the stop string is complete."""
        k = self.matched
        while k and self.stop[k] != character:
            k = self._failure[k - 1]
        self.matched = k + (self.stop[k] == character)
        return self.matched == len(self.stop)


@lru_cache(maxsize=256)
def _failure(stop: str) -> tuple[int, ...]:
    """`[i]`: the longest proper beginning of `stop[: i + 1]` that it also ends with. One for all choices."""
    failure = [0] * len(stop)
    for i in range(1, len(stop)):
        k = failure[i - 1]
        while k and stop[i] != stop[k]:
            k = failure[k - 1]
        failure[i] = k + (stop[i] == stop[k])
    return tuple(failure)
