"""A model's own form of calls, from its chat template to its answer, on both engines of this process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import snugvl
from snugvl.backends.child.requests import capabilities_of
from snugvl.backends.vllm.requests import ServedModel, body_of
from snugvl.backends.vllm.settings import read_facts
from snugvl.core.messages import Request, Text, Tool, ToolForm, ToolUse, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.tools.forms import call_parser
from snugvl.inputs.tools.in_text import tool_json
from snugvl.inputs.trials import Trials
from tests.inputs.tools.reading import read
from tests.inputs.tools.templates import TEMPLATES
from tests.inputs.tools.test_in_text import HERMES, HISTORY, PLAIN

POCKET = Path(snugvl.__file__).parent / "pocket"
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["a b", "c"]}},
    "required": ["n", "s"],
}
USE = ToolUse((Tool("run", "", PARAMETERS),), "run")


def with_template(folder: Path, source: str, *, tokens: bool = False) -> Path:
    """Pocket, with another template. `tokens`: with Mistral's markers in place of two control tokens."""
    for path in POCKET.iterdir():
        if path.is_file() and path.suffix != ".py":
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(source)
    if tokens:
        whole = (POCKET / "tokenizer.json").read_text()
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.json").write_text(
            whole.replace("<|quad_start|>", "[TOOL_CALLS]").replace("<|quad_end|>", "[ARGS]")
        )
    return folder


@pytest.mark.parametrize(
    ("backend", "name", "tokens"),
    [
        ("native", "qwen-xml", False),
        ("native", "llama", False),
        ("native", "mistral-args", True),
        ("transformers", "mistral-args", False),
    ],
)
@pytest.mark.sample("native-qwen-xml-False", "native-mistral-args-True")
def test_a_call_in_the_models_form(tmp_path: Path, backend: Any, name: str, tokens: bool) -> None:
    source, form = TEMPLATES[name]
    folder = with_template(tmp_path, source, tokens=tokens)
    with snugvl.load(folder, device="cpu", backend=backend) as model:
        assert model.capabilities.tool_form == form
        assert model.capabilities.tools
        assert model.capabilities.thinks == ("</think>" in source)
        request = Request((user("Call it."),), SamplingParams(max_tokens=200), tools=USE)
        text = "".join(delta.text for delta in model.backend.submit(request))
    said, ((called, arguments),) = read(call_parser(form, USE), text)
    assert (said, called) == ("", "run")
    value = json.loads(arguments)
    assert 0 <= value["n"] <= 9
    assert value["s"] in ("a b", "c")


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.sample("native")
def test_a_call_where_the_template_shows_no_tools(tmp_path: Path, backend: Any) -> None:
    folder = with_template(tmp_path, PLAIN + "{# </think> #}")
    with snugvl.load(folder, device="cpu", backend=backend) as model:
        assert not model.capabilities.tools
        assert model.capabilities.thinks
        assert model.capabilities.tool_form == ToolForm()
        for choice in ("required", "run"):
            request = Request(
                (user("Call it."),), SamplingParams(max_tokens=200), tools=replace(USE, choice=choice)
            )
            text = "".join(delta.text for delta in model.backend.submit(request))
            said, calls = read(call_parser(ToolForm(), USE), text)
            assert said == ""
            assert {called for called, _ in calls} == {"run"}
            assert all(json.loads(arguments).keys() == {"n", "s"} for _, arguments in calls)


def test_vllm_gets_as_text_what_the_template_does_not_show(tmp_path: Path) -> None:
    facts = read_facts(str(with_template(tmp_path, PLAIN)))
    assert (facts.tools, facts.calls) == (False, False)
    trials, model = Trials(1), ServedModel("m", 10_000, replace(facts, images=True))
    messages = tuple(
        message for message in HISTORY if all(isinstance(part, Text) for part in message.content)
    )
    fields = body_of(Request(messages, tools=USE), model, trials).fields
    assert "tools" not in fields
    assert fields["structured_outputs"]["grammar"].startswith('start: "<tool_call>" call')
    assert not any("tool_calls" in message or message["role"] == "tool" for message in fields["messages"])
    shown = [tool_json(tool) for tool in USE.tools]
    wanted = ChatTemplate(HERMES).render(messages, tools=shown)
    assert ChatTemplate(PLAIN).render(messages, tools=shown) == wanted
    sent = "".join(
        f"<|im_start|>{message['role']}\n{text_of(message['content'])}<|im_end|>\n"
        for message in fields["messages"]
    )
    assert sent + "<|im_start|>assistant\n" == wanted


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def test_vllm_is_told_the_form_of_the_folder(tmp_path: Path) -> None:
    source, form = TEMPLATES["qwen-xml"]
    facts = read_facts(str(with_template(tmp_path, source)))
    assert facts.tool_form == form
    assert capabilities_of("m", 100, facts, "vllm").tool_form == form
    trials, model = Trials(1), ServedModel("m", 9, facts, {"<tool_call>": 7})
    fields = body_of(Request((user("x"),), tools=USE), model, trials).fields
    grammar = fields["structured_outputs"]["grammar"]
    assert grammar.startswith("start: <[7]> call")
    assert "<function=run>" in grammar
    assert read_facts("nobody/knows-this").tool_form == ToolForm()
    wrong = ToolUse((Tool("a"), Tool("b", "", {"properties": {"x": {"type": 5}}})))
    with pytest.raises(RequestError, match="type must be a string") as raised:
        body_of(Request((user("x"),), tools=wrong), ServedModel("m", 9, facts), trials)
    assert raised.value.field == "tools[1].parameters"
