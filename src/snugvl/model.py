"""A loaded model with the four tasks and chat: what `snugvl.load` returns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self, cast

from PIL import Image, ImageOps

from snugvl.core.messages import Backend, Capabilities, Message, Request, Stream, Video, messages_of
from snugvl.core.sampling import SamplingParams
from snugvl.inputs import frames
from snugvl.inputs.image import ImageLimits, name_of, open_image, read_source, to_rgb
from snugvl.tasks import ask, caption, detect, scene
from snugvl.tasks.prompts import Detail
from snugvl.tasks.request import collect
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene

ImageSource = str | Path | bytes | BinaryIO | Image.Image
"""An image: a path, the bytes of a file, an open file, or a picture that Pillow has decoded."""

VisualSource = ImageSource | Video
"""An image, or a video: a file of one, told by its content, or frames with their times."""


class Model:
    """A vision-language model.

    Every method is safe to call from several threads; calls that run at the same time share the engine's
    batches, so eight threads are faster than a loop. `sampling` defaults to greedy, with a token limit that
    suits the task. `max_pixels` lowers the checkpoint's own limit, above which an image is scaled down.
    Where the model reads videos (`capabilities.video`), a video file may take the place of an image, but in
    `detect`.

        with snugvl.load("pocket") as model:
            print(model.caption("picture.png").text)

    All of them raise `ImageError` for something that isn't a picture, `RequestError` for a wrong or too
    large request, `OutputError` where the model's answer isn't what the task asked for.
    """

    def __init__(self, backend: Backend) -> None:
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
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Caption:
        """Describe an image, in one sentence or in detail."""
        stream = self.stream_caption(image, detail=detail, sampling=sampling, max_pixels=max_pixels)
        return caption.result(_read(stream))

    def ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Answer:
        """Answer a question about an image, or about several together."""
        return ask.result(_read(self.stream_ask(images, question, sampling=sampling, max_pixels=max_pixels)))

    def scene(
        self,
        image: VisualSource,
        *,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Scene:
        """Analyse an image: summary, setting, objects with counts and positions, text, relations."""
        scene.check(self.capabilities)
        request = scene.request(see(image), self.capabilities, sampling=sampling, max_pixels=max_pixels)
        return scene.result(self._complete(request))

    def detect(
        self,
        image: ImageSource,
        objects: Sequence[str] = (),
        *,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Detections:
        """Find the named objects, or every object, with boxes in pixels of the original image."""
        model = self.capabilities
        detect.check(objects, model)
        picture = decode(image)
        request = detect.request(picture, objects, model, sampling=sampling, max_pixels=max_pixels)
        reply = self._complete(request)
        return detect.result(reply, picture.size, objects, model, max_pixels=max_pixels)

    def chat(self, messages: Message | Sequence[Message], sampling: SamplingParams | None = None) -> Reply:
        """Continue a conversation (see `snugvl.user`); with `sampling.n` above 1, `stream_chat` has all."""
        return _read(self.stream_chat(messages, sampling))

    def stream_caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Stream:
        """`caption` as it is generated. Close the stream, or leave its `with`, to stop early."""
        request = caption.request(
            see(image), self.capabilities, detail=detail, sampling=sampling, max_pixels=max_pixels
        )
        return self.backend.submit(request)

    def stream_ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> Stream:
        """`ask` as it is generated."""
        request = ask.request(
            [see(image) for image in _several(images)],
            question,
            self.capabilities,
            sampling=sampling,
            max_pixels=max_pixels,
        )
        return self.backend.submit(request)

    def stream_chat(
        self, messages: Message | Sequence[Message], sampling: SamplingParams | None = None
    ) -> Stream:
        """`chat` as it is generated."""
        return self.backend.submit(Request(messages_of(messages), sampling or SamplingParams()))

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        return self.backend.memory()

    def close(self) -> None:
        """Abort what runs, and give back the model's memory, on the GPU and beside it. Safe to call twice."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _complete(self, request: Request) -> Reply:
        return _read(self.backend.submit(request))


def decode(source: ImageSource) -> Image.Image:
    """The image, upright and RGB, as the model sees it and boxes are counted in.

    Raises:
        ImageError: it isn't a picture, or larger than the limits.
    """
    if isinstance(source, Image.Image):
        return to_rgb(ImageOps.exif_transpose(source))
    return open_image(source)


def see(source: VisualSource) -> Image.Image | Video:
    """The image as `decode` gives it, or the video that a file is by its content.

    Raises:
        ImageError: it is neither, or larger than the limits.
    """
    if isinstance(source, Image.Image):
        return decode(source)
    if isinstance(source, Video):
        return source
    name = name_of(source)
    data = read_source(source, name, ImageLimits())
    return frames.open_video(data, name) if frames.is_video(data) else open_image(data, name=name)


def _several(images: VisualSource | Sequence[VisualSource]) -> list[VisualSource]:
    if isinstance(images, list | tuple):
        return list(images)
    return [cast(VisualSource, images)]


def _read(stream: Stream) -> Reply:
    with stream:
        return collect(stream)
