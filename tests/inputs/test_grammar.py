"""Grammars allow what they should and nothing else, and bad ones are refused before anything starts."""

import json
import random
import re
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Backend

from snugvl.core.messages import Grammar, Tool, ToolUse
from snugvl.engine.sampling.grammar import GrammarState, TokenGrammar
from snugvl.engine.sampling.masks import MOST_THREADS, unpacked
from snugvl.errors import QueueFull, RequestError
from snugvl.inputs import grammar
from snugvl.inputs.constraints import grammar_text
from snugvl.inputs.grammar import KEPT, SLICES, GrammarCompiler, _State
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.enforceable import referred
from snugvl.inputs.tools.hermes import HermesParser
from snugvl.inputs.tools.parser import CallArguments, CallStarted
from tests.inputs.conftest import PLAIN_ADDED, small_tokenizer
from tests.inputs.test_trials import numbers
from tests.masks import allowed_by
from tests.patience import PATIENCE_S

VOCAB = 512
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("get_weather", "", CITY), Tool("now"))


def compiler_of(backend: Backend) -> GrammarCompiler:
    eos = frozenset(backend.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    return GrammarCompiler(Tokenizer(backend, eos_ids=eos), VOCAB)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return small_tokenizer()


@pytest.fixture(scope="module")
def compiler(backend: Backend) -> GrammarCompiler:
    return compiler_of(backend)


@pytest.fixture(scope="module", params=["marker tokens", "literal markers"])
def either(request: pytest.FixtureRequest, backend: Backend) -> tuple[GrammarCompiler, Backend]:
    """A compiler over a tokenizer with `<tool_call>` as a token, and over one without."""
    if request.param == "literal markers":
        state = json.loads(backend.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in PLAIN_ADDED]
        backend = Backend.from_str(json.dumps(state))
    return compiler_of(backend), backend


def allowed(state: GrammarState) -> set[int]:
    return set(allowed_by(state, VOCAB).nonzero()[:, 0].tolist())


def follows(grammar: TokenGrammar, backend: Backend, text: str) -> bool:
    """Whether the grammar takes `text`, token by token, and then its end."""
    state = grammar.start()
    for token in [*backend.encode(text).ids, backend.token_to_id("<|im_end|>")]:
        if token not in allowed(state):
            return False
        state.accept(token)
        assert state.error is None
    return True


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "y"]}}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (
            "json_schema",
            SCHEMA,
            ['{"a": 1}', '{"a":1,"b":[]}', '{"a": -3, "b": ["x", "y"]}'],
            ["", "{}", '{"a": "1"}', '{"a": 1, "c": 2}', '{"a": 1}\n', '{ "a": 1}', '{"a":  1}', '{"a":\n1}'],
        ),
        ("json_schema", '{"type": "object"}', ["{}", '{"é": [null, 1.5]}'], ["[]", "1", "{", '{"a": }']),
        ("regex", "[ab]{2,3}|c", ["ab", "bbb", "c"], ["a", "abc", "cc", ""]),
        ("lark", 'start: "<" inner* ">"\ninner: "(" inner ")" | /x+/', ["<>", "<(xx)x>"], ["<(>", "x"]),
    ],
)
def test_what_it_allows(
    compiler: GrammarCompiler, backend: Backend, kind: Any, source: str, good: list[str], bad: list[str]
) -> None:
    grammar = compiler.compile(Grammar(kind, source))
    for text in good:
        assert follows(grammar, backend, text), text
    for text in bad:
        assert not follows(grammar, backend, text), text


def number_of(kind: str, **more: Any) -> str:
    return json.dumps({"type": "object", "properties": {"n": {"type": kind, **more}}, "required": ["n"]})


N = '{"n": '


