"""Each form's grammar takes valid calls, and nothing else that would be read as one."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from snugvl.core.messages import Tool, ToolForm, ToolUse
from snugvl.errors import RequestError
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.forms import MARKERS, call_parser
from tests.inputs.conftest import PLAIN_ADDED, small_tokenizer
from tests.inputs.test_grammar import VOCAB, allowed, follows
from tests.inputs.tools.reading import read

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USE = ToolUse((Tool("weather", "", CITY), Tool("now")))
ARGUMENTS = {"weather": {"city": 'Rome "1" }; ['}, "now": {}}


def tokenizer(tokens: bool) -> Backend:
    """With every form's markers as tokens of their own, or with none."""
    backend = small_tokenizer()
    if tokens:
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in MARKERS[2:]])
        return backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in PLAIN_ADDED]
    return Backend.from_str(json.dumps(state))


@pytest.fixture(scope="module", params=["marker tokens", "literal markers"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return tokenizer(request.param == "marker tokens")


@cache
def compiler_of(backend: Backend, form: ToolForm) -> GrammarCompiler:
    """One for all tests: each tries grammars in processes of its own."""
    eos = frozenset(backend.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    return GrammarCompiler(Tokenizer(backend, eos_ids=eos), VOCAB, form)


def call(form: ToolForm, name: str, arguments: dict[str, Any] | None = None) -> str:
    """An answer that is one call."""
    arguments = ARGUMENTS[name] if arguments is None else arguments
    text = json.dumps(arguments)
    match form.name:
        case "llama":
            return f'{{"name": "{name}", "parameters": {text}}}'
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {text}}}]'
        case "mistral-args":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def both(form: ToolForm) -> str:
    """An answer that is two calls."""
    first, second = call(form, "weather"), call(form, "now")
    between = {"llama": "; ", "mistral": ", ", "mistral-args": ""}.get(form.name, "\n")
    if form.name == "mistral":
        first, second = first[:-1], second.partition("[{")[2].join(["{", ""])
    return first + between + second


FORMS = [ToolForm("llama"), ToolForm("mistral"), ToolForm("mistral-args"), ToolForm("qwen-xml")]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.sample(
    "marker tokens-llama",
    "marker tokens-mistral-args",
    "literal markers-llama",
    "literal markers-mistral-args",
)
def test_calls(backend: Backend, form: ToolForm) -> None:
    one, two, now = call(form, "weather"), both(form), call(form, "now")
    bad = [
        one + " and text",
        one[:-1],
        call(form, "weather", {}),
        call(form, "weather", {"city": "x", "more": "y"}),
        call(form, "now", {"a": "1"}),
        re.sub("weather", "rm", one) if form.name != "llama" else '{"name": "now", "parameters": []}',
    ]
    text = ["", "Hi < [ { <tool", '{"a": 1}', '{"name": "Bob"}', 'See {"x": 1}\n{"y": 2}']
    if form.name == "llama":
        bad += [f'{{"name": "weather", "{key}": {{"city": 1}}}}' for key in ("parameters", "arguments")]
        bad += ['\u00a0{"name" : "now", "parameters": {"a": 1}}', '{"name":\u2003"now","parameters":{"a":1}}']
    wanted: list[tuple[ToolUse, list[str], list[str]]] = [
        (USE, [*text, one, now, two, f"Wait.\n{one}"], bad),
        (replace(USE, parallel=False), [*text, one, f"Wait.\n{now}"], [*bad, two]),
        (replace(USE, choice="required"), [one, now, two], [*bad, *text, f"x\n{one}"]),
        (replace(USE, choice="now"), [now], [*bad, *text, one, two]),
    ]
    for use, good, refused in wanted:
        grammar = compiler_of(backend, form).compile_tools(use)
        for answer in good:
            assert follows(grammar, backend, answer), answer
            _, calls = read(call_parser(form, use), answer)
            assert all(json.loads(arguments) == ARGUMENTS[name] for name, arguments in calls)
            assert len(calls) == answer.count("weather") + answer.count("now")
        for answer in refused:
            assert not follows(grammar, backend, answer), answer


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_call_or_an_answer_in_a_form(backend: Backend, form: ToolForm) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    use = replace(USE, form=json.dumps({**schema, "additionalProperties": False}))
    grammar = compiler_of(backend, form).compile_tools(use)
    tag = "<|python_tag|>" if form.name == "llama" else ""
    for answer in ('{"a": "x"}', tag + call(form, "weather"), tag + both(form)):
        assert follows(grammar, backend, answer), answer
    for answer in ("", "Hi", '{"a": "y"}', "{}", f"Wait.\n{call(form, 'now')}"):
        assert not follows(grammar, backend, answer), answer
    wrong = replace(USE, form='{"type": "object", "not": {}}')
    with pytest.raises(RequestError, match=r"not can't be enforced; .*\(at #/not: {}\)") as refused:
        compiler_of(backend, form).compile_tools(wrong)
    assert refused.value.field == "response_format"


def test_a_template_that_shows_one_call_gets_one() -> None:
    backend, form = tokenizer(True), ToolForm("llama", single=True)
    grammar = compiler_of(backend, form).compile_tools(USE)
    assert follows(grammar, backend, call(form, "now"))
    assert not follows(grammar, backend, both(form))


