"""What is asked about each picture: one of the tasks, with its words."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from PIL.Image import Image

from snugvl.core.messages import Capabilities, Request
from snugvl.core.sampling import SamplingParams
from snugvl.tasks import ask, caption, detect, scene

TaskName = Literal["caption", "ask", "detect", "scene"]
# Tokens of an answer, where nobody says: each is computed by every variant and by the reference.
MAX_TOKENS: Final[dict[TaskName, int]] = {"caption": 128, "ask": 256, "detect": 1024, "scene": 768}


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a picture.

    Attributes:
        text: of `ask`.
        objects: of `detect`; none: everything.
        max_tokens: of the answer.
    """

    task: TaskName
    text: str = ""
    objects: tuple[str, ...] = ()
    max_tokens: int = 0

    @property
    def limit(self) -> int:
        """Tokens of the answer, at most."""
        return self.max_tokens or MAX_TOKENS[self.task]

    @property
    def params(self) -> dict[str, Any]:
        """What was asked, in records."""
        said: dict[str, Any] = {"question": self.text} if self.task == "ask" else {}
        return said | ({"objects": list(self.objects)} if self.task == "detect" else {})

    def request(self, image: Image, model: Capabilities, max_pixels: int | None) -> Request:
        """As the model is asked.

        Raises:
            RequestError: it can't be asked that.
        """
        common: dict[str, Any] = {"sampling": SamplingParams(max_tokens=self.limit), "max_pixels": max_pixels}
        match self.task:
            case "ask":
                return ask.request([image], self.text, model, **common)
            case "detect":
                return detect.request(image, self.objects, model, **common)
            case "scene":
                scene.check(model)
                return scene.request(image, model, **common)
            case "caption":
                return caption.request(image, model, **common)


def limited(question: Question, max_tokens: int | None) -> Question:
    """The question with answers of so many tokens."""
    return question if max_tokens is None else replace(question, max_tokens=max_tokens)
