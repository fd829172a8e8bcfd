"""Grammars over a tokenizer's vocabulary, by llguidance: JSON schemas, regular expressions, Lark, tool calls.

A grammar is compiled and asked for its first token in the caller's thread, before anything starts, so what
is wrong with it is said at once. What could make that slow is bounded: sizes and nesting first (the Rust side
recurses, and a stack that overflows takes the process along); then it is tried in a process that can be ended
(`trials.py`), as a grammar doesn't tell how long its compiler takes. Those used last are kept.

    kept? ─ no ─► sizes ─► llguidance's own form ─► tried ─► compiled, first mask ─► kept
"""

import ctypes
import json
import time
import weakref
from _thread import start_new_thread
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy as shallow
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from threading import Lock
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from snugvl.core.messages import GoOn, Grammar, ToolForm, ToolUse, going_on
from snugvl.core.resources import give_back_heap
from snugvl.engine.sampling.grammar import GrammarState, KeptLast, MadeMask, Openings, TokenGrammar
from snugvl.engine.sampling.masks import MOST_THREADS
from snugvl.errors import ENDINGS, QueueFull
from snugvl.inputs.constraints import check_choices, grammar_text, one_line, refused, tools_lark
from snugvl.inputs.positions import Calls, Key, Position, beginning
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.enforceable import ended
from snugvl.inputs.tools.forms import before_arguments, markers
from snugvl.inputs.tools.grammar import arguments_schema, called
from snugvl.inputs.trial import limits
from snugvl.inputs.trials import GRAMMAR_BYTES, Trials

FIELD: Final = "response_format"  # that has a grammar
KEPT: Final = 16  # compiled grammars
KEPT_BYTES: Final = 8 << 20  # of each that is kept, at most
MASKS_BYTES: Final = 16 << 20  # of masks that are kept of one grammar, by position
MOST_MASKS: Final = 1_024  # of them: small ones take less than the keys of their positions
IN_USE: Final = 2  # of them, those asked for last, keep what several answers at once have found out
AGAIN_S: Final = 0.02  # of processor time, that compiling a grammar for all choices of a request may take
# Classes of tokens that a mask allows as a whole, where the grammar allows all of a class: white space, and
# what a JSON string holds, up to so many characters. In strings with a `maxLength` masks of 151,936 tokens
# take 0.29 ms so, and 0.43 with llguidance's own lengths (10, 30).
_STRING: Final = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS: Final = (3, 6, 10, 15, 20, 30)
SLICES: Final = [r"[\x20\x0A\x0D\x09]+", *(_STRING + f"{{1,{n}}}" for n in _LENGTHS), _STRING + "+"]
Kept = tuple[str, str]  # kind and source
AT_ONCE_BYTES: Final = 192 << 20  # of all grammars in use that are too large to be kept
GONE_S: Final = 0.1  # from the end of one's last request until its memory is free for sure

T = TypeVar("T")


