"""A loaded model with the four tasks and chat: what `snugvl.load` returns."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from snugvl.core.messages import Backend, Capabilities, Closing, Message, Request, Stream, with_names
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, SnugvlError, WrongType, warn
from snugvl.inputs.given import ImageSource, VisualSource, decode, look, look_at, see, still
from snugvl.inputs.talk import Spoken, Turn, seen, turns
from snugvl.tasks import ask, detect, scene
from snugvl.tasks.ask import collect
from snugvl.tasks.conversation import Conversation
from snugvl.tasks.prompts import Detail
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene
from snugvl.tasks.surface import Asked, Tasks, check_question
from snugvl.tasks.training import warnings

__all__ = ["ImageSource", "Model", "VisualSource", "decode", "see"]


class Model(Tasks, Closing):
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
        self._process = os.getpid()

    @property
    def capabilities(self) -> Capabilities:
        """Abilities and limits of the model."""
        return self.backend.capabilities

    def _caption(self, image: VisualSource, detail: Detail, asked: Asked) -> Caption:
        return ask.caption_result(_read(self._stream_caption(image, detail, asked)))

    def _ask(self, images: VisualSource | Sequence[VisualSource], question: str, asked: Asked) -> Answer:
        return ask.result(_read(self._stream_ask(images, question, asked)))

    def _scene(self, image: VisualSource, asked: Asked) -> Scene:
        scene.check(self.capabilities)
        request = scene.request(
            look(image), self.capabilities, sampling=asked.sampling, max_pixels=asked.max_pixels
        )
        return scene.result(_read(self._submit(request)))

    def _detect(self, image: ImageSource, objects: str | Sequence[str], asked: Asked) -> Detections:
        model, names, most = self.capabilities, detect.check_names(objects), asked.max_pixels
        detect.check(names, model)
        picture = still(image)
        request = detect.request(picture, names, model, sampling=asked.sampling, max_pixels=most)
        reply = _read(self._submit(request))
        return detect.result(reply, picture.image.size, names, model, max_pixels=most)

    def _conversation(self, system: str | None) -> Conversation[Message]:
        return Conversation(_message, self.stream_chat, system, self.capabilities.model)

    def _chat(self, messages: Spoken | Sequence[Spoken], asked: Asked) -> Reply:
        return _read(self._stream_chat(messages, asked))

    def _stream_caption(self, image: VisualSource, detail: Detail, asked: Asked) -> Stream:
        said, most = asked.sampling, asked.max_pixels
        return self._submit(
            ask.caption_request(look(image), self.capabilities, detail=detail, sampling=said, max_pixels=most)
        )

    def _stream_ask(
        self, images: VisualSource | Sequence[VisualSource], question: str, asked: Asked
    ) -> Stream:
        check_question(images, question)
        said, most = asked.sampling, asked.max_pixels
        return self._submit(
            ask.request(look_at(images), question, self.capabilities, sampling=said, max_pixels=most)
        )

    def _stream_chat(self, messages: Spoken | Sequence[Spoken], asked: Asked) -> Stream:
        said = asked.sampling
        content = with_names([_message(turn) for turn in turns(messages, asked.system)])
        return self._submit(Request(content, said or SamplingParams()))

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        return self.backend.memory()

    def close(self) -> None:
        """Abort what runs, and give back the model's memory, on the GPU and beside it. Safe to call twice.

        In a process that was forked from the model's it does nothing.
        """
        if self._process == os.getpid():
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

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied: there is one engine, in this process.

        Raises:
            WrongType: says what to do instead; a `TypeError`, as pickle's own is.
        """
        raise WrongType(
            "a loaded model is neither pickled nor copied; load it in each process, or run snugvl serve and "
            "give each a snugvl.Client"
        )

    def _submit(self, request: Request) -> Stream:
        if self._process != os.getpid():  # the engine's thread wasn't forked with the rest
            raise EngineError(
                f"the model was loaded in process {self._process} and can't be used in {os.getpid()}, which "
                "was forked from it; load it there, or run snugvl serve and give each process a "
                "snugvl.Client"
            )
        for text in warnings(self.capabilities.training, request.messages):
            warn(text)
        return self.backend.submit(request)


def _message(turn: Turn) -> Message:
    return turn.message(seen)


def _read(stream: Stream) -> Reply:
    with stream:
        return collect(stream)
