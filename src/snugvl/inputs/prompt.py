"""A conversation to what the engine runs: token ids with placeholders expanded, and patches.

Equal to transformers' `Qwen3VLProcessor` and `Qwen2_5_VLProcessor`, in another order: each placeholder is
tokenised once and repeated as an id, so a prompt of 16,000 image tokens costs the tokeniser a few hundred
characters.

A video of Qwen3-VL becomes, per temporal patch, its time as text and a run of placeholders of its own (of
Qwen2.5-VL one run, whose times are positions):

    <|vision_start|>  <0.2 seconds><|vision_start|>▪▪▪▪<|vision_end|>  <1.2 seconds>…  <|vision_end|>

The outer pair is what the template writes around the video. transformers ≥ 5.10 keeps it, and so does vLLM
with it; transformers 4.57, with which Qwen3-VL was published, dropped it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snugvl.backends.protocol import Message, Picture, Text, Tool, Video
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.engine.request import VisionItem
from snugvl.errors import CheckpointError, RequestError, RequestTooLarge
from snugvl.inputs.chat import ChatTemplate, call_arguments, tool_json
from snugvl.inputs.pixels import ImagePreprocessor
from snugvl.inputs.settings import PixelSettings
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.video import VideoPreprocessor, read_video_preprocessor


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """`prompt_ids` with one placeholder per image token (`image_tokens` of them), and their patches."""

    prompt_ids: tuple[int, ...]
    vision: tuple[VisionItem, ...]
    image_tokens: int


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Strings of the control tokens around and for pictures."""

    image: str
    video: str
    start: str
    end: str


