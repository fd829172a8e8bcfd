"""A backend whose answers are scripted: the tasks and the command line without an engine."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from PIL.Image import Image

from snugvl.core.messages import Capabilities, Delta, Picture, Request, Text, Usage, Video
from snugvl.errors import EngineError
from snugvl.model import Model
from tests.server.fake import FakeStream, Step

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


def steps(answer: Answer, finish: str) -> Iterator[Step]:
    """Words of an answer, one delta each."""
    if isinstance(answer, Exception):
        yield answer
        return
    words = answer.split(" ")
    for index, word in enumerate(words):
        yield (Delta(word if index == 0 else f" {word}"),)
    yield (Delta("", finish_reason=finish, usage=Usage(20, len(words), 16)),)  # type: ignore[arg-type]


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

    def submit(self, request: Request, wait_s: Callable[[], float] | None = None) -> FakeStream:
        """The answer; with `wait_s` instead of the backend's own delay before each word."""
        if self._stopped.is_set():
            raise EngineError("the engine is closed")
        self.requests.append(request)
        stream = FakeStream(
            steps(self._script(request), self._finish),
            wait_s=wait_s or (lambda: self._delay),
            stopped=self._stopped,
        )
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
