"""What the tasks give back: frozen, typed, and the stable schema of `--json`.

Fields are only ever added, never renamed or taken away, within a major version.
`Scene.model_json_schema()` (any of them) is the JSON schema.
"""

import math
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from snugvl.core.messages import Usage


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reply(_Frozen):
    """A model's complete answer to one request, as text."""

    text: str
    finish_reason: str = Field(description='"stop", or "length" when the answer reached its token limit')
    usage: Usage | None = None

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut at its token limit."""
        return self.finish_reason == "length"


class Result(_Frozen):
    """What every task's result has."""

    truncated: bool = Field(
        default=False,
        description="the answer was cut at its token limit (or broke off); what was complete of it is here",
    )
    usage: Usage | None = Field(default=None, description="tokens of the request")


class Caption(Result):
    """A description of an image."""

    text: str


class Answer(Result):
    """An answer about one image or several."""

    text: str


class SceneObject(_Frozen):
    """One kind of object in a scene."""

    name: str
    count: int = Field(default=1, ge=0)
    positions: tuple[str, ...] = Field(default=(), description='where, in words ("top left", "on the table")')


class Scene(Result):
    """What is in an image and how it hangs together."""

    summary: str
    setting: str = ""
    objects: tuple[SceneObject, ...] = ()
    text: tuple[str, ...] = Field(default=(), description="words and numbers that are written in the image")
    relations: tuple[str, ...] = Field(default=(), description='such as "the cup is left of the plate"')


class Box(_Frozen):
    """A rectangle in pixels of the original, upright image; x to the right, y down, edges at x2 and y2."""

    x1: float
    y1: float
    x2: float
    y2: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not all(map(math.isfinite, (self.x1, self.y1, self.x2, self.y2))):
            raise ValueError("a box needs finite coordinates")
        if self.x1 >= self.x2 or self.y1 >= self.y2:
            raise ValueError("a box needs x1 < x2 and y1 < y2")
        return self

    @property
    def width(self) -> float:
        """Pixels from left to right."""
        return self.x2 - self.x1

    @property
    def height(self) -> float:
        """Pixels from top to bottom."""
        return self.y2 - self.y1

    @property
    def area(self) -> float:
        """Square pixels."""
        return self.width * self.height


class Detection(_Frozen):
    """One object and where it is."""

    label: str
    box: Box


class Detections(Result):
    """Objects found in an image of `width` × `height` pixels (upright: its EXIF rotation applied)."""

    width: int
    height: int
    objects: tuple[Detection, ...] = ()
