"""A conversation to what the engine runs: token ids with placeholders expanded, and patches.

Equal to transformers' `Qwen3VLProcessor` and `Qwen2_5_VLProcessor`, in another order: each placeholder is
tokenised once and repeated as an id, so a prompt of 16,000 image tokens costs the tokeniser a few hundred
characters.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snugvl.backends.protocol import Message, Text, Tool
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.engine.request import VisionItem
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.chat import ChatTemplate, call_arguments, tool_json
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
        parts = [part for message in messages for part in message.content if not isinstance(part, Text)]
        pictures = self.pictures
        if pictures is None and parts:
            raise RequestError("this model reads text alone; it takes no pictures", field="messages")
        self._check_text(messages)
        self._check_tools(tools)
        runs = [] if pictures is None else [run for part in parts for run in pictures.runs(part)]
        text = self.template.render(messages, tools=[tool_json(tool) for tool in tools] or None)
        marked = text if pictures is None else pictures.marked(text, parts)
        self.tokenizer.refuse_long(marked, max_tokens, more=sum(runs) - len(runs), field="messages")
        ids = self.tokenizer.encode(marked)
        if pictures is not None:
            ids = pictures.expanded(ids, runs)
        image_tokens = sum(runs)
        if max_tokens is not None and len(ids) > max_tokens:
            raise RequestTooLarge(
                f"the prompt has {len(ids):,} tokens ({image_tokens:,} of them for pictures), at most "
                f"{max_tokens:,} fit; send fewer or smaller pictures (max_pixels), or less text",
                field="messages",
            )
        vision = () if pictures is None else tuple(pictures.item(part) for part in parts)
        reasoning = opened(text) if self.template.thinks else None
        return PreparedPrompt(tuple(ids), vision, image_tokens, reasoning=reasoning)

    def prepare_prompt(self, prompt: str | Sequence[int], *, max_tokens: int | None = None) -> PreparedPrompt:
        """A prompt that goes to the model as it is: text, or token ids of any kind but pictures'.

        Text is given what the tokenizer puts around a whole one ("<s>"), as transformers and vLLM do.

        Raises:
            RequestError: it is empty, text that holds a control token, or ids the model doesn't have.
            RequestTooLarge: more than `max_tokens`.
        """
        if isinstance(prompt, str):
            self.tokenizer.refuse_control_tokens(prompt, field="prompt")
            self.tokenizer.refuse_long(prompt, max_tokens, field="prompt")
            ids = tuple(self.tokenizer.encode(prompt, framed=True))
        else:
            ids = tuple(prompt)
            self._check_ids(ids)
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", field="prompt")
        if max_tokens is not None and len(ids) > max_tokens:
            raise RequestTooLarge(
                f"the prompt has {len(ids):,} tokens, at most {max_tokens:,} fit; send less", field="prompt"
            )
        return PreparedPrompt(ids, (), 0, bare=True)

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
