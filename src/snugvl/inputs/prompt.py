"""A conversation to what the engine runs: token ids with placeholders expanded, and patches.

Pictures are those of Qwen's vision towers: each is one run of placeholders and one item.

Equal to transformers' `Qwen3VLProcessor` and `Qwen2_5_VLProcessor`, in another order: each placeholder is
tokenised once and repeated as an id, so a prompt of 16,000 image tokens costs the tokeniser a few hundred
characters.

A video of Qwen3-VL becomes, per temporal patch, its time as text and a run of placeholders of its own (of
Qwen2.5-VL one run, whose times are positions):

    <|vision_start|>  <0.2 seconds><|vision_start|>▪▪▪▪<|vision_end|>  <1.2 seconds>…  <|vision_end|>

The outer pair is what the template writes around the video. transformers ≥ 5.10 keeps it, and so does vLLM
with it; transformers 4.57, with which Qwen3-VL was published, dropped it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from snugvl.checkpoint.architecture import ModelConfig, VisionConfig
from snugvl.core.messages import (
    GoOn,
    Message,
    Picture,
    Text,
    Tool,
    ToolForm,
    Video,
    characters,
    going_on,
    named_in_errors,
)
from snugvl.engine.request import VisionItem
from snugvl.errors import CheckpointError, RequestError, RequestTooLarge, blamed
from snugvl.inputs.chat import ChatTemplate, refuse_marks, template_texts, texts
from snugvl.inputs.defusing import defused
from snugvl.inputs.pixels import ImagePreprocessor, VideoPreprocessor, read_video_preprocessor
from snugvl.inputs.reasoning import opened
from snugvl.inputs.settings import PixelSettings
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.in_text import tool_json

COUNTED_CONTEXTS = 4  # what is only counted may be so many times as long as what is answered


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Strings of the control tokens around and for pictures."""

    image: str
    video: str
    start: str
    end: str


