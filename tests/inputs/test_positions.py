"""Answers that stand at the same position of a JSON schema may go on alike, and share their masks."""

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend

from snugvl.core.messages import Grammar, Tool, ToolForm, ToolUse
from snugvl.engine.sampling.grammar import GrammarState, KeptLast, MadeMask, TokenGrammar
from snugvl.engine.sampling.masks import unpacked
from snugvl.errors import RequestError
from snugvl.inputs.grammar import MASKS_BYTES, MOST_MASKS, GrammarCompiler, _State, most_masks
from snugvl.inputs.positions import ALTERNATIVES, LONGEST, Position, comparisons
from snugvl.inputs.tools.enforceable import referred
from snugvl.inputs.tools.forms import before_arguments
from tests.draws import draws
from tests.inputs.test_grammar import VOCAB, allowed, backend, compiler, either

__all__ = ("backend", "compiler", "either")

Schema = dict[str, Any]


def scalars() -> st.SearchStrategy[Schema]:
    lengths = st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 2), "maxLength": st.integers(2, 7)},
    )
    literals = st.lists(
        st.sampled_from(["a", "ab", "é", 'b"c', "x\\y", "a\n", 7, 1.5, None, True]), min_size=1
    )
    return st.one_of(
        lengths,
        lengths,
        st.builds(
            lambda values: {"enum": values},
            literals.map(lambda values: list({str(v): v for v in values}.values())),
        ),
        st.builds(lambda value: {"const": value}, st.sampled_from(["ab", "ü", 3])),
        st.builds(
            lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b},
            st.integers(-20, 300),
            st.integers(0, 90),
        ),
        st.sampled_from(
            [{"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]
        ),
        st.sampled_from([{"type": "string", "pattern": "^[a-c]+x$"}, {"type": "string", "format": "date"}]),
    )


def nested(part: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.lists(st.sampled_from(["a", "ab", "é", "n o", "x\\y"]), unique=True, min_size=1, max_size=3)
    objects = st.builds(
        lambda names, parts, more, required: {
            "type": "object",
            "properties": dict(zip(names, parts, strict=False)),
            "required": names[:required],
            "additionalProperties": more,
        },
        names,
        st.lists(part, min_size=3, max_size=3),
        st.one_of(st.just(False), st.just(True), scalars()),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda items, least, more, first: (
            {"type": "array", "items": items, "minItems": least, "maxItems": least + more}
            | ({"prefixItems": first} if first else {})
        ),
        part,
        st.integers(0, 2),
        st.integers(0, 2),
        st.lists(part, max_size=1),
    )
    either = st.builds(lambda a, b: {"anyOf": [a, b]}, part, scalars())
    return st.one_of(objects, arrays, either)


schemas = st.recursive(scalars(), nested, max_leaves=6)


def own_matcher(state: _State) -> LLMatcher:
    """A matcher that has taken the same tokens and shares nothing."""
    matcher: LLMatcher = state._lent.owner.make()  # type: ignore[union-attr]
    assert matcher.consume_tokens(state._tokens)
    return matcher


def mask_of(matcher: LLMatcher, state: _State) -> torch.Tensor:
    """The mask of a matcher, corrected as the state's are."""
    bits = torch.zeros((VOCAB + 31) // 32, dtype=torch.int32)
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
    assert not matcher.is_error(), matcher.get_error()
    state._correct(bits)
    return bits


def walk(compiler: GrammarCompiler, schema: Schema, seed: int, answers: int = 6, tokens: int = 40) -> int:
    """Random answers, each of whose masks is compared; how many of them were known by their position."""
    return walked(compiler.compile(Grammar("json_schema", json.dumps(schema))), seed, answers, tokens)


def walked(grammar: TokenGrammar, seed: int, answers: int = 6, tokens: int = 40) -> int:
    """`walk` of a grammar."""
    draw, known = random.Random(seed), 0
    for _ in range(answers):
        state: Any = grammar.start()
        matcher = own_matcher(state)
        made: MadeMask | None = None
        for _ in range(tokens):
            bits = torch.zeros((VOCAB + 31) // 32, dtype=torch.int32)
            taken = state._taken
            state.fill(bits)
            assert torch.equal(bits, mask_of(matcher, state)), (state._tokens, state._key)
            ids = unpacked(bits[None], VOCAB)[0].nonzero()[:, 0].tolist()
            if made is not None:
                known += 1
                assert made == (bits.numpy().tobytes(), ids[0] if len(ids) == 1 else None)
                assert state._taken == taken, "its matcher isn't asked"
            if matcher.is_stopped() or state._panic:
                break
            # Ends of strings and of lists among the first of them would make all answers short.
            token = draw.choice(ids)
            made = state.accept(token)
            assert matcher.consume_token(token)
        assert state.error is None
        assert state._taken == len(state._tokens)
    return known


@given(schemas, st.integers(0, 1 << 20))
def test_answers_at_one_position_may_go_on_alike(
    compiler: GrammarCompiler, schema: Schema, seed: int
) -> None:
    try:
        walk(compiler, schema, seed)
    except Exception as error:
        if "can't be used" not in str(error):
            raise


@pytest.mark.parametrize("form", ["hermes", "llama"])
@draws(15)
@given(st.lists(schemas, min_size=1, max_size=2), st.integers(0, 1 << 20))
def test_calls_of_tools_at_one_position_may_go_on_alike(
    either: tuple[GrammarCompiler, Backend], form: Any, parts: list[Schema], seed: int
) -> None:
    """Whatever stands before them, and whichever tool is called."""
    compiler = either[0]
    compiler._form = ToolForm(form)
    tools = tuple(
        Tool(name, parameters={"properties": {"a": part, "b": {"type": "string"}}, "required": ["a"]})
        for name, part in zip(("f", "g"), parts, strict=False)
    )
    for choice in ("required", "auto"):
        try:
            grammar = compiler.compile_tools(ToolUse(tools, choice))
        except RequestError:
            continue
        walked(Called(grammar, compiler, tools[0]) if choice == "auto" else grammar, seed, answers=4)


class Called:
    """A grammar whose answers have begun with a text and a call."""

    def __init__(self, grammar: TokenGrammar, compiler: GrammarCompiler, tool: Tool) -> None:
        self.grammar, self.compiler = grammar, compiler
        self.text = "Ab<" + (before_arguments(compiler._form, tool.name) or "")

    def start(self) -> GrammarState:
        state = self.grammar.start()
        for token in self.compiler._source.encode(self.text):
            state.accept(token)
        assert state.error is None
        return state


def test_most_masks_of_later_calls_are_known(either: tuple[GrammarCompiler, Backend]) -> None:
    compiler = either[0]
    compiler._form = ToolForm("hermes")
    use = ToolUse((Tool("f", parameters=LIMITED), Tool("g", parameters=LIMITED)), "required")
    assert walked(compiler.compile_tools(use), 1, answers=20, tokens=60) > 200


def test_a_call_is_known_by_what_stands_before_its_arguments(compiler: GrammarCompiler) -> None:
    """In each tool's arguments there are positions of its own, if there are any."""
    compiler._form = ToolForm("hermes")
    text = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    other = {"properties": {"a": {"allOf": [{"type": "string"}]}}, "required": ["a"]}
    tools = Tool("f", parameters=text), Tool("g", parameters=other), Tool("h", parameters=text)
    state: Any = compiler.compile_tools(ToolUse(tools)).start()

    def key_after(said: str) -> object:
        for token in compiler._source.encode(said):
            state.accept(token)
        assert state.error is None
        return state._key

    assert key_after("Text <tool") is None
    assert key_after('<tool_call>\n{"name": "f", "arguments":') is None
    inside = key_after(' {"a": "x')
    assert inside is not None
    assert key_after("yz<tool") == inside
    copied = state.copy()
    assert key_after('"}}\n</tool_call>') is None, "what stands behind a call is in none"
    assert copied._key == inside
    assert key_after('\n<tool_call>\n{"name": "h", "arguments": {"a": "x') not in (None, inside)
    assert key_after('"}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"a": "x') is None
    assert key_after('"}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a": "x') == inside


LIMITED: Schema = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 3, "maxItems": 5},
    },
    "required": ["title", "tags"],
    "additionalProperties": False,
}


def test_most_masks_of_later_answers_are_known_and_right(compiler: GrammarCompiler) -> None:
    assert walk(compiler, LIMITED, 1, answers=20) > 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": "x', '{"a":"y'),
        ('{"a": "xy", "b": [1, 2, "', '{"a": "", "b": [23, 4,"'),
        ('{"a": {"c": [1], "d": {}}, ', '{"a": {"c": [5, 6], "d": {"e": 0}}, '),
        ('["é', '["\u20ac'),
        ('["\\n', '["\\t'),
        ('["\\u0041', '["\\u12ab'),
        ('["\\n', '["n'),
        ('["\\nab', '["a\\u0041b'),
        ('["a", "b", "c", "d", ', '["a", "b", "c", '),
        ('["abcdefghijkl', '["abcdefghijklmnop'),
        ('["re\\nx', '["rest'),
        ('["\\n\\u0041', '["\\t\\n'),
    ],
)
def test_what_no_grammar_compares_makes_no_other_position(one: str, other: str) -> None:
    items = {"anyOf": [{"type": "string", "maxLength": 12}, {"enum": ["red", "a\nb"]}]}
    schema = {"type": "array", "maxItems": 3, "items": items}
    assert key_of(schema, one) == key_of(schema, other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('["a', '["ab'),
        ('["a', '["a\\'),
        ('["\\u00', '["\\u0'),
        ('["a", ', '["a",'),
        ('["a"', '["a'),
        ('["a", "', '["'),
        ('["a", 1', '["a", 2'),
        ('{"a": "', '{"b": "'),
        ('{"a": 1, "', '{"a": 1, "b": "'),
        ('{"a', '["a'),
        ("[[", "["),
        ('{"zzz"', '{"zzz":'),
        ('{"zzz":1,"', '{"'),
        ('{"zzz', '["zzz'),
        ('[{"a": ["', '[["'),
    ],
)
def test_positions_that_differ(one: str, other: str) -> None:
    items = {"type": ["string", "array", "object"], "maxLength": 12, "properties": {"a": {}, "b": {}}}
    schema = {"type": "array", "maxItems": 3, "items": items}
    assert key_of(schema, one) != key_of(schema, other)


