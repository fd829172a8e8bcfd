"""Calls in Qwen's XML, as Qwen3-Coder and Qwen3.5 write them:

    <tool_call>
    <function=f>
    <parameter=a>
    a value, of several lines if it is text
    </parameter>
    </function>
    </tool_call>

Text is written as it is, up to the first line that begins with `</parameter>`; anything else as JSON. What
a value is, its schema says; one that is not JSON of its type stays a string. A body in JSON is read too.

    head ──<function=f>──→ parameters ──<parameter=a>──→ value ──</parameter>──→ parameters … ──</function>──→
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from snugvl.core.messages import Tool, ToolUse
from snugvl.errors import RequestError
from snugvl.inputs.tools.enforceable import between_quotes, ended, referred
from snugvl.inputs.tools.grammar import (
    ANY,
    COMPACT,
    arguments_schema,
    called,
    escaped,
    marked,
    marker,
    quoted,
)
from snugvl.inputs.tools.hermes import CLOSING, OPENING, HermesParser
from snugvl.inputs.tools.in_text import no_number
from snugvl.inputs.tools.parser import HEAD_LIMIT, NAME, held

_FUNCTION = re.compile(rf"\s*<function=({NAME})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_PARAMETER_END: Final = "</parameter>"
_LINE: Final = "\n"
# Pair by pair: in `\\/` the backslashes are one, which leaves the slash to be escaped.
_SLASHES = re.compile(r"\\.|/|\n", re.DOTALL)
_HOPS = 16  # of references
_STARTS = ("<parameter=", "</function>")
ALL: Final = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
TEXT: Final = frozenset(("string",))
_DEPTH: Final = 64  # of references and alternatives, one within the other
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # as some templates write them


class Types:
    """The types that the parts of one schema admit; each part is looked at once, however many refer to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}  # by the part's id

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a part of the root admits; all of them where it doesn't say."""
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return ALL
        if id(schema) not in self._known:
            self._known[id(schema)] = ALL  # what refers to itself says nothing
            self._known[id(schema)] = self._of(schema, depth + 1)
        return self._known[id(schema)]

    def _of(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        found = ALL
        if "type" in schema:
            named = schema["type"]
            found = frozenset([named] if isinstance(named, str) else named)
            found |= {"integer"} if "number" in found else frozenset()
        if "$ref" in schema:
            found &= self.of(referred(schema["$ref"], self._root), depth)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                found &= frozenset().union(*(self.of(each, depth) for each in schema[key]))
        for each in schema.get("allOf", ()):
            found &= self.of(each, depth)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            found &= {_type(value) for value in values}
        return found


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Types of a tool's parameters; `others`: of those that its schema doesn't name."""

    types: Mapping[str, frozenset[str]]
    others: frozenset[str]

    @classmethod
    def of(cls, tool: Tool) -> "_Parameters":
        schema = arguments_schema(tool)
        types = Types(schema)
        properties = schema.get("properties", {})
        named = {name: types.of(value) for name, value in properties.items()}
        return cls(named, types.of(schema.get("additionalProperties", True)))


class QwenXmlParser(HermesParser):
    """Reads calls between Hermes' markers; arguments become JSON as they come."""

    heads = "{<"

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._tools = {tool.name: tool for tool in use.tools}
        self._known: dict[str, _Parameters] = {}  # of tools that were called
        self._parameters = _Parameters({}, ALL)
        self._type = ALL  # of the present value
        self._separator = ""
        self._value_end = ""  # what ends it; empty until its first character has come
        self._lead = 0  # characters of the buffer before it

    def _read_head(self) -> bool:
        match = _FUNCTION.match(self._buffer[:HEAD_LIMIT])
        if match is None or match[1] not in self._names:
            return super()._read_head()
        if match[1] not in self._known:
            self._known[match[1]] = _Parameters.of(self._tools[match[1]])
        self._parameters = self._known[match[1]]
        self._start(match[1])
        self._argue("{")
        self._separator = ""
        return self._enter(self._read_parameters, self._buffer[match.end() :])

    def _read_parameters(self) -> bool:
        if match := _PARAMETER.match(self._buffer[:HEAD_LIMIT]):
            key = match[1]
            self._type = self._parameters.types.get(key, self._parameters.others)
            begin = '"' if self._type == TEXT else ""
            self._argue(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {begin}")
            self._separator, self._value_end = ", ", ""
            return self._enter(self._read_value, self._buffer[match.end() :])
        end = _FUNCTION_END.match(self._buffer)
        rest = self._buffer.lstrip()
        begun = any(start.startswith(rest) for start in _STARTS)
        open_key = rest.startswith(_STARTS[0]) and "\n" not in rest
        if end is None and len(self._buffer) < HEAD_LIMIT and (begun or open_key):
            return False
        self._argue("}")
        return self._enter(self._read_tail, self._buffer[end.end() :] if end else self._buffer)

    def _read_value(self) -> bool:
        """A value ends where `</parameter>` begins a line; one on the line of its key at the first one."""
        if not self._buffer:
            return False
        if not self._value_end:
            self._lead = int(self._buffer[0] == "\n")
            self._value_end = "\n" * self._lead + _PARAMETER_END
        end = self._value_end
        found = self._buffer.find(end, max(0, self._searched - len(end)))
        if found >= 0:
            value = self._buffer[self._lead : found]
            text = self._type == TEXT
            self._argue(f'{between_quotes(value)}"' if text else value_json(value, self._type))
            return self._enter(self._read_parameters, self._buffer[found + len(end) :])
        sure = len(self._buffer) - held(self._buffer, end)
        if self._type == TEXT and sure:
            self._argue(between_quotes(self._buffer[self._lead : sure]))
            self._buffer, self._lead = self._buffer[sure:], 0
        self._searched = len(self._buffer)
        return False

    def _cut(self, state: Callable[[], bool], rest: str, *, lost: bool) -> None:
        if state != self._read_value:
            super()._cut(state, rest, lost=lost)
        elif rest:
            value = rest[self._lead : len(rest) - held(rest, self._value_end)]
            quote = '"' if self._type != TEXT and "string" in self._type else ""
            self._argue(quote + between_quotes(value) if "string" in self._type else value)


def lark(use: ToolUse, tokens: Mapping[str, int]) -> list[str]:
    """Lines of the Lark grammar of an answer with calls.

    Parameters come in the order of the schema, the required ones always. A text follows its `enum`, `const`,
    `maxLength` and `pattern`, isn't empty if there is a `minLength`, and follows no `format`.

    Raises:
        RequestError: a parameter's name that can't be written in this form.
    """
    rules, functions = [], []
    for i, tool in enumerate(called(use)):
        parameters = _parameters(i, tool, use.tools.index(tool))
        functions.append(f"{quoted(f'{_LINE}<function={tool.name}>{_LINE}')} function_{i}")
        rules.append(f"function_{i}: {' '.join(name for name, _ in parameters) or quoted('')}")
        rules += [rule for _, rules_of in parameters for rule in rules_of]
    return [
        *marked(use, OPENING, tokens, between="\n"),
        f"call: ({' | '.join(functions)}) {quoted('</function>' + _LINE)} {marker(CLOSING, tokens)}",
        *rules,
    ]


def _parameters(i: int, tool: Tool, index: int) -> list[tuple[str, list[str]]]:
    """Grammar of each parameter: how the function's rule names it, and its own rules."""
    schema = arguments_schema(tool)
    types = Types(schema)
    required = schema.get("required", [])
    properties = dict(schema.get("properties", {}))
    properties |= {key: True for key in required if key not in properties}
    found = []
    for j, (key, value) in enumerate(properties.items()):
        if value is False or not types.of(value):
            continue  # no value is valid, so it is left out
        if not _PARAMETER.fullmatch(f"<parameter={key}>"):
            raise RequestError(
                f"this model writes calls as XML, which can't name the parameter {key!r} of {tool.name!r}; "
                "rename it without '>' and line breaks",
                field=f"tools[{index}].parameters",
            )
        name = f"parameter_{i}_{j}"
        rule = f"{name}: {quoted(f'<parameter={key}>{_LINE}')} value_{i}_{j} {quoted(_LINE)}"
        wanted = name if key in required else f"{name}?"
        found.append((wanted, [rule, *_value(f"value_{i}_{j}", value, schema, types)]))
    others = schema.get("additionalProperties", True)
    if others is not False:
        taken = "|".join(escaped(key) for key in properties)
        but = f" & ~/<parameter=({taken})>\\n/" if taken else ""
        rules = [
            f"other_{i}: KEY_{i} others_{i} {quoted(_LINE)}",
            f"KEY_{i}: /<parameter=[^>\\n]{{1,64}}>\\n/{but}",
        ]
        found.append((f"other_{i}*", [*rules, *_value(f"others_{i}", others, schema, types)]))
    return found


def _value(name: str, schema: Any, root: Mapping[str, Any], known: Types) -> list[str]:
    """The rule `name` of a value and the line that ends it, and what it needs."""
    types = known.of(schema)
    for _ in range(_HOPS):
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = referred(schema["$ref"], root)
    schema = schema if isinstance(schema, Mapping) else {}
    end = _LINE + _PARAMETER_END
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        written = (value if isinstance(value, str) else json.dumps(value) for value in values)
        return [f"{name}: {' | '.join(quoted(value + end) for value in written)}"]
    if "string" not in types:
        whole = {key: root[key] for key in ("$defs", "definitions") if key in root} | dict(schema)
        made = json.dumps(ended(whole) | {"x-guidance": COMPACT})
        return [f"{name}: {name}_json {quoted(end)}", f"{name}_json: %json {made}"]
    return [f"{name}[lazy]: {_text(schema if types == TEXT else {}, escaped(end))}"]


def _text(schema: Mapping[str, Any], end: str) -> str:
    """A pattern of a text and the line that ends it, read no further than to the first such line."""
    wanted = []
    if pattern := _pattern(schema.get("pattern", "")):
        # Nothing that looks like the end may stand before it, though the pattern would take it.
        wanted += [f"/{pattern}{end}/", f"~/{ANY}{end}(.|\\n)+/"]
    if "maxLength" in schema:
        wanted.append(f"/(.|\\n){{0,{schema['maxLength']}}}{end}/")
    if schema.get("minLength", 0):
        wanted.append(f"~/{end}{ANY}/")
    if not pattern and "maxLength" not in schema:
        wanted.insert(0, f"/{ANY}{end}/")
    return " & ".join(wanted)


def _pattern(source: str) -> str | None:
    """A JSON schema's pattern, which may match anywhere, for a whole text.

    None for none, and for one whose anchors are elsewhere than at its two ends.
    """
    plain = re.sub(r"\\.|\[[^\]]*\]", "", source)
    begins, ends = plain.startswith("^"), plain.endswith("$")
    inner = plain[begins : len(plain) - ends]
    if not source or re.search(r"[$^]", inner) or ((begins or ends) and "|" in re.sub(r"\(.*\)", "", inner)):
        return None
    body = _SLASHES.sub(_within_slashes, source[begins : len(source) - ends])
    return f"{'' if begins else ANY}({body}){'' if ends else ANY}"


def _within_slashes(found: re.Match[str]) -> str:
    """An escape for what ends a literal between slashes; any other pair with a backslash stays as it is."""
    match found[0].removeprefix("\\") or found[0]:
        case "/":
            return "\\/"
        case "\n":
            return "\\n"
    return found[0]


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as `text`: of one of `types` if it can be, else a string."""
    plain = text.strip()
    plain = _PYTHON.get(plain, plain)
    try:
        value = json.loads(plain, parse_constant=no_number)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type(value)
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    if kind in types and kind != "string":
        return plain
    return json.dumps(text, ensure_ascii=False)


def _type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
