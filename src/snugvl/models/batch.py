"""What a network is given for one step, and what a network is."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache

GridTHW = tuple[int, int, int]
"""Patches of an image or video: temporal patches, rows, columns. Its tokens are t·h·w / merge²."""

PatchReader = Callable[[int, int], torch.Tensor]
"""Patches `start … end - 1` of an item, `[end - start, patch_dim]`, ready for the network."""


def encoded(steps: Generator[int, None, torch.Tensor]) -> torch.Tensor:
    """What `Network.encode_in_steps` returns at its end, without a stop on the way."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            rows: torch.Tensor = end.value
            return rows


@dataclass(frozen=True, slots=True)
class Batch:
    """One step over several sequences, flattened token by token.

    Attributes:
        input_ids: `[tokens]` int64; placeholders where an image or video token stands.
        positions: `[3, tokens]` int64, M-RoPE positions: time, height, width.
        attention: which tokens belong together and where the cache has their context.
        logit_rows: `[n]` int64, the rows whose logits are wanted, or None for all.
        vision_rows: `[k]` int64, the rows that hold a placeholder, or None. Where sizes must be the same for
            every step (`engine/graphs/steps.py`): `[tokens]` bool, whether each row does.
        vision_embeds: `[k, (1 + deepstack levels) · hidden]`, their embeddings, or None; beside bools
            `[tokens, …]`, zeros for a row that holds none.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    logit_rows: torch.Tensor | None
    vision_rows: torch.Tensor | None = None
    vision_embeds: torch.Tensor | None = None

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Those of `hidden` `[tokens, size]` whose logits are wanted, `[n, size]`."""
        return hidden if self.logit_rows is None else hidden.index_select(0, self.logit_rows)


class Network(Protocol):
    """A network as the engine sees it. Dtype and device are those of its weights."""

    config: ModelConfig

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Encode an image or video, yielding the floating point operations done at every place to stop.

        Returns `[image tokens, (1 + levels) · hidden]`.
        """
        ...

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Run one step, writing keys and values into the cache. Logits `[n, vocab]` in float32."""
        ...