@pytest.mark.parametrize(
    ("source", "before", "digits"),
    [
        (number_of("integer"), N, 20),
        (number_of("integer"), N + "-", 20),
        (number_of("number"), N, 20),
        (number_of("number"), N + "0.", 20),
        (number_of("number"), N + "9" * 20 + ".", 20),
        (number_of("number"), N + "1e-", 20),
        (number_of("integer", minimum=0), N, 20),
        ('{"type": "array", "items": {"type": "integer"}}', "[1, 22, ", 20),
        ('{"type": "integer"}', "", 20),
        ('{"type": "object"}', N, 20),
        (number_of("integer", maximum=999), N, 3),
        (number_of("string"), N + '"', 99),
        (number_of("string", pattern="^[0-9]+$"), N + '"', 99),
        (number_of("string", pattern="^[0-9a-f]{64}$"), N + '"', 64),
        (number_of("string", pattern="^[0-9]{30}$"), N + '"', 30),
    ],
)
def test_numbers_end(
    compiler: GrammarCompiler, backend: Backend, source: str, before: str, digits: int
) -> None:
    state = moved(compiler.compile(Grammar("json_schema", source)).start(), backend, before)
    assert endless(state, backend) == digits
    assert state.error is None
    assert allowed(state), "something else may come"


@pytest.mark.parametrize("choice", ["auto", "required", "n"])
def test_numbers_of_calls_end(compiler: GrammarCompiler, backend: Backend, choice: str) -> None:
    tool = Tool("n", "", json.loads(number_of("integer")))
    called = '<tool_call>\n{"name": "n", "arguments": {"n": '
    state = moved(compiler.compile_tools(ToolUse((tool,), choice)).start(), backend, called)
    assert endless(state, backend) == 20
    text = moved(compiler.compile_tools(ToolUse((tool,))).start(), backend, "pi is 3")
    assert endless(text, backend) == 99, "but not those of text"


def test_other_grammars_count_no_digits(compiler: GrammarCompiler, backend: Backend) -> None:
    state = moved(compiler.compile(Grammar("regex", "[0-9]+[.,]?")).start(), backend, "1")
    assert endless(state, backend) == 99


