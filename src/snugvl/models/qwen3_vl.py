"""Qwen3-VL: the vision tower and the decoder joined. Parameter names are the checkpoint's."""

import math
from collections.abc import Generator, Sequence

import torch
from torch import nn

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import Linear
from snugvl.models.batch import Batch, GridTHW, PatchReader, encoded
from snugvl.models.decoder import Decoder
from snugvl.models.patch_reader import reader
from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.vision import VisionTower

Tower = VisionTower | Qwen25Tower


class Qwen3VL(nn.Module):
    """The network of every dense Qwen3-VL checkpoint (and of pocket), with or without its tower."""

    aliases: tuple[tuple[str, str], ...] = ()
    unloaded: tuple[str, ...] = ()
    tower_type: type[Tower] = VisionTower

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({"language_model": Decoder(config.text)})
        if config.vision is None:
            self.unloaded = ("model.visual.*",)
        else:
            self.model["visual"] = self.tower_type(config.vision)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.text.hidden_size, config.text.vocab_size)

    @property
    def decoder(self) -> Decoder:
        """The text part."""
        part = self.model["language_model"]
        assert isinstance(part, Decoder)
        return part

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations, of the KV cache and of the weights that aren't stored in fewer bits."""
        return self.decoder.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.norm.weight.device

    @property
    def tower(self) -> Tower | None:
        """The vision part, where there is one."""
        if self.config.vision is None:
            return None
        part = self.model["visual"]
        assert isinstance(part, Tower)
        return part

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Encode an image or video, stopping after every chunk: see `VisionTower.encode_in_steps`."""
        assert self.tower is not None, "pictures are refused without a tower"
        return self.tower.encode_in_steps(read, grid)

    def encode_vision(self, patches: torch.Tensor, grids: Sequence[GridTHW]) -> torch.Tensor:
        """`patches` `[patches, patch_dim]` of several images → `[image tokens, (1 + levels) · hidden]`."""
        encodings, first = [], 0
        for grid in grids:
            last = first + math.prod(grid)
            image = patches[first:last]
            encodings.append(encoded(self.encode_in_steps(reader(image, self.device, self.dtype), grid)))
            first = last
        return torch.cat(encodings)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """One step of the decoder. Logits `[n, vocab]` in float32, of the rows that are wanted."""
        levels: tuple[torch.Tensor, ...] = ()
        if batch.vision_embeds is not None:
            levels = torch.split(batch.vision_embeds, self.config.text.hidden_size, dim=-1)
        hidden = self.decoder(
            batch.input_ids, batch.positions, cache, batch.attention, batch.vision_rows, levels
        )
        hidden = self.decoder.norm(batch.wanted(hidden))
        head = self.decoder.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        logits: torch.Tensor = head(hidden, dtype=torch.float32)
        return logits
