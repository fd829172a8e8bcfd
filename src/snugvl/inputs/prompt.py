"""A conversation to what the engine runs: token ids with placeholders expanded, and patches.

Equal to transformers' `Qwen3VLProcessor` and `Qwen2_5_VLProcessor`, in another order: each placeholder is
tokenised once and repeated as an id, so a prompt of 16,000 image tokens costs the tokeniser a few hundred
characters.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from snugvl.backends.protocol import GoOn, Message, Picture, Text, Tool, Video, characters, going_on
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.engine.request import VisionItem
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.chat import ChatTemplate, refuse_answer_marks, texts, tool_json
from snugvl.inputs.pictures import PictureInputs
from snugvl.inputs.reasoning import opened
from snugvl.inputs.tokenizer import Tokenizer


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


class Processor:
    """Everything of a checkpoint that turns messages into a prompt."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        pictures: PictureInputs | None,
    ) -> None:
        """`pictures`: None for a model, or a load, without a vision tower."""
        self.config = config
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

    def image_size_tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Prompt tokens that an image of that size costs, for planning."""
        assert self.pictures is not None, "asked of a model that sees"
        return self.pictures.images.tokens(width, height, max_pixels)

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        go_on: GoOn = going_on,
    ) -> PreparedPrompt:
        """Render, tokenise and preprocess a conversation.

        Args:
            tools: what the prompt tells the model it may call.
            max_tokens: refuse a longer prompt before any pixel is touched.
            go_on: called between two parts of the work, which it may end by raising.

        Raises:
            RequestError: a role, text or part that can't be used, with what to do.
            RequestTooLarge: more than `max_tokens`; says how many and how many are pictures'.
            ImageError: a picture that can't be prepared.
            CheckpointError: the chat template fails.
        """
        prompt = self._read(messages, tools, max_tokens, go_on, exactly=True)
        vision = []
        for part in _pictures(messages):
            go_on()
            assert self.pictures is not None, "a model that doesn't see was given a picture"
            vision.append(self.pictures.item(part))
        return replace(prompt, vision=tuple(vision))

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        most: int | None = None,
        go_on: GoOn = going_on,
    ) -> PreparedPrompt:
        """The prompt of a conversation without its patches; it may be longer than the context.

        Args:
            most: refuse text of more characters than so many tokens can stand for.

        Raises:
            RequestError, RequestTooLarge, CheckpointError: as `prepare`.
        """
        return self._read(messages, tools, most, go_on, exactly=False)

    def count_prompt(self, prompt: str, *, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a bare text; it may be longer than the context. `most`: as in `count`.

        Raises:
            RequestError, RequestTooLarge: text that can't be tokenised, or far too much of it.
        """
        self.tokenizer.refuse_oversized(len(prompt), most, field="prompt")
        return tuple(self.tokenizer.encode(prompt, framed=True))

    def _read(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        max_tokens: int | None,
        go_on: GoOn,
        *,
        exactly: bool,
    ) -> PreparedPrompt:
        """Everything but patches. `exactly`: a prompt of more than `max_tokens` is refused."""
        self.tokenizer.refuse_oversized(characters(messages, tools), max_tokens, field="messages")
        parts, pictures = _pictures(messages), self.pictures
        if pictures is None and parts:
            raise RequestError("this model reads text alone; it takes no pictures", field="messages")
        for field, text in texts(messages, tools):
            self.tokenizer.refuse_control_tokens(text, field=field)
            refuse_answer_marks(text, self.template.answer_marks, field)
            go_on()
        runs = [] if pictures is None else [run for part in parts for run in pictures.runs(part)]
        rendered = self.template.render(messages, tools=[tool_json(tool) for tool in tools] or None)
        go_on()
        marked = rendered if pictures is None else pictures.marked(rendered, parts)
        image_tokens = sum(runs)
        if exactly:
            more = image_tokens - len(runs)
            self.tokenizer.refuse_long(marked, max_tokens, more=more, field="messages")
        ids = self.tokenizer.encode(marked)
        go_on()
        count = len(ids) - len(runs) + image_tokens
        if exactly:
            check_length(count, image_tokens, max_tokens, "messages")
        if pictures is not None:
            ids = pictures.expanded(ids, runs)
        reasoning = opened(rendered) if self.template.thinks else None
        return PreparedPrompt(tuple(ids), (), image_tokens, reasoning=reasoning)

    def prepare_prompt(self, prompt: str | Sequence[int], *, max_tokens: int | None = None) -> PreparedPrompt:
        """A prompt that goes to the model as it is: text, or token ids of any kind but pictures'.

        Text is given what the tokenizer puts around a whole one ("<s>"), as transformers and vLLM do.

        Raises:
            RequestError: it is empty, text that holds a control token, or ids the model doesn't have.
            RequestTooLarge: more than `max_tokens`.
        """
        if isinstance(prompt, str):
            self.tokenizer.refuse_oversized(len(prompt), max_tokens, field="prompt")
            self.tokenizer.refuse_control_tokens(prompt, field="prompt")
            self.tokenizer.refuse_long(prompt, max_tokens, field="prompt")
            ids = tuple(self.tokenizer.encode(prompt, framed=True))
        else:
            ids = tuple(prompt)
            check_ids(ids, self.config.text.vocab_size, self.config.placeholders)
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", field="prompt")
        check_length(len(ids), 0, max_tokens, "prompt")
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


def check_ids(ids: Sequence[int], vocab_size: int, placeholders: Collection[int]) -> None:
    """Raise RequestError if a bare prompt has an id that the model doesn't have, or that is a picture's."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"a token id is a whole number from 0 to {vocab_size - 1}, not {token!r}", field="prompt"
            )
        if token in placeholders:
            raise RequestError(
                f"token id {token} stands for a picture, which a bare prompt can't have; send messages",
                field="prompt",
            )


def _pictures(messages: Sequence[Message]) -> list[Picture | Video]:
    """Pictures and videos of a conversation, in order."""
    return [part for message in messages for part in message.content if not isinstance(part, Text)]
