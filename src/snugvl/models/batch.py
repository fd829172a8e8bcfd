"""The interface of a network, and its inputs: a step's tokens, or the patches of a picture."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.device import to_device
from snugvl.layers.kv_cache import KVCache
from snugvl.models.expert_cache import ExpertCache

GridTHW = tuple[int, int, int]
"""Patches of an image or video: temporal patches, rows, columns. Its tokens are t·h·w / merge²."""

PatchReader = Callable[[int, int], torch.Tensor]
"""Patches `start … end - 1` of an item, `[end - start, patch_dim]`, ready for the network."""


def encoded(steps: Generator[int, None, torch.Tensor]) -> torch.Tensor:
    """Run `Network.encode_in_steps` to its end without a stop; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            rows: torch.Tensor = end.value
            return rows


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rows whose logits are looked at a few at a time, so that they take no more memory than a step's own.

    Attributes:
        rows: `[k]` int64, among the tokens.
        at_once: of them.
        look: is given the number of the first row and logits `[n, vocab]` float32 of `n` rows from there on.
    """

    rows: torch.Tensor
    at_once: int
    look: Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Tokens and hidden states that a step leaves for a draft model (`models/networks.py`).

    Attributes:
        hidden: `[rows, hidden]`, hidden states of the last tokens of each sequence; the last row is unused.
        rows: `[tokens]` int64, where the hidden state of each token goes among them.
        following: `[tokens]` int64, the token after each; below 0 that of the next row, picture or text.
            None: no keys and values are made of them now.
    """

    hidden: torch.Tensor
    rows: torch.Tensor
    following: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step over several sequences, flattened token by token.

    Attributes:
        input_ids: `[tokens]` int64; placeholders where an image or video token stands.
        positions: `[3, tokens]` int64, M-RoPE positions: time, height, width.
        attention: which tokens belong together and where the cache has their context.
        logit_rows: `[n]` int64, the rows whose logits are wanted, or None for all.
        vision_rows: `[k]` int64, the rows that hold a placeholder, or None. Where sizes must be the same for
            every step (`engine/graphs/prefill.py`): `[tokens]` bool, whether each row does.
        vision_embeds: `[k, (1 + deepstack levels) · hidden]`, their embeddings, or None; beside bools
            `[tokens, …]`, zeros for a row that holds none.
        scoring: rows whose logits are looked at besides; None: no others.
        drafts: what is left for a draft model; None without one.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    logit_rows: torch.Tensor | None
    vision_rows: torch.Tensor | None = None
    vision_embeds: torch.Tensor | None = None
    scoring: Scoring | None = None
    drafts: DraftBatch | None = None

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `hidden` `[tokens, size]` whose logits are wanted, `[n, size]`."""
        return hidden if self.logit_rows is None else hidden.index_select(0, self.logit_rows)


class Network(Protocol):
    """A network as the engine sees it. Dtype and device are those of its weights.

    `expert_cache`: the slots of experts that are in host memory; None where all are on the device.
    """

    config: ModelConfig
    expert_cache: ExpertCache | None

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tower_is_capturable(self) -> bool:
        """Whether a CUDA graph may hold the kernels of `encode_in_steps`: not where weights are streamed."""

    @property
    def capturable_tokens(self) -> int | None:
        """Tokens of the largest step whose kernels a CUDA graph may hold, None: of any; 0 where the host
        reads the experts of every step."""

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Encode an image or video, yielding the floating point operations done at every place to stop.

        Returns `[image tokens, (1 + levels) · hidden]`.
        """

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Run one step, writing keys and values into the cache. Logits `[n, vocab]` in float32."""


class PredictingNetwork(Network, Protocol):
    """A network with its multi-token predictor."""

    def predict(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `models.networks.Predictor.forward`; `ids` `[tokens]` int64 are the tokens that follow."""

    def draft(self, predicted: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens `[tokens]` int64 after what was predicted `[tokens, hidden]`."""


def patch_reader(
    patches: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    levels: torch.Tensor | None = None,
    slots: int = 1,
) -> PatchReader:
    """The function by which a network on `device` reads an item's patches.

    Args:
        patches: `[patches, values]`; floating point, or bytes.
        levels: what the bytes mean: `[channels, 256]` floating point. A patch is one channel after another.
        slots: how often the values of a channel are repeated (one frame that fills a temporal patch).
    """
    if levels is None:
        return lambda start, end: to_device(patches[start:end], device).to(dtype)
    channels = len(levels)
    meanings = to_device(levels.flatten().to(dtype), device)  # rounded here as each value would be
    first = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=device)[:, None]

    def read(start: int, end: int) -> torch.Tensor:
        codes = to_device(patches[start:end], device).view(end - start, channels, -1)
        places = codes + first  # int32
        values = meanings.index_select(0, places.flatten()).view(end - start, channels, 1, -1)
        return values.expand(-1, -1, slots, -1).reshape(end - start, -1)

    return read