class GrammarCompiler:
    """Makes grammars for one tokenizer and a network of `vocab_size` logits. Safe to use from threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, form: ToolForm | None = None) -> None:
        """`form`: how the model writes calls of tools; None: in Hermes' form."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._form = form or ToolForm()
        self._made: LLTokenizer | None = None
        self._table: TokenTable | None = None
        self._lock = Lock()
        self._trials = Trials()
        self._kept: OrderedDict[Kept, _Compiled] = OrderedDict()
        self._large: LargeGrammars[_Compiled] = LargeGrammars()

    def compile(self, grammar: Grammar, *, choices: int = 1, go_on: GoOn = going_on) -> TokenGrammar:
        """A grammar that constrains the whole answer. `choices`: answers that follow it at the same time;
        `go_on`: called now and then; it ends the work by raising.

        Raises:
            RequestError: it is no such grammar, uses what isn't supported, allows nothing, or is too large.
        """
        key = grammar.kind, grammar.source
        compiled = self._compiled(key, lambda: grammar_text(grammar, FIELD), FIELD, go_on)
        check_choices(grammar, choices, FIELD)
        return compiled.lend(choices)

    def compile_tools(self, use: ToolUse, *, choices: int = 1, go_on: GoOn = going_on) -> TokenGrammar:
        """A grammar for an answer with tool calls. `choices`, `go_on`: as in `compile`.

        Raises:
            RequestError: a tool's name or schema, or the choice, can't be used.
        """

        def text() -> str:
            lark = tools_lark(self._form, use, self.marker_tokens, self._trials, go_on)
            return LLMatcher.grammar_from_lark(lark)

        compiled = self._compiled(("tools", repr(use)), text, "tools", go_on, use)
        return compiled.lend(choices)

    def _calls(self, use: ToolUse) -> Calls | None:
        """Where arguments begin; None where that is known of no tool."""
        begun = {}
        for i, tool in enumerate(called(use)):
            position = beginning(ended(arguments_schema(tool)), b"%d;" % i)
            head = before_arguments(self._form, tool.name)
            if head is not None and position is not None:
                begun[head.encode()] = position
        return Calls(begun) if begun else None

    def close(self) -> None:
        """End what runs beside this process, and let go of what was compiled."""
        self._trials.close()
        with self._lock:
            self._kept.clear()
            self._made = self._table = None

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
                self._table = TokenTable(self._made)
            return self._made

    def _compiled(
        self, key: Kept, make: Callable[[], str], field: str, go_on: GoOn, use: ToolUse | None = None
    ) -> "_Compiled":
        """The grammar that was kept for a key, or the one that `make` gives in llguidance's own form."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                for old in [*self._kept.values()][:-IN_USE]:
                    old.forget()
                return self._kept[key]
        if (large := self._large.find(key)) is not None:
            return large
        text = make()
        verdict = self._trials.check(text, go_on)
        if verdict.error:
            raise refused(verdict.error, key[0], field)
        tokenizer = self._tokenizer
        table = self._table if key[0] in ("json_schema", "tools") else None
        position = beginning(ended(json.loads(key[1]))) if key[0] == "json_schema" else None
        calls = None if use is None else self._calls(use)

        def matcher() -> LLMatcher:
            return LLMatcher(tokenizer, text, log_level=0, limits=limits())

        def made() -> _Compiled:
            return _Compiled(matcher, verdict.bytes, table, position, calls, self.marker_tokens, tokenizer)

        too_large = verdict.bytes > KEPT_BYTES
        compiled = self._large.made(key, verdict.bytes, made) if too_large else made()
        if compiled.error is not None:
            raise refused(compiled.error, key[0], field)
        if verdict.bytes <= KEPT_BYTES:
            with self._lock:
                self._kept[key] = compiled
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return compiled


@cache
def _executor(processors: int) -> LLExecutor:
    """So many threads of Rust's. What is woken for masks of microseconds costs more than they do."""
    return LLExecutor(num_threads=processors)


# A form says "integer", and a model may write digits until the context is full: JSON's numbers have any
# number of them; so have llguidance's. A mask that follows a long run of digits loses the digits, if it
# stands within a number: where the number could end, and nothing could come that no number goes on with. In
# a string another character could, its quotation mark at least. So every part of a number has an end,
# whatever form of calls it stands in.
MOST: Final = 20  # digits in a row: what 64 bits hold has no more
_WHOLE: Final = 0x80  # of an entry of `_tails`: the token has nothing but digits
_DIGITS: Final = frozenset(b"0123456789")
_GO_ON: Final = frozenset(b".eE")  # also continue a number
_ENDS: Final = frozenset(b",}]<\n\r\t ")  # what may stand after a number


