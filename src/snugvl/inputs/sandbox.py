"""Where chat templates run: jinja2's immutable sandbox, with bounds of size and time.

A template comes with a downloaded file, and one line of it (`{{ 'x' * 10**10 }}`) could take the machine's
memory. So what makes a value larger than what it is made of is weighed before it runs: operators, filters,
calls, displays such as `[x, x]`, what is joined, compared and printed. Everything else grows a value by a
small factor at most, and is counted afterwards; so are the turns of loops, and the processor's time.

Otherwise the environment is that of `render_jinja_template` in transformers: trimmed blocks, loop controls,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`; but `safe` changes
nothing, as nothing is escaped.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from math import prod
from sys import getsizeof
from time import monotonic, thread_time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

MOST_BYTES = 16 << 20  # of one value, beside FACTOR times what the template is given
FACTOR = 16  # and so many values of the most bytes in all
MOST_SECONDS = 5.0  # of a processor; a million characters in a thousand messages take 0.1
MOST_BITS = 10_000  # of a whole number

# Filters and methods that no chat template needs, and whose work can't be told from what they are given.
_NO_FILTERS = ("filesizeformat", "forceescape", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = {
    "encode", "expandtabs", "format_map", "from_bytes", "fromkeys", "maketrans", "striptags", "to_bytes",
    "translate", "unescape",
}  # fmt: skip
_WIDENING = ("center", "ljust", "rjust", "zfill")  # methods that fill up to a width
_PLAIN_FILTERS = {  # they neither read nor compare what is inside a list
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
    "rejectattr", "reverse", "select", "selectattr",
}  # fmt: skip


class ConversationRefused(jinja2.TemplateError):
    """The template called `raise_exception`: the conversation is to blame, not the template."""


class TooMuch(Exception):
    """The template asks for more than it may: what, and the bound."""


class _Budget:
    """Bytes and seconds that one rendering may still take."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        given = _weight(variables)
        self.most = MOST_BYTES + FACTOR * given
        # Some add each message to a text of those before.
        self.all = self.left = FACTOR * self.most + given * len(variables.get("messages", ()))
        self._until, self._began = monotonic() + MOST_SECONDS, thread_time()

    def take(self, size: int) -> None:
        """Raise TooMuch for a value of `size` bytes that is too large, or one too many, or made too late."""
        if size > self.most:
            raise TooMuch(f"a value of {size:,} bytes, at most {self.most:,} are allowed")
        self.left -= size + 32  # an empty text isn't free
        if self.left < 0:
            raise TooMuch(f"values of more than {self.all:,} bytes in all")
        if monotonic() > self._until and thread_time() - self._began > MOST_SECONDS:  # the second is slower
            raise TooMuch(f"more than {MOST_SECONDS:g} s of processor time")


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")  # none while compiling: our filters aren't folded


def rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The template's text with these variables.

    Raises:
        TooMuch: it asks for too much.
        ConversationRefused: it calls `raise_exception`.
        Exception: it fails in any other way that Python can.
    """
    token = _BUDGET.set(_Budget(variables))
    try:
        return template.render(variables)
    finally:
        _BUDGET.reset(token)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's environment for chat templates; its templates are rendered by `rendered`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters["safe"] = str  # jinja2's own makes what escapes any text that is joined to it
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters = {name: _guarded(name, found) for name, found in self.filters.items()}
        self.tests |= {
            name: _guarded(name, found)
            for name, found in self.tests.items()
            if found.__module__ == "_operator" or name == "in"  # they compare
        }
        self.filters |= {"_weighed": _weighed, "_made": _made, "_counted": _counted}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found: nodes.Template = _Weighing().visit(super()._parse(source, name, filename))
        return found

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of these pieces, all of which are counted before they are joined."""
        text = "".join([_made(piece) for piece in pieces])
        _made(text)
        return text

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or getattr(value, "__name__", "") != "format":
            return None  # and `format_map` is no safe attribute
        return lambda *args, **kwargs: _made(_Formatter(self).vformat(text, args, kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget, size = _BUDGET.get(), getsizeof(left) + getsizeof(right)
        if operator == "%" and isinstance(left, str):
            size = _formatted(left, right)
        elif operator == "*" and not isinstance(left, float) and not isinstance(right, float):
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Sequence) and isinstance(times, int):
                    size = (4 * len(value) if isinstance(value, str) else _weight(value)) * max(times, 1)
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) * max(right, 1))
        budget.take(size)
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(obj, LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        elif not isinstance(obj, Macro) or obj.catch_varargs or obj.catch_kwargs:
            args = tuple(_whole(value) for value in args)
            read = isinstance(owner, str) or name in ("count", "index")
            size = _asked(name, [owner, *args] if read else args, kwargs)
            _BUDGET.get().take(size * (_times([*args, *kwargs.values()]) if name in _WIDENING else 1))
        result = super().call(context, obj, *args, **kwargs)
        return _weighed(result) if isinstance(owner, str) else _made(result)


class _Weighing(NodeTransformer):
    """Puts filters of ours around the expressions of a template that the environment isn't asked about."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _behind("_counted", node.iter)
            case nodes.Output() | nodes.Concat():
                node.nodes = [_weighing(child) for child in node.nodes]
            case nodes.Compare() if not isinstance(node.expr, nodes.Const):
                node.expr = _weighing(node.expr)
                for operand in node.ops:
                    operand.expr = _weighing(operand.expr)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return _behind("_weighed", node)
            case nodes.Getitem(arg=nodes.Slice()):
                return _behind("_made", node)
        return node


class _Formatter(SandboxedFormatter):
    """`str.format` with bounds."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        found, first = super().get_field(field_name, args, kwargs)
        return _weighed(found), first

    def format_field(self, value: Any, format_spec: str) -> Any:
        _BUDGET.get().take(_widest(format_spec))
        return _made(super().format_field(value, format_spec))


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without names that reach into Python, and whose text isn't that of what is in it."""

    def __repr__(self) -> str:
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"{name!r} is not allowed as the name of an attribute")
        super().__setitem__(name, value)


