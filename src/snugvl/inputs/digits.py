"""Numbers that end: a form says "integer", and a model may write digits until the context is full.

JSON's numbers have any number of digits, and so have llguidance's. A mask that follows a long run of digits
loses the digits, if it stands within a number: where the number could end, and nothing could come that no
number goes on with. In a string another character could, its quotation mark at least. So every part of a
number has an end, whatever form of calls it stands in.
"""

from typing import Any, Final

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

MOST: Final = 20  # digits in a row: what 64 bits hold has no more
_WHOLE: Final = 0x80  # of an entry of `_tails`: the token has nothing but digits
_DIGITS: Final = frozenset(b"0123456789")
_GO_ON: Final = frozenset(b".eE")  # what a number goes on with, too
_ENDS: Final = frozenset(b",}]<\n\r\t ")  # what may stand after a number


class Digits:
    """Which tokens of a vocabulary are digits, go on with a number, or stand after one."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        size = tokenizer.vocab_size
        tails = bytearray(size)
        digits, ends, others = (np.zeros(-(-size // 32) * 32, dtype=bool) for _ in range(3))
        for token in range(size):
            if tokenizer.is_special_token(token):
                ends[token] = True
                continue
            text = tokenizer.decode_bytes([token])
            kept = text.rstrip(b"0123456789")
            tails[token] = min(len(text) - len(kept), _WHOLE - 1) | (0 if kept or not text else _WHOLE)
            if text:
                first = text[0]
                digits[token] = first in _DIGITS
                ends[token] = first in _ENDS
                others[token] = first not in _DIGITS and first not in _GO_ON and first not in _ENDS
        self._tails = bytes(tails)
        self._digits, self._ends, self._others = map(_words, (digits, ends, others))

    def run(self, before: int, token: int) -> int:
        """Digits in a row at the end of a text of which `before` stood before `token`."""
        tail = self._tails[token]
        return before + tail - _WHOLE if tail >= _WHOLE else tail

    def end(self, bits: NDArray[Any]) -> None:
        """Take the digits out of a mask, `[ceil(vocab / 32)]` int32, if it stands within a number."""
        words = bits.view(np.uint32)[: len(self._digits)]
        size = len(words)
        if (words & self._ends[:size]).any() and not (words & self._others[:size]).any():
            words &= ~self._digits[:size]


def _words(flags: NDArray[np.bool_]) -> NDArray[np.uint32]:
    return np.packbits(flags, bitorder="little").view(np.uint32)
