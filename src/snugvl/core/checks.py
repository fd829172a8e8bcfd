"""Checks of a request that are the same for every engine."""

from collections.abc import Sequence
from typing import Final

from snugvl.core.messages import Capabilities, Request, Text
from snugvl.errors import RequestError

SEES: Final = "Qwen/Qwen3-VL-2B-Instruct-FP8"  # a small one, named in refusals of pictures


def check_combination(request: Request) -> None:
    """Refuse a request whose fields contradict one another.

    Raises:
        RequestError: names the field to change.
    """
    if request.prompt is not None and request.messages:
        raise RequestError("a request has messages or a prompt, not both", field="prompt")
    if request.prompt is not None and request.tools is not None:
        raise RequestError("tools need a conversation; a bare prompt has no place for them", field="tools")
    if request.grammar is not None and request.tools is not None:
        raise RequestError(
            "a request constrains its answer by tools or by a grammar, not by both", field="response_format"
        )


def check_pictures(request: Request, capabilities: Capabilities) -> None:
    """Refuse pictures and videos before any work: where the model doesn't see, and more than were planned.

    Raises:
        RequestError: with how many there are, how many are taken or were learned, and what to do.
    """
    places = []
    for index, message in enumerate(request.messages):
        seen = sum(not isinstance(part, Text) for part in message.content)
        if seen:
            check_sight(capabilities, f"messages[{index}].content")
        places += [f"messages[{index}].content"] * seen
    check_number(capabilities, places)


def check_number(capabilities: Capabilities, places: Sequence[str]) -> None:
    """Refuse more pictures and videos of one conversation than were planned, or than the model learned.

    Args:
        places: the field of the request that holds each.

    Raises:
        RequestError: with how many there are, how many are taken or were learned, and what to do.
    """
    most, count = capabilities.most_images, len(places)
    learned = capabilities.training.max_images
    if learned is not None and (most is None or learned < most):
        most = learned
    if most is None or count <= most:
        return
    blamed = places[most]
    if most == learned:
        raise RequestError(
            f"the conversation has {count} pictures, and {capabilities.model} can't tell more than {learned} "
            f"apart (its training says so); send fewer, or load another model, such as {SEES}",
            field=blamed,
        )
    taken = f"at most {most} (--images {most})" if most else "none (--images 0)"
    raise RequestError(
        f"the conversation has {count} pictures, and {capabilities.model} was started to take {taken}; "
        f"send fewer, or start it with --images {count}",
        field=blamed,
    )


def check_sight(capabilities: Capabilities, field: str = "messages") -> None:
    """Raise RequestError, with a way out, if this model takes no pictures; `field` is where one was sent."""
    if capabilities.images:
        return
    if capabilities.language_only:
        raise RequestError(
            f"{capabilities.model} runs without its vision tower (--language-only) and reads text alone; "
            "start it without that option to send pictures",
            field=field,
        )
    raise RequestError(
        f"{capabilities.model} reads text alone and takes no pictures; load a model that sees, such as "
        f"{SEES}",
        field=field,
    )
