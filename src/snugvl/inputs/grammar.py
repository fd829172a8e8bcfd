"""Grammars over a tokenizer's vocabulary, by llguidance: JSON schemas, regular expressions, Lark, tool calls.

A grammar is compiled and asked for its first token in the caller's thread, before anything starts, so what
is wrong with it is said at once. What could make that slow is bounded: sizes and nesting here (the Rust
side recurses, and a stack that overflows takes the process along), work and memory by llguidance's limits.
"""

import json
from collections.abc import Iterator
from threading import Lock
from typing import Any, Final

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from snugvl.backends.protocol import Grammar, ToolUse
from snugvl.engine.grammar import GrammarState, TokenGrammar
from snugvl.errors import RequestError
from snugvl.inputs import tool_grammar
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools import CLOSING, OPENING

MAX_CHARACTERS: Final = {"json_schema": 131_072, "regex": 8_192, "lark": 32_768}
MAX_DEPTH: Final = 100  # of a JSON document
MAX_LINKED_DEPTH: Final = 400  # of a schema and everything it refers to, on top of each other
MAX_RULES: Final = 256  # of a Lark grammar
SPACE: Final = " ?"  # between the tokens of JSON: `{"a": 1}` and `{"a":1}`, but no endless white space
_LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False)
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


class GrammarCompiler:
    """Makes grammars for one tokenizer and a network of `vocab_size` logits. Safe to use from threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
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
            options: Any = {"whitespace_pattern": SPACE, "lenient": False, "coerce_one_of": False}
            text = LLMatcher.grammar_from_json_schema(source, overrides=options)
        elif kind == "regex":
            text = LLMatcher.grammar_from_regex(source)
        else:
            rules = sum(":" in line for line in source.splitlines())
            if rules > MAX_RULES:
                raise RequestError(
                    f"the Lark grammar has {rules} rules, at most {MAX_RULES} are taken", field=field
                )
            text = LLMatcher.grammar_from_lark(source)
        return self._checked(text, f"the {_NAMES[kind]}", field)

    def compile_tools(self, use: ToolUse) -> TokenGrammar:
        """A grammar for an answer with tool calls.

        Raises:
            RequestError: a tool's name or schema, or the choice, can't be used.
        """
        tool_grammar.check_tools(use)
        total = 0
        for index, tool in enumerate(use.tools):
            field = f"tools[{index}].parameters"
            source = json.dumps(tool_grammar.arguments_schema(tool))
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
        lark = tool_grammar.tool_lark(use, marker_tokens=self.has_marker_tokens, space=SPACE)
        return self._checked(LLMatcher.grammar_from_lark(lark), "the tools", "tools")

    @property
    def has_marker_tokens(self) -> bool:
        """Whether `<tool_call>` and `</tool_call>` are tokens of their own."""
        ids = [self._source.token_id(text) for text in (OPENING, CLOSING)]
        return all(i is not None and self._tokenizer.is_special_token(i) for i in ids)

    @property
    def _tokenizer(self) -> LLTokenizer:
        """llguidance's view of the vocabulary, built for the first grammar (1 s for 150,000 tokens)."""
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


def check_schema(source: str, field: str) -> None:
    """Refuse what is no JSON object, or is nested so deeply that compiling could overflow a stack.

    Raises:
        RequestError: with what is wrong and the limit.
    """
    try:
        schema = json.loads(source)
    except RecursionError:
        schema = None
        depth = MAX_DEPTH + 1
    except ValueError as error:
        raise RequestError(f"the JSON schema is not JSON: {error}", field=field) from None
    else:
        depth = _depth(schema)
    if depth > MAX_DEPTH:
        raise RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels", field=field)
    if not isinstance(schema, dict):
        raise RequestError('a JSON schema is an object, such as {"type": "object"}', field=field)
    linked = depth + sum(_depth(_target(schema, link)) for link in set(_links(schema)))
    if linked > MAX_LINKED_DEPTH:
        raise RequestError(
            f"the JSON schema and what its $refs lead to are {linked} levels deep in all, at most "
            f"{MAX_LINKED_DEPTH} are taken; use fewer $refs",
            field=field,
        )


def _check_length(kind: str, source: str, field: str) -> None:
    if len(source) > MAX_CHARACTERS[kind]:
        raise RequestError(
            f"the {_NAMES[kind]} has {len(source):,} characters, at most {MAX_CHARACTERS[kind]:,} are taken",
            field=field,
        )


def _depth(value: Any) -> int:
    """Lists and objects within each other; without recursion, as that is what it is there to prevent."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, level)
            children = item.values() if isinstance(item, dict) else item
            stack += [(child, level + 1) for child in children]
    return deepest


def _links(value: Any) -> Iterator[str]:
    """Every `$ref` of a schema."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if isinstance(item.get("$ref"), str):
                yield item["$ref"]
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _target(schema: Any, link: str) -> Any:
    """What a `$ref` leads to; the whole schema where that isn't plain."""
    found = schema
    for name in link.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return schema
        found = found[name]
    return found


def _one_line(message: str) -> str:
    """The first 300 characters of llguidance's message, without its listing of the source."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
