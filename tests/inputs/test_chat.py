"""Templates render as transformers renders them, and can't do harm."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.core.messages import Message, Picture, Text, Tool, ToolCall, Video, user
from snugvl.errors import CheckpointError, RequestError
from snugvl.inputs import sandbox
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.tools.in_text import tool_json

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
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
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
CALLS = (ToolCall("1", "wörter", '{"a":[1,"é"],  "b":{}}'), ToolCall("2", "now", "{}"))
POCKET = Path(__file__).parents[2] / "src/snugvl/pocket/chat_template.jinja"
CONVERSATIONS: dict[str, list[Message]] = {
    "text": [user("Hi <b> & 'you'\n")],
    "system": [SYSTEM, user("Hi")],
    "images": [user(PICTURE, "a", PICTURE, PICTURE, "b")],
    "turns": [
        SYSTEM, user(PICTURE, "What?"), Message("assistant", (Text("A cat."),)), user("And ", PICTURE, "?")
    ],
    "video": [user(VIDEO, PICTURE, "What?")],
    "parts of text": [user("a", "b "), Message("assistant", (Text(""),)), user("c")],
    "calls": [
        SYSTEM,
        user(PICTURE, "What?"),
        Message("assistant", (Text("Let me see."),), CALLS),
        Message("tool", (Text("sun <b>"),), tool_call_id="1"),
        Message("tool", (PICTURE, Text("rain")), tool_call_id="2"),
        Message("assistant", (), CALLS[:1]),
        Message("tool", (Text('{"a": 1}'),)),
        user("So?"),
    ],
}  # fmt: skip


def as_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    def part(value: Any) -> dict[str, Any]:
        return {"type": "text", "text": value.text} if isinstance(value, Text) else (
            {"type": "image"} if isinstance(value, Picture) else {"type": "video"}
        )  # fmt: skip

    def fields(m: Message) -> dict[str, Any]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in m.tool_calls
        ]
        return (
            {"role": m.role, "content": [part(p) for p in m.content]}
            | ({"tool_calls": calls} if calls else {})
            | ({"reasoning_content": m.reasoning} if m.reasoning else {})
        )

    return [fields(m) for m in messages]


# The simple template shows neither tools nor calls, and refuses them (see below).
CASES = [
    pytest.param(which, name, tools, id=f"{which}-{name}-{'tools' if tools else 'plain'}")
    for which in ("full", "simple", "pocket")
    for name in CONVERSATIONS
    for tools in (None, TOOLS)
    if which != "simple" or (tools is None and name != "calls")
]


@pytest.mark.parametrize(("which", "name", "tools"), CASES)
@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.sample(
    "False-simple-images-plain",
    "True-pocket-video-plain",
    "False-full-system-plain",
    "False-full-parts of text-tools",
    "False-full-video-tools",
    "False-simple-turns-plain",
    "True-simple-video-plain",
    "True-pocket-system-plain",
    "False-pocket-text-tools",
    "True-pocket-parts of text-plain",
    "False-full-calls-tools",
    "False-simple-system-plain",
    "True-full-system-tools",
    "True-pocket-calls-plain",
    "True-pocket-parts of text-tools",
    "False-full-turns-tools",
    "False-full-text-tools",
    "False-full-parts of text-plain",
    "True-pocket-video-tools",
    "True-full-images-plain",
    "True-full-calls-plain",
    "False-pocket-system-tools",
    "False-full-images-tools",
    "True-pocket-turns-tools",
    "False-full-video-plain",
    "True-simple-text-plain",
    "False-full-turns-plain",
    "True-pocket-calls-tools",
    "False-simple-parts of text-plain",
    "False-pocket-images-tools",
    "True-pocket-turns-plain",
    "False-pocket-text-plain",
    "False-full-text-plain",
    "True-pocket-images-plain",
)
def test_equals_transformers(checkpoint: Path, name: str, tools: Any, ask: bool, which: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    sources = {"full": FULL_TEMPLATE, "pocket": POCKET.read_text()}
    source = sources.get(which) or (checkpoint / "chat_template.jinja").read_text()
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


# As Qwen's templates have it: what was thought before the newest question is left out.
THINKING_TEMPLATE = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content is string and loop.index0 > ns.last -%}
<think>
{{ m.reasoning_content.strip() }}
</think>

{% endif %}{% for part in m.content %}{{ part.text }}{% endfor %}{{ m.tool_calls | length }}<|im_end|>
{% endfor -%}
"""


