"""A conversation to what the network takes, by the checkpoint's own template and processor.

No text of a user becomes a control token, nor a placeholder that the processor would replace by a picture.
Templates differ in how they want content: as a string, as parts, or with the placeholders written by whoever
calls. `_Style` finds out by rendering a conversation that says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from PIL import Image

from snugvl.backends.transformers.opening import Checkpoint, Inputs, variables_of
from snugvl.backends.transformers.resolution import Resolution
from snugvl.backends.transformers.sampling import ModelPrompt
from snugvl.core.messages import Message, Picture, Text, ToolForm, Video, user
from snugvl.errors import CheckpointError, ImageError, RequestError, SnugvlError
from snugvl.inputs.chat import ChatTemplate, refuse_marks
from snugvl.inputs.prompt import PromptMaker, Wording, check_length
from snugvl.inputs.reasoning import opened
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.in_text import tool_json

_PROBE = "snugvl asks"
_PLACEHOLDERS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token",
                 "global_image_tag", "global_image_token", "start_image_token", "end_image_token",
                 "image_break_token", "image_end_token")  # fmt: skip
_MILLISECONDS = 1000.0


@dataclass(frozen=True, slots=True)
class _Style:
    """How a template is given pictures: `written`: as placeholders in the text; else as parts."""

    template: ChatTemplate
    written: bool


class Preparer(PromptMaker[ModelPrompt]):
    """Everything of a checkpoint that turns messages into a prompt of transformers'."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        inputs: Inputs,
        tokenizer: Tokenizer,
        resolution: Resolution | None,
        vocab_size: int,
    ) -> None:
        """`resolution`: None where pictures are refused."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.resolution = resolution
        self._name = checkpoint.name
        self._inputs = inputs
        self._lock = Lock()  # tokenizers keep settings between calls
        self._texts = _placeholder_texts(inputs)
        self.placeholders = _image_ids(checkpoint.config)
        self._style = _style_of(inputs, self._image_text)

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools."""
        return self._style.template.shows_tools

    @property
    def thinks(self) -> bool:
        """Whether the chat template knows of reasoning before an answer."""
        return self._style.template.thinks

    @property
    def tool_form(self) -> ToolForm:
        return self._style.template.tool_form

    @property
    def videos(self) -> bool:
        """Whether it takes videos."""
        return (
            self.resolution is not None
            and getattr(self._inputs.processor, "video_processor", None) is not None
        )

    def _made(self, given: Wording) -> ModelPrompt:
        marks = self._style.template.answer_marks
        messages, tools = self._defused(given, marks, self._texts)
        parts = [part for message in messages for part in message.content if not isinstance(part, Text)]
        self._check_parts(parts)
        shown = [tool_json(tool) for tool in tools] or None
        text = self._style.template.render(self._written(messages), tools=shown, extra=given.template)
        self.tokenizer.refuse_long(text, given.counted(), field="messages")
        given.go_on()
        prompt = self._processed(text, parts)
        if given.exactly:
            check_length(prompt.tokens, prompt.image_tokens, given.most, "messages")
        return prompt

    def _framed(self, text: str) -> tuple[int, ...]:
        return self._ids_of(text, special=True)

    def _bare(self, ids: tuple[int, ...]) -> ModelPrompt:
        return ModelPrompt(ids, (), 0, bare=True, inputs=_tensors(ids))

    def _ids_of(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text. `special`: with what the tokenizer puts around a text, such as a first token.

        Raises:
            RequestError: text that can't be tokenised.
        """
        try:
            with self._lock:
                return tuple(self._inputs.tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:
            raise RequestError(f"text can't be tokenised: {str(error).splitlines()[0][:200]}") from None

    def _processed(self, text: str, parts: Sequence[Picture | Video]) -> ModelPrompt:
        """Through the processor, which repeats placeholders and prepares pixels."""
        reasoning = opened(text) if self.thinks else None
        if self._inputs.processor is None:
            ids = self._ids_of(text)
            return ModelPrompt(ids, (), 0, reasoning=reasoning, inputs=_tensors(ids))
        options = {**self._pictures(parts), **self._videos(parts)}
        bos = getattr(self._inputs.tokenizer, "bos_token", None)
        special = not (bos and text.startswith(bos))  # many templates write it themselves
        try:
            with self._lock:
                made = self._inputs.processor(
                    text=[text], return_tensors="pt", add_special_tokens=special, **options
                )
        except SnugvlError:
            raise
        except Exception as error:
            what = " ".join(str(error).split())[:300]
            if (refused := self._refused_picture(parts)) is not None:
                called = refused.name or "the image"
                message = f"{called} can't be taken by {self._name}: {what}"
                raise ImageError(message, field="messages") from None
            kind = ImageError if parts else RequestError
            raise kind(f"{self._name} can't take this: {what}", field="messages") from None
        inputs = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        ids = tuple(inputs["input_ids"][0].tolist())
        image_tokens = sum(token in self.placeholders for token in ids)
        return ModelPrompt(ids, (), image_tokens, reasoning=reasoning, inputs=inputs, pictures=len(parts))

    def _refused_picture(self, parts: Sequence[Picture | Video]) -> Picture | None:
        """The first picture that the processor refuses alone: its error about several names none."""
        for part in parts:
            if isinstance(part, Picture):
                options = self._pictures([part])
                try:
                    self._inputs.processor.image_processor(
                        options["images"], return_tensors="pt", **options.get("images_kwargs", {})
                    )
                except Exception:
                    return part
        return None

    def _pictures(self, parts: Sequence[Picture | Video]) -> dict[str, Any]:
        """Pictures, each as large as its own limit and the model's allow.

        A processor takes one limit for all pictures of a request: the smallest.
        """
        pictures = [part for part in parts if isinstance(part, Picture)]
        if not pictures:
            return {}
        assert self.resolution is not None, "pictures were checked"
        limits = [
            min(part.max_pixels or self.resolution.max_pixels, self.resolution.max_pixels)
            for part in pictures
        ]
        least = min(limits)
        if least < self.resolution.min_pixels:
            raise RequestError(
                f"max_pixels is {least:,}; this model needs at least {self.resolution.min_pixels:,}",
                field="max_pixels",
            )
        images: list[Image.Image] = [
            self.resolution.limited(part.image, limit) for part, limit in zip(pictures, limits, strict=True)
        ]
        told = self.resolution.arguments(least)
        return {"images": images, "images_kwargs": told} if told else {"images": images}

    def _videos(self, parts: Sequence[Picture | Video]) -> dict[str, Any]:
        """Frames as they are, with their times: nothing is sampled again."""
        from transformers.video_utils import VideoMetadata

        videos = [part for part in parts if isinstance(part, Video)]
        if not videos:
            return {}
        metadata = []
        for video in videos:
            indices = [round(second * _MILLISECONDS) for second in video.timestamps]
            metadata.append(
                VideoMetadata(total_num_frames=indices[-1] + 1, fps=_MILLISECONDS, frames_indices=indices)
            )
        frames = [list(video.frames) for video in videos]
        told = {"video_metadata": metadata, "do_sample_frames": False}
        return {"videos": frames, "videos_kwargs": told}

    def _written(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with text in place of pictures where the template takes nothing else."""
        if not self._style.written:
            return messages
        return [
            replace(
                message,
                content=tuple(
                    part if isinstance(part, Text) else Text(self._image_text + "\n")
                    for part in message.content
                ),
            )
            for message in messages
        ]

    @property
    def _image_text(self) -> str:
        return str(getattr(self._inputs.processor, "image_token", "<image>"))

    def _check_parts(self, parts: Sequence[Picture | Video]) -> None:
        if not parts:
            return
        if self.resolution is None:
            raise RequestError(f"{self._name} takes no pictures here; send text alone", field="messages")
        if any(isinstance(part, Video) for part in parts):
            if not self.videos:
                raise RequestError(
                    f"{self._name} takes no videos here: transformers prepares them with torchvision, and "
                    "only for some models; send frames as pictures",
                    field="messages",
                )
            if any(not video.frames for video in parts if isinstance(video, Video)):
                raise RequestError("a video has no frames", field="messages")

    def _refuse(self, text: str, field: str) -> None:
        super()._refuse(text, field)
        refuse_marks(text, self._texts, "which stands for a picture in this model's prompts", field)


def _style_of(inputs: Inputs, image_text: str) -> _Style:
    """The style in which this checkpoint's template wants content.

    Raises:
        CheckpointError: it has none, or it shows no text in any way.
    """
    source = _source(inputs)
    if source is None:
        raise CheckpointError(
            "the checkpoint has no chat template (chat_template.jinja); is it a chat model?"
        )
    variables = variables_of(inputs.tokenizer)
    as_string = ChatTemplate(source, variables=variables)
    as_parts = ChatTemplate(source, variables=variables, parts=True)
    text = Text(_PROBE)
    string, parts = _shown(as_string, user(text)), _shown(as_parts, user(text))
    if not string and not parts:
        as_string.render([user(text)])  # says why, if it fails
        raise CheckpointError("the chat template leaves out what the user writes")
    if inputs.processor is None:
        return _Style(as_string if string else as_parts, written=False)
    pictured = parts and image_text in _rendered(as_parts, user(_blank(), text))
    if pictured or not string:
        return _Style(as_string if string else as_parts, written=False)
    return _Style(as_string, written=True)


def _blank() -> Picture:
    return Picture(Image.new("RGB", (1, 1)))


def _shown(template: ChatTemplate, message: Message) -> bool:
    """Whether the text comes out, and nothing of how it was given."""
    text = _rendered(template, message)
    return _PROBE in text and "'type'" not in text and '"type"' not in text


def _rendered(template: ChatTemplate, message: Message) -> str:
    try:
        return template.render([message])
    except (CheckpointError, RequestError):
        return ""


def _source(inputs: Inputs) -> str | None:
    """The template, of the processor or of the tokenizer; the one named "default" of several."""
    for owner in (inputs.processor, inputs.tokenizer):
        found = getattr(owner, "chat_template", None)
        if isinstance(found, Mapping):
            found = found.get("default")
        if isinstance(found, str) and found:
            return found
    return None


def _placeholder_texts(inputs: Inputs) -> list[str]:
    """Texts that the processor replaces, or puts around pictures, the longest first."""
    owners = [owner for owner in (inputs.processor, inputs.tokenizer) if owner is not None]
    found = (getattr(owner, name, None) for owner in owners for name in _PLACEHOLDERS)
    texts = {str(text) for text in found if text and inputs.processor is not None}
    return sorted(texts, key=lambda text: (-len(text), text))


def _image_ids(config: Any) -> frozenset[int]:
    """Ids of placeholders, as a configuration names them."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = (getattr(config, name, None) for name in names)
    return frozenset(token for token in found if isinstance(token, int))


def _tensors(ids: Sequence[int]) -> dict[str, torch.Tensor]:
    tensor = torch.tensor([list(ids)])
    return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
