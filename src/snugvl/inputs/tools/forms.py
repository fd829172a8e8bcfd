"""Which form of calls a model was trained on, by its chat template, and what goes with each form."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from snugvl.core.messages import ToolForm, ToolUse
from snugvl.inputs.tools import hermes, llama, mistral, qwen_xml
from snugvl.inputs.tools.grammar import check_tools
from snugvl.inputs.tools.parser import CallParser

_KEY = r"\\?[\"']{}\\?[\"']\s*:"  # of an object, in a string of a template
_LLAMA = re.compile(_KEY.format("name") + ".*" + _KEY.format("parameters"), re.DOTALL)
_LOOP = re.compile(r"\bfor\s+\w+\s+in\s+[\w.\[\]\"']*tool_calls\b")


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of tool calls: parser and grammar. `markers`: texts that may be tokens of their own; `before`:
    see `before_arguments`."""

    parser: type[CallParser]
    lark: Callable[[ToolUse, Mapping[str, int]], list[str]]
    markers: tuple[str, ...]
    before: Callable[[str], str | None] = lambda _: None


_FORMS: Final[Mapping[str, _Form]] = {
    "hermes": _Form(
        hermes.HermesParser, hermes.lark, (hermes.OPENING, hermes.CLOSING), hermes.before_arguments
    ),
    "qwen-xml": _Form(qwen_xml.QwenXmlParser, qwen_xml.lark, (hermes.OPENING, hermes.CLOSING)),
    "mistral": _Form(mistral.MistralParser, mistral.list_lark, (mistral.OPENING,)),
    "mistral-args": _Form(mistral.MistralParser, mistral.args_lark, (mistral.OPENING, mistral.ARGS)),
    "llama": _Form(llama.LlamaParser, llama.lark, (llama.TAG,)),
}
MARKERS: Final = tuple(dict.fromkeys(text for form in _FORMS.values() for text in form.markers))


def tool_form(template: str) -> ToolForm:
    """The form whose marks are in a chat template's source; Hermes' where none is recognised."""
    single = "tool_calls[0]" in template and not _LOOP.search(template)
    if "<tool_call>" in template:
        xml = "<function=" in template and "<parameter=" in template
        return ToolForm("qwen-xml" if xml else "hermes", single)
    if mistral.OPENING in template:
        return ToolForm("mistral-args" if mistral.ARGS in template else "mistral", single)
    if "ipython" in template and _LLAMA.search(template):
        return ToolForm("llama", single)
    return ToolForm("hermes", single)


def call_parser(form: ToolForm, use: ToolUse) -> CallParser:
    """Reads one choice's text."""
    return _FORMS[form.name].parser(use)


def opening(form: ToolForm) -> str:
    """The marker that begins calls, or may."""
    return _FORMS[form.name].parser.opening


def markers(form: ToolForm) -> tuple[str, ...]:
    """Strings that are text for a parser, even where they are special tokens."""
    return _FORMS[form.name].markers


def before_arguments(form: ToolForm, name: str) -> str | None:
    """The text before the arguments of a call of that name; None where it may stand elsewhere, too."""
    return _FORMS[form.name].before(name)


def tool_lark(form: ToolForm, use: ToolUse, tokens: Mapping[str, int]) -> str:
    """The grammar of an answer, in llguidance's dialect of Lark. `tokens`: ids of the form's markers that are
    tokens of their own.

    Raises:
        RequestError: tools that can't be told apart or called; a name that the form can't write.
    """
    check_tools(use)
    if form.single:
        use = replace(use, parallel=False)
    return "\n".join(_FORMS[form.name].lark(use, tokens))
