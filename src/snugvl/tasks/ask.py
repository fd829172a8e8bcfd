"""Tasks whose answer is a text: a question about one image, or about several together; and a caption, in one
sentence or in detail."""

from collections.abc import Sequence
from typing import Final

from snugvl.core.messages import Capabilities, Request, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.tasks import prompts
from snugvl.tasks.conventions import convention_of
from snugvl.tasks.parse import answer_text
from snugvl.tasks.request import Shown, about
from snugvl.tasks.results import Answer, Caption, Reply

MAX_TOKENS: Final = 768
MAX_CAPTION_TOKENS: Final[dict[prompts.Detail, int]] = {"short": 128, "detailed": 768}


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


def caption_request(
    image: Shown,
    capabilities: Capabilities,
    *,
    detail: prompts.Detail = "short",
    sampling: SamplingParams | None = None,
    max_pixels: int | None = None,
) -> Request:
    """Ask for a caption of `image`, which may be a video.

    Raises:
        RequestError: an unknown `detail`.
    """
    if detail not in prompts.CAPTION:
        raise RequestError(f"detail is one of {', '.join(prompts.CAPTION)}, not {detail!r}", field="detail")
    prompt = convention_of(capabilities).captions[detail]
    return about(
        [image],
        prompts.of_video(prompt) if isinstance(image, Video) else prompt,
        sampling=sampling,
        max_tokens=MAX_CAPTION_TOKENS[detail],
        capabilities=capabilities,
        max_pixels=max_pixels,
    )


def caption_result(reply: Reply) -> Caption:
    """The caption in `reply`."""
    return Caption(text=answer_text(reply.text), truncated=reply.truncated, usage=reply.usage)
