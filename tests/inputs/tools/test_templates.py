"""A template's form is told by its source, and what it writes is read as what it was."""

import json
from typing import Any

import pytest

from snugvl.core.messages import Message, Text, Tool, ToolCall, ToolUse, user
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.tools.forms import call_parser, markers, opening, tool_form
from tests.inputs.tools.reading import read
from tests.inputs.tools.templates import TEMPLATES

PARAMETERS = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
}
USE = ToolUse((Tool("run", "", PARAMETERS), Tool("now")))
ARGUMENTS: dict[str, Any] = {"s": '5 <b>"; } ]\n', "n": 5, "o": {"list": [1.5, None, True]}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_which_form(name: str) -> None:
    source, form = TEMPLATES[name]
    assert tool_form(source) == form == ChatTemplate(source).tool_form
    assert opening(form) in markers(form)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not name.startswith("no")])
def test_what_a_template_writes_is_read_again(name: str) -> None:
    source, form = TEMPLATES[name]
    calls = [ToolCall("abcdefghi", "run", json.dumps(ARGUMENTS)), ToolCall("123456789", "now", "{}")]
    calls = calls[:1] if form.single else calls
    conversation = [user("Hi"), Message("assistant", (Text("See:\n"),), tuple(calls))]
    text = ChatTemplate(source).render(conversation, add_generation_prompt=False)
    written = text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    said, found = read(call_parser(form, USE), written)
    assert said == "See:"
    assert [(called, json.loads(arguments)) for called, arguments in found] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<seed:tool_call><function=f><parameter=a>", "hermes"),
        ("<tool_call>name<arg_key>", "hermes"),
        ("<tool_call><function=f>{json}</function>", "hermes"),
        ("ipython <tool_call> {'name': x, 'parameters': y}", "hermes"),
        ("""ipython "{\\"name\\": \\"" + f + "\\"parameters\\": " """, "llama"),
        ("{'name': x, 'parameters': y}", "hermes"),
        ("[TOOL_CALLS]f[CALL_ID]i[ARGS]", "mistral-args"),
    ],
)
def test_marks_that_look_alike(source: str, name: str) -> None:
    assert tool_form(source).name == name
