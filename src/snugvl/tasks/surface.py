"""The common methods of a model here and a model on a server, with their documentation.

`snugvl.Model` and `snugvl.Client` are both a `Tasks`: programs can take either. `snugvl.AsyncClient` has the
same methods as coroutines. Each class does the tasks in its way; the arguments are defined here, once.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar, overload

from snugvl.core.guesses import HintedClass, hint_arguments, unknown
from snugvl.core.messages import Deltas
from snugvl.core.sampling import SamplingParams, chosen
from snugvl.errors import WrongType
from snugvl.inputs.given import ImageSource, VisualSource
from snugvl.inputs.talk import Spoken
from snugvl.tasks.conversation import Conversation
from snugvl.tasks.prompts import Detail
from snugvl.tasks.results import Answer, Caption, Detections, Reply, Scene

CaptionT = TypeVar("CaptionT", covariant=True)
AnswerT = TypeVar("AnswerT", covariant=True)
SceneT = TypeVar("SceneT", covariant=True)
DetectionsT = TypeVar("DetectionsT", covariant=True)
ReplyT = TypeVar("ReplyT", covariant=True)
StreamT = TypeVar("StreamT", covariant=True)
ConversationT = TypeVar("ConversationT", covariant=True)

TASKS: Final = frozenset(
    f"{form}{task}" for task in ("caption", "ask", "scene", "detect", "chat") for form in ("", "stream_")
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments that all methods take, as they were given.

    Attributes:
        max_pixels: larger images are scaled down to it.
        system: the system message.
    """

    given: SamplingParams | None
    max_tokens: int | None
    temperature: float | None
    max_pixels: int | None = None
    system: str | None = None

    @property
    def sampling(self) -> SamplingParams | None:
        """Sampling parameters of these arguments; None where none was given. Raises as `chosen`."""
        return chosen(self.given, self.max_tokens, self.temperature)


