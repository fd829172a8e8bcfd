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
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """A JSON object of a request.

    Attributes:
        harmless: fields of the protocol that we don't support, each with the values (null is always one)
            that ask for nothing, and so may be sent.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    harmless: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, values: Any) -> Any:
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
