"""Requests to the engine and its outputs: token ids and pixel patches, never text."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from snugvl.core.sampling import SamplingParams
from snugvl.engine.sampling.grammar import TokenGrammar
from snugvl.errors import SnugvlError
from snugvl.models.batch import GridTHW, PatchReader, patch_reader

FinishReason = Literal["stop", "length", "abort", "error"]


class Sampled(NamedTuple):
    """A token and, if asked for, log-probabilities. `token_id` None: logits or grammar are broken."""

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class VisionItem:
    """One image or video, preprocessed.

    Attributes:
        patches: patches in the vision tower's order: `[t·h·w, patch_dim]` floating point, or
            `[t·h·w, patch_dim / slots]` bytes.
        grid_thw: numbers of temporal patches, rows and columns.
        digest: hash of content and preprocessing; equal digests have equal encodings.
        levels: `[channels, 256]` float32, the normalised value of each byte; None for floating point.
        slots: how often the bytes of a channel are repeated: one frame fills a temporal patch.
        time_step: M-RoPE positions of time between frames of a video whose frames share one run of
            placeholders; None where each has a run of its own.
    """

    patches: torch.Tensor
    grid_thw: GridTHW
    digest: bytes
    levels: torch.Tensor | None = None
    slots: int = 1
    time_step: float | None = None

    def holds(self, count: int, patch_dim: int) -> bool:
        """Whether there are `count` patches of `patch_dim` values, of types that a network can read."""
        patches, levels = self.patches, self.levels
        if patches.dim() != 2 or (len(patches), patches.shape[1] * self.slots) != (count, patch_dim):
            return False
        if levels is None:
            return patches.is_floating_point()
        if levels.shape[1:] != (256,) or not len(levels) or patches.shape[1] % len(levels):
            return False
        return patches.dtype == torch.uint8 and levels.is_floating_point()

    def reader(self, device: torch.device, dtype: torch.dtype) -> PatchReader:
        """The function by which a network reads the patches."""
        return patch_reader(self.patches, device, dtype, self.levels, self.slots)

    def values(self) -> torch.Tensor:
        """The patches as floating point, `[t·h·w, patch_dim]`."""
        dtype = self.patches.dtype if self.levels is None else self.levels.dtype
        return self.reader(self.patches.device, dtype)(0, len(self.patches))


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One prompt and how to continue it.

    Attributes:
        request_id: unique among the requests the engine is running.
        prompt_ids: token ids, placeholders expanded to one per image or video token.
        vision: images and videos in order of appearance.
        stop_ids: token ids that end a choice (end of sequence and the user's), unless `ignore_eos`.
        deadline: `time.monotonic()` seconds after which the request ends with `DeadlineExceeded`.
        grammar: grammar that every choice follows; made for this model's vocabulary.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    vision: tuple[VisionItem, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    grammar: TokenGrammar | None = None


@dataclass(frozen=True, slots=True)
class VisionSlice:
    """Rows `start … end - 1` of an item's encoding."""

    item: VisionItem
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPrompt:
    """A checked prompt, shared by all choices of its request.

    Attributes:
        ids: token ids, one placeholder per image token.
        positions: `[3, tokens]` int64, M-RoPE.
        delta: generated token `i` (counted from the start of the sequence) has position `i + delta`.
        vision: images and videos in order of appearance.
        placeholders: indices of the placeholders among `ids`, ascending.
        item_starts: index among `placeholders` where each item starts; one more than items, for the end.
        vocabulary: the distinct ids, for the repetition penalty.
        scores: its second and later tokens with their log-probabilities, as far as they are computed, by
            whichever choice computes the prompt; None where they aren't wanted.
    """

    ids: tuple[int, ...]
    positions: torch.Tensor
    delta: int
    vision: tuple[VisionItem, ...]
    placeholders: tuple[int, ...]
    item_starts: tuple[int, ...]
    vocabulary: frozenset[int]
    scores: list[Sampled] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its tokens are still to be computed."""
        return self.scores is not None and len(self.scores) < len(self) - 1

    def placeholders_in(self, start: int, end: int) -> tuple[int, ...]:
        """Indices of the placeholders among tokens `start … end - 1`."""
        return self.placeholders[bisect_left(self.placeholders, start) : bisect_left(self.placeholders, end)]

    def vision_in(self, start: int, end: int) -> list[VisionSlice]:
        """The encoder rows that tokens `start … end - 1` need, in order."""
        low, high = bisect_left(self.placeholders, start), bisect_left(self.placeholders, end)
        slices = []
        while low < high:
            index = bisect_right(self.item_starts, low) - 1
            first, stop = self.item_starts[index], min(high, self.item_starts[index + 1])
            slices.append(VisionSlice(self.vision[index], low - first, stop - first))
            low = stop
        return slices


class TokenOutput(NamedTuple):
    """One new token of one choice of one request, or its end. A tuple, as one is made for every token.

    Attributes:
        choice: index below `sampling.n`.
        token_id: None only when a choice ends without a new token (abort, error).
        logprob: log-probability of the token before temperature and filters, if asked for.
        top_logprobs: the most likely tokens and theirs, most likely first, if asked for.
        finish: why the choice ended, or None while it goes on.
        error: with `finish == "error"`.
        cached_tokens: number of the prompt's tokens that the prefix cache had.
        accepted, rejected: drafts of this step (`speculation.py`) that were right, and that weren't; on the
            last output that it gave.
        prompt: the second and later tokens of the prompt with their log-probabilities, on the first output of
            a choice, if asked for.
    """

    request_id: str
    choice: int
    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    error: SnugvlError | None = None
    cached_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    prompt: tuple[Sampled, ...] = ()
