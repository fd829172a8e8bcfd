"""The base of OpenAI's request bodies."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Discriminator, model_validator

from snugvl.errors import RequestError
from snugvl.server.fields import Strict

# Tell the members of a union apart by JSON type, so that an error speaks of the one that was meant.
STRING_OR_ARRAY = Discriminator(lambda value: "array" if isinstance(value, list) else "string")
STRING_OR_OBJECT = Discriminator(lambda value: "string" if isinstance(value, str) else "object")


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: 1.0 is a whole number in it, and some clients write it so.
# Stands after the bounds in Annotated, or the OpenAPI document loses them.
WHOLE = BeforeValidator(_whole)

Harmless = Mapping[str, tuple[object, ...]]


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
                raise RequestError(f"{name} is not supported: {advice}", field=name)
        return values