def test_what_was_thought_before_is_shown_as_transformers_would() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    call = ToolCall("c", "look", "{}")
    messages = [
        user("One?"),
        Message("assistant", (Text("Yes."),), reasoning="old thoughts"),
        user("Two?"),
        Message("assistant", (), (call,), reasoning="new thoughts"),
        Message("tool", (Text("a ball"),), tool_call_id="c"),
    ]
    theirs, _ = utils.render_jinja_template(
        conversations=[as_dicts(messages)], chat_template=THINKING_TEMPLATE, add_generation_prompt=True
    )
    ours = ChatTemplate(THINKING_TEMPLATE, parts=True).render(messages)
    assert ours == theirs[0]
    assert "new thoughts" in ours
    assert "old thoughts" not in ours
    without_calls = ChatTemplate(THINKING_TEMPLATE.replace("tool_calls", "x"), parts=True)
    assert "new thoughts" in without_calls.render(messages[:4]), "also where calls are written as text"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_templates_find_what_was_thought_under_their_own_name(name: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.NAME }}{% endfor %}".replace("NAME", name))
    assert template.render([Message("assistant", (Text("Yes."),), reasoning="hm")]) == "hm"


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "it is nested too deeply"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "it is nested too deeply"),
        ("{{ " + "+".join("1" * 3000) + " }}", "it is nested too deeply"),
        ("a" * 200_001, "has 200,001 characters, at most 200,000 are read"),
    ],
    ids=["parentheses", "ifs", "a sum", "long"],
)
def test_a_template_that_is_too_deep_or_too_long(broken: Path, source: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ChatTemplate(source)
    (broken / "chat_template.jinja").write_text(source)
    with pytest.raises(CheckpointError, match=f"chat_template.jinja.*{said}"):
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
    with pytest.raises(CheckpointError, match=r"fails with .* even on a simple question") as raised:
        ChatTemplate(source).render([user("x")])
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 4


GROWING = "{% set n = namespace(x='ab', l=[1], n=3) %}{% for i in range(60) %}"
BIG = "{% set b = 'x' * 1000000 %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ '%0999999999d' % 1 }}", "a value of 4,000,000,0.. bytes, at most 16,79"),
        ("{{ '%*d' % (10**9, 1) }}", "a value of 1,000,000,0.. bytes"),
        ("{{ '%0999999999d' | format(1) }}", "bytes"),
        ("{{ '{:{}}'.format(1, 10**9) }}", "bytes"),
        ("{{ ('%s' * 100000) % ((messages,) * 100000) }}", "bytes"),
        (BIG + "{{ ('{0}' * 100000).format(b) }}", "values of more than 268,.* bytes in all"),
        ("{{ 'x' * 10**10 }}", "a value of 40,000,000,000 bytes"),
        ("{{ 10**9 * [1] }}", "bytes"),
        ("{{ 'x' | center(10**9) }}", "bytes"),
        ("{{ 'x'.ljust(10**9) }}", "bytes"),
        ("{{ ('\n' * 1000000) | indent(10**6, true, true) }}", "bytes"),
        ("{{ [1] | batch(10**9, 'x') | list }}", "bytes"),
        ("{{ 42 | round(10**9) }}", "bytes"),
        ("{{ [[1]] | tojson(indent=10**9) }}", "bytes"),
        (BIG + "{{ b.replace('x', b) }}", "bytes"),
        (BIG + "{{ b | replace('', b) }}", "bytes"),
        (BIG + "{{ b.join(range(100000) | map('string')) }}", "bytes"),
        (BIG + "{{ range(100000) | map('default', b, true) | join(b) }}", "bytes"),
        (BIG + "{{ ([b] * 100000) == ([b ~ ''] * 100000) }}", "bytes"),
        ("{{ 10 ** 10 ** 4 }}{{ 2 ** (10 ** 8) }}", "a whole number of 200,000,000 bits, at most 10,000"),
        (GROWING + "{% set n.n = n.n * n.n %}{% endfor %}", "bits"),
        (GROWING + "{% set n.x = n.x ~ n.x %}{% endfor %}", "bytes"),
        (GROWING + "{% set n.x = n.x + n.x %}{% endfor %}", "bytes"),
        (GROWING + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}", "bytes"),
        (GROWING + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}", "bytes"),
        (GROWING + "{% set n.l = dict(a=n.l, b=n.l) %}{% endfor %}{{ n.l }}", "bytes"),
        ("{% macro m(n) %}{{ m(n, varargs, varargs) }}{% endmacro %}{{ m(1, 1, 1) }}", "bytes"),
        (BIG + "".join("{% set a" + str(i) + " = b[1:] %}" for i in range(300)), "in all"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}", "in all"),
        (f"{{% for i in '{'x' * 9000}' %}}" * 3 + "{% endfor %}" * 3, "in all"),
        ("{% for i in [1] recursive %}{{ loop(range(9999)) if loop.depth < 4 }}{% endfor %}", "in all"),
    ],
)
def test_what_a_template_may_take_is_bounded(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 600.0)
    if said == "in all" and not source.startswith(BIG):
        monkeypatch.setattr(sandbox, "MOST_BYTES", 1 << 20)  # which takes a tenth of the time
    with pytest.raises(CheckpointError, match=f"^the chat template .*{said}"):
        ChatTemplate(source).render([user("x")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum(n=10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ '{a:999999999}'.format_map({'a': 1}) }}",
        "{% autoescape true %}{{ ('<!--' | e).striptags() }}{% endautoescape %}",
    ],
)
def test_what_no_template_needs_is_not_there(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"fails with (Undefined|Security)Error"):
        ChatTemplate(source).render([user("x")])


