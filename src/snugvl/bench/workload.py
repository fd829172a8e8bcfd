"""The requests of a benchmark (one picture and a text each, no two alike, the same for the same seed) and the
server that gets them: whether it is there, its name for the model, the fields that it takes.

Pictures are JPEGs of a size like photographs': smooth coloured noise with shapes on it.
"""

import base64
import json
import random
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from os import cpu_count
from typing import Any

import openai
from PIL import Image, ImageDraw

from snugvl.client import Client
from snugvl.client.connection import Address, address_of, translating
from snugvl.core.training import UNLEARNED
from snugvl.errors import (
    EngineError,
    EngineUnavailable,
    ModelNotServed,
    RequestError,
    SnugvlError,
    SnugvlWarning,
)

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
    """The shape of every request.

    Attributes:
        image: width and height of its picture in pixels, or None without.
        prompt_tokens: approximate number of its text's tokens; None for a short question.
        max_tokens: length of its answer.
        same_image: whether all requests show one picture, so that caches may help.
        seed: seed of everything that is random.
    """

    image: tuple[int, int] | None
    prompt_tokens: int | None
    max_tokens: int
    same_image: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Manner:
    """The fields that a server takes.

    Attributes:
        ignore_eos: whether it takes the field that makes every answer as long as `max_tokens`.
        usage: whether it takes the field that asks for its own count of tokens.
        tokens_per_word: tokens a word of `WORDS`, by its tokenizer.
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
    """`count` random words."""
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


FEWEST_WORDS, MANY_WORDS = 16, 216
PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Target:
    """A server, found and asked once.

    Attributes:
        software: its own name and version, where it tells them.
        first_token_at: `time.perf_counter()` of the very first token, or None where none came.
        notes: whole sentences on what it doesn't do.
    """

    address: Address
    api_key: str | None
    manner: Manner
    software: str | None
    has_ledger: bool
    first_token_at: float | None
    notes: tuple[str, ...]

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def connect(
    url: str, api_key: str | None, model: str | None, workload: Workload, *, timeout_s: float
) -> Target:
    """Find the server and learn which fields it takes.

    Raises:
        EngineUnavailable: nothing answers there, or it isn't ready.
        Unauthorized, ModelNotServed: as the server says.
        SnugvlError: it refuses a request like those of `workload`, with its own reason.
    """
    address = address_of(url)
    with Client(url, api_key=api_key, timeout=timeout_s, max_retries=1) as client:
        name = _model(client, model, address)
        probe = _Probe(client, address, workload)
        manner, notes = probe.negotiate(Manner(name))
        if workload.prompt_tokens is not None:
            manner, note = probe.calibrate(manner)
            notes += note
        software = _software(client)
        has_ledger = _has_ledger(client)
    return Target(address, api_key, manner, software, has_ledger, probe.first_token_at, notes)


def _model(client: Client, model: str | None, address: Address) -> str:
    names = client.models()
    if model is None and not names:
        raise EngineUnavailable(f"{address.root} serves no model; name one")
    if model is not None and names and model not in names:
        served = ", ".join(names[:10])
        raise ModelNotServed(f"{address.root} doesn't serve {model!r}; it serves {served}")
    return model or names[0]


class _Probe:
    """A few requests before anything is measured."""

    def __init__(self, client: Client, address: Address, workload: Workload) -> None:
        self._client, self._address, self._workload = client, address, workload
        self.first_token_at: float | None = None

    def negotiate(self, manner: Manner) -> tuple[Manner, tuple[str, ...]]:
        """The fields that the server takes: all that help, or fewer."""
        asked = message(self._workload, self._workload.seed)
        refusal = None
        for ignore_eos, usage in ((True, True), (False, True), (True, False), (False, False)):
            tried = replace(manner, ignore_eos=ignore_eos, usage=usage)
            try:
                counted = self._ask(tried, asked)
            except RequestError as error:
                if type(error) is not RequestError:  # too large: no field of ours is to blame
                    raise
                refusal = refusal or error
                continue
            return tried, _notes(tried, counted)
        assert refusal is not None
        raise refusal

    def calibrate(self, manner: Manner) -> tuple[Manner, tuple[str, ...]]:
        """Tokens per word of our texts, by two texts of different length."""
        counts = []
        for count in (FEWEST_WORDS, MANY_WORDS):
            content = words(random.Random(self._workload.seed + count), count)
            usage = self._ask(manner, {"role": "user", "content": content})
            counts.append(usage.get("prompt_tokens") or 0)
        per_word = (counts[1] - counts[0]) / (MANY_WORDS - FEWEST_WORDS)
        if per_word <= 0:
            note = "the server doesn't count the prompt: one word stands for one token of --prompt-tokens"
            return manner, (note,)
        return replace(manner, tokens_per_word=per_word), ()

    def _ask(self, manner: Manner, asked: dict[str, Any]) -> dict[str, Any]:
        """Send one streamed request; returns its usage, empty where the server reports none."""
        fields = {"model": manner.model, "messages": [asked], "max_tokens": PROBE_TOKENS, "stream": True}
        usage: dict[str, Any] = {}
        with translating(self._address), warnings.catch_warnings():
            # Answers about random pictures and words aren't read.
            warnings.filterwarnings("ignore", f".*{UNLEARNED}", SnugvlWarning)
            stream = self._client.openai.post(
                self._address.url("/v1/chat/completions"),
                cast_to=object,
                body=fields | {"temperature": 0} | extras(manner),
                stream=True,
                stream_cls=openai.Stream[object],
            )
            for event in stream:
                if not isinstance(event, dict):
                    raise EngineError(f"{self._address.root} doesn't stream chat completions as OpenAI does")
                self._note_first_token(event)
                usage = event.get("usage") or usage
        return usage

    def _note_first_token(self, event: dict[str, Any]) -> None:
        choices = event.get("choices") or ()
        if self.first_token_at is None and any(
            (choice.get("delta") or {}).get("content") for choice in choices
        ):
            self.first_token_at = time.perf_counter()


def _notes(manner: Manner, usage: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    if not manner.ignore_eos:
        notes.append("the server refuses ignore_eos: answers end where the model ends them")
    if not manner.usage or not usage.get("completion_tokens"):
        notes.append("the server doesn't count tokens in streams: pieces of the answer are counted instead")
    return tuple(notes)


def _software(client: Client) -> str | None:
    """The server's name, with its version where it is snugvl or vLLM; None where unknown."""
    try:
        found = client.get("/version")
    except SnugvlError:
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return str(version) if version else None


def _has_ledger(client: Client) -> bool:
    try:
        return client.memory().ledger is not None
    except SnugvlError:
        return False
