"""A text model: the decoder and its head. Parameter names are the checkpoint's."""

from collections.abc import Generator

import torch
from torch import nn

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import Linear
from snugvl.models.batch import Batch, GridTHW, PatchReader
from snugvl.models.decoder import Decoder


class CausalLM(nn.Module):
    """The network of every dense Llama, Mistral, Phi-3, Qwen2, Qwen2.5 and Qwen3."""

    aliases: tuple[tuple[str, str], ...] = ()
    unloaded: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # a table that Llama 2's files still store

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config.text)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.text.hidden_size, config.text.vocab_size)

    @property
    def decoder(self) -> Decoder:
        """All of it but the head."""
        return self.model

    @property
    def tower(self) -> None:
        """It sees nothing."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations, of the KV cache and of the weights that aren't stored in fewer bits."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Never called: `engine/admission.py` refuses pictures."""
        raise AssertionError("a text model encodes no pictures")

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """One step. Logits `[n, vocab]` in float32, of the rows that are wanted."""
        hidden = self.model(batch.input_ids, batch.positions, cache, batch.attention)
        hidden = self.model.norm(batch.wanted(hidden))
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        logits: torch.Tensor = head(hidden, dtype=torch.float32)
        return logits