def _behind(name: str, node: nodes.Node) -> nodes.Filter:
    """The expression with a filter of ours behind it."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _weighing(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const | nodes.TemplateData) else _behind("_weighed", node)


def _weighed(value: Any) -> Any:
    """The value, counted with all that is in it."""
    _BUDGET.get().take(_weight(value))
    return value


def _made(value: Any) -> Any:
    """The value, counted without what is in it."""
    if isinstance(value, int):
        _check_bits(_bits(value))
    _BUDGET.get().take(getsizeof(value))
    return value


def _counted(values: Iterable[Any]) -> Iterable[Any]:
    """The values of a loop, each of which is counted."""
    budget = _BUDGET.get()
    for value in values:
        budget.take(0)
        yield value


def _whole(value: Any) -> Any:
    """A list of what a lazy filter (`map`, …) would make; any other value as it is."""
    return list(_counted(value)) if isinstance(value, Iterator) and not callable(value) else value


def _weight(value: object, known: dict[int, int] | None = None) -> int:
    """Bytes of a value with all that is in it, what is in it twice counted twice."""
    if not isinstance(value, list | tuple | dict):
        return getsizeof(value)
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = 0  # what contains itself is written as "..."
        inner = (*value, *value.values()) if isinstance(value, dict) else value
        known[id(value)] = getsizeof(value) + sum(_weight(one, known) for one in inner)
    return known[id(value)]


def _guarded(name: str, function: Any) -> Callable[..., Any]:
    """A filter or a test whose work is bounded before it begins."""
    own = _PassArg.from_obj(function) is not None  # the context or the environment, before the values

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = [_whole(value) for value in args[own:]]
        if name not in _PLAIN_FILTERS:
            _BUDGET.get().take(_asked(name, values, kwargs) * _times([*values, *kwargs.values()]))
        return _made(function(*args[:own], *values, **kwargs))

    return guarded


def _asked(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> int:
    """The most bytes that a filter, or a method of its first value, can make of these values."""
    values = [*values, *named.values()]
    size = sum(map(_weight, values))
    if name == "replace" and len(values) > 2:
        text, old, new = map(str, values[:3])
        return size + text.count(old) * getsizeof(new)
    if name == "format" and isinstance(values[0], str):  # the filter; the method is `_Formatter`
        return _formatted(values[0], dict(named) or tuple(values[1:]))
    if name == "join":
        return size + 4 * prod(max(len(value), 1) for value in values if isinstance(value, Sized))
    return size


def _formatted(layout: str, values: Any) -> int:
    """The most bytes that `layout % values` can have."""
    stars = [value for value in values if isinstance(value, int)] if "*" in layout else []
    return getsizeof(layout) + layout.count("%") * max(_widest(layout), _weight(values), *stars, 1)


def _widest(layout: str) -> int:
    """The largest width or precision of a format, in bytes."""
    return 4 * max(map(int, re.findall(r"\d+", layout)), default=0)


def _times(values: Iterable[Any]) -> int:
    """The largest whole number of what a filter is given: a width, an indent, a length."""
    return max([1, *(value for value in values if isinstance(value, int))])


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TooMuch(f"a whole number of {bits:,} bits, at most {MOST_BITS:,} are allowed")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes `<` and `&` for HTML, which no model was trained on."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return Environment.concat(encoder.iterencode(value))


def _raise_exception(message: str) -> None:
    raise ConversationRefused(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout[:1000])  # a width in it makes no more than 256 times as much
