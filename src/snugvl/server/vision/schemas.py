"""What the four tasks take and give over HTTP.

Each task has a class of options, which forms carry as fields beside their files, and a request, which adds
the picture's URL for a JSON body.
"""

from typing import Annotated, Literal

from pydantic import Field

from snugvl.sampling import SamplingParams
from snugvl.server.fields import WHOLE, Strict
from snugvl.tasks.prompts import Detail
from snugvl.tasks.results import Answer, Caption, Detections, Scene

MAX_IMAGES = 64
MAX_OBJECTS = 200
PICTURE = "data URL or public http(s) URL of a picture"
STREAM = 'whether to answer with events: {"delta": "…"} for each piece of text, then {"result": {…}}'


class TaskOptions(Strict):
    """What every task takes."""

    model: str | None = Field(default=None, description="a name this server serves; its first one without")
    max_pixels: Annotated[int, Field(ge=1, le=2**53), WHOLE] | None = Field(
        default=None,
        description="the picture is scaled down to this many before it is seen",
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        default=None, description="longest answer, in tokens; the task's own limit without"
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy: the same answer every time")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = Field(
        default=None, description="same seed, same answer"
    )

    def sampling(self) -> SamplingParams:
        """How to choose tokens."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


class CaptionOptions(TaskOptions):
    """How to describe a picture."""

    detail: Detail = Field(default="short", description="one sentence, or a paragraph")
    stream: bool = Field(default=False, description=STREAM)


class CaptionRequest(CaptionOptions):
    """A picture to describe."""

    image: str = Field(description=PICTURE)


class AskOptions(TaskOptions):
    """What to ask about pictures."""

    question: str = Field(min_length=1)
    stream: bool = Field(default=False, description=STREAM)


class AskRequest(AskOptions):
    """A question about one picture (`image`), or about several together (`images`)."""

    image: str | None = Field(default=None, description=PICTURE)
    images: list[str] = Field(
        default_factory=list, max_length=MAX_IMAGES, description="several, in the order they are shown"
    )


class SceneOptions(TaskOptions):
    """How to analyse a picture."""


class SceneRequest(SceneOptions):
    """A picture to analyse."""

    image: str = Field(description=PICTURE)


class DetectOptions(TaskOptions):
    """What to find in a picture."""

    objects: list[str] = Field(
        default_factory=list, max_length=MAX_OBJECTS, description="names of what to find; everything without"
    )
    format: Literal["json", "coco", "png"] = Field(
        default="json", description='"coco": a COCO data set; "png": the picture with the boxes drawn on it'
    )


class DetectRequest(DetectOptions):
    """A picture to find things in."""

    image: str = Field(description=PICTURE)


class CaptionResponse(Caption):
    """A description of a picture."""

    model: str


class AnswerResponse(Answer):
    """An answer about pictures."""

    model: str


class SceneResponse(Scene):
    """What is in a picture and how it hangs together."""

    model: str


class DetectionsResponse(Detections):
    """What was found where, in pixels of the picture as it was sent, upright."""

    model: str
