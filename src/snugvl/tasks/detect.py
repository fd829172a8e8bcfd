"""Detect: objects and their boxes in pixels of the original image.

The prompt and the unit of the answer's numbers are the family's convention (`conventions`); `boxes` finds
them in the text. Here they become pixels of the image that the user sent.

Numbers that are all at most 1 and not all whole are fractions of the image, whatever the convention. Boxes
are ordered and clamped to the image; one without area there is dropped, as is an exact repetition (a model
caught in a loop).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from PIL.Image import Image

from snugvl.core.messages import Capabilities, Picture, Request
from snugvl.core.sampling import SamplingParams
from snugvl.errors import OutputError, RequestError, WrongType
from snugvl.tasks.ask import about
from snugvl.tasks.boxes import Four
from snugvl.tasks.conventions import convention_of
from snugvl.tasks.results import Box, Detection, Detections, Reply

MAX_TOKENS: Final = 2048


def check(objects: Sequence[str], capabilities: Capabilities) -> None:
    """Refuse objects that this model can't be asked for, before any picture is fetched.

    Raises:
        RequestError: its family gives no boxes, or only those of named objects; a name has a character that
            the prompt can't hold.
    """
    convention_of(capabilities).detection(check_names(objects), capabilities.model)


def request(
    image: Image | Picture,
    objects: Sequence[str],
    capabilities: Capabilities,
    *,
    sampling: SamplingParams | None = None,
    max_pixels: int | None = None,
) -> Request:
    """Ask where `objects` are, or where everything is when none are named.

    Raises:
        RequestError: as `check`.
    """
    convention = convention_of(capabilities)
    prompt = convention.detection(check_names(objects), capabilities.model)
    return about(
        [image], prompt, capabilities, MAX_TOKENS, sampling=sampling, max_pixels=max_pixels,
        grammar=convention.grammar, marks=convention.marks,
    )  # fmt: skip


def check_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of objects as the prompt can list them, without repetitions. A string may hold several, between
    commas, as on the command line.

    Raises:
        RequestError: an empty name, or one with a comma, a quote or a line break.
    """
    if isinstance(names, str):
        names = [name for name in names.split(",") if name.strip()] or (names,)
    if not isinstance(names, Iterable):
        raise WrongType(f"objects must be names, not {names!r} ({type(names).__name__})", field="objects")
    names = tuple(names)  # it may be an iterator
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise RequestError(f"an object needs a name, not {name!r}", field="objects")
        if "," in name:
            raise RequestError(f"give each object its own name instead of {name!r}", field="objects")
        if '"' in name or not name.isprintable():
            raise RequestError(f"an object's name is plain text on one line, not {name!r}", field="objects")
    return tuple(dict.fromkeys(" ".join(name.split()) for name in names))


def result(
    reply: Reply,
    size: tuple[int, int],
    objects: Sequence[str],
    capabilities: Capabilities,
    *,
    max_pixels: int | None = None,
) -> Detections:
    """The detections in `reply`. `size`: width and height of the image that was asked about, upright;
    `objects`, `capabilities`, `max_pixels`: as they were given to `request`.

    Raises:
        OutputError: the answer has neither boxes nor the statement that there are none; its `text` has it.
    """
    convention = convention_of(capabilities)
    reading = convention.read(reply.text)
    cut = reply.truncated or reading.cut
    if not reading.boxes and not reading.nothing:
        why = "its answer was cut before the first one; allow more tokens" if cut else "not in its usual form"
        raise OutputError(f"no boxes from the model: {why}", text=reply.text)
    names = {name.casefold(): name for name in check_names(objects)}
    grid = convention.grid(size, capabilities, max_pixels)
    detections = [
        Detection(label=_label(label, names), box=box)
        for label, four in reading.boxes
        if (box := to_pixels(four, size, grid)) is not None
    ]
    return Detections(
        width=size[0],
        height=size[1],
        objects=tuple(dict.fromkeys(detections)),
        truncated=cut,
        usage=reply.usage,
    )


def to_pixels(four: Four, size: tuple[int, int], grid: tuple[float, float]) -> Box | None:
    """A box in units of `grid`, or in fractions, as pixels of the image; None where no area is left."""
    if max(four) <= 1 and any(value != int(value) for value in four):
        grid = (1.0, 1.0)
    x1, x2 = sorted(_clamped(value / grid[0] * size[0], size[0]) for value in (four[0], four[2]))
    y1, y2 = sorted(_clamped(value / grid[1] * size[1], size[1]) for value in (four[1], four[3]))
    return Box(x1=x1, y1=y1, x2=x2, y2=y2) if x1 < x2 and y1 < y2 else None


def _clamped(value: float, limit: int) -> float:
    return round(min(max(value, 0.0), float(limit)), 2)


def _label(label: str | None, names: dict[str, str]) -> str:
    """The model's label in the user's spelling; without a label the only name asked for, or "object"."""
    words = " ".join((label or "").split())[:200]
    text = "".join(character for character in words if character.isprintable())
    if not text:
        return next(iter(names.values())) if len(names) == 1 else "object"
    return names.get(text.casefold(), text)
