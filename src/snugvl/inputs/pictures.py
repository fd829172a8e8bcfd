"""Pictures and videos in a prompt: what stands for them, how often, and their patches.

A video of Qwen3-VL becomes, per temporal patch, its time as text and a run of placeholders of its own (of
Qwen2.5-VL one run, whose times are positions):

    <|vision_start|>  <0.2 seconds><|vision_start|>▪▪▪▪<|vision_end|>  <1.2 seconds>…  <|vision_end|>

The outer pair is what the template writes around the video. transformers ≥ 5.10 keeps it, and so does vLLM
with it; transformers 4.57, with which Qwen3-VL was published, dropped it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snugvl.backends.protocol import Picture, Video
from snugvl.checkpoint.architecture import ModelConfig, VisionConfig
from snugvl.engine.request import VisionItem
from snugvl.errors import CheckpointError, RequestError
from snugvl.inputs.pixels import ImagePreprocessor
from snugvl.inputs.settings import PixelSettings
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.video import VideoPreprocessor, read_video_preprocessor


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Strings of the control tokens around and for pictures."""

    image: str
    video: str
    start: str
    end: str


class PictureInputs:
    """How a model that sees is given pictures and videos. `videos`: None where it takes none."""

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
        """Its patches, and where they stand."""
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
