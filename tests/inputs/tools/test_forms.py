"""Calls in the forms of Llama, Mistral and Qwen's XML: whole or broken, in any cut, never half a marker."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.messages import Tool, ToolForm, ToolUse
from snugvl.inputs.tools.forms import call_parser
from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece, ToolEvent
from tests.draws import draws
from tests.inputs.tools.reading import read

CODE = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "n": {"type": "integer"},
        "yes": {"type": "boolean"},
        "list": {"$ref": "#/$defs/list"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
        "choice": {"enum": ["a", "b"]},
    },
    "$defs": {"list": {"type": "array", "items": {"type": "number"}}},
}
USE = ToolUse((Tool("now"), Tool("add-2"), Tool("run", "", CODE)))
FORMS = ("hermes", "llama", "mistral", "mistral-args", "qwen-xml")
NASTY = {"s": 'a "b" } ] ; </tool_call> [TOOL_CALLS] <|python_tag|> \\ \n', "n": [1, {"x": [{}, []]}]}
JSON = json.dumps(NASTY)

LLAMA = {
    "text": ('A {"b": 1}, {\n<|python_ta', ('A {"b": 1}, {\n<|python_ta', [])),
    "one": ('{"name": "now", "parameters": {}}', ("", [("now", "{}")])),
    "after the tag": ('<|python_tag|>{"name": "now", "parameters": {}}', ("", [("now", "{}")])),
    "with its type": (
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        ("", [("now", "{}")]),
    ),
    "with its type, bare": ('{"type": "function", "name": "now", "parameters": {}}', ("", [("now", "{}")])),
    "text and one": ('So.\n\n{"name": "now", "parameters": {}}', ("So.", [("now", "{}")])),
    "text and the tag": ('So <|python_tag|>{"name": "now", "parameters": {}}', ("So", [("now", "{}")])),
    "two": (
        '{"name": "now", "parameters": {}}; {"name": "add-2", "parameters": {"a": 1}}',
        ("", [("now", "{}"), ("add-2", '{"a": 1}')]),
    ),
    "two lines": (
        '{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {"a": 1}}',
        ("", [("now", "{}"), ("now", '{"a": 1}')]),
    ),
    "arguments": ('{"name": "now", "arguments": {}} b', (" b", [("now", "{}")])),
    "nasty": (f'{{"name": "now", "parameters": {JSON}}}', ("", [("now", JSON)])),
    "no such tool": ('{"name": "rm", "parameters": {}}', ('{"name": "rm", "parameters": {}}', [])),
    "no such tool after one": (
        '{"name": "now", "parameters": {}}; {"name": "rm"} x',
        ('; {"name": "rm"} x', [("now", "{}")]),
    ),
    "within a line": ('x {"name": "now", "parameters": {}}', ('x {"name": "now", "parameters": {}}', [])),
    "an answer in JSON": ('{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    "a tag and no call": ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    "a tag, other order": (
        '<|python_tag|>{"parameters": {"a": 1}, "name": "now"}',
        ("", [("now", '{"a": 1}')]),
    ),
    "a tag, broken": ('<|python_tag|>{"name": now}.', ('<|python_tag|>{"name": now}.', [])),
    "no arguments": ('{"name": "now"}', ('{"name": "now"}', [])),
    "parameters that are a list": (
        '{"name": "now", "parameters": []}',
        ('{"name": "now", "parameters": []}', []),
    ),
    "a bracket too few": ('{"name": "now", "parameters": {}', ("", [("now", "{}")])),
    "keys after": ('{"name": "now", "parameters": {}, "id": "}"}!', ("!", [("now", "{}")])),
    "cut in the head": ('a\n{"name": "no', ('a\n{"name": "no', [])),
    "cut in the arguments": ('{"name": "now", "parameters": {"a": "b', ("", [("now", '{"a": "b')])),
    "cut after a call": ('{"name": "now", "parameters": {}}; ', (";", [("now", "{}")])),
}
MISTRAL = {
    "text": ("A [TOOL] [TOOL_CALLS", ("A [TOOL] [TOOL_CALLS", [])),
    "one": ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', ("", [("now", "{}")])),
    "text and one": ('So.\n[TOOL_CALLS][{"name": "now", "arguments": {}}]', ("So.", [("now", "{}")])),
    "two": (
        '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"},\n{"name": "add-2", '
        '"arguments": {"a": 1}}] b',
        (" b", [("now", "{}"), ("add-2", '{"a": 1}')]),
    ),
    "nasty": (f'[TOOL_CALLS] [{{"name": "now", "arguments": {JSON}}}]', ("", [("now", JSON)])),
    "other order": ('[TOOL_CALLS][{"arguments": {}, "name": "now"}]', ("", [("now", "{}")])),
    "no such tool": (
        'x [TOOL_CALLS] [{"name": "rm", "arguments": {}}] y',
        ('x [TOOL_CALLS] [{"name": "rm", "arguments": {}}] y', []),
    ),
    "no such tool after one": (
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "rm"}]',
        (', {"name": "rm"}]', [("now", "{}")]),
    ),
    "no objects": ("[TOOL_CALLS] [1, 2]", ("[TOOL_CALLS] [1, 2]", [])),
    "an empty list": ("[TOOL_CALLS] []", ("[TOOL_CALLS] []", [])),
    "no list": ("[TOOL_CALLS] what? [A", ("[TOOL_CALLS] what? [A", [])),
    "text instead of the end": ('[TOOL_CALLS] [{"name": "now", "arguments": {}} b', (" b", [("now", "{}")])),
    "cut in the list": ('[TOOL_CALLS] [{"name": "now", "argu', ('[TOOL_CALLS] [{"name": "now", "argu', [])),
    "cut in the arguments": ('[TOOL_CALLS] [{"name": "now", "arguments": {"a', ("", [("now", '{"a')])),
    "cut after a call": ('[TOOL_CALLS] [{"name": "now", "arguments": {}', ("", [("now", "{}")])),
    "args": ('[TOOL_CALLS]now[ARGS]{"a": 1}', ("", [("now", '{"a": 1}')])),
    "text and args": ("So. [TOOL_CALLS]now[ARGS]{}", ("So.", [("now", "{}")])),
    "two args": (
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add-2[CALL_ID]abcdefghi[ARGS]{"a": [1]}',
        ("", [("now", "{}"), ("add-2", '{"a": [1]}')]),
    ),
    "nasty args": (f"[TOOL_CALLS]now[ARGS]{JSON}", ("", [("now", JSON)])),
    "no args": ("[TOOL_CALLS]now{}", ("", [("now", "{}")])),
    "no such tool of args": ("[TOOL_CALLS]rm[ARGS]{} x", ("[TOOL_CALLS]rm[ARGS]{} x", [])),
    "args that are a list": ("[TOOL_CALLS]now[ARGS][1]", ("[TOOL_CALLS]now[ARGS][1]", [])),
    "cut in the name": ("a [TOOL_CALLS]no", ("a [TOOL_CALLS]no", [])),
    "only the marker": ("[TOOL_CALLS]", ("[TOOL_CALLS]", [])),
}


def xml(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


HTML = '<b>"1 < 2"</b> </parameter> </tool_call>\n\n\\ </function>'
XML = {
    "text": ("A <function=now> <tool_cal", ("A <function=now> <tool_cal", [])),
    "one": (xml("now"), ("", [("now", "{}")])),
    "text and one": ("So.\n\n" + xml("now"), ("So.", [("now", "{}")])),
    "two": (
        xml("now") + "\n" + xml("run", ("n", "3")) + " b",
        (" b", [("now", "{}"), ("run", '{"n": 3}')]),
    ),
    "types": (
        xml("run", ("code", "5"), ("n", "5"), ("yes", "true"), ("list", "[1, 2.5]"), ("choice", "a")),
        ("", [("run", '{"code": "5", "n": 5, "yes": true, "list": [1, 2.5], "choice": "a"}')]),
    ),
    "text as it is": (xml("run", ("code", HTML)), ("", [("run", json.dumps({"code": HTML}))])),
    "empty texts": (
        "<tool_call><function=run><parameter=code>\n</parameter><parameter=code>\n\n</parameter>"
        "<parameter=code></parameter></function></tool_call>",
        ("", [("run", '{"code": "", "code": "", "code": ""}')]),
    ),
    "what is no value of its type": (
        xml("run", ("n", "many"), ("yes", "1"), ("list", "[1"), ("n", "2.5")),
        ("", [("run", '{"n": "many", "yes": "1", "list": "[1", "n": "2.5"}')]),
    ),
    "a whole number": (xml("run", ("n", "3.0")), ("", [("run", '{"n": 3}')])),
    "as Python writes it": (
        xml("run", ("yes", "True"), ("note", "None")),
        ("", [("run", '{"yes": true, "note": null}')]),
    ),
    "text or null": (
        xml("run", ("note", "null"), ("note", "5"), ("note", '"x"')),
        ("", [("run", '{"note": null, "note": "5", "note": "\\"x\\""}')]),
    ),
    "no type": (
        xml("run", ("any", "5"), ("any", "five"), ("any", "Infinity")),
        ("", [("run", '{"any": 5, "any": "five", "any": "Infinity"}')]),
    ),
    "a parameter that isn't known": (xml("run", ("x", '{"a": 1}')), ("", [("run", '{"x": {"a": 1}}')])),
    "on one line": (
        "<tool_call><function=run><parameter=n>5</parameter></function></tool_call>",
        ("", [("run", '{"n": 5}')]),
    ),
    "as JSON": ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', ("", [("now", "{}")])),
    "no such tool": ("x " + xml("rm", ("a", "1")), ("x " + xml("rm", ("a", "1")), [])),
    "no function": ("<tool_call>\nnow()\n</tool_call>", ("<tool_call>\nnow()\n</tool_call>", [])),
    "no end of the function": (
        "<tool_call>\n<function=now>\n</tool_call>\n" + xml("now"),
        ("", [("now", "{}"), ("now", "{}")]),
    ),
    "something else inside": ("<tool_call><function=now>what?</tool_call>.", (".", [("now", "{}")])),
    "cut in the head": ("<tool_call>\n<function=no", ("<tool_call>\n<function=no", [])),
    "cut in the parameters": ("<tool_call>\n<function=run>\n<param", ("", [("run", "{")])),
    "cut in a text": (
        '<tool_call>\n<function=run>\n<parameter=code>\na "\n</par',
        ("", [("run", '{"code": "a \\"')]),
    ),
    "cut in a number": ("<tool_call>\n<function=run>\n<parameter=n>\n12", ("", [("run", '{"n": 12')])),
    "cut before a value": ("<tool_call>\n<function=run>\n<parameter=n>", ("", [("run", '{"n": ')])),
    "cut at the end": (xml("now")[:-3], ("", [("now", "{}")])),
}
CASES = {
    f"{form}: {name}": (ToolForm(form), *case)
    for form, cases in (("llama", LLAMA), ("mistral", MISTRAL), ("qwen-xml", XML))
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_text_and_calls_in_any_cut(name: str) -> None:
    form, answer, wanted = CASES[name]
    assert read(call_parser(form, USE), answer) == wanted
    assert read(call_parser(form, USE), *answer) == wanted, "character by character"
    for cut in range(1, len(answer)):
        assert read(call_parser(form, USE), answer[:cut], answer[cut:]) == wanted


TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {"n": 3}}\n</tool_call>',
    "llama": '{"name": "now", "parameters": {"a": 1}}; {"name": "run", "parameters": {"n": 3}}',
    "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}}, '
    '{"name": "run", "arguments": {"n": 3}}]',
    "mistral-args": '[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]run[ARGS]{"n": 3}',
    "qwen-xml": xml("now", ("a", "1")) + "\n" + xml("run", ("n", "3")),
}


@pytest.mark.parametrize("form", TWO_CALLS)
def test_a_limit_shows_no_beginning_of_a_call_as_text(form: str) -> None:
    answer = TWO_CALLS[form]
    for end in range(2, len(answer) + 1):
        text, calls = read(call_parser(ToolForm(form), USE), "So:\n" + answer[:end], cut=True)
        assert text.rstrip() == "So:", answer[:end]
        assert [name for name, _ in calls] == ["now", "run"][: len(calls)]
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "It writes <tool_call> and then a call"), ("hermes", "2 <"),
        ("qwen-xml", "a <tool_call>now"), ("mistral", "a [TOOL_CALLS]rm! "),
        ("llama", '{"a": 1, "b'), ("llama", "<|python_tag|>print(1"),
    ],
)  # fmt: skip
def test_what_is_no_beginning_of_a_call_stays_text_at_a_limit(form: str, text: str) -> None:
    assert read(call_parser(ToolForm(form), USE), text, cut=True) == (text, [])


def pushed(form: str, *pieces: str) -> list[ToolEvent]:
    """The events of the last piece."""
    parser = call_parser(ToolForm(form), USE)
    return [parser.push(piece) for piece in pieces][-1]


@pytest.mark.parametrize(
    ("form", "marker"),
    [("llama", "<|python_tag|>"), ("mistral", "[TOOL_CALLS]"), ("qwen-xml", "<tool_call>")],
)
def test_no_part_of_a_marker_is_ever_shown(form: str, marker: str) -> None:
    parser = call_parser(ToolForm(form), USE)
    assert [event for character in f"a {marker}" for event in parser.push(character)] == [TextPiece("a")]


def test_text_and_arguments_are_not_held_back() -> None:
    for form in FORMS:
        assert pushed(form, "Let me see. {") == [TextPiece("Let me see. {")]
    assert pushed("llama", 'A:\n{"name": "B') == [TextPiece('A:\n{"name": "B')]
    assert pushed("llama", '{"name": "now", "parameters": {', '"a')[0] == CallArguments(0, '"a')
    assert pushed("mistral", "[TOOL_CALLS]now[ARGS]{", '"a') == [CallArguments(0, '"a')]
    begun = "<tool_call>\n<function=run>\n<parameter=code>\nimp"
    assert isinstance(pushed("qwen-xml", begun)[0], CallStarted)
    assert pushed("qwen-xml", begun, 'ort "x"\n</p') == [CallArguments(0, 'ort \\"x\\"')]


@pytest.mark.parametrize("form", FORMS)
def test_endless_space_costs_no_quadratic_time(form: str) -> None:
    parser = call_parser(ToolForm(form), USE)
    opening = "{" if form == "llama" else parser.opening
    parser.push(opening)
    shown = [event for _ in range(20_000) for event in parser.push("  ")] + parser.flush()
    assert shown[0] == TextPiece(opening)


def test_ids_of_calls_are_those_that_templates_take() -> None:
    ids = [pushed(form, text)[0] for form, text in (
        ("mistral", "[TOOL_CALLS]now[ARGS]{"), ("llama", '{"name": "now", "parameters": {')
    )]  # fmt: skip
    assert [len(event.id) for event in ids if isinstance(event, CallStarted)] == [9, 29]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=now>", "<function=run>", "</function>", "[ARGS]", "now"),
        *("<parameter=n>", "<parameter=code>", "\n</parameter>", "</parameter>", "[TOOL_CALLS]", "; ", "\n"),
        *('{"name": "now", "parameters": {', '{"name": "rm", "arguments": {', "<|python_tag|>", "[TOOL"),
        *("{", "}", "[", "]", '"', "\\", "<", "x", " ", '"a": ', "1", ",", "é", "</", "<|"),
    ]
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS[1:])
@draws(150)
@given(pieces=st.lists(PIECES, max_size=24))
def test_nothing_raises_and_cuts_change_nothing(form: str, pieces: list[str]) -> None:
    answer = "".join(pieces)
    whole = read(call_parser(ToolForm(form), USE), answer)
    assert whole[1] or whole[0] == answer, "what is no call is text"
    assert read(call_parser(ToolForm(form), USE), *answer) == whole
    assert read(call_parser(ToolForm(form), USE), *pieces) == whole
