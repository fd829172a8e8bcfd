"""Requests of tasks, and the reading of their replies.

Here are also the tasks whose answer is a text: a question about one image, or about several together; and a
caption, in one sentence or in detail.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from PIL.Image import Image, Resampling

from snugvl.core.messages import Capabilities, Delta, Grammar, Message, Picture, Request, Text, Usage, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, RequestError, WrongType
from snugvl.tasks import prompts
from snugvl.tasks.conventions import convention_of
from snugvl.tasks.parse import answer_text
from snugvl.tasks.results import Answer, Caption, Reply

MAX_TOKENS: Final = 768
MAX_CAPTION_TOKENS: Final[dict[prompts.Detail, int]] = {"short": 128, "detailed": 768}

Shown = Image | Picture | Video
"""The subject of a task. A video takes the place of an image where a task looks at what happens."""


def about(
    images: Iterable[Shown],
    prompt: str,
    capabilities: Capabilities,
    max_tokens: int,
    *,
    sampling: SamplingParams | None,
    max_pixels: int | None = None,
    grammar: Grammar | None = None,
    marks: tuple[str, ...] = (),
) -> Request:
    """A request that shows `images` and says `prompt`; its answer follows `grammar`.

    `marks`: control tokens that `prompt` holds on purpose.

    `max_tokens` is the task's own limit, for a sampling that has none: enough for an honest answer, short
    enough that a model caught in a loop ends. It never takes more than a quarter of the context, so a
    small model keeps room for the image.

    Raises:
        RequestError: the sampling asks for several choices; a task has one result. `WrongType`: `max_pixels`
            is not a number.
    """
    if not isinstance(max_pixels, int | None):
        raise WrongType(f"max_pixels must be a number of pixels, not {max_pixels!r}", field="max_pixels")
    sampling = sampling or SamplingParams()
    if sampling.n != 1:
        raise RequestError(f"a task gives one result: n must be 1, not {sampling.n}", field="n")
    if sampling.max_tokens is None:
        fitting = max(64, capabilities.context_tokens // 4)
        sampling = replace(sampling, max_tokens=min(max_tokens, fitting))
    shown = tuple(
        _scaled(image, max_pixels, capabilities.min_pixels)
        if isinstance(image, Video)
        else _picture(image, max_pixels)
        for image in images
    )
    return Request((Message("user", (*shown, Text(prompt, marks))),), sampling, grammar=grammar)


def _picture(image: Image | Picture, max_pixels: int | None) -> Picture:
    picture = image if isinstance(image, Picture) else Picture(image)
    return replace(picture, max_pixels=max_pixels)


def _scaled(video: Video, max_pixels: int | None, min_pixels: int) -> Video:
    """The video with its frames scaled down so that all together have the tokens of a picture of
    `max_pixels`.

    Models that read videos see two frames as one picture.
    """
    if max_pixels is None or not video.frames:
        return video
    width, height = video.frames[0].size
    pairs = (len(video.frames) + 1) // 2
    shrink = math.sqrt(max(max_pixels / pairs, min_pixels) / (width * height))
    if shrink >= 1:
        return video
    size = max(1, int(width * shrink)), max(1, int(height * shrink))
    return replace(video, frames=tuple(frame.resize(size, Resampling.BICUBIC) for frame in video.frames))


def collect(deltas: Iterable[Delta]) -> Reply:
    """The whole answer of a request with one choice.

    Raises:
        EngineError: the request was aborted before it finished.
    """
    pieces: list[str] = []
    finish_reason = "abort"
    usage: Usage | None = None
    for delta in deltas:
        pieces.append(delta.text)
        finish_reason = delta.finish_reason or finish_reason
        usage = delta.usage or usage
    if finish_reason == "abort":
        raise EngineError("the request was aborted before its answer was complete")
    return Reply(text="".join(pieces), finish_reason=finish_reason, usage=usage)


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
    prompt = convention_of(capabilities).question.format(question.strip())
    return about(images, prompt, capabilities, MAX_TOKENS, sampling=sampling, max_pixels=max_pixels)


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
        raise RequestError(
            f"detail must be one of {', '.join(prompts.CAPTION)}, not {detail!r}", field="detail"
        )
    prompt, most = convention_of(capabilities).captions[detail], MAX_CAPTION_TOKENS[detail]
    if isinstance(image, Video):
        prompt = prompts.of_video(prompt)
    return about([image], prompt, capabilities, most, sampling=sampling, max_pixels=max_pixels)


def caption_result(reply: Reply) -> Caption:
    """The caption in `reply`."""
    return Caption(text=answer_text(reply.text), truncated=reply.truncated, usage=reply.usage)