class TokenTable:
    """The tokens of a vocabulary that are digits, go on with a number, or stand after one.

    Attributes:
        characters: of each token, how many characters it adds to a JSON string; 0 where it does more than
            that, or less: quotation marks, escapes, parts of characters.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        size = tokenizer.vocab_size
        tails, characters = bytearray(size), bytearray(size)
        digits, ends, others = (np.zeros(-(-size // 32) * 32, dtype=bool) for _ in range(3))
        for token in range(size):
            if tokenizer.is_special_token(token):
                ends[token] = True
                continue
            text = tokenizer.decode_bytes([token])
            if b'"' not in text and b"\\" not in text:
                with suppress(ValueError):  # no UTF-8, or too long
                    characters[token] = len(text.decode())
            kept = text.rstrip(b"0123456789")
            tails[token] = min(len(text) - len(kept), _WHOLE - 1) | (0 if kept or not text else _WHOLE)
            if text:
                first = text[0]
                digits[token] = first in _DIGITS
                ends[token] = first in _ENDS
                others[token] = first not in _DIGITS and first not in _GO_ON and first not in _ENDS
        self._tails, self.characters = bytes(tails), bytes(characters)
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


def most_masks(vocab_size: int) -> int:
    """Number of masks over a vocabulary that are kept of one grammar."""
    return min(8 * MASKS_BYTES // vocab_size, MOST_MASKS)


class _Compiled:
    """A grammar whose first mask is known: all choices of all requests begin with it.

    Copies of a matcher share its automata of words, and a lock that each holds while it makes a mask: on
    copies of one, eight threads are no faster than one. So each request has a matcher of its own as long as
    there are fewer than threads; more share them, as making one holds Python's lock for a millisecond. What
    comes back knows more words, which makes the next answer's masks quicker.

    Attributes:
        error: what is wrong with it, or None.
        openings: see `GrammarState`.
        table: ends numbers that go on and on; None where its digits aren't JSON's.
        position: the one at which answers begin; None where masks aren't known by position from there on.
        calls: positions in answers with calls; None where there are none.
        markers: text of tokens that are markers of calls.
        masks: those that were made last, by position.
        tokenizer: whose tokens its answers have.
    """

    def __init__(
        self,
        make: Callable[[], LLMatcher],
        size: int,
        table: TokenTable | None,
        position: Position | None,
        calls: Calls | None,
        markers: Mapping[str, int],
        tokenizer: LLTokenizer,
    ) -> None:
        """`size`: bytes that a matcher takes; all of them take `GRAMMAR_BYTES` at most."""
        self.table, self.position, self.calls, self.tokenizer = table, position, calls, tokenizer
        self.markers = {token: text.encode() for text, token in markers.items()}
        self.masks: KeptLast[Key, MadeMask] = KeptLast(most_masks(tokenizer.vocab_size))
        begun = time.thread_time()
        matcher = make()
        self.make = make
        self.first = b"" if matcher.is_error() else matcher.compute_bitmask()  # finds what allows nothing
        self.error = matcher.get_error() if matcher.is_error() else None
        self._most = min(max(KEPT_BYTES // max(size, 1), 1), MOST_THREADS)
        self._limit = min(max(GRAMMAR_BYTES // max(size, 1), 1), MOST_THREADS)
        self._own = int(AGAIN_S / max(time.thread_time() - begun, AGAIN_S / MOST_THREADS))
        self.openings = Openings()
        self._lock = Lock()
        self._matchers = [_Shared(matcher)]
        self._returned: deque[Sequence[_Shared]] = deque()

    @property
    def idle(self) -> list[LLMatcher]:
        """Matchers that no request uses."""
        return [each.matcher for each in self._matchers if not each.users]

    def lend(self, choices: int) -> "_Lent":
        """Matchers for one request: one for each choice, if they are made quickly, no more than threads."""
        return _Lent(self, [self._one() for _ in range(min(choices, max(self._own, 1), self._limit))])

    def _one(self) -> "_Shared":
        self._settle()
        with self._lock:
            found = min(self._matchers, key=lambda each: each.users, default=None)
            if found is not None and (not found.users or len(self._matchers) >= self._limit):
                found.users += 1
                return found
        made = _Shared(self.make(), 1)
        with self._lock:
            self._matchers.append(made)
        return made

    def forget(self) -> None:
        """Drop all unused matchers but one, each of which may hold ten megabytes of words, and all masks."""
        self.masks.clear()
        self._trim(1)
        self._settle()

    def keep(self, matchers: Sequence["_Shared"]) -> None:
        """Lend these matchers no more; requests that use them go on."""
        with self._lock:
            self._matchers = [each for each in self._matchers if each not in matchers]
        self._settle()

    def take_back(self, matchers: Sequence["_Shared"]) -> None:
        """Matchers that a request no longer uses. The garbage collector calls it, in any thread, anywhere."""
        self._returned.append(matchers)
        self._settle()

    def _settle(self) -> None:
        """Count matchers that were given back, unless another thread is doing so."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                for each in self._returned.popleft():
                    each.users -= 1
            finally:
                self._lock.release()
            self._trim(self._most)

    def _trim(self, most: int) -> None:
        """Drop unused matchers beyond `most`."""
        with self._lock:
            idle = [each for each in self._matchers if not each.users]
            gone = idle[: max(len(idle) - most, 0)]
            self._matchers = [each for each in self._matchers if each not in gone]


@dataclass(slots=True, eq=False)
class _Shared:
    """A matcher of which answers use copies; `users`: requests."""

    matcher: LLMatcher
    users: int = 0


class _Lent:
    """Matchers of one request, as long as it or one of its choices lives."""

    def __init__(self, owner: _Compiled, matchers: Sequence[_Shared]) -> None:
        self.owner, self._matchers, self._turns = owner, matchers, cycle(matchers)
        weakref.finalize(self, owner.take_back, matchers).atexit = False

    def start(self) -> GrammarState:
        return _State(next(self._turns).matcher.deep_copy(), self)

    def keep(self) -> None:
        """They are not to be lent again."""
        self.owner.keep(self._matchers)