def test_the_processor_time_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.0)
    with pytest.raises(CheckpointError, match=r"asks for more than 0 s of processor time, .*; use another"):
        ChatTemplate("{% for i in range(100) %}x{% endfor %}").render([user("x")])


def test_a_long_conversation_is_no_attack() -> None:
    """A template may take more where it is given more: here each message is added to those before."""
    adds = (
        "{% set n = namespace(x='') %}{% for m in messages[0:] %}{% set n.x = n.x + m.content %}{% endfor %}"
    )
    conversation = [user("word " * 1000)] * 500
    assert ChatTemplate(adds + "{{ n.x.strip() | tojson | length }}").render(conversation) == "2500001"


def test_formats_and_joins_are_as_ever() -> None:
    source = (
        "{{ '%s is %-5d|' % ('a', 3) }}{{ '{0:>4}{n[0]!r}'.format(1, n=['b']) }}{{ '%(k)s' | format(k=2) }}"
        "{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}{{ '=' * 3 }}{{ 2 ** 3 * 1.5 }}"
        "{{ 'x'.center(3) }}{{ ' a b'.split() }}{{ 'aXb'.replace('X', '--') }}{{ [1, 2] + [3] }}"
        "{{ (1, 2)[1:] }}{{ {'a': 1} == {'a': 1} }}{{ 3 in [1, 2] + [3] }}{{ [3, 1] | sort | first }}"
        "{% for k, v in {'a': 1}.items() %}{{ loop.length }}{{ loop.last }}{{ k ~ v }}{% endfor %}"
        "{% for i in [1, [2]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}"
    )
    assert ChatTemplate(source).render([user("x")]) == (
        "a is 3    |   1'b'2a, bc-d===12.0 x ['a', 'b']a--b[1, 2, 3](2,)TrueTrue11Truea112"
    )


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([user("x")]).isdigit()


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "calls"])
@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.sample(
    "True-turns", "False-parts of text", "True-video", "False-system", "False-text", "False-images"
)
def test_without_tools_pocket_renders_what_it_was_trained_on(checkpoint: Path, name: str, ask: bool) -> None:
    simple = ChatTemplate.from_folder(checkpoint)
    pocket = ChatTemplate(POCKET.read_text())
    assert pocket.render(CONVERSATIONS[name], ask) == simple.render(CONVERSATIONS[name], ask)


def test_pocket_shows_calls_in_the_form_of_hermes() -> None:
    tool = Tool("now", "The time", {"type": "object"})
    text = ChatTemplate(POCKET.read_text()).render(CONVERSATIONS["calls"], tools=[tool_json(tool)])
    assert f"<tools>\n{json.dumps(tool_json(tool))}\n</tools>" in text
    assert (
        "<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "wörter", "arguments": {"a": [1, "é"], "b": {}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun <b>\n</tool_response>\n<tool_response>\n"
    ) in text


@pytest.mark.parametrize(
    ("message", "match", "field"),
    [
        (Message("user", (), CALLS), "only the assistant calls tools", "messages[1]"),
        (Message("robot"), "role 'robot' is unknown", "messages"),  # type: ignore[arg-type]
        (
            Message("assistant", (), (CALLS[0], ToolCall("3", "f", "{"))),
            "not JSON",
            "messages[1].tool_calls[1].arguments",
        ),
        (Message("assistant", (), (ToolCall("3", "f", "[]"),)), "not a JSON object", None),
        (Message("assistant", (), (ToolCall("3", "f", '{"a": NaN}'),)), "NaN is not a JSON number", None),
        (Message("assistant", (), (ToolCall("3", "f", '{"a": 1e999}'),)), "1e999 is not a JSON number", None),
        (Message("assistant", (), (ToolCall("3", "f", "[" * 100_000),)), "not JSON", None),
    ],
)
def test_messages_it_refuses(message: Message, match: str, field: str | None) -> None:
    with pytest.raises(RequestError, match=match) as raised:
        ChatTemplate(POCKET.read_text()).render([user("x"), message])
    assert field is None or raised.value.field == field