@pytest.mark.parametrize("processors", [1, 2])
def test_numbers_end_in_masks_that_are_made_together(
    compiler: GrammarCompiler, backend: Backend, processors: int
) -> None:
    answers = compiler.compile(Grammar("json_schema", number_of("integer")), choices=3)
    states = [moved(answers.start(), backend, N + "9" * count) for count in (3, 19, 20)]
    bits = torch.zeros(3, VOCAB // 32, dtype=torch.int32)
    _State.fill_all(states, bits, processors)
    nine = backend.token_to_id("9")
    assert [bool(row[nine]) for row in unpacked(bits, VOCAB)] == [True, True, False]


def endless(state: GrammarState, backend: Backend) -> int:
    """How often a model that writes nothing but nines, if it may, writes one."""
    nine = backend.token_to_id("9")
    for count in range(99):
        if nine not in allowed(state):
            return count
        state.accept(nine)
    return 99


def test_when_complete_only_the_end_is_left(compiler: GrammarCompiler, backend: Backend) -> None:
    state = compiler.compile(Grammar("regex", "ab")).start()
    ends = {backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")}
    for token in backend.encode("ab").ids:
        assert not allowed(state) & ends
        state.accept(token)
    assert allowed(state) == ends
    for _ in range(3):  # with ignore_eos the end goes on
        state.accept(min(ends))
        assert allowed(state) == ends
        assert state.error is None


def test_states_are_independent(compiler: GrammarCompiler, backend: Backend) -> None:
    grammar = compiler.compile(Grammar("regex", "a[bc]"))
    first, second = grammar.start(), grammar.start()
    before = allowed(second)
    first.accept(backend.token_to_id("a"))
    assert allowed(first) != before
    assert allowed(second) == before == allowed(grammar.start())


def test_ids_beyond_the_tokenizer_and_control_tokens_are_never_allowed(
    compiler: GrammarCompiler, backend: Backend
) -> None:
    free = allowed(compiler.compile(Grammar("regex", r"(.|\n)*")).start())
    assert backend.get_vocab_size() < VOCAB
    assert max(free) < backend.get_vocab_size()
    assert backend.token_to_id("<|im_start|>") not in free
    assert backend.token_to_id("<|image_pad|>") not in free
    assert len(free) > 200


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


MANY = json.dumps({"properties": {f"p{i}": {"type": "string", "pattern": f"a{i}"} for i in range(9)}})


def chain(links: int) -> str:
    steps = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(links)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**steps, f"a{links}": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("kind", "source", "match"),
    [
        ("json_schema", "{", "JSON schema is not JSON"),
        ("json_schema", "[]", "is an object"),
        ("json_schema", '{"type": "foo"}', "foo is not a type"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (
            "json_schema",
            '{"x-guidance": {"lenient": true}, "uniqueItems": true, "type": "array"}',
            "uniqueItem",
        ),
        ("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "oneOf"),
        ("json_schema", '{"type": "string", "format": "idn-email"}', "idn-email"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}', "greater than maximum"),
        ("json_schema", '{"$ref": "#"}', "'#' leads back to itself, and to nothing else"),
        (
            "json_schema",
            '{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, '
            '"b": {"$ref": "#/$defs/a"}}}',
            "leads back to itself",
        ),
        ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "isn't followed; write #/.defs/NAME"),
        (
            "json_schema",
            '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}}',
            "b' leads nowhere",
        ),
        ("json_schema", nested(101), "deeper than 100"),
        ("json_schema", nested(30_000), "deeper than 100|characters"),
        ("json_schema", '{"enum": ["' + "x" * 140_000 + '"]}', "140,0.. characters, at most 131,072"),
        ("json_schema", chain(200), "levels deep in all, at most 400"),
        (
            "json_schema",
            json.dumps({"properties": {f"p{i}": {} for i in range(1001)}}),
            "has 1001 properties",
        ),
        (
            "json_schema",
            json.dumps({"allOf": [{"pattern": f".*b{i}.*"} for i in range(40)]}),
            "with 40 patterns",
        ),
        (
            "json_schema",
            '{"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": ' + MANY + "}}",
            "with 9 patterns",
        ),
        ("regex", "[a-z", "unclosed character class"),
        ("regex", "(?!a)b", "look-around"),
        ("regex", "a" * 8200, "8,200 characters, at most 8,192"),
        ("regex", "(" * 4000 + "x" + ")" * 4000, "regular expression can't be used"),
        ("lark", "start: foo", "unknown name"),
        ("lark", 'root ::= "yes" | "no"', "in GBNF .* write it in Lark"),
        ("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2000)), "2001 rules"),
        ("lark", "start: A\nA: /a/" + " & /a/" * 9, "9 intersections"),
        ("yaml", "a", "not 'yaml'"),
    ],
)
def test_what_it_refuses(compiler: GrammarCompiler, kind: Any, source: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as raised:
        compiler.compile(Grammar(kind, source))
    assert raised.value.field == "response_format"
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {f"x{i}": {"$ref": f"#/none{i}"} for i in range(4000)}},
        {
            "anyOf": [{"$ref": "#/$defs/a", "minLength": 1}] * 1500,
            "$defs": {"a": {"anyOf": [{"pattern": "a"}] * 1500}},
        },
    ],
)
def test_links_cost_no_quadratic_time(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"levels deep in all|with 1500 patterns"):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))