def test_llamas_tag_may_stand_before_a_call() -> None:
    backend, form = tokenizer(True), ToolForm("llama")
    for choice, lead in (("auto", "So "), ("required", "")):
        grammar = compiler_of(backend, form).compile_tools(replace(USE, choice=choice))
        for head in ('{"name": ', '{"type": "function", "name": ', '{\n  "name":'):
            answer = f'{lead}<|python_tag|>{head}"now", "parameters": {{}}}}'
            assert follows(grammar, backend, answer), answer
        assert not follows(grammar, backend, f"{lead}<|python_tag|>print(1)")


def test_text_cannot_spell_a_marker_in_other_tokens(backend: Backend) -> None:
    for form in FORMS[1:]:
        opening = call_parser(form, USE).opening
        state = compiler_of(backend, form).compile_tools(USE).start()
        for character in opening[:-1]:
            state.accept(backend.token_to_id(character))
        last = backend.token_to_id(opening[-1])
        if last in allowed(state):  # then it opens a call, which goes on as one
            state.accept(last)
            assert {backend.decode([token])[:1] for token in allowed(state)} <= set("\n [wn")


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 3},
        "code": {"type": "string", "pattern": "^a+/?b*$"},
        "kind": {"enum": ["x y", 1, None]},
        "at": {"$ref": "#/$defs/point"},
        "note": {"type": ["string", "null"]},
        "part": {"type": "string", "pattern": "q"},
    },
    "required": ["at"],
    "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
}
AT = ("at", "[1, 2]")
ORDER = tuple(SCHEMA["properties"])


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({}, True),
        ({"text": "a\nb", "note": "any\n</param"}, True),
        ({"text": "abcd"}, False),
        ({"text": ""}, False),
        ({"code": "aa/b"}, True),
        ({"code": "ba"}, False),
        ({"part": "a\nq\n"}, True),
        ({"part": "abc"}, False),
        ({"part": "abc\n</parameter>\nq"}, False),
        ({"kind": "x y"}, True),
        ({"kind": "1"}, True),
        ({"kind": "null"}, True),
        ({"kind": "2"}, False),
        ({"at": "[1,2]"}, True),
        ({"at": "[1]"}, False),
        ({"at": "here"}, False),
        ({"note": ""}, True),
    ],
)  # fmt: skip
def test_values_follow_their_schema(given: dict[str, str], valid: bool) -> None:
    backend, form = tokenizer(True), ToolForm("qwen-xml")
    use = ToolUse((Tool("f", "", SCHEMA),), "required")
    values = dict([AT]) | given
    answer = call(form, "f", {key: values[key] for key in ORDER if key in values})
    assert follows(compiler_of(backend, form).compile_tools(use), backend, answer) is valid


def test_parameters_that_are_required_or_free() -> None:
    backend, form = tokenizer(True), ToolForm("qwen-xml")
    tools = (Tool("f", "", SCHEMA), Tool("g", "", {"type": "object", "required": ["a"]}))
    grammar = compiler_of(backend, form).compile_tools(ToolUse(tools, "required"))
    assert not follows(grammar, backend, call(form, "f", {"text": "a"})), "'at' is required"
    assert not follows(grammar, backend, call(form, "f", {"at": "[1, 2]", "text": "a"})), "another order"
    assert follows(grammar, backend, call(form, "g", {"a": "x", "b": "y", "c d": "z"}))
    assert not follows(grammar, backend, call(form, "g", {"b": "y"}))


def test_parameters_that_no_value_suits_are_left_out() -> None:
    backend, form = tokenizer(True), ToolForm("qwen-xml")
    never: dict[str, Any] = {"a": False, "b": {"enum": []}, "c": {"anyOf": []}, "d": {"type": "null"}}
    use = ToolUse((Tool("f", "", {"properties": never}),), "required")
    grammar = compiler_of(backend, form).compile_tools(use)
    assert follows(grammar, backend, call(form, "f", {"d": "null"}))
    for key in "abc":
        assert not follows(grammar, backend, call(form, "f", {key: ""}))


@pytest.mark.parametrize("pattern", ["^a|b$", "(^a)"])
def test_patterns_with_other_anchors_are_left_out(pattern: str) -> None:
    backend, form = tokenizer(True), ToolForm("qwen-xml")
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    grammar = compiler_of(backend, form).compile_tools(ToolUse((Tool("f", "", schema),), "required"))
    assert follows(grammar, backend, call(form, "f", {"a": "ab"}))


def test_a_name_that_xml_cannot_write_is_refused() -> None:
    use = ToolUse((Tool("f"), Tool("g", "", {"properties": {"a>b": {"type": "string"}}})))
    with pytest.raises(RequestError, match="'a>b' of 'g'") as raised:
        compiler_of(tokenizer(True), ToolForm("qwen-xml")).compile_tools(use)
    assert raised.value.field == "tools[1].parameters"
    compiler_of(tokenizer(True), ToolForm("mistral")).compile_tools(use)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^a\\/b$", "a\\/b", "a/b"),  # a backslash, then a slash: it must not close the literal
        (r"^a\/b$", "a/b", "a\\/b"),
        ("^a/b$", "a/b", "ab"),
        ("^a\nb$", "a\nb", "ab"),
    ],
)
def test_slashes_and_lines_of_a_pattern_stay_within_it(pattern: str, good: str, bad: str) -> None:
    tool = Tool("f", "", {"properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]})
    backend = tokenizer(True)
    grammar = compiler_of(backend, ToolForm("qwen-xml")).compile_tools(ToolUse((tool,), "f"))
    call = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert follows(grammar, backend, call.format(good))
    assert not follows(grammar, backend, call.format(bad))