def test_properties_that_no_schema_names() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}
    assert key_of(schema, '{"na') != key_of(schema, '{"nx')
    assert key_of(schema, '{"nx') == key_of(schema, '{"some other')
    assert key_of(schema, '{"name": "a", "b": 1, "c": ') == key_of(schema, '{"name": "b", "d": ')
    assert key_of(schema, '{"name": "a", "b": 1, "c') != key_of(schema, '{"name": "b", "d')
    assert key_of(schema, '{"name": "a", "b') != key_of(schema, '{"b')
    assert key_of(schema, '{"b\\') != key_of(schema, '{"b')


@pytest.mark.parametrize(
    "schema", [{"const": "ab"}, {"type": "string"}, {"type": "object", "properties": {}}]
)
def test_behind_its_end_an_answer_stays_where_it_is(compiler: GrammarCompiler, schema: Schema) -> None:
    """With `ignore_eos` tokens that end it go on coming."""
    grammar, end = compiler.compile(Grammar("json_schema", json.dumps(schema))), compiler._tokenizer.eos_token
    for _ in range(2):
        state: Any = grammar.start()
        text = '{"x": 1}' if schema.get("type") == "object" else '"ab"'
        for token in [*compiler._tokenizer.tokenize_str(text), end, end, end]:
            state.accept(token)
            assert state.error is None
            if token == end:
                assert end in allowed(state)