TREE = json.dumps({"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"a": {"$ref": "#/$defs/t"}}}}})


@pytest.mark.parametrize("source", [nested(99), chain(100), TREE])
def test_nesting_below_the_limits_is_fine(compiler: GrammarCompiler, source: str) -> None:
    assert allowed(compiler.compile(Grammar("json_schema", source)).start())


def test_a_grammar_that_grows_beyond_its_limits_says_so(compiler: GrammarCompiler, backend: Backend) -> None:
    """Some are found out only on the way; the state must not pass for a complete one then."""
    state = compiler.compile(Grammar("regex", "((a{1,1000}){1,1000}){1,1000}")).start()
    for _ in range(4000):
        allowed(state)
        if state.error is not None:
            break
        state.accept(backend.token_to_id("a"))
    assert state.error is None or "\n" not in state.error


WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BAD_CALLS = [
    "<tool_call>",
    '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "b": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>',
    NOW + " and more text",
]


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("auto", True, ["", "Hi < <tool", "Wait.\n" + WEATHER, WEATHER + "\n" + NOW, NOW], BAD_CALLS),
        ("auto", False, ["", "Hi", "Wait. " + NOW], [*BAD_CALLS, NOW + "\n" + NOW]),
        ("required", True, [NOW, WEATHER + "\n" + NOW + "\n" + NOW], ["", "Hi", " " + NOW, *BAD_CALLS]),
        ("required", False, [NOW, WEATHER], ["", NOW + "\n" + NOW, *BAD_CALLS]),
        ("now", True, [NOW], ["", "Hi", WEATHER, NOW + "\n" + NOW, *BAD_CALLS]),
    ],
)
def test_calls(
    either: tuple[GrammarCompiler, Backend], choice: str, parallel: bool, good: list[str], bad: list[str]
) -> None:
    compiler, backend = either
    use = ToolUse(TOOLS, choice, parallel)
    grammar = compiler.compile_tools(use)
    for text in good:
        assert follows(grammar, backend, text), text
        parser = HermesParser(use)
        events = parser.push(text) + parser.flush()
        assert sum(isinstance(event, CallStarted) for event in events) == text.count("<tool_call>")
        if text.count("<tool_call>") == 1:
            fragments = [event.fragment for event in events if isinstance(event, CallArguments)]
            assert json.loads("".join(fragments)) in ({}, {"city": "Rome"})
    for text in bad:
        assert not follows(grammar, backend, text), text


def test_text_cannot_spell_the_marker_in_other_tokens(either: tuple[GrammarCompiler, Backend]) -> None:
    compiler, backend = either
    state = compiler.compile_tools(ToolUse(TOOLS)).start()
    for character in "<tool_call":
        state.accept(backend.token_to_id(character))
    bracket = backend.token_to_id(">")
    if bracket in allowed(state):  # then it opens a call, which goes on as one
        state.accept(bracket)
        assert {backend.decode([token])[:1] for token in allowed(state)} == {"\n"}


def test_which_markers_a_tokenizer_has(backend: Backend, either: tuple[GrammarCompiler, Backend]) -> None:
    compiler, mine = either
    ids = {text: mine.token_to_id(text) for text in ("<tool_call>", "</tool_call>")}
    assert compiler.marker_tokens == (ids if ids["<tool_call>"] is not None else {})


def test_a_real_schema_of_arguments(either: tuple[GrammarCompiler, Backend]) -> None:
    compiler, backend = either
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}, "how": {"enum": ["a", "b"], "description": 'say "a"'}},
        "required": ["p"],
        "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
    }
    grammar = compiler.compile_tools(ToolUse((Tool("go", "", schema),), "go"))
    head = '<tool_call>\n{"name": "go", "arguments": '
    assert follows(grammar, backend, head + '{"p": [1, 2.5], "how": "b"}}\n</tool_call>')
    assert not follows(grammar, backend, head + '{"p": [1]}}\n</tool_call>')


@pytest.mark.parametrize(
    ("use", "match", "field"),
    [
        (ToolUse(()), "1 to 128 tools, not 0", "tools"),
        (ToolUse(tuple(Tool(f"t{i}") for i in range(129))), "not 129", "tools"),
        (ToolUse((Tool("a b"),)), "not 'a b'", "tools[0].name"),
        (ToolUse((Tool("a"), Tool(""))), "not ''", "tools[1].name"),
        (ToolUse((Tool("x" * 129),)), "1 to 128 letters", "tools[0].name"),
        (ToolUse((Tool("a"), Tool("a"))), "two tools", "tools[1].name"),
        (ToolUse((Tool("a"),), "b"), "not 'b'; the tools are a", "tool_choice"),
        (ToolUse((Tool("a", "", {"type": "array"}),)), "can't be 'array'", "tools[0].parameters"),
        (ToolUse((Tool("a", "", {"properties": {"x": {"type": "y"}}}),)), "y is not", "tools[0].parameters"),
        (
            ToolUse((Tool("a"), Tool("b", "", {"properties": {"a": json.loads(nested(99))}}))),
            "deeper than 100",
            "tools[1].parameters",
        ),
        (
            ToolUse(tuple(Tool(f"t{i}", "", {"description": "d" * 2000}) for i in range(70))),
            "characters, at most 131,072 are taken together",
            "tools",
        ),
    ],
)  # fmt: skip
def test_tools_it_refuses(compiler: GrammarCompiler, use: ToolUse, match: str, field: str) -> None:
    with pytest.raises(RequestError, match=re.escape(match)) as raised:
        compiler.compile_tools(use)
    assert raised.value.field == field


