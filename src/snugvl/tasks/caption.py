"""Caption: describe an image, in one sentence or in detail."""

from typing import Final

from snugvl.core.messages import Capabilities, Request, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.tasks import prompts
from snugvl.tasks.conventions import convention_of
from snugvl.tasks.parse import answer_text
from snugvl.tasks.request import Shown, about
from snugvl.tasks.results import Caption, Reply

MAX_TOKENS: Final[dict[prompts.Detail, int]] = {"short": 128, "detailed": 768}


def request(
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
        max_tokens=MAX_TOKENS[detail],
        capabilities=capabilities,
        max_pixels=max_pixels,
    )


def result(reply: Reply) -> Caption:
    """The caption in `reply`."""
    return Caption(text=answer_text(reply.text), truncated=reply.truncated, usage=reply.usage)
