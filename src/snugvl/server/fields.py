"""The base of every request body: what it doesn't know is refused by name, never silently ignored.

    class ChatRequest(Strict):
        harmless = {"logit_bias": ({},), "store": (False,), "n": (1,)}  # not supported; these change nothing
        messages: list[MessageIn]

A body with `"store": true` is answered 400 with `param: "store"`; with `"store": false`, `"store": null`
or without it, it passes. Every error has the path of the field as people write it
("messages[0].content[1].type"); `server.errors` makes the answer. All bodies have passed
`server.body.parse_json` before: UTF-8, finite numbers, no duplicate keys, not too deep.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from snugvl.server.errors import InvalidRequest

# Tell the members of a union apart by JSON type, so that an error speaks of the one that was meant.
STRING_OR_ARRAY = Discriminator(lambda value: "array" if isinstance(value, list) else "string")
STRING_OR_OBJECT = Discriminator(lambda value: "string" if isinstance(value, str) else "object")

FormT = TypeVar("FormT")
StringOrArray = Annotated[Annotated[str, Tag("string")] | Annotated[FormT, Tag("array")], STRING_OR_ARRAY]
StringOrObject = Annotated[Annotated[str, Tag("string")] | Annotated[FormT, Tag("object")], STRING_OR_OBJECT]


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: 1.0 is a whole number in it, and some clients write it so.
# Stands after the bounds in Annotated, or the OpenAPI document loses them.
WHOLE = BeforeValidator(_whole)

Harmless = Mapping[str, tuple[object, ...]]


MAX_NAME = 1024  # characters of a field's name, known or not
MAX_ALL_PARTS = 16_384  # of all messages of a conversation
MAX_FIELDS = 256  # of one object; no protocol has as many, and each unknown one would be an error of its own


def at_most(count: int) -> BeforeValidator:
    """Refuses an object of more entries before each of them is looked at."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "too_many_entries", "{given} entries; at most {count}", {"given": len(value), "count": count}
            )
        return value

    return BeforeValidator(check)


def _check_names(values: dict[str, Any]) -> None:
    """Before pydantic makes an error of each, with a copy of its name."""
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


def _check_parts(values: dict[str, Any]) -> None:
    """Of a conversation in all, before an object is made of each."""
    for messages in (values.get("messages"), values.get("input")):
        if isinstance(messages, list):
            contents = [message.get("content") for message in messages if isinstance(message, dict)]
            count = sum(len(content) for content in contents if isinstance(content, list))
            if count > MAX_ALL_PARTS:
                raise PydanticCustomError(
                    "too_many_parts", "the messages have {given} parts in all; at most {count}",
                    {"given": count, "count": MAX_ALL_PARTS},
                )  # fmt: skip


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

    Attributes:
        harmless: fields of the protocol that we don't support, each with the values (null is always one)
            that ask for nothing, and so may be sent.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    harmless: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, values: Any) -> Any:
        if isinstance(values, dict):
            _check_names(values)
            _check_parts(values)
        if not isinstance(values, dict) or not cls.harmless:
            return values
        return {name: value for name, value in values.items() if not cls._asks_for_nothing(name, value)}

    @classmethod
    def _asks_for_nothing(cls, name: str, value: object) -> bool:
        if name not in cls.harmless:
            return False
        # True equals 1 in Python, not in JSON.
        same = (value == good and type(value) is type(good) for good in cls.harmless[name])
        return value is None or any(same)


class Exact(Strict):
    """A JSON object whose fields have exactly their types: "1" and true are no numbers.

    Attributes:
        instead: fields of the protocol that a request is likely to have and that we don't support, each
            with what to do instead. For bodies as a whole; their names are paths.
    """

    model_config = ConfigDict(strict=True)

    instead: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_with_advice(cls, values: Any) -> Any:
        for name, advice in cls.instead.items():
            asked = isinstance(values, dict) and values.get(name) is not None
            if asked and not cls._asks_for_nothing(name, values[name]):
                raise InvalidRequest(
                    f"{name} is not supported: {advice}", field=name, code="unsupported_parameter"
                )
        return values
