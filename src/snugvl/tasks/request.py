"""What the tasks' requests have in common, and the reading of their replies."""

from collections.abc import Iterable
from dataclasses import replace

from PIL.Image import Image

from snugvl.core.messages import Capabilities, Delta, Grammar, Message, Picture, Request, Text, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, RequestError
from snugvl.tasks.results import Reply


def about(
    images: Iterable[Image | Picture],
    prompt: str,
    *,
    sampling: SamplingParams | None,
    max_tokens: int,
    capabilities: Capabilities,
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
        RequestError: the sampling asks for several choices; a task has one result.
    """
    sampling = sampling or SamplingParams()
    if sampling.n != 1:
        raise RequestError(f"a task gives one result: n must be 1, not {sampling.n}", field="n")
    if sampling.max_tokens is None:
        fitting = max(64, capabilities.context_tokens // 4)
        sampling = replace(sampling, max_tokens=min(max_tokens, fitting))
    pictures = tuple(_picture(image, max_pixels) for image in images)
    return Request((Message("user", (*pictures, Text(prompt, marks))),), sampling, grammar=grammar)


def _picture(image: Image | Picture, max_pixels: int | None) -> Picture:
    picture = image if isinstance(image, Picture) else Picture(image)
    return replace(picture, max_pixels=max_pixels)


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
