"""A backend whose answers are scripted: the tasks and the command line without an engine."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Self

from PIL.Image import Image

from snugvl.core.messages import Capabilities, Delta, Picture, Request, Text, Usage, Video
from snugvl.errors import EngineError
from snugvl.model import Model

SCENE = (
    '{"summary": "Two cups on a table.", "setting": "indoors", "objects": [{"name": "cup", "count": 2, '
    '"positions": ["left", "right"]}], "text": ["SALE"], "relations": ["one cup is left of the other"]}'
)
BOXES = (
    '```json\n[{"bbox_2d": [100, 200, 300, 400], "label": "red circle"}, '
    '{"bbox_2d": [500, 500, 900, 1000], "label": "cup"}]\n```'
)

Answer = str | Exception
Script = Callable[[Request], Answer]


def prompt_of(request: Request) -> str:
    """The text of the last message."""
    return " ".join(part.text for part in request.messages[-1].content if isinstance(part, Text))


def images_of(request: Request) -> list[Image]:
    """The images of the last message."""
    return [part.image for part in request.messages[-1].content if isinstance(part, Picture)]


def videos_of(request: Request) -> list[Video]:
    """The videos of the last message."""
    return [part for part in request.messages[-1].content if isinstance(part, Video)]


def sensible(request: Request) -> Answer:
    """A true-to-form answer to each task; captions name the size, so that each image has its own."""
    prompt = prompt_of(request)
    if "bbox" in prompt:
        return BOXES
    if "JSON only" in prompt:
        return SCENE
    sizes = " and ".join(f"{image.width}x{image.height}" for image in images_of(request))
    return f"A picture of {sizes}." if prompt.startswith("Describe") else f"{prompt} {sizes}!"


class FakeStream:
    """Words of an answer, one delta each."""

    def __init__(self, answer: Answer, finish: str, delay: float, stopped: threading.Event) -> None:
        self._answer, self._finish, self._delay, self._stopped = answer, finish, delay, stopped
        self.closed = False

    def __iter__(self) -> Iterator[Delta]:
        if isinstance(self._answer, Exception):
            raise self._answer
        words = self._answer.split(" ")
        for index, word in enumerate(words):
            if self._stopped.wait(self._delay) or self.closed:
                yield Delta("", finish_reason="abort")
                return
            yield Delta(word if index == 0 else f" {word}")
        yield Delta("", finish_reason=self._finish, usage=Usage(20, len(words), 16))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self:
            yield delta

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FakeBackend:
    """Answers by `script`; remembers requests and the most that were running at once."""

    def __init__(self, script: Script = sensible, *, finish: str = "stop", delay: float = 0.0) -> None:
        self._script, self._finish, self._delay = script, finish, delay
        self._stopped = threading.Event()
        self.requests: list[Request] = []
        self.streams: list[FakeStream] = []
        self.closed = 0
        self.described = Capabilities(
            "fake", 2048, images=True, video=False, max_pixels=1 << 20, min_pixels=1024
        )

    @property
    def capabilities(self) -> Capabilities:
        return self.described

    def submit(self, request: Request) -> FakeStream:
        if self._stopped.is_set():
            raise EngineError("the engine is closed")
        self.requests.append(request)
        stream = FakeStream(self._script(request), self._finish, self._delay, self._stopped)
        self.streams.append(stream)
        return stream

    def memory(self) -> Mapping[str, int]:
        return {"weights": 7}

    def reopen(self) -> None:
        """As if it had been loaded anew."""
        self._stopped.clear()

    def close(self) -> None:
        self.closed += 1
        self._stopped.set()


def model(answer: Answer | Script = sensible, **options: float | str) -> Model:
    """A model that says `answer`, or what it returns."""
    script = answer if callable(answer) else lambda _: answer
    return Model(FakeBackend(script, **options))


def slowly(answer: Answer, seconds: float) -> Answer:
    """`answer`, later."""
    time.sleep(seconds)
    return answer