class Surface(
    Generic[CaptionT, AnswerT, SceneT, DetectionsT, ReplyT, StreamT, ConversationT], metaclass=HintedClass
):
    """The methods of `Tasks`, generic in what they return: results, or coroutines of them."""

    def caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> CaptionT:
        """Describe an image.

        Args:
            image: what to look at; see the class.
            detail: "short" for one sentence, "detailed" for all there is to say.
            max_tokens: longest answer; by default 128, or 768 in detail.
            temperature: 0, the default, is greedy: the same answer every time.
            sampling: everything else about the choice of tokens.
            max_pixels: scale a larger image down to this many; fewer are quicker and take less memory.

        Returns:
            The description, as `text`; `print` prints it.

        Raises:
            ImageError: the image can't be read; `ImageTooLarge` where it has too many bytes or pixels.
            RequestError: an argument is wrong; `WrongType` where it is of a type that isn't taken.
            OutputError: the model answered with nothing.

        Example:
            print(model.caption("photo.jpg", detail="detailed"))
        """
        return self._caption(image, detail, Asked(sampling, max_tokens, temperature, max_pixels))

    def ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> AnswerT:
        """Answer a question about an image, or about several together.

        Args:
            images: one, or a list in the order in which they are shown; see the class.
            question: in words.
            max_tokens: longest answer; by default 768.
            temperature, sampling, max_pixels: as of `caption`; `max_pixels` of each image.

        Returns:
            The answer, as `text`; `print` prints it.

        Raises:
            ImageError, RequestError, OutputError: as `caption`; there is no question, or no image.

        Example:
            print(model.ask(["before.png", "after.png"], "What has changed?"))
        """
        return self._ask(images, question, Asked(sampling, max_tokens, temperature, max_pixels))

    def scene(
        self,
        image: VisualSource,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> SceneT:
        """Analyse an image: summary, setting, objects with counts and positions, text, relations.

        Args:
            image, temperature, sampling, max_pixels: as of `caption`.
            max_tokens: longest answer; by default 1,024.

        Returns:
            The parts, typed; `model_dump_json()` is what `snugvl scene --json` prints.

        Raises:
            ImageError, RequestError: as `caption`; the model's family answers in words alone.
            OutputError: the answer isn't a scene; its `text` has it.

        Example:
            for thing in model.scene("photo.jpg").objects:
                print(thing.count, thing.name, thing.positions)
        """
        return self._scene(image, Asked(sampling, max_tokens, temperature, max_pixels))

    def detect(
        self,
        image: ImageSource,
        objects: str | Sequence[str] = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> DetectionsT:
        """Find objects, with boxes in pixels of the original, upright image.

        Args:
            image: what to look at; no video.
            objects: the name of one, a list of names, or nothing for everything there is.
            max_tokens: longest answer; by default 2,048.
            temperature, sampling, max_pixels: as of `caption`.

        Returns:
            The objects with their boxes; none where there are none. `draw(image)` draws them.

        Raises:
            ImageError, RequestError: as `caption`; the model's family gives no boxes.
            OutputError: the answer has neither boxes nor the statement that there are none; its `text` has
                it.

        Example:
            found = model.detect("photo.jpg", ["cup", "plate"])
            found.draw("photo.jpg", "boxes.png")
        """
        return self._detect(image, objects, Asked(sampling, max_tokens, temperature, max_pixels))

    @overload
    def chat(self, messages: None = None, *, system: str | None = None) -> ConversationT: ...

    @overload
    def chat(
        self,
        messages: Spoken | Sequence[Spoken],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> ReplyT: ...

    def chat(
        self,
        messages: Spoken | Sequence[Spoken] | None = None,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> ReplyT | ConversationT:
        """Continue a conversation; without messages, begin one that remembers.

        Args:
            messages: words, `snugvl.user(picture, "words")`, an answer, or a dict as OpenAI or transformers
                have it; or a list of these, oldest first.
            sampling: everything about the choice of tokens; with `n` above 1, `stream_chat` has all choices.
            max_tokens: longest answer; by default what the context leaves.
            temperature: 0, the default, is greedy.
            system: the system message.

        Returns:
            The answer, as `text`, which may go back in as a message; without messages a `Conversation`.

        Raises:
            ImageError, RequestError: a message can't be used; says which, and what can.
            RequestTooLarge: the conversation is longer than the context.

        Example:
            chat = model.chat()
            print(chat.send("photo.jpg", "What is this?"))
            print(chat.send("And who made it?"))

            first = model.chat(snugvl.user("photo.jpg", "What is this?"))
            model.chat([snugvl.user("photo.jpg", "What is this?"), first, "And who made it?"])
        """
        if messages is None:
            return self._conversation(system)
        return self._chat(messages, Asked(sampling, max_tokens, temperature, system=system))

    def stream_caption(
        self,
        image: VisualSource,
        *,
        detail: Detail = "short",
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> StreamT:
        """`caption` as it is generated.

        Returns:
            `Delta`s, of which `print(delta, end="")` prints the text. Leaving its `with`, or closing it,
            stops the work.

        Raises:
            ImageError, RequestError: as `caption`, at once; errors of the engine come while it is read.

        Example:
            with model.stream_caption("photo.jpg") as stream:
                for delta in stream:
                    print(delta, end="", flush=True)
        """
        return self._stream_caption(image, detail, Asked(sampling, max_tokens, temperature, max_pixels))

    def stream_ask(
        self,
        images: VisualSource | Sequence[VisualSource],
        question: str,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        max_pixels: int | None = None,
    ) -> StreamT:
        """`ask` as it is generated: see `stream_caption`."""
        return self._stream_ask(images, question, Asked(sampling, max_tokens, temperature, max_pixels))

    def stream_chat(
        self,
        messages: Spoken | Sequence[Spoken],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
    ) -> StreamT:
        """`chat` as it is generated: see `stream_caption`. With `sampling.n` above 1, `delta.choice` tells
        the answers apart."""
        return self._stream_chat(messages, Asked(sampling, max_tokens, temperature, system=system))

    @abstractmethod
    def _caption(self, image: VisualSource, detail: Detail, asked: Asked) -> CaptionT: ...

    @abstractmethod
    def _ask(self, images: VisualSource | Sequence[VisualSource], question: str, asked: Asked) -> AnswerT: ...

    @abstractmethod
    def _scene(self, image: VisualSource, asked: Asked) -> SceneT: ...

    @abstractmethod
    def _detect(self, image: ImageSource, objects: str | Sequence[str], asked: Asked) -> DetectionsT: ...

    @abstractmethod
    def _chat(self, messages: Spoken | Sequence[Spoken], asked: Asked) -> ReplyT: ...

    @abstractmethod
    def _conversation(self, system: str | None) -> ConversationT: ...

    @abstractmethod
    def _stream_caption(self, image: VisualSource, detail: Detail, asked: Asked) -> StreamT: ...

    @abstractmethod
    def _stream_ask(
        self, images: VisualSource | Sequence[VisualSource], question: str, asked: Asked
    ) -> StreamT: ...

    @abstractmethod
    def _stream_chat(self, messages: Spoken | Sequence[Spoken], asked: Asked) -> StreamT: ...

    if not TYPE_CHECKING:  # or every attribute would be taken to exist

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(unknown(type(self).__name__, name))


hint_arguments(Surface, TASKS)


class Tasks(Surface[Caption, Answer, Scene, Detections, Reply, Deltas, Conversation[Any]]):
    """Caption, ask, scene, detect and chat, of a model in this process or on a server.

    An image is a path, the bytes of a file, an open file, a Pillow image, or an array (height × width × 3,
    uint8 or floats from 0 to 1); on a server also a URL, which it fetches. Where the model reads videos, a
    file of one may take the place of an image, but in `detect`. Of an animation the first frame is looked at,
    and a `SnugvlWarning` says so; `snugvl.video(file)` shows all of it.

    Every method is safe to call from several threads.
    """


def check_question(images: object, question: object) -> None:
    """Refuse a question that is not text, and a question in the place of the picture.

    Raises:
        WrongType: says in which order they come.
    """
    if not isinstance(question, str):
        swapped = isinstance(images, str)
        raise WrongType(
            f"the question is of type {type(question).__name__}; "
            + ("pictures come first: ask(images, question)" if swapped else "give words"),
            field="question",
        )
