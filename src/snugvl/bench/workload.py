"""What is asked: one picture and a text a request, no two requests alike, the same for the same seed.

Pictures are of a size like that of photographs: smooth coloured noise with shapes on it.
"""

import base64
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from os import cpu_count
from typing import Any

from PIL import Image, ImageDraw

# fmt: off
WORDS = (
    "river", "house", "green", "paper", "light", "stone", "water", "garden", "music", "window",
    "table", "road", "winter", "summer", "friend", "story", "night", "morning", "field", "horse",
    "bread", "market", "letter", "metal", "glass", "number", "sister", "brother", "island", "engine",
    "forest", "silver", "colour", "mountain", "village", "doctor", "kitchen", "bridge", "ocean", "season",
)
# fmt: on
QUESTION_WITH_PICTURE = "Describe this image in detail."
QUESTION_WITHOUT = "Write a long story about these words."
FEW_WORDS = 8
SHAPES = 48  # of a picture
GRAIN = 16  # pixels of the picture to one of the noise below it
QUALITY = 90  # of the JPEG


@dataclass(frozen=True, slots=True)
class Workload:
    """What every request is like.

    Attributes:
        image: width and height of its picture in pixels, or None without.
        prompt_tokens: of its text, about; None for a short question.
        max_tokens: length of its answer.
        same_image: all requests show one picture, so that caches may help.
        seed: of everything that is random.
    """

    image: tuple[int, int] | None
    prompt_tokens: int | None
    max_tokens: int
    same_image: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Manner:
    """How a server wants to be asked.

    Attributes:
        ignore_eos: it takes the field that makes every answer as long as `max_tokens`.
        usage: it takes the field that asks for its own count of tokens.
        tokens_per_word: of `WORDS`, by its tokenizer.
    """

    model: str
    ignore_eos: bool = True
    usage: bool = True
    tokens_per_word: float = 1.0


def text(workload: Workload, seed: int, tokens_per_word: float) -> str:
    """The text of a request: random words first, so that no two share a beginning."""
    dice = random.Random(seed)
    question = QUESTION_WITHOUT if workload.image is None else QUESTION_WITH_PICTURE
    count = FEW_WORDS
    if workload.prompt_tokens is not None:
        count = max(1, round(workload.prompt_tokens / tokens_per_word) - len(question.split()))
    return f"{words(dice, count)}. {question}"


def words(dice: random.Random, count: int) -> str:
    """`count` words."""
    return " ".join(dice.choices(WORDS, k=count))


def message(workload: Workload, seed: int, tokens_per_word: float = 1.0) -> dict[str, Any]:
    """The one message of a request."""
    asked = text(workload, seed, tokens_per_word)
    if workload.image is None:
        return {"role": "user", "content": asked}
    url = picture_url(*workload.image, workload.seed if workload.same_image else seed)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": asked}]
    return {"role": "user", "content": parts}


def extras(manner: Manner) -> dict[str, Any]:
    """The fields that not every server takes."""
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if manner.usage else {}
    return fields | ({"ignore_eos": True} if manner.ignore_eos else {})


def body(workload: Workload, manner: Manner, seed: int) -> bytes:
    """A request's body: a streamed, greedy chat completion."""
    fields = {
        "model": manner.model,
        "stream": True,
        "temperature": 0,
        "max_tokens": workload.max_tokens,
        "messages": [message(workload, seed, manner.tokens_per_word)],
    }
    return json.dumps(fields | extras(manner)).encode()


def bodies(workload: Workload, manner: Manner, first_seed: int, count: int) -> list[bytes]:
    """The bodies of `count` requests; pictures are made on all cores."""
    seeds = range(first_seed, first_seed + count)
    with ThreadPoolExecutor(cpu_count() or 1) as pool:  # Pillow works without the interpreter's lock
        return list(pool.map(partial(body, workload, manner), seeds))


def picture(width: int, height: int, seed: int) -> bytes:
    """A JPEG: smooth coloured noise with shapes on it."""
    dice = random.Random(seed)
    coarse = (max(2, width // GRAIN), max(2, height // GRAIN))
    noise = Image.frombytes("RGB", coarse, dice.randbytes(coarse[0] * coarse[1] * 3))
    image = noise.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(SHAPES):
        left, top = dice.randrange(width), dice.randrange(height)
        size = dice.randrange(2, max(3, min(width, height) // 4))
        shape = dice.choice((draw.rectangle, draw.ellipse))
        shape((left, top, left + size, top + size), fill=(*dice.randbytes(3),))
    file = BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def picture_url(width: int, height: int, seed: int) -> str:
    """A picture of that size and seed, as a data URL."""
    return "data:image/jpeg;base64," + base64.b64encode(picture(width, height, seed)).decode()
