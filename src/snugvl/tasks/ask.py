"""Ask: a question about one image, or about several together."""

from collections.abc import Sequence
from typing import Final

from snugvl.core.messages import Capabilities, Request
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.tasks.conventions import convention_of
from snugvl.tasks.parse import answer_text
from snugvl.tasks.request import Shown, about
from snugvl.tasks.results import Answer, Reply

MAX_TOKENS: Final = 768


def request(
    images: Sequence[Shown],
    question: str,
    capabilities: Capabilities,
    *,
    sampling: SamplingParams | None = None,
    max_pixels: int | None = None,
) -> Request:
    """Ask `question` about `images` (or videos), which the model sees in this order.

    Raises:
        RequestError: no question, or no image.
    """
    if not question.strip():
        raise RequestError("the question is empty", field="question")
    if not images:
        raise RequestError("a question needs at least one image; `chat` works without", field="images")
    return about(
        images,
        convention_of(capabilities).question.format(question.strip()),
        sampling=sampling,
        max_tokens=MAX_TOKENS,
        capabilities=capabilities,
        max_pixels=max_pixels,
    )


def result(reply: Reply) -> Answer:
    """The answer in `reply`."""
    return Answer(text=answer_text(reply.text), truncated=reply.truncated, usage=reply.usage)