def test_a_token_of_a_string_goes_on_as_its_bytes_do(compiler: GrammarCompiler) -> None:
    compared = comparisons({"type": "string", "maxLength": 99})
    assert compared is not None
    counted = 0
    for token, characters in enumerate(compiler._table.characters):  # type: ignore[union-attr]
        one, other = Position(compared), Position(compared)
        one.advance(b'"a')
        other.advance(b'"a')
        if (key := one.count(characters)) is not None:
            counted += 1
            other.advance(compiler._tokenizer.decode_bytes([token]))
            assert one.key == key == other.key
    assert counted > VOCAB / 3


def test_a_character_in_parts() -> None:
    compared = comparisons({"type": "string", "maxLength": 9})
    assert compared is not None
    position, keys = Position(compared), []
    for part in (b'"\xe2', b"\x82", b"\xac", b"a"):
        position.advance(part)
        keys.append(position.key)
    assert len(set(keys)) == 4
    assert keys[2] == key_of({"type": "string", "maxLength": 9}, '"x')


@pytest.mark.parametrize("first", [*range(0xC2, 0xF5)])
def test_how_a_character_may_go_on(compiler: GrammarCompiler, backend: Backend, first: int) -> None:
    """Two that have begun share a position only if the same tokens may follow."""
    masks: dict[object, list[int]] = {}
    tokens = {bytes(compiler._tokenizer.decode_bytes([i])): i for i in range(256)}
    for begun in [bytes([first]), *(bytes([first, second]) for second in (0x80, 0x90, 0x9F, 0xA0, 0xBF))]:
        state: Any = compiler.compile(Grammar("json_schema", '{"type": "string", "maxLength": 3}')).start()
        state.accept(tokens[b'"'])
        if state.takes([tokens[bytes([byte])] for byte in begun]) != len(begun):
            continue
        for byte in begun:
            state.accept(tokens[bytes([byte])])
        own = mask_of(own_matcher(state), state).tolist()
        assert masks.setdefault(state._position.key, own) == own
        assert GOING_ON.setdefault(state._position.key, own) == own


