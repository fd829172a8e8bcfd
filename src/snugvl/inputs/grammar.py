"""Grammars over a tokenizer's vocabulary, by llguidance: JSON schemas, regular expressions, Lark, tool calls.

A grammar is compiled and asked for its first token in the caller's thread, before anything starts, so what
is wrong with it is said at once. What could make that slow is bounded: sizes and nesting here (the Rust
side recurses, and a stack that overflows takes the process along), work and memory by llguidance's limits.
"""

import json
from threading import Lock
from typing import Any, Final

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from snugvl.backends.protocol import Grammar, ToolForm, ToolUse
from snugvl.engine.sampling.grammar import GrammarState, TokenGrammar
from snugvl.errors import RequestError
from snugvl.inputs.schema import check_schema
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.forms import markers, tool_lark
from snugvl.inputs.tools.grammar import COMPACT, arguments_schema, check_tools

MAX_CHARACTERS: Final = {"json_schema": 131_072, "regex": 8_192, "lark": 32_768}
MAX_RULES: Final = 256  # of a Lark grammar
MAX_INTERSECTIONS: Final = 8  # of a Lark grammar
_LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False)
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


class GrammarCompiler:
    """Makes grammars for one tokenizer and a network of `vocab_size` logits. Safe to use from threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, form: ToolForm | None = None) -> None:
        """`form`: how the model writes calls of tools; None: Hermes' way."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._form = form or ToolForm()
        self._made: LLTokenizer | None = None
        self._lock = Lock()

    def compile(self, grammar: Grammar, *, field: str = "response_format") -> TokenGrammar:
        """A grammar that constrains the whole answer.

        Raises:
            RequestError: it is no such grammar, uses what isn't supported, allows nothing, or is too large.
        """
        kind, source = grammar.kind, grammar.source
        if kind not in _NAMES:
            raise RequestError(f"a grammar is a {', a '.join(_NAMES.values())}, not {kind!r}", field=field)
        _check_length(kind, source, field)
        if kind == "json_schema":
            check_schema(source, field)
            options: Any = {**COMPACT, "lenient": False, "coerce_one_of": False}
            text = LLMatcher.grammar_from_json_schema(source, overrides=options)
        elif kind == "regex":
            text = LLMatcher.grammar_from_regex(source)
        else:
            _check_lark(source, field)
            text = LLMatcher.grammar_from_lark(source)
        return self._checked(text, f"the {_NAMES[kind]}", field)

    def compile_tools(self, use: ToolUse) -> TokenGrammar:
        """A grammar for an answer with tool calls.

        Raises:
            RequestError: a tool's name or schema, or the choice, can't be used.
        """
        check_tools(use)
        total = 0
        for index, tool in enumerate(use.tools):
            field = f"tools[{index}].parameters"
            source = json.dumps(arguments_schema(tool))
            total += len(source)
            _check_length("json_schema", source, field)
            check_schema(source, field)
            # Compiled alone, so that an error names its tool.
            self.compile(Grammar("json_schema", source), field=field)
        if total > MAX_CHARACTERS["json_schema"]:
            raise RequestError(
                f"the tools' schemas have {total:,} characters, at most "
                f"{MAX_CHARACTERS['json_schema']:,} are taken together; offer fewer tools",
                field="tools",
            )
        lark = tool_lark(self._form, use, self.marker_tokens)
        return self._checked(LLMatcher.grammar_from_lark(lark), "the tools", "tools")

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
                )
            return self._made

    def _checked(self, grammar: str, what: str, field: str) -> TokenGrammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what allows nothing, and warms the copies up
        if matcher.is_error():
            raise RequestError(f"{what} can't be used: {_one_line(matcher.get_error())}", field=field)
        return _Compiled(matcher)


class _Compiled:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._lock = Lock()

    def start(self) -> GrammarState:
        with self._lock:
            return _State(self._matcher.deep_copy())


class _State:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill(self, bits: torch.Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():  # with `ignore_eos` end-of-sequence tokens go on coming
            self._matcher.consume_token(token)


def _check_length(kind: str, source: str, field: str) -> None:
    if len(source) > MAX_CHARACTERS[kind]:
        raise RequestError(
            f"the {_NAMES[kind]} has {len(source):,} characters, at most {MAX_CHARACTERS[kind]:,} are taken",
            field=field,
        )


def _check_lark(source: str, field: str) -> None:
    rules = sum(":" in line for line in source.splitlines())
    if rules > MAX_RULES or source.count("&") > MAX_INTERSECTIONS:
        raise RequestError(
            f"the Lark grammar has {rules} rules and {source.count('&')} intersections (&); at most "
            f"{MAX_RULES} and {MAX_INTERSECTIONS} are taken",
            field=field,
        )


def _one_line(message: str) -> str:
    """The first 300 characters of llguidance's message, without its listing of the source."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