class PictureInputs:
    """Prepares pictures and videos for a model that sees. `videos`: None where it takes none."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        images: ImagePreprocessor,
        videos: VideoPreprocessor | None,
    ) -> None:
        self.images = images
        self.videos = videos
        self._ids = config.placeholders
        tokens, vision = config.vision_tokens, config.vision
        assert tokens is not None
        assert vision is not None
        self._tokens = _Tokens(
            image=_control(tokenizer, "image_token_id", tokens.image),
            video=_control(tokenizer, "video_token_id", tokens.video),
            start=_control(tokenizer, "vision_start_token_id", tokens.start),
            end=_control(tokenizer, "vision_end_token_id", tokens.end),
        )
        self._placeholder = re.compile(f"({re.escape(self._tokens.image)}|{re.escape(self._tokens.video)})")
        for preprocessor in (images, videos):
            if preprocessor is not None:
                _check_settings(preprocessor.settings, vision)

    @classmethod
    def from_folder(
        cls, folder: Path, config: ModelConfig, tokenizer: Tokenizer, max_pixels: int | None
    ) -> "PictureInputs | None":
        """Read a checkpoint folder's preprocessor settings; None for a model, or a load, without a tower."""
        if config.vision is None:
            return None
        images = ImagePreprocessor.from_folder(folder, max_pixels=max_pixels)
        return cls(config, tokenizer, images, read_video_preprocessor(folder, config.vision))

    def limit(self, max_pixels: int) -> None:
        """Hold pictures to `max_pixels`, and videos to the patches that such a picture has."""
        self.images = self.images.limited(max_pixels)
        if self.videos is not None:
            self.videos = self.videos.limited(max_pixels // self.images.settings.patch_size**2)

    def runs(self, part: Picture | Video) -> list[int]:
        """Tokens of each unbroken run of placeholders: one for an image, one or many for a video."""
        if isinstance(part, Picture):
            return [self.images.tokens(part.image.width, part.image.height, part.max_pixels)]
        videos = self._videos()
        videos.check(part)
        return videos.runs(len(part.frames), *part.frames[0].size)

    def item(self, part: Picture | Video) -> VisionItem:
        """The vision item of a picture or video: its patches with their grid, and its digest."""
        if isinstance(part, Picture):
            return self.images.prepare(part.image, part.max_pixels, part.file)
        return self._videos().prepare(part)

    def _videos(self) -> VideoPreprocessor:
        if self.videos is None:
            raise RequestError("this model takes no videos; send frames as pictures", field="messages")
        return self.videos

    def marked(self, text: str, parts: Sequence[Picture | Video]) -> str:
        """The rendered text. Where times are text, a video's placeholder becomes one per frame pair."""
        pieces = self._placeholder.split(text)  # text, placeholder, text, …, text
        written = pieces[1::2]
        wanted = [self._tokens.image if isinstance(part, Picture) else self._tokens.video for part in parts]
        if written != wanted:
            raise RequestError(
                f"the chat template wrote {len(written)} placeholders for {len(wanted)} pictures and videos, "
                "or in another order; put them into user messages",
                field="messages",
            )
        for index, part in enumerate(parts):
            times = self._videos().timestamps(part) if isinstance(part, Video) else ()
            if times:
                one = f"{self._tokens.start}{self._tokens.video}{self._tokens.end}"
                pieces[2 * index + 1] = "".join(time + one for time in times)
        return "".join(pieces)

    def expanded(self, ids: Sequence[int], runs: Sequence[int]) -> list[int]:
        """Each placeholder repeated to its number of tokens."""
        placeholders = set(self._ids)
        found = sum(token in placeholders for token in ids)
        if found != len(runs):
            raise CheckpointError(
                f"the tokenizer made {found} placeholders of {len(runs)}; is it this model's?"
            )
        return list(_repeat(ids, placeholders, runs))


def _control(tokenizer: Tokenizer, field: str, token_id: int) -> str:
    text = tokenizer.token_text(token_id)
    if not text or token_id not in tokenizer.special_ids:
        raise CheckpointError(
            f"config.json has {field!r} = {token_id}, which is not a special token of tokenizer.json"
        )
    return text


def _repeat(ids: Sequence[int], placeholders: set[int], runs: Sequence[int]) -> Iterator[int]:
    lengths = iter(runs)
    for token in ids:
        if token in placeholders:
            yield from [token] * next(lengths)
        else:
            yield token


def _check_settings(settings: PixelSettings, vision: VisionConfig) -> None:
    """The preprocessor must cut patches of the size that the vision tower takes."""
    pairs = {
        "patch_size": (settings.patch_size, vision.patch_size),
        "temporal_patch_size": (settings.temporal_patch_size, vision.temporal_patch_size),
        "merge_size": (settings.merge_size, vision.spatial_merge_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise CheckpointError(f"the preprocessor has {name!r} = {ours}, config.json has {theirs}")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """`prompt_ids` with one placeholder per image token (`image_tokens` of them), and their patches.

    `bare`: it is text to continue, not a conversation to answer. `reasoning`: whether the model's answer
    begins inside its reasoning; None for a model that isn't known to think.
    """

    prompt_ids: tuple[int, ...]
    vision: tuple[VisionItem, ...]
    image_tokens: int
    bare: bool = False
    reasoning: bool | None = None


P = TypeVar("P", bound=PreparedPrompt)


@dataclass(frozen=True, slots=True)
class Wording:
    """A conversation whose prompt is wanted.

    Attributes:
        tools: what the prompt tells the model it may call.
        template: variables of the chat template.
        most: tokens of a prompt that isn't refused; None: any number.
        go_on: called between two parts of the work, which it may end by raising.
        exactly: whether a prompt of more tokens is refused; else only text that is far too long.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool]
    template: Mapping[str, Any]
    most: int | None
    go_on: GoOn
    exactly: bool

    def counted(self, more: int = 0) -> int | None:
        """Tokens beyond which text is refused before it is tokenised; `more`: of pictures."""
        if self.exactly or self.most is None:
            return self.most
        return COUNTED_CONTEXTS * self.most + more


class PromptMaker(ABC, Generic[P]):
    """Makes the prompts of one checkpoint. Safe to use from several threads.

    Attributes:
        tokenizer: the checkpoint's.
        vocab_size: tokens that the model knows.
        placeholders: ids of tokens that stand for pictures.
    """

    tokenizer: Tokenizer
    vocab_size: int
    placeholders: Collection[int]

    @property
    @abstractmethod
    def tool_form(self) -> ToolForm:
        """How the model writes calls of tools, by the chat template."""

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        go_on: GoOn = going_on,
    ) -> P:
        """Render, tokenise and preprocess a conversation.

        Args:
            tools: what the prompt tells the model it may call.
            template: variables of the chat template.
            max_tokens: refuse a longer prompt, before its pixels are touched where its length is known then.
            go_on: called between two parts of the work, which it may end by raising.

        Raises:
            RequestError: a role, text or part that can't be used, with what to do.
            RequestTooLarge: more than `max_tokens`; says how many and how many are pictures'.
            ImageError: a picture that can't be prepared.
            CheckpointError: the chat template fails.
        """
        return self._made(Wording(messages, tools, template or {}, max_tokens, go_on, exactly=True))

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template: Mapping[str, Any] | None = None,
        most: int | None = None,
        go_on: GoOn = going_on,
    ) -> P:
        """The prompt of a conversation to be counted; it may be longer than the context, and have no pixels.

        Args:
            template: variables of the chat template.
            most: tokens; refuse text of more characters than these can stand for, or of more than
                `COUNTED_CONTEXTS` times as many tokens.

        Raises:
            RequestError, RequestTooLarge, CheckpointError: as `prepare`.
        """
        return self._made(Wording(messages, tools, template or {}, most, go_on, exactly=False))

    def count_prompt(self, prompt: str, *, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a bare text; it may be longer than the context. `most`: as in `count`.

        Raises:
            RequestError, RequestTooLarge: text that can't be tokenised, or far too much of it.
        """
        self.tokenizer.refuse_oversized(len(prompt), most, field="prompt")
        self.tokenizer.refuse_long(prompt, None if most is None else COUNTED_CONTEXTS * most, field="prompt")
        return self._framed(prompt)

    def prepare_prompt(self, prompt: str | Sequence[int], *, max_tokens: int | None = None) -> P:
        """A prompt that goes to the model as it is: text, or token ids of any kind but pictures'.

        Text is given what the tokenizer puts around a whole one ("<s>"), as transformers and vLLM do.

        Raises:
            RequestError: it is empty, text that holds a control token, or ids the model doesn't have.
            RequestTooLarge: more than `max_tokens`.
        """
        if isinstance(prompt, str):
            self.tokenizer.refuse_oversized(len(prompt), max_tokens, field="prompt")
            self._refuse(prompt, "prompt")
            self.tokenizer.refuse_long(prompt, max_tokens, field="prompt")
            ids = self._framed(prompt)
        else:
            ids = tuple(prompt)
            check_ids(ids, self.vocab_size, self.placeholders)
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", field="prompt")
        check_length(len(ids), 0, max_tokens, "prompt")
        return self._bare(ids)

    @abstractmethod
    def _made(self, given: Wording) -> P:
        """See `prepare` and `count`."""

    @abstractmethod
    def _framed(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole text, with what the tokenizer puts around one."""

    @abstractmethod
    def _bare(self, ids: tuple[int, ...]) -> P:
        """The prompt that has these ids, and no pictures."""

    def _refuse(self, text: str, field: str) -> None:
        """Raise RequestError where text holds what no user may write."""
        self.tokenizer.refuse_control_tokens(text, field=field)

    def _defused(
        self, given: Wording, marks: Sequence[str], also: Sequence[str] = ()
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """A conversation whose control tokens, `marks` and `also` are broken up; what is left is refused.
        `marks`: the chat template's marks of an answer, which its variables may not hold either.

        Raises:
            RequestError, RequestTooLarge: text that no user may write, or more than `most` tokens can be.
        """
        self.tokenizer.refuse_oversized(characters(given.messages, given.tools), given.most, field="messages")
        broken = defused(
            given.messages, given.tools, lambda text: self.tokenizer.break_up(text, (*marks, *also))
        )
        for field, text in (*texts(*broken), *template_texts(given.template)):
            self._refuse(text, field)
            refuse_marks(text, marks, "which marks a tool's answer for this model", field)
            given.go_on()
        return broken


class Processor(PromptMaker[PreparedPrompt]):
    """Everything of a checkpoint that turns messages into a prompt of our own engine."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        pictures: PictureInputs | None,
    ) -> None:
        """`pictures`: None for a model, or a load, without a vision tower."""
        self.config, self.vocab_size = config, config.text.vocab_size
        self.placeholders = config.placeholders
        self.tokenizer = tokenizer
        self.template = template
        self.pictures = pictures

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, *, max_pixels: int | None = None) -> "Processor":
        """Read tokenizer, chat template and preprocessor settings of a checkpoint folder.

        A folder without settings for videos takes images only; without a vision tower in `config` the model
        reads text alone. `max_pixels` lowers the checkpoint's limit for every image.

        Raises:
            CheckpointError: a file is missing, corrupt, or contradicts `config`.
            RequestError: `max_pixels` is smaller than one token.
            UnsupportedModel: a kind of tokenizer this version doesn't read.
        """
        tokenizer = Tokenizer.from_folder(folder)
        return cls(
            config,
            tokenizer,
            ChatTemplate.from_folder(folder, tokenizer.variables),
            PictureInputs.from_folder(folder, config, tokenizer, max_pixels),
        )

    @property
    def tool_form(self) -> ToolForm:
        return self.template.tool_form

    def _made(self, given: Wording) -> PreparedPrompt:
        parts, pictures = _pictures(given.messages), self.pictures
        if pictures is None and parts:
            raise RequestError("this model reads text alone; it takes no pictures", field="messages")
        messages, tools = self._defused(given, self.template.answer_marks)
        runs = [] if pictures is None else [*_runs(pictures, messages)]
        rendered = self.template.render(
            messages, tools=[tool_json(tool) for tool in tools] or None, extra=given.template
        )
        given.go_on()
        marked = rendered if pictures is None else pictures.marked(rendered, parts)
        image_tokens = sum(runs)
        more = image_tokens - len(runs)
        self.tokenizer.refuse_long(marked, given.counted(more), more=more, field="messages")
        ids = self.tokenizer.encode(marked)
        given.go_on()
        if given.exactly:
            check_length(len(ids) + more, image_tokens, given.most, "messages")
        vision = []
        if pictures is not None:
            ids = pictures.expanded(ids, runs)
            for part in parts if given.exactly else ():
                given.go_on()
                vision.append(pictures.item(part))
        reasoning = opened(rendered) if self.template.thinks else None
        return PreparedPrompt(tuple(ids), tuple(vision), image_tokens, reasoning=reasoning)

    def _framed(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, framed=True))

    def _bare(self, ids: tuple[int, ...]) -> PreparedPrompt:
        return PreparedPrompt(ids, (), 0, bare=True)


def check_length(tokens: int, image_tokens: int, most: int | None, field: str) -> None:
    """Raise RequestTooLarge if a prompt has more than `most` tokens; `image_tokens` of them are pictures'."""
    if most is None or tokens <= most:
        return
    pictures = f" ({image_tokens:,} of them for pictures)" if image_tokens else ""
    less = "fewer or smaller pictures (max_pixels), or less text" if image_tokens else "less text"
    raise RequestTooLarge(
        f"the prompt has {tokens:,} tokens{pictures}, at most {most:,} fit; send {less}", field=field
    )


def check_ids(
    ids: Sequence[int], vocab_size: int, placeholders: Collection[int] = (), field: str = "prompt"
) -> None:
    """Raise RequestError if a bare prompt has an id that the model doesn't have, or that is a picture's."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"a token id must be a whole number from 0 to {vocab_size - 1}, not {token!r}", field=field
            )
        if token in placeholders:
            raise RequestError(
                f"token id {token} stands for a picture, which a bare prompt can't have; send messages",
                field="prompt",
            )


def _runs(pictures: PictureInputs, messages: Sequence[Message]) -> Iterator[int]:
    """Runs of placeholders of a conversation's pictures and videos, in order; errors say which of them."""
    for index, message in enumerate(messages):
        for part in message.content:
            if not isinstance(part, Text):
                with blamed(f"messages[{index}].content"), named_in_errors(part):
                    runs = pictures.runs(part)
                yield from runs


def _pictures(messages: Sequence[Message]) -> list[Picture | Video]:
    """Pictures and videos of a conversation, in order."""
    return [part for message in messages for part in message.content if not isinstance(part, Text)]
