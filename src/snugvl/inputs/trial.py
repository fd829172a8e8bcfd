"""The process that grammars are tried in: `python -m snugvl.inputs.trial`, asked over its standard input.

A grammar of some hundred bytes can keep its compiler busy for minutes (a `multipleOf` of eight digits has a
hundred million remainders), and nothing ends a thread. Here the system ends the process: each try may take
`CPU_S` of processor time, however busy the machine is, and `GRAMMAR_BYTES` of memory. What takes long depends
on the grammar alone, so a vocabulary of 256 bytes will do, and no model is needed.

    4 bytes length, a grammar of llguidance ─► 4 bytes length, {"error": …, "held_bytes": …, "grown_bytes": …}
"""

import re
import signal
from functools import partial
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from snugvl.inputs.trials import GRAMMAR_BYTES, bound, serve

MARKERS: Final = 16  # tokens that a grammar may name by their numbers
_NUMBERED: Final = re.compile(r"<\[(\d+)\]>")


def limits() -> LLParserLimits:
    """llguidance's limits for one grammar."""
    return LLParserLimits(max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False)


class _Bytes:
    """A vocabulary of single bytes, an end, and tokens in place of those that a grammar names by number."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self) -> None:
        markers = [f"<|{number}|>".encode() for number in range(MARKERS)]
        self.tokens = [*(bytes([value]) for value in range(256)), b"<|end|>", *markers]
        self.special_token_ids = [*range(256, len(self.tokens))]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def attempt(tokenizer: LLTokenizer, grammar: str) -> tuple[str, LLMatcher]:
    """Compile a grammar and ask for its first token: what is wrong with it, or nothing, and its matcher."""
    numbers = {number: i % MARKERS for i, number in enumerate(dict.fromkeys(_NUMBERED.findall(grammar)))}
    grammar = _NUMBERED.sub(lambda found: f"<[{257 + numbers[found[1]]}]>", grammar)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds what allows nothing
    return matcher.get_error() if matcher.is_error() else "", matcher


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the parent
    bound()
    serve(partial(attempt, LLTokenizer(TokenizerWrapper(_Bytes()))), GRAMMAR_BYTES)