GOING_ON: dict[object, list[int]] = {}


def test_literals_and_patterns_are_compared_whole() -> None:
    schema = {
        "type": "array",
        "items": {"anyOf": [{"enum": ["red", "rest"]}, {"type": "string", "maxLength": 9}]},
    }
    assert key_of(schema, '["re') != key_of(schema, '["xy')
    assert key_of(schema, '["rex') == key_of(schema, '["xyz')
    exact = {"type": "array", "items": {"type": "string", "pattern": "a.*"}}
    assert key_of(exact, '["abc') != key_of(exact, '["abd')
    assert key_of(exact, '["abc", ') == key_of(exact, '["abd", ')


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
        {"anyOf": [{"type": ["object", "string"]}, {"anyOf": [{"type": "null"}, {"type": "object"}]}]},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": {"type": "object"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"oneOf": [True, {"type": "array"}]},
        {"allOf": [{"type": "string"}]},
        {"type": "object", "maxProperties": 2},
        {"type": "array", "items": {"patternProperties": {"a": {}}}},
        {"enum": [[1, 2], [1, 3]]},
        {"const": {"a": 1}},
        {"type": "string", "maxLength": 7.0},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "type": "string"},
        {"items": [{"type": "string"}]},
    ],
)
def test_of_other_schemas_no_position_is_known(schema: Schema) -> None:
    assert comparisons(schema) is None


def test_a_schema_that_leads_back_to_itself() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert comparisons(node) is not None


@pytest.mark.parametrize("text", ["[1 ", "[\n", "[]]", "{}}", '["' + "a" * LONGEST + "\\", '["\\ud83d'])
def test_what_can_not_be_followed_has_no_position(text: str) -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    if "aaa" in text:  # counted, but where a pattern looks at it
        assert key_of(schema, text) is not None
        schema["items"] = {"type": "string", "pattern": "a+"}  # type: ignore[assignment]
    assert key_of(schema, text) is None


def test_so_many_masks_are_kept() -> None:
    masks: KeptLast[Any, bytes] = KeptLast(4)
    for count in range(6):
        masks.keep(((), b"", count), bytes(8))
    assert [key[2] for key in masks] == [2, 3, 4, 5]
    assert most_masks(VOCAB) == MOST_MASKS
    assert MASKS_BYTES - 151_936 // 8 < most_masks(151_936) * 151_936 // 8 <= MASKS_BYTES


def test_of_a_schema_so_many_alternatives_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand alternatives leads to a part that leads to itself twice."""
    twice = {"anyOf": [{"$ref": "#/$defs/twice"}, {"$ref": "#/$defs/twice"}]}
    names = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/twice"}]} for i in range(1000)}
    schema: Schema = {"type": "object", "properties": names, "$defs": {"twice": twice}}
    calls: list[str] = []

    def counted(reference: str, root: Any) -> Any:
        calls.append(reference)
        return referred(reference, root)

    monkeypatch.setattr("snugvl.inputs.positions.referred", counted)
    assert comparisons(schema) is None
    assert len(calls) <= ALTERNATIVES


def test_masks_that_are_all_known_are_copied_together(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compiler.compile(Grammar("json_schema", json.dumps(LIMITED)))
    tokens = compiler._tokenizer.tokenize_str('{"title": "a')
    bits = torch.zeros(2, (VOCAB + 31) // 32, dtype=torch.int32)
    found = []
    for _ in range(2):
        states: list[Any] = [grammar.start(), grammar.start()]
        for state in states:
            for token in tokens:
                state.accept(token)
        bits.zero_()
        _State.fill_all(states, bits, processors=2)
        found.append(bits.tolist())
        # The second time nothing computes a mask, neither together nor one by one, as after an error.
        monkeypatch.setattr("snugvl.inputs.grammar._executor", None)
        monkeypatch.setattr(_State, "fill", None)
    assert found[0] == found[1]
    assert any(found[0][0])


def test_a_token_that_is_no_text_ends_the_position(compiler: GrammarCompiler) -> None:
    state: Any = compiler.compile(Grammar("json_schema", '{"type": "integer"}')).start()
    state.accept(compiler._tokenizer.tokenize_str("7")[0])
    assert state._position.key is not None
    state.accept(compiler._tokenizer.eos_token)
    assert state._position is None


def key_of(schema: Schema, text: str) -> object:
    compared = comparisons(schema)
    assert compared is not None
    position = Position(compared)
    position.advance(text.encode(errors="surrogatepass"))
    return position.key
