"""Results of the tasks: frozen, typed, and the stable schema of `--json`.

Fields are only ever added, never renamed or taken away, within a major version.
`Scene.model_json_schema()` (any of them) is the JSON schema.
"""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from snugvl.core.guesses import hint
from snugvl.core.messages import Usage
from snugvl.errors import ImageError

if TYPE_CHECKING:  # they import Pillow
    from PIL.Image import Image

    from snugvl.inputs.given import ImageSource


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # or every attribute would be taken to exist

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                raise AttributeError(f"{error}{hint(name)}") from None


class _Said(_Frozen):
    """A result whose main part is a text: printing it prints the text."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __contains__(self, words: str) -> bool:
        """Whether the text contains these words."""
        return words in self.text


class Reply(_Said):
    """A model's complete answer to one request, as text. `chat` takes it as a message of the conversation.

    Attributes:
        text: the answer; `print(reply)` prints it.
        finish_reason: "stop", or "length" where it was cut at its token limit.
        usage: tokens of the request, where the engine or the server tells.
    """

    finish_reason: str = Field(description='"stop", or "length" when the answer reached its token limit')
    usage: Usage | None = None

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut at its token limit."""
        return self.finish_reason == "length"


class Result(_Frozen):
    """A task's result.

    Attributes:
        truncated: whether the answer was cut at its token limit, or broke off; its complete part is here.
        usage: tokens of the request, where the engine or the server tells.
    """

    truncated: bool = Field(
        default=False,
        description="the answer was cut at its token limit (or broke off); what was complete of it is here",
    )
    usage: Usage | None = Field(default=None, description="tokens of the request")


class Caption(Result, _Said):
    """A description of an image: `text`, which `print(caption)` prints."""


class Answer(Result, _Said):
    """An answer about one image or several: `text`, which `print(answer)` prints."""


class SceneObject(_Frozen):
    """One kind of object in a scene."""

    name: str
    count: int = Field(default=1, ge=0)
    positions: tuple[str, ...] = Field(default=(), description='where, in words ("top left", "on the table")')


class Scene(Result):
    """An analysis of an image: the objects in it, and their relations.

    Attributes:
        summary: one sentence; `print(scene)` prints it.
        setting: where it is ("indoors"); empty where the model doesn't say.
        objects: each kind with its count and positions.
        text: words and numbers that are written in the image.
        relations: such as "the cup is left of the plate".
    """

    summary: str
    setting: str = ""
    objects: tuple[SceneObject, ...] = ()
    text: tuple[str, ...] = Field(default=(), description="words and numbers that are written in the image")
    relations: tuple[str, ...] = Field(default=(), description='such as "the cup is left of the plate"')

    def __str__(self) -> str:
        return self.summary


class Box(_Frozen):
    """A rectangle in pixels of the original, upright image; x to the right, y down, edges at x2 and y2."""

    x1: float
    y1: float
    x2: float
    y2: float

    def __iter__(self) -> Iterator[float]:  # type: ignore[override]
        """x1, y1, x2, y2: `tuple(box)` is what Pillow draws."""
        return iter((self.x1, self.y1, self.x2, self.y2))

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
        """Area in square pixels."""
        return self.width * self.height


class Detection(_Frozen):
    """One object: its label and its box."""

    label: str
    box: Box


class Detections(Result):
    """Objects found in an image of `width` × `height` pixels (upright: its EXIF rotation applied)."""

    width: int
    height: int
    objects: tuple[Detection, ...] = ()

    def __iter__(self) -> Iterator[Detection]:  # type: ignore[override]
        """The objects: `for item in found`."""
        return iter(self.objects)

    def __str__(self) -> str:
        lines = (
            f"{thing.label}: {thing.box.x1:g}, {thing.box.y1:g}, {thing.box.x2:g}, {thing.box.y2:g}"
            for thing in self.objects
        )
        return "\n".join(lines) or "nothing"

    def draw(self, image: "ImageSource", path: str | os.PathLike[str] | BinaryIO | None = None) -> "Image":
        """The image with the boxes and their labels on it.

        Args:
            image: that the objects were found in, in any form that tasks take.
            path: where to save it, in the format of its suffix; its folder is made where it is missing. Or a
                file opened for writing, such as a BytesIO; a PNG where its name has no picture's suffix.

        Returns:
            A new picture. One that is very small is enlarged, so that labels can be read.

        Raises:
            ImageError: the image can't be read, or is of another size than the one that was asked about.
            InputError: no picture can be saved under that name; `WrongType`: neither a name nor a file.

        Example:
            model.detect("photo.jpg", "cup").draw("photo.jpg", "cups.png").show()
        """
        from snugvl.inputs.given import decode
        from snugvl.tasks import export

        target = None if path is None else export.target_of(path)
        picture = decode(image)
        if picture.size != (self.width, self.height):
            raise ImageError(
                f"the objects were found in an image of {self.width}×{self.height} pixels; this one has "
                f"{picture.width}×{picture.height}"
            )
        drawn = export.annotate(picture, self)
        if target is not None:
            export.save(drawn, target)
        return drawn