class _State(GrammarState):
    """Where one choice is. What Rust panics at is an error of this grammar, not the end of the engine.

    Its matcher takes tokens when a mask must be made: where masks are known by position, it may lag behind.
    Automata only grow, up to a limit. An answer that comes to it in automata that knew others' words, too,
    goes on with new ones.
    """

    def __init__(self, matcher: LLMatcher, lent: _Lent) -> None:
        self._matcher = matcher
        self._first: bytes | None = lent.owner.first  # the mask, until there was a token
        self._panic: str | None = None
        self._lent: _Lent | None = lent  # None: no other request's words are in its automata
        self._tokens: list[int] = []
        self._taken = 0  # of them, by the matcher
        owner = lent.owner
        self._table = owner.table
        self._characters = b"" if owner.table is None else owner.table.characters
        self._run = 0  # digits in a row at the end of the answer so far
        self._masks, self._tokenizer = owner.masks, owner.tokenizer
        self._position = owner.position and owner.position.copy()
        self._calls, self._markers = owner.calls, owner.markers
        self._tail = b""  # of what stands outside of arguments, where it may call tools
        self._key: Key | None = None  # of its position; None where that says nothing about the mask

    @property
    def openings(self) -> Openings | None:
        return None if self._first is None or self._lent is None else self._lent.owner.openings

    @property
    def error(self) -> str | None:
        self._catch_up()
        if self._panic is not None:
            return self._panic
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def _broken(self) -> bool:
        return self._panic is not None or self._matcher.is_error()

    def fill(self, bits: torch.Tensor) -> None:
        if self._first is not None:
            bits.numpy().view("uint8")[:] = memoryview(self._first)[: bits.nbytes]
        else:
            self._fill(bits.data_ptr(), bits.nbytes)
            self._correct(bits)

    def _correct(self, bits: torch.Tensor) -> None:
        """Let a number end that has gone on for long enough, and nothing go on in a grammar that can't."""
        if self._broken:
            bits.zero_()
        elif self._run >= MOST and self._table is not None:
            self._table.end(bits.numpy())

    def _fill(self, address: int, size: int) -> None:
        """Write the mask of the next token to `size` bytes at `address`."""
        if self._recall(address, size):
            return
        try:  # not `_guarded`, as in `accept`
            self._catch_up()
            self._matcher.unsafe_compute_mask_ptr(address, size)
            if self._goes_on():
                self._matcher.unsafe_compute_mask_ptr(address, size)
            self._remember(address, size)
        except BaseException as error:
            self._note(error)

    def _recall(self, address: int, size: int) -> bool:
        """Write the mask of this position there, if an answer has stood here before; whether one has."""
        made = None if self._key is None else self._masks.get(self._key)
        if made is None or len(made.bits) != size:
            return False
        ctypes.memmove(address, made.bits, size)
        return True

    def _remember(self, address: int, size: int) -> None:
        """Keep the mask of this position, which stands there."""
        if self._key is not None and not self._matcher.is_error():
            words = np.frombuffer(ctypes.string_at(address, size), np.int32)
            self._masks.keep(self._key, MadeMask.of(words))

    @classmethod
    def fill_all(cls, states: Sequence[Self], bits: torch.Tensor, processors: int = 1) -> None:
        if any(state._first is not None for state in states):
            super().fill_all(states, bits)
            return
        start, size = bits.data_ptr(), bits[0].nbytes
        if processors == 1:
            for row, state in enumerate(states):
                state._fill(start + row * size, size)
        else:
            new = [row for row, state in enumerate(states) if not state._recall(start + row * size, size)]
            try:
                for row in new:
                    states[row]._catch_up()
                pairs = [(states[row]._matcher, row) for row in new]
                if pairs:  # it takes no empty list
                    _executor(processors).unsafe_compute_mask_ptr(pairs, start, size, len(bits))
            except BaseException as error:
                if isinstance(error, ENDINGS):
                    raise
                super().fill_all(states, bits)  # it doesn't say whose grammar Rust panicked at
                return
            for row in new:
                states[row]._remember(start + row * size, size)
                if states[row]._goes_on():
                    states[row]._fill(start + row * size, size)
        for row, state in enumerate(states):
            if state._run >= MOST or state._broken:
                state._correct(bits[row])

    def accept(self, token: int) -> MadeMask | None:
        if self._position is not None and (key := self._position.count(self._characters[token])):
            self._tokens.append(token)
            self._run, self._key = 0, key  # its digits are none of a number
            return self._masks.get(key)
        if self._key is None:
            self._catch_up()
            if self._panic is not None or self._matcher.is_stopped():
                return None  # with `ignore_eos` end-of-sequence tokens go on coming
        self._first = None
        self._tokens.append(token)
        if self._table is not None:
            self._run = self._table.run(self._run, token)
        if self._position is not None or self._calls is not None:
            self._advance(token)
        return None if self._key is None or self._run >= MOST else self._masks.get(self._key)

    def _advance(self, token: int) -> None:
        """Go on to the position after a token."""
        text = self._markers.get(token)
        if text is None and self._tokenizer.is_special_token(token):
            self._position = self._calls = self._key = None  # it stands for no text
            return
        text = text or self._tokenizer.decode_bytes([token])
        if self._position is not None:
            self._position.advance(text)
        elif self._calls is not None:
            self._tail, self._position = self._calls.find(self._tail + text)
        self._key = None if self._position is None else self._position.key
        if self._key is None and self._calls is not None:
            self._position = None  # until arguments begin again

    def _catch_up(self) -> None:
        """Give the matcher the tokens that it hasn't taken yet."""
        if self._taken == len(self._tokens):
            return
        new, self._taken = self._tokens[self._taken :], len(self._tokens)
        try:  # not `_guarded`, which would take as long again: this is once a token
            self._matcher.consume_tokens(new)
            self._goes_on()
        except BaseException as error:
            self._note(error)

    def _goes_on(self) -> bool:
        """Whether an answer that couldn't go on now can, in automata of its own."""
        if self._lent is None or not self._matcher.is_error():
            return False
        self._lent.keep()
        self._matcher, self._lent = self._lent.owner.make(), None
        return self._matcher.consume_tokens(self._tokens)

    def takes(self, tokens: Sequence[int]) -> int:
        other, found = self.copy(), 0  # what goes wrong there is nothing that anybody has chosen
        with other._guarded():
            found = other._matcher.validate_tokens(list(tokens))
        return 0 if other.error is not None else found

    def copy(self) -> "_State":
        self._catch_up()
        made = shallow(self)
        made._matcher, made._tokens = self._matcher.deep_copy(), [*self._tokens]
        made._position = self._position and self._position.copy()
        return made

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._note(error)

    def _note(self, error: BaseException) -> None:
        """Keep what Rust panicked at; what is not an error passes through."""
        if isinstance(error, ENDINGS):
            raise error
        self._panic = f"{type(error).__name__}: {one_line(str(error))}"


