"""The base of every request body. Nothing that would change the answer is ignored; what can't change it is.

    class ChatRequest(Body):
        unsupported = CHAT             # fields that it doesn't declare: refused, or read as one of those
        messages: list[MessageIn]      # a field that is declared is honoured, or checked at least

Three kinds of objects, by what they do with a name that neither their fields nor their unsupported ones have:

    Exact   refuse it: our own protocol, where it is a client's mistake
    Part    ignore it: inside of messages and tools, where a client's own history has names of its own
    Body    ignore it, and name it in the answer's `Snugvl-Warning` header: an unknown field

Every error has the path of the field as people write it ("messages[0].content[1].type"); `server.errors`
makes the answer. All bodies have passed `server.body.parse_json` before: UTF-8, finite numbers, no duplicate
keys, not too deep.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from snugvl.server.metrics import RequestNotes
from snugvl.server.unsupported import UnsupportedFields, settled

TURN: Final = 32  # messages that are worked at before other requests have their turn

T = TypeVar("T")
# Tell the members of a union apart by JSON type, so that an error speaks of the one that was meant.
STRING_OR_ARRAY = Discriminator(lambda value: "array" if isinstance(value, list) else "string")
STRING_OR_OBJECT = Discriminator(lambda value: "string" if isinstance(value, str) else "object")

FormT = TypeVar("FormT")
StringOrArray = Annotated[Annotated[str, Tag("string")] | Annotated[FormT, Tag("array")], STRING_OR_ARRAY]
StringOrObject = Annotated[Annotated[str, Tag("string")] | Annotated[FormT, Tag("object")], STRING_OR_OBJECT]


def whole(value: object) -> object:
    """A number as people write it, to its last digit: 2 for 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: 1.0 is a whole number in it, and some clients write it so.
# Stands after the bounds in Annotated, or the OpenAPI document loses them.
WHOLE = BeforeValidator(whole)

MOST_IGNORED = 12  # warnings of fields that are ignored; others matter more
MAX_NAME = 1024  # characters of a field's name, known or not
MAX_ALL_PARTS = 16_384  # of all messages of a conversation
MAX_FIELDS = 256  # of one object; no protocol has as many, and each unknown one would be an error of its own


def at_most(count: int) -> BeforeValidator:
    """A validator that refuses an object of more than `count` entries before it looks at any."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "too_many_entries", "{given} entries; at most {count}", {"given": len(value), "count": count}
            )
        return value

    return BeforeValidator(check)


def _check_names(values: dict[str, Any]) -> None:
    """Refuse too many fields, or too long names, before pydantic makes an error of each with a copy of it."""
    if len(values) > MAX_FIELDS:
        raise PydanticCustomError(
            "too_many_fields", "an object has {given} fields; at most {count}",
            {"given": len(values), "count": MAX_FIELDS},
        )  # fmt: skip
    longest = max(values, key=len, default="")
    if len(longest) > MAX_NAME:
        raise PydanticCustomError(
            "too_long_a_name", "the name of a field ({name}…) has {given} characters; at most {count}",
            {"name": longest[:40], "given": len(longest), "count": MAX_NAME},
        )  # fmt: skip


_PARTS: Final = ("content", "output", "tool_calls", "images")  # of a message; a tool's result has parts, too


def _check_parts(values: dict[str, Any]) -> None:
    """Refuse too many parts of a conversation, before an object is made of each."""
    for messages in (values.get("messages"), values.get("input")):
        count = _parts_in(messages) if isinstance(messages, list) else 0
        if count > MAX_ALL_PARTS:
            raise PydanticCustomError(
                "too_many_parts", "the messages have {given} parts in all; at most {count}",
                {"given": count, "count": MAX_ALL_PARTS},
            )  # fmt: skip


def _parts_in(items: list[Any]) -> int:
    """Parts, calls and pictures of messages and of what is within them; a body is 100 levels deep at most."""
    lists = [item[key] for item in items if isinstance(item, dict) for key in _PARTS if key in item]
    return sum(len(each) + _parts_in(each) for each in lists if isinstance(each, list))


def _stop_at_first(schema: Any) -> None:
    """Let every list of a schema end at its first wrong item: more would only be counted and thrown away."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for value in schema.values():
            _stop_at_first(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            _stop_at_first(value)


class Strict(BaseModel):
    """A JSON object of a request.

    Validated with `context=` a `RequestNotes`, it warns there of what it ignores.

    Attributes:
        unsupported: fields of the protocol that it doesn't declare and that are not just ignored.
        known: names of these, and of its fields as a request writes them.
        optional: names of its fields that a request may leave out; null is as good as that.
        warns: whether unknown names are a warning; `place`: what stands before them in it.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[UnsupportedFields] = {}
    known: ClassVar[frozenset[str]] = frozenset()
    optional: ClassVar[frozenset[str]] = frozenset()
    warns: ClassVar[bool] = False
    place: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        super().__pydantic_init_subclass__(**given)
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        cls.unsupported = settled(cls.unsupported, declared)
        cls.known = frozenset(declared | cls.unsupported.keys())
        cls.optional = frozenset(
            field.alias or name for name, field in cls.model_fields.items() if not field.is_required()
        )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: Any, info: ValidationInfo) -> Any:
        """Refuse what would change the answer; leave out what can't."""
        if not isinstance(values, dict):
            return values
        _check_names(values)
        _check_parts(values)
        table = cls.unsupported
        for name in values.keys() & table.keys():
            table[name].check(name, values[name])
        if cls.warns and isinstance(info.context, RequestNotes):
            cls._warn_ignored(values, info.context)
        values = dict(values)
        for name in [name for name in values if name in table and table[name].verdict == "read"]:
            table[name].settle(name, values)
        return {
            name: value
            for name, value in values.items()
            if name not in table and not (value is None and name in cls.optional)
        }

    @classmethod
    def _warn_ignored(cls, values: dict[str, Any], notes: RequestNotes) -> None:
        """Name what is ignored and was asked for."""
        for name, value in values.items():
            if name in cls.known or value in (None, False, "", [], {}):
                continue
            if len(notes.warnings) < MOST_IGNORED:
                notes.warn(f"ignored {cls.place}{name}")


class Exact(Strict):
    """A JSON object whose fields have exactly their types: "1" and true are not numbers."""

    model_config = ConfigDict(strict=True)


class Part(Exact):
    """A part of a request: of a message, a tool, a format. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class Body(Exact):
    """A request as a whole. Unknown fields are ignored, with a warning."""

    model_config = ConfigDict(extra="ignore")

    warns = True


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items; the event loop's other work is done between every `TURN` of them.

    Loops over messages of a conversation use it: there may be thousands of them.
    """
    for index, item in enumerate(items, 1):
        yield item
        if index % TURN == 0:
            await asyncio.sleep(0)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all coroutines, run at once, in order. The first error ends the others and is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(item) for item in work]
    except ExceptionGroup as errors:
        # The error's traceback knows this frame, which would keep the results of the others (pictures).
        tasks.clear()
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
