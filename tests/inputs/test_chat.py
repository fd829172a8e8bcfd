"""Templates render as transformers renders them, and can't do harm."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.backends.protocol import Message, Picture, Text, Video, user
from snugvl.errors import CheckpointError, RequestError
from snugvl.inputs.chat import ChatTemplate

PICTURE = Picture(Image.new("RGB", (8, 8)))
VIDEO = Video((Image.new("RGB", (8, 8)),) * 2, (0.0, 0.5))

# Written for this test with the features that Qwen3-VL's published template has: tools, a macro over parts,
# counting with a namespace, multi-turn, loop variables, whitespace control.
FULL_TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) %}
{%- macro parts(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for item in content %}
            {%- if item.type == 'image' or 'image' in item %}
                {%- set seen.images = seen.images + 1 %}
                {%- if number_pictures %}Picture {{ seen.images }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif item.type == 'video' or 'video' in item %}
                {%- set seen.videos = seen.videos + 1 -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- parts(messages[0].content) + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + parts(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'system' %}{{ raise_exception('System message must be first') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {% generation %}
    {{- parts(message.content) }}
    {% endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
{{- eos_token if eos_token is defined and false }}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wörter",
            "description": "a <b> & 'c'",
            "parameters": {"type": "object", "n": [1.5, None]},
        },
    }
]
SYSTEM = Message("system", (Text("Be brief."),))
CONVERSATIONS: dict[str, list[Message]] = {
    "text": [user("Hi <b> & 'you'\n")],
    "system": [SYSTEM, user("Hi")],
    "images": [user(PICTURE, "a", PICTURE, PICTURE, "b")],
    "turns": [
        SYSTEM, user(PICTURE, "What?"), Message("assistant", (Text("A cat."),)), user("And ", PICTURE, "?")
    ],
    "video": [user(VIDEO, PICTURE, "What?")],
    "parts of text": [user("a", "b "), Message("assistant", (Text(""),)), user("c")],
}  # fmt: skip


def as_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    def part(value: Any) -> dict[str, Any]:
        return {"type": "text", "text": value.text} if isinstance(value, Text) else (
            {"type": "image"} if isinstance(value, Picture) else {"type": "video"}
        )  # fmt: skip

    return [{"role": m.role, "content": [part(p) for p in m.content]} for m in messages]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.parametrize("which", ["full", "simple"])
def test_equals_transformers(checkpoint: Path, name: str, tools: Any, ask: bool, which: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = FULL_TEMPLATE if which == "full" else (checkpoint / "chat_template.jinja").read_text()
    messages = CONVERSATIONS[name]
    theirs, _ = utils.render_jinja_template(
        conversations=[as_dicts(messages)],
        tools=tools,
        chat_template=source,
        add_generation_prompt=ask,
        eos_token="<|im_end|>",
    )
    ours = ChatTemplate(source, variables={"eos_token": "<|im_end|>"}).render(messages, ask, tools)
    assert ours == theirs[0]
    assert ours.count("<|image_pad|>") == sum(isinstance(p, Picture) for m in messages for p in m.content)


def test_blocks_are_trimmed_as_in_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = "{% if true %}\n  a\n  {% endif %}\nb\n    {% set x = 1 %}\n{{ x }}\n"
    source += "{% generation %}\nc\n{% endgeneration %}\n"
    theirs, _ = utils.render_jinja_template(conversations=[as_dicts([user("x")])], chat_template=source)
    assert ChatTemplate(source).render([user("x")]) == theirs[0]


def test_sources_in_order(broken: Path) -> None:
    def render() -> str:
        return ChatTemplate.from_folder(broken).render([user("x")])

    (broken / "chat_template.jinja").write_text("jinja")
    (broken / "chat_template.json").write_text('{"chat_template": "json"}')
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    (broken / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert render() == "jinja"
    (broken / "chat_template.jinja").unlink()
    assert render() == "json"
    (broken / "chat_template.json").unlink()
    assert render() == "named"
    (broken / "tokenizer_config.json").write_text('{"chat_template": "plain"}')
    assert render() == "plain"
    (broken / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no chat template"):
        render()


def test_special_tokens_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", variables={"bos_token": "<s>"})
    assert template.render([user("x")]) == "<s>x"


def test_a_template_that_is_none(broken: Path) -> None:
    (broken / "chat_template.jinja").write_text("a\n{% for x in %}")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is not a valid template: line 2"):
        ChatTemplate.from_folder(broken)
    (broken / "chat_template.jinja").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(CheckpointError, match="can't be read"):
        ChatTemplate.from_folder(broken)


def test_a_conversation_it_refuses() -> None:
    with pytest.raises(RequestError, match="refuses this: System message must be first") as raised:
        ChatTemplate(FULL_TEMPLATE).render([user("a"), SYSTEM])
    assert raised.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(CheckpointError, match="fails on this conversation") as raised:
        ChatTemplate(source).render([user("x")])
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 4


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([user("x")]).isdigit()