class LargeGrammars(Generic[T]):
    """Grammars that are too large to be kept: shared while they are in use, given back afterwards.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: weakref.WeakValueDictionary[tuple[str, str], T] = weakref.WeakValueDictionary()
        self._bytes = 0
        self._gone: deque[int] = deque()  # bytes; the garbage collector adds to it, in any thread, anywhere

    @property
    def bytes(self) -> int:
        """Bytes of the grammars in use."""
        with self._lock:
            while self._gone:
                self._bytes -= self._gone.popleft()
            return self._bytes

    def find(self, key: tuple[str, str]) -> T | None:
        """The grammar of this kind and source, if it is in use."""
        return self._found.get(key)

    def made(self, key: tuple[str, str], size: int, make: Callable[[], T]) -> T:
        """A new grammar of `size` bytes, which count for as long as it is in use.

        Raises:
            QueueFull: those in use leave no room for it.
        """
        used = self.bytes
        with self._lock:
            if used and self._bytes + size > AT_ONCE_BYTES:
                raise QueueFull(
                    f"grammars of running requests take {used >> 20} MiB, and this one {size >> 20}; "
                    f"at most {AT_ONCE_BYTES >> 20} MiB are taken at once; try again shortly"
                )
            self._bytes += size
        try:
            compiled = make()
        except BaseException:
            self._gone.append(size)
            raise
        weakref.finalize(compiled, _let_go, self._gone, size).atexit = False
        self._found[key] = compiled
        return compiled


def _let_go(gone: deque[int], size: int) -> None:
    gone.append(size)
    with suppress(RuntimeError):  # the interpreter ends
        # Not a `threading.Thread`, which takes locks that the garbage collector may have come between.
        start_new_thread(_give_back, ())


def _give_back() -> None:
    time.sleep(GONE_S)
    give_back_heap()