class Processor:
    """Everything of a checkpoint that turns messages into a prompt."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        images: ImagePreprocessor,
        videos: VideoPreprocessor | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.images = images
        self.videos = videos
        tokens = config.vision_tokens
        assert tokens is not None
        self._tokens = _Tokens(
            image=self._control("image_token_id", tokens.image),
            video=self._control("video_token_id", tokens.video),
            start=self._control("vision_start_token_id", tokens.start),
            end=self._control("vision_end_token_id", tokens.end),
        )
        self._placeholder = re.compile(f"({re.escape(self._tokens.image)}|{re.escape(self._tokens.video)})")
        for preprocessor in (images, videos):
            if preprocessor is not None:
                _check_settings(preprocessor.settings, config)

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, *, max_pixels: int | None = None) -> "Processor":
        """Read tokenizer, chat template and preprocessor settings of a checkpoint folder.

        A folder without settings for videos takes images only. `max_pixels` lowers the checkpoint's limit
        for every image.

        Raises:
            CheckpointError: a file is missing, corrupt, or contradicts `config`.
            RequestError: `max_pixels` is smaller than one token.
            UnsupportedModel: a kind of tokenizer this version doesn't read.
        """
        tokenizer = Tokenizer.from_folder(folder)
        assert config.vision is not None
        return cls(
            config,
            tokenizer,
            ChatTemplate.from_folder(folder, tokenizer.variables),
            ImagePreprocessor.from_folder(folder, max_pixels=max_pixels),
            read_video_preprocessor(folder, config.vision),
        )

    def image_size_tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Prompt tokens that an image of that size costs, for planning."""
        return self.images.tokens(width, height, max_pixels)

    def prepare(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), max_tokens: int | None = None
    ) -> PreparedPrompt:
        """Render, tokenise and preprocess a conversation.

        Args:
            tools: what the prompt tells the model it may call.
            max_tokens: refuse a longer prompt before any pixel is touched.

        Raises:
            RequestError: a role, text or part that can't be used, with what to do.
            RequestTooLarge: more than `max_tokens`; says how many and how many are pictures'.
            ImageError: a picture that can't be prepared.
            CheckpointError: the chat template fails.
        """
        self._check_text(messages)
        self._check_tools(tools)
        parts = [part for message in messages for part in message.content if not isinstance(part, Text)]
        runs = [run for part in parts for run in self._runs(part)]
        shown = [tool_json(tool) for tool in tools] or None
        text = self._marked(self.template.render(messages, tools=shown), parts)
        ids = self._expanded(self.tokenizer.encode(text), runs)
        image_tokens = sum(runs)
        if max_tokens is not None and len(ids) > max_tokens:
            raise RequestTooLarge(
                f"the prompt has {len(ids):,} tokens ({image_tokens:,} of them for pictures), at most "
                f"{max_tokens:,} fit; send fewer or smaller pictures (max_pixels), or less text",
                field="messages",
            )
        vision = tuple(self._item(part) for part in parts)
        return PreparedPrompt(tuple(ids), vision, image_tokens)

    def prepare_prompt(self, prompt: str | Sequence[int], *, max_tokens: int | None = None) -> PreparedPrompt:
        """A prompt that goes to the model as it is: text, or token ids of any kind but pictures'.

        Raises:
            RequestError: it is empty, text that holds a control token, or ids the model doesn't have.
            RequestTooLarge: more than `max_tokens`.
        """
        if isinstance(prompt, str):
            self.tokenizer.refuse_control_tokens(prompt, field="prompt")
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            ids = tuple(prompt)
            self._check_ids(ids)
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", field="prompt")
        if max_tokens is not None and len(ids) > max_tokens:
            raise RequestTooLarge(
                f"the prompt has {len(ids):,} tokens, at most {max_tokens:,} fit; send less", field="prompt"
            )
        return PreparedPrompt(ids, (), 0)

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab = self.config.text.vocab_size
        placeholders = self.config.placeholders
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise RequestError(
                    f"a token id is a whole number from 0 to {vocab - 1}, not {token!r}", field="prompt"
                )
            if token in placeholders:
                raise RequestError(
                    f"token id {token} stands for a picture, which a bare prompt can't have; send messages",
                    field="prompt",
                )

    def _check_text(self, messages: Sequence[Message]) -> None:
        """No text may become a control token, neither alone nor where the template joins two parts."""
        for index, message in enumerate(messages):
            texts = [part.unmarked for part in message.content if isinstance(part, Text)]
            for joined in ("".join(texts), "".join(text.strip() for text in texts)):
                self.tokenizer.refuse_control_tokens(joined, field=f"messages[{index}].content")
            for number, call in enumerate(message.tool_calls):
                field = f"messages[{index}].tool_calls[{number}]"
                arguments = json.dumps(call_arguments(call, f"{field}.arguments"), ensure_ascii=False)
                for text in (call.name, arguments, call.id):
                    self.tokenizer.refuse_control_tokens(text, field=field)
            self.tokenizer.refuse_control_tokens(
                message.tool_call_id or "", field=f"messages[{index}].tool_call_id"
            )

    def _check_tools(self, tools: Sequence[Tool]) -> None:
        for index, tool in enumerate(tools):
            schema = json.dumps(dict(tool.parameters), ensure_ascii=False)
            for name, text in {
                "name": tool.name, "description": tool.description, "parameters": schema
            }.items():  # fmt: skip
                self.tokenizer.refuse_control_tokens(text, field=f"tools[{index}].{name}")

    def _runs(self, part: Picture | Video) -> list[int]:
        """Tokens of each unbroken run of placeholders: one for an image, one or many for a video."""
        if isinstance(part, Picture):
            return [self.images.tokens(part.image.width, part.image.height, part.max_pixels)]
        videos = self._videos()
        videos.check(part)
        return videos.runs(len(part.frames), *part.frames[0].size)

    def _item(self, part: Picture | Video) -> VisionItem:
        if isinstance(part, Picture):
            return self.images.prepare(part.image, part.max_pixels)
        return self._videos().prepare(part)

    def _videos(self) -> VideoPreprocessor:
        if self.videos is None:
            raise RequestError("this model takes no videos; send frames as pictures", field="messages")
        return self.videos

    def _marked(self, text: str, parts: Sequence[Picture | Video]) -> str:
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

    def _expanded(self, ids: Sequence[int], runs: Sequence[int]) -> list[int]:
        """Each placeholder repeated to its number of tokens."""
        placeholders = set(self.config.placeholders)
        found = sum(token in placeholders for token in ids)
        if found != len(runs):
            raise CheckpointError(
                f"the tokenizer made {found} placeholders of {len(runs)}; is it this model's?"
            )
        return list(_repeat(ids, placeholders, runs))

    def _control(self, field: str, token_id: int) -> str:
        text = self.tokenizer.token_text(token_id)
        if not text or token_id not in self.tokenizer.special_ids:
            raise CheckpointError(
                f"config.json has {field!r} = {token_id}, which is no special token of tokenizer.json"
            )
        return text


def _repeat(ids: Sequence[int], placeholders: set[int], runs: Sequence[int]) -> Iterator[int]:
    lengths = iter(runs)
    for token in ids:
        if token in placeholders:
            yield from [token] * next(lengths)
        else:
            yield token


def _check_settings(settings: PixelSettings, config: ModelConfig) -> None:
    """The preprocessor must cut patches of the size that the vision tower takes."""
    vision = config.vision
    assert vision is not None
    pairs = {
        "patch_size": (settings.patch_size, vision.patch_size),
        "temporal_patch_size": (settings.temporal_patch_size, vision.temporal_patch_size),
        "merge_size": (settings.merge_size, vision.spatial_merge_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise CheckpointError(f"the preprocessor has {name!r} = {ours}, config.json has {theirs}")
