"""Tools, calls and answers as text: what a template that shows none makes of them is what Hermes' shows."""

from typing import Any

import pytest
from PIL import Image

from snugvl.core.messages import Message, Picture, Text, Tool, ToolCall, ToolForm, user
from snugvl.errors import RequestError
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.tools.in_text import tool_json

_PARTS = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}
{{- part.text if part.type == 'text' else '<|image_pad|>' -}}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
# With the layout and the words of the templates of Hermes 3, Qwen2.5 and Qwen3-VL.
HERMES = _PARTS + """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- shown(messages[0].content) + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments " }}
    {{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + shown(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + shown(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # fmt: skip
PLAIN = _PARTS + """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + shown(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # fmt: skip
TOOLS = [
    tool_json(Tool("wörter", "a <b> & 'c'", {"type": "object", "n": [1.5, None]})),
    tool_json(Tool("now")),
]
SYSTEM = Message("system", (Text("Be "), Text("brief.")))
PICTURE = Picture(Image.new("RGB", (8, 8)))
CALLS = (ToolCall("1", "wörter", '{"a":[1,"é"],  "b":{}}'), ToolCall("2", "now", "{}"))
HISTORY = [
    user(PICTURE, "What?"),
    Message("assistant", (Text("Let me see."),), CALLS),
    Message("tool", (Text("sun <b>"),), tool_call_id="1"),
    Message("tool", (PICTURE, Text("rain")), tool_call_id="2"),
    Message("assistant", (), CALLS[:1]),
    Message("tool", (), tool_call_id="1"),
    Message("assistant", (Text("So."),)),
    user("Thanks"),
]
CASES: dict[str, tuple[list[Message], Any]] = {
    "tools": ([user("Hi")], TOOLS),
    "tools beside a system message": ([SYSTEM, user("Hi")], TOOLS),
    "a history": ([SYSTEM, *HISTORY], TOOLS),
    "a history whose tools are gone": (HISTORY, None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [False, True])
def test_it_is_what_hermes_template_shows(name: str, parts: bool) -> None:
    messages, tools = CASES[name]
    plain, hermes = ChatTemplate(PLAIN, parts=parts), ChatTemplate(HERMES, parts=parts)
    assert (plain.shows_tools, plain.shows_calls) == (False, False)
    assert plain.render(messages, tools=tools) == hermes.render(messages, tools=tools)


def test_a_template_that_shows_calls_but_no_tools() -> None:
    source = PLAIN.replace("+ '<|im_end|>", "+ (message.tool_calls or [])|tojson + '<|im_end|>")
    text = ChatTemplate(source).render(HISTORY, tools=TOOLS)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '"name": "now"' in text
    assert "<tool_response>" not in text


def test_whoever_writes_the_marks_would_speak_as_the_tool() -> None:
    template = ChatTemplate(PLAIN)
    assert template.answer_marks == ("<tool_response>", "</tool_response>")
    assert template.tool_form == ToolForm("hermes")


def test_arguments_that_are_none_are_blamed() -> None:
    message = Message("assistant", (), (CALLS[1], ToolCall("1", "f", "[1]")))
    with pytest.raises(RequestError, match="'f' are not a JSON object") as raised:
        ChatTemplate(PLAIN).render([user("x"), message])
    assert raised.value.field == "messages[1].tool_calls[1].arguments"
