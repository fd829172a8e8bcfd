"""Grammars over a tokenizer's vocabulary, by llguidance: JSON schemas, regular expressions, Lark, tool calls.

A grammar is compiled and asked for its first token in the caller's thread, before anything starts, so what
is wrong with it is said at once. What could make that slow is bounded: sizes and nesting first (the Rust side
recurses, and a stack that overflows takes the process along); then it is tried in a process that can be ended
(`trials.py`), as nobody can tell from a grammar how long its compiler takes. Those used last are kept.

    kept? ─ no ─► sizes ─► llguidance's own form ─► tried ─► compiled, first mask ─► kept
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final

import torch
from llguidance import LLMatcher, LLTokenizer

from snugvl.core.messages import GoOn, Grammar, ToolForm, ToolUse, going_on
from snugvl.engine.sampling.grammar import GrammarState, TokenGrammar
from snugvl.inputs.constraints import check_choices, grammar_text, one_line, refused, tools_lark
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.forms import markers
from snugvl.inputs.trial import limits
from snugvl.inputs.trials import Trials

KEPT: Final = 16  # compiled grammars
KEPT_BYTES: Final = 8 << 20  # of each that is kept, at most
# Classes of tokens that a mask allows as a whole, where the grammar allows all of a class: white space, and
# what a JSON string holds, up to so many characters. In strings with a `maxLength` masks of 151,936 tokens
# take 0.29 ms so, and 0.43 with llguidance's own lengths (10, 30).
_STRING: Final = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS: Final = (3, 6, 10, 15, 20, 30)
SLICES: Final = [r"[\x20\x0A\x0D\x09]+", *(_STRING + f"{{1,{n}}}" for n in _LENGTHS), _STRING + "+"]
Kept = tuple[str, str]  # kind and source


class GrammarCompiler:
    """Makes grammars for one tokenizer and a network of `vocab_size` logits. Safe to use from threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, form: ToolForm | None = None) -> None:
        """`form`: how the model writes calls of tools; None: Hermes' way."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._form = form or ToolForm()
        self._made: LLTokenizer | None = None
        self._lock = Lock()
        self._trials = Trials()
        self._kept: OrderedDict[Kept, _Compiled] = OrderedDict()

    def compile(
        self, grammar: Grammar, *, choices: int = 1, field: str = "response_format", go_on: GoOn = going_on
    ) -> TokenGrammar:
        """A grammar that constrains the whole answer.

        Args:
            choices: answers that follow it at the same time.
            go_on: called now and then; it ends the work by raising.

        Raises:
            RequestError: it is no such grammar, uses what isn't supported, allows nothing, or is too large.
        """
        compiled = self._compiled(
            (grammar.kind, grammar.source), lambda: grammar_text(grammar, field), field, go_on
        )
        check_choices(grammar, choices, field)
        return compiled

    def compile_tools(self, use: ToolUse, *, go_on: GoOn = going_on) -> TokenGrammar:
        """A grammar for an answer with tool calls. `go_on`: as in `compile`.

        Raises:
            RequestError: a tool's name or schema, or the choice, can't be used.
        """

        def text() -> str:
            lark = tools_lark(self._form, use, self.marker_tokens, self._trials, go_on)
            return LLMatcher.grammar_from_lark(lark)

        return self._compiled(("tools", repr(use)), text, "tools", go_on)

    def close(self) -> None:
        """End what runs beside this process."""
        self._trials.close()

    def warm_up(self) -> None:
        """Build what the first grammar would wait for: a second for 150,000 tokens, with the GIL held."""
        assert self._tokenizer

    @property
    def marker_tokens(self) -> dict[str, int]:
        """Ids of the markers of calls that are tokens of their own."""
        ids = {text: self._source.token_id(text) for text in markers(self._form)}
        return {text: i for text, i in ids.items() if i is not None and self._tokenizer.is_special_token(i)}

    @property
    def _tokenizer(self) -> LLTokenizer:
        """llguidance's view of the vocabulary, built for the first grammar or by `warm_up`."""
        with self._lock:
            if self._made is None:
                self._made = LLTokenizer(
                    self._source.serialized(),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._source.eos_ids),
                    slices=SLICES,
                )
            return self._made

    def _compiled(self, key: Kept, make: Callable[[], str], field: str, go_on: GoOn) -> TokenGrammar:
        """The grammar that was kept for a key, or the one that `make` gives in llguidance's own form."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        text = make()
        verdict = self._trials.check(text, go_on)
        if verdict.error:
            raise refused(verdict.error, key[0], field)
        compiled = _Compiled(LLMatcher(self._tokenizer, text, log_level=0, limits=limits()))
        if compiled.error is not None:
            raise refused(compiled.error, key[0], field)
        if verdict.bytes <= KEPT_BYTES:
            with self._lock:
                self._kept[key] = compiled
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return compiled


class _Compiled:
    """A grammar whose first mask is known: all choices of all requests begin with it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._lock = Lock()
        self._first = b"" if matcher.is_error() else matcher.compute_bitmask()  # finds what allows nothing
        self.error = matcher.get_error() if matcher.is_error() else None

    def start(self) -> GrammarState:
        with self._lock:
            return _State(self._matcher.deep_copy(), self._first)


class _State:
    """Where one choice is. What Rust panics at is an error of this grammar, not the end of the engine."""

    def __init__(self, matcher: LLMatcher, first: bytes) -> None:
        self._matcher = matcher
        self._first: bytes | None = first  # the mask, until there was a token
        self._panic: str | None = None

    @property
    def error(self) -> str | None:
        if self._panic is not None:
            return self._panic
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill(self, bits: torch.Tensor) -> None:
        if self._first is not None:
            bits.numpy().view("uint8")[:] = memoryview(self._first)[: bits.nbytes]
            return
        with self._guarded():
            self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)

    def accept(self, token: int) -> None:
        self._first = None
        with self._guarded():
            if not self._matcher.is_stopped():  # with `ignore_eos` end-of-sequence tokens go on coming
                self._matcher.consume_token(token)

    def takes(self, tokens: Sequence[int]) -> int:
        other, found = self.copy(), 0  # what goes wrong there is nothing that anybody has chosen
        with other._guarded():
            found = other._matcher.validate_tokens(list(tokens))
        return 0 if other.error is not None else found

    def copy(self) -> "_State":
        made = _State(self._matcher.deep_copy(), b"")
        made._first, made._panic = self._first, self._panic
        return made

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            self._panic = f"{type(error).__name__}: {one_line(str(error))}"