OWNER = SimpleNamespace(
    first=b"", openings={}, table=None, position=None, calls=None, markers={}, masks={}, tokenizer=None
)
LENT: Any = SimpleNamespace(owner=OWNER)


def test_what_rust_panics_at_is_an_error_of_the_grammar() -> None:
    class Panic(BaseException):
        """As PyO3's: no Exception."""

    class Matcher:
        def is_error(self) -> bool:
            return False

        def is_stopped(self) -> bool:
            return False

        def consume_tokens(self, tokens: list[int]) -> bool:
            raise Panic("index out of\nbounds")

    state = _State(cast("Any", Matcher()), LENT)
    assert state.error is None
    state.accept(3)
    assert state.error == "Panic: index out of bounds"


def test_a_panic_in_one_of_several_is_no_error_of_the_others(
    compiler: GrammarCompiler, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panics:
        def unsafe_compute_mask_ptr(self, *told: object) -> None:
            raise BaseException("somebody's")

    answers = compiler.compile(Grammar("regex", "(ab|b)*"), choices=3)
    states = [moved(answers.start(), backend, "ab") for _ in range(3)]
    monkeypatch.setattr(grammar, "_executor", lambda _: Panics())
    bits = torch.zeros(3, VOCAB // 32, dtype=torch.int32)
    _State.fill_all(states, bits, 2)
    assert [state.error for state in states] == [None] * 3
    assert all(set(row.nonzero()[:, 0].tolist()) == allowed(states[0]) for row in unpacked(bits, VOCAB))


def moved(state: GrammarState, backend: Backend, text: str) -> _State:
    """A state after a text."""
    assert isinstance(state, _State)
    for token in backend.encode(text).ids:
        state.accept(token)
    return state


@pytest.mark.parametrize("processors", [1, 2])
def test_masks_that_are_made_together_are_those_made_alone(
    compiler: GrammarCompiler, backend: Backend, processors: int
) -> None:
    schema = Grammar("json_schema", json.dumps({"type": "string", "maxLength": 6}))
    texts = ['"a', '"ab cd', '"', '"ab cdef', '""', '"\\']
    answers = compiler.compile(schema, choices=len(texts))
    states = [moved(answers.start(), backend, text) for text in texts]
    bits = torch.full((len(texts), VOCAB // 32), 7, dtype=torch.int32)
    _State.fill_all(states, bits, processors)
    rows = [set(row.nonzero()[:, 0].tolist()) for row in unpacked(bits, VOCAB)]
    assert rows == [allowed(state) for state in states]
    assert len({frozenset(row) for row in rows}) > 3, "they differ"
    begun = answers.start()
    assert isinstance(begun, _State)
    _State.fill_all([states[0], begun], bits[:2], processors)  # one that has taken nothing yet
    assert set(unpacked(bits, VOCAB)[1].nonzero()[:, 0].tolist()) == allowed(compiler.compile(schema).start())


# The automaton of this one has a state for each of its last fourteen letters: more than may be.
HUNGRY = Grammar("regex", "(a|b)*a(a|b){14}c")


def test_what_takes_long_to_compile_is_compiled_once_for_a_request(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "AGAIN_S", 0.0)
    answers = compiler_of(backend).compile(Grammar("regex", "a+b"), choices=5)
    states = [answers.start() for _ in range(5)]
    for count, state in enumerate(states):  # copies, each at a place of its own
        for _ in range(count):
            state.accept(backend.token_to_id("a"))
    ends = [backend.token_to_id("b") in allowed(state) for state in states]
    assert ends == [False, True, True, True, True]


@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_one_answer_takes_nothing_from_those_after_it(backend: Backend, together: int) -> None:
    """Matchers are used again; an answer that their automata have no room for goes on with new ones."""
    compiler, own = compiler_of(backend), 0
    letters = [backend.token_to_id(letter) for letter in "ab"]
    bits = torch.zeros(together, VOCAB // 32, dtype=torch.int32)
    for seed in range(45):
        states = [cast("_State", compiler.compile(HUNGRY).start()) for _ in range(together)]
        draw = random.Random(seed)
        for _ in range(400):
            _State.fill_all(states, bits, together)
            assert unpacked(bits, VOCAB)[:, letters].all()
            for state in states:
                state.accept(draw.choice(letters))
        assert [state.error for state in states] == [None] * together
        own += sum(state._lent is None for state in states)
        del state, states  # its matchers are the next one's
    assert own, "none came to the limit"
    (compiled,) = compiler._kept.values()
    begun = [matcher.deep_copy() for matcher in compiled.idle]
    assert all(matcher.consume_token(letters[0]) and matcher.compute_bitmask() for matcher in begun)
    assert not any(matcher.is_error() for matcher in begun), "a full one was kept"


def test_matchers_come_back_when_a_request_has_ended(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "AGAIN_S", 60.0)  # however long this machine takes
    compiler = compiler_of(backend)
    answers = compiler.compile(Grammar("regex", "a+"), choices=3)
    (compiled,) = compiler._kept.values()
    states = [answers.start() for _ in range(4)]
    assert len(compiled.idle) == 0
    del answers
    assert len(compiled.idle) == 0, "its choices go on"
    for state in states:
        state.accept(backend.token_to_id("a"))
    del states, state
    assert len(compiled.idle) == 3
    again = compiler.compile(Grammar("regex", "a+"), choices=2)
    assert len(compiled.idle) == 1
    assert allowed(again.start()) == allowed(compiler_of(backend).compile(Grammar("regex", "a+")).start())
    many = compiler.compile(Grammar("regex", "a+"), choices=50)
    del many, again
    assert len(compiled.idle) == MOST_THREADS, "no more than work at the same time"
    for other in ("b+", "c+", "b+", "c+"):
        compiler.compile(Grammar("regex", other))
    assert len(compiled.idle) == 1, "others are asked for now"


def test_more_requests_than_threads_share_matchers(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "AGAIN_S", 60.0)
    compiler, letter = compiler_of(backend), backend.token_to_id("a")
    requests = [compiler.compile(Grammar("regex", "a{1,30}")) for _ in range(3 * MOST_THREADS)]
    (compiled,) = compiler._kept.values()
    assert sorted(each.users for each in compiled._matchers) == [3] * MOST_THREADS
    states = [each.start() for each in requests]
    for count, state in enumerate(states):
        for _ in range(count):
            state.accept(letter)
    ends = [backend.token_to_id("<|im_end|>") in allowed(state) for state in states]
    assert ends == [count > 0 for count in range(len(states))], "each is at a place of its own"
    cast("_State", states[0])._lent.keep()  # type: ignore[union-attr]
    assert len(compiled._matchers) == MOST_THREADS - 1
    with compiled._lock:  # as when the garbage collector comes in the middle of it
        del requests, states, state
        assert len(compiled._returned) == 3 * MOST_THREADS
    assert not compiled.idle
    compiler.compile(Grammar("regex", "a{1,30}"))
    assert len(compiled.idle) == MOST_THREADS - 1


@pytest.mark.parametrize("taken", [0, 2, 5])
def test_it_says_which_tokens_it_would_take_and_stays_where_it_is(
    taken: int, compiler: GrammarCompiler, backend: Backend
) -> None:
    text = '{"a": 12, "b": ["x", "y"]}'
    ids = [*backend.encode(text).ids, backend.token_to_id("<|im_end|>")]
    state = compiler.compile(Grammar("json_schema", SCHEMA)).start()
    for token in ids[:taken]:
        state.accept(token)
    other, wrong = state.copy(), backend.token_to_id("<|im_start|>")
    for count in range(len(ids) - taken + 1):
        assert state.takes(ids[taken : taken + count]) == count
        assert state.takes([*ids[taken : taken + count], wrong, *ids[taken + count :]]) == count
    for token in ids[taken:]:
        assert allowed(other) == allowed(other.copy())
        assert token in allowed(other)
        other.accept(token)
        assert ids[taken] in allowed(state), "a copy goes its own way"
    assert other.error is None


def test_what_breaks_while_it_looks_ahead_breaks_nothing() -> None:
    class Matcher:
        def is_error(self) -> bool:
            return False

        def deep_copy(self) -> "Matcher":
            return Matcher()

        def validate_tokens(self, tokens: list[int]) -> int:
            raise BaseException("index out of bounds")  # as pyo3's PanicException

    state = _State(cast("Any", Matcher()), LENT)
    assert state.takes([3, 4]) == 0
    assert state.error is None
    state._panic = "it broke"
    assert state.copy().error == "it broke"


def test_a_compiled_grammar_is_kept(compiler: GrammarCompiler) -> None:
    asked = Grammar("json_schema", '{"type": "string", "maxLength": 7}')
    compiler.compile(asked)
    before = list(compiler._kept.values())[-1]
    compiler.compile(asked)
    assert list(compiler._kept.values())[-1] is before
    for length in range(KEPT):
        compiler.compile(Grammar("regex", f"a{{{length}}}"))
    assert len(compiler._kept) == KEPT


@pytest.mark.parametrize("longest", [0, 2, 5, 12, 40])
def test_classes_of_tokens_change_no_mask(backend: Backend, longest: int) -> None:
    """They only save time: what a string may hold, at each of its lengths."""
    source = json.dumps({"type": "string", "maxLength": longest, "minLength": min(longest, 1)})
    text = grammar_text(Grammar("json_schema", source), "response_format")
    tokenizers = [LLTokenizer(backend.to_str(), n_vocab=VOCAB, slices=slices) for slices in (SLICES, [])]
    ours, plain = (LLMatcher(tokenizer, text) for tokenizer in tokenizers)
    for token in backend.encode(json.dumps("ab cd" * 8)[: longest + 1]).ids:
        assert ours.compute_bitmask() == plain.compute_bitmask()
        assert ours.consume_token(token)
        assert plain.consume_token(token)
    assert ours.compute_bitmask() == plain.compute_bitmask()


def test_a_large_grammar_is_shared_and_let_go_after_use(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(grammar, "give_back_heap", given_back.set)
    monkeypatch.setattr(grammar, "AT_ONCE_BYTES", 24 << 20)
    monkeypatch.setattr(grammar, "AGAIN_S", 60.0)  # however long this machine takes, each may have its own
    monkeypatch.setattr(grammar, "GRAMMAR_BYTES", 24 << 20)
    compiler = compiler_of(backend)
    asked, other = (Grammar("json_schema", json.dumps(numbers(count))) for count in (1000, 999))
    answers = compiler.compile(asked, choices=4)
    assert compiler._large.bytes > 8 << 20
    assert not compiler._kept
    again = compiler.compile(asked, choices=4)
    assert again.owner is answers.owner  # type: ignore[attr-defined]
    assert len(answers.owner._matchers) == 1, "all choices share it"  # type: ignore[attr-defined]
    with pytest.raises(QueueFull, match=r"requests take \d+ MiB, and this one \d+; at most"):
        compiler.compile(other)
    state = again.start()
    del answers, again
    assert compiler._large.bytes, "its choice goes on"
    del state
    assert not compiler._large.bytes
    assert given_back.wait(PATIENCE_S)
    assert compiler.compile(other).start().error is None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"type": "integer", "minimum": 1e30}', "a minimum or maximum in it has more than 18 digits"),
        ('{"type": "number", "maximum": -1e30}', "a minimum or maximum in it has more than 18 digits"),
        ('{"type": "number", "minimum": 1e-320}', "a minimum or maximum in it has too many decimal places"),
        ('{"type": "number", "minimum": "5"}', 'minimum is "5", not a number'),
        ('{"type": "number", "minimum": 5, "maximum": 3}', "no answer fits it: minimum (5) is greater than"),
        ('{"type": "integer", "multipleOf": 0}', "multipleOf is 0; use a number above 0"),
        ('{"type": "integer", "multipleOf": 1e-300}', "a multipleOf in it has too many decimal places"),
        ('{"type": "integer", "multipleOf": 1e30}', "has multipleOf 1e+30 in one place"),
        ('{"type": "string", "maxLength": 10000000000}', "is 10000000000, at most 4294967295 is taken"),
        ('{"type": "string", "minLength": 4294967296}', "is 4294967296, at most 4294967295 is taken"),
        ('{"type": "string", "maxLength": 3.0}', "maxLength is 3.0, not a whole number"),
        ('{"type": "array", "minItems": -1}', "minItems is -1, not a whole number"),
        (
            '{"type": "array", "minItems": 5, "maxItems": 3}',
            "no answer fits it: minItems (5) is greater than",
        ),
        ('{"type": "string", "pattern": "("}', "its pattern ( is not a regular expression: unclosed group"),
        ('{"type": "nonsense"}', "nonsense is not a type; use object, array"),
        ('{"type": "object", "required": "a"}', 'required is "a", not of type array'),
        ('{"enum": []}', "no answer fits it, as an enum or anyOf in it is empty"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_in_our_words(
    compiler: GrammarCompiler, schema: str, said: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as raised:
        compiler.compile(Grammar("json_schema", schema))
    assert not re.search("regex|Some\\(|f64|Unsatisfiable", str(raised.value))


def test_a_place_in_a_schema_is_a_json_pointer(compiler: GrammarCompiler) -> None:
    """Names that have its own signs in them are written so that it leads there."""
    schema = {"type": "object", "properties": {"km/h ~1": {"type": "integer", "minimum": 10**19}}}
    with pytest.raises(RequestError, match=re.escape("(at #/properties/km~1h ~01/minimum: ")):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert referred("#/properties/km~1h ~01/minimum", schema) == 10**19


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "integer", "minimum": 10**19}, "minimum: 10000000000000000000"),
        ({"type": "number", "exclusiveMaximum": 1e30}, "exclusiveMaximum: 1e+30"),
        ({"type": "number", "minimum": 1e-90, "maximum": 7}, "minimum: 1e-90"),
        ({"type": "number", "maximum": -1e-90}, "maximum: -1e-90"),
        ({"type": "string", "minLength": 3, "maxLength": 10**10}, "maxLength: 10000000000"),
        ({"type": "number", "multipleOf": 1e-300}, "multipleOf: 1e-300"),
        ({"type": "number", "multipleOf": 10**6}, ""),
        ({"type": "string", "pattern": "((a"}, 'pattern: "((a"'),
        ({"type": "array", "minItems": 2.5}, "minItems: 2.5"),
        ({"type": "strin"}, 'type: "strin"'),
        ({"type": "string", "format": "barcode"}, 'format: "barcode"'),
        ({"enum": ["a" * 9000]}, ""),
        ({"type": "array", "uniqueItems": True}, "uniqueItems: true"),
    ],
)
def test_a_value_of_a_schema_that_is_refused_is_named_with_its_place(
    compiler: GrammarCompiler, part: dict[str, Any], place: str
) -> None:
    """Beside others of the same keyword that can be used, in a form as in a strict tool."""
    fine = {"type": "number", "minimum": 1, "maximum": 5, "multipleOf": 2}
    shape = {"type": "array", "items": {"type": "object", "properties": {"fine": fine, "x": part}}}
    schema = {"type": "object", "properties": {"list": shape}, "required": ["list"]}
    schema["properties"]["fine"] = {"type": "string", "minLength": 2, "maxLength": 8, "pattern": "a"}
    place = "/".join(["(at #/properties/list/items/properties/x", *([place] if place else [])])
    with pytest.raises(RequestError, match=re.escape(place + ")")):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    tool = Tool("look", parameters=schema, strict=True)
    with pytest.raises(RequestError, match=re.escape(place + ")")) as raised:
        compiler.compile_tools(ToolUse((tool,)))
    assert "parse error" not in str(raised.value)
