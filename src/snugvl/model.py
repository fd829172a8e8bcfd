"""A loaded model with the four tasks and chat: what `snugvl.load` returns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, overload

from snugvl.core.messages import Backend, Capabilities, Message, Request, Stream, with_names
from snugvl.core.sampling import SamplingParams, chosen
from snugvl.errors import SnugvlError, WrongType, warn
from snugvl.inputs.given import ImageSource, VisualSource, decode, look, look_at, see, still
from snugvl.inputs.talk import Spoken, Turn, seen, turns
from snugvl.tasks import ask, caption, detect, scene
from snugvl.tasks.conversation import Conversation
from snugvl.tasks.prompts import Detail
from snugvl.tasks.request import collect
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene
from snugvl.tasks.surface import Tasks, check_question
from snugvl.tasks.training import warnings

__all__ = ["ImageSource", "Model", "VisualSource", "decode", "see"]


class Model(Tasks):
    """A vision-language model in this process: what `snugvl.load` gives.

    Every method is safe to call from several threads; calls that run at the same time share the engine's
    batches, so eight threads are faster than a loop. `sampling` defaults to greedy, with a token limit that
    suits the task. `max_pixels` lowers the checkpoint's own limit, above which an image is scaled down.

        with snugvl.load("pocket") as model:
            print(model.caption("picture.png"))

    All of them raise `ImageError` for something that isn't a picture, `RequestError` for a wrong or too
    large request, `OutputError` where the model's answer isn't what the task asked for.
    """

    def __init__(self, backend: Backend) -> None:
        if isinstance(backend, str | Path):
            raise WrongType(
                f"a Model is made of an engine; snugvl.load({str(backend)!r}) loads one by its name"
            )
        self.backend = backend

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self.backend.capabilities

    def caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Caption:
        said = chosen(sampling, max_tokens, temperature)
        stream = self.stream_caption(image, detail=detail, sampling=said, max_pixels=max_pixels)
        return caption.result(_read(stream))

    def ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Answer:
        said = chosen(sampling, max_tokens, temperature)
        return ask.result(_read(self.stream_ask(images, question, sampling=said, max_pixels=max_pixels)))

    def scene(
        self,
        image: VisualSource,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Scene:
        scene.check(self.capabilities)
        said = chosen(sampling, max_tokens, temperature)
        request = scene.request(look(image), self.capabilities, sampling=said, max_pixels=max_pixels)
        return scene.result(self._complete(request))

    def detect(
        self,
        image: ImageSource,
        objects: str | Sequence[str] = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Detections:
        model, names = self.capabilities, detect.check_names(objects)
        detect.check(names, model)
        picture, said = still(image), chosen(sampling, max_tokens, temperature)
        request = detect.request(picture, names, model, sampling=said, max_pixels=max_pixels)
        return detect.result(self._complete(request), picture.image.size, names, model, max_pixels=max_pixels)

    @overload
    def chat(self, messages: None = None, *, system: str | None = None) -> Conversation[Message]: ...

    @overload
    def chat(
        self,
        messages: Spoken | Sequence[Spoken],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> Reply: ...

    def chat(
        self,
        messages: Spoken | Sequence[Spoken] | None = None,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> Reply | Conversation[Message]:
        if messages is None:
            return Conversation(_message, self.stream_chat, system, self.capabilities.model)
        said = chosen(sampling, max_tokens, temperature)
        return _read(self.stream_chat(messages, said, system=system))

    def stream_caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Stream:
        said = chosen(sampling, max_tokens, temperature)
        request = caption.request(
            look(image), self.capabilities, detail=detail, sampling=said, max_pixels=max_pixels
        )
        return self._submit(request)

    def stream_ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Stream:
        check_question(images, question)
        said = chosen(sampling, max_tokens, temperature)
        request = ask.request(
            look_at(images),
            question,
            self.capabilities,
            sampling=said,
            max_pixels=max_pixels,
        )
        return self._submit(request)

    def stream_chat(
        self,
        messages: Spoken | Sequence[Spoken],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> Stream:
        said = chosen(sampling, max_tokens, temperature)
        content = with_names([_message(turn) for turn in turns(messages, system)])
        return self._submit(Request(content, said or SamplingParams()))

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        return self.backend.memory()

    def close(self) -> None:
        """Abort what runs, and give back the model's memory, on the GPU and beside it. Safe to call twice."""
        self.backend.close()

    def __repr__(self) -> str:
        try:
            model = self.capabilities
        except SnugvlError:
            return "<snugvl.Model, closed>"
        sees = (
            "text, images and videos" if model.video else "text and images" if model.images else "text alone"
        )
        where = ", ".join(filter(None, (model.engine, model.device, model.weights or model.dtype)))
        return f"<snugvl.Model {model.model}: {sees}, context of {model.context_tokens:,} tokens, {where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _complete(self, request: Request) -> Reply:
        return _read(self._submit(request))

    def _submit(self, request: Request) -> Stream:
        for text in warnings(self.capabilities.training, request.messages):
            warn(text)
        return self.backend.submit(request)


def _message(turn: Turn) -> Message:
    return turn.message(seen)


def _read(stream: Stream) -> Reply:
    with stream:
        return collect(stream)
