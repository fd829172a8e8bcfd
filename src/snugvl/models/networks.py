"""The networks that a configuration can describe. Parameter names are the checkpoint's."""

from collections.abc import Generator
from importlib import import_module

import torch
from torch import nn

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.facts import PREDICTOR
from snugvl.checkpoint.families import network_class
from snugvl.checkpoint.families.qwen2_5_vl import ALIASES
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import Linear
from snugvl.models.batch import DraftBatch, ForwardBatch, GridTHW, PatchReader
from snugvl.models.decoder import Decoder
from snugvl.models.expert_cache import ExpertCache
from snugvl.models.host_memory import Resident
from snugvl.models.predictor import HEAD_ROWS, Predictor
from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.vision import VisionTower

Tower = VisionTower | Qwen25Tower


class LoadableNetwork(nn.Module):
    """A decoder with its head: a network that `models/loader.py` can fill.

    Attributes:
        aliases: (prefix in older files, prefix of the parameter's name here), the first match counts.
        unloaded: patterns of names (after aliases) that files store and this network doesn't have.
        lm_head: unless it is tied to the embedding.
        mtp: the multi-token predictor, in a network that has one.
        expert_cache: the slots of experts that are in host memory; None where all are on the device.
    """

    aliases: tuple[tuple[str, str], ...] = ()
    unloaded: tuple[str, ...] = ()
    mtp: Predictor
    expert_cache: ExpertCache | None = None

    def __init__(self, config: ModelConfig, model: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self._first_rows: tuple[Linear] | None = None  # of the head; in a tuple, as they are no part of it
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.text.hidden_size, config.text.vocab_size)

    @property
    def decoder(self) -> Decoder:
        """The text part, without the head."""
        assert isinstance(self.model, Decoder)
        return self.model

    @property
    def tower(self) -> Tower | None:
        """The vision part, where there is one."""
        return None

    @property
    def tower_is_capturable(self) -> bool:
        """See `Network`."""
        return self.tower is not None and isinstance(self.tower.weights, Resident)

    @property
    def capturable_tokens(self) -> int | None:
        """See `Network`."""
        mixture = self.config.text.mixture
        if self.expert_cache is None or mixture is None:
            return None
        return self.expert_cache.device_slots // mixture.used

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations, of the KV cache and of the weights that aren't stored in fewer bits."""
        return self.decoder.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder.norm.weight.device

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Encode an image or video, stopping after every chunk: see `VisionTower.encode_in_steps`."""
        assert self.tower is not None, "`engine/admission.py` refuses pictures without a tower"
        return self.tower.encode_in_steps(read, grid)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """One step of the decoder. Logits `[n, vocab]` in float32, of the rows that are wanted."""
        levels: tuple[torch.Tensor, ...] = ()
        if batch.vision_embeds is not None:
            levels = torch.split(batch.vision_embeds, self.config.text.hidden_size, dim=-1)
        hidden: torch.Tensor = self.decoder(
            batch.input_ids, batch.positions, cache, batch.attention, batch.vision_rows, levels
        )
        if batch.scoring is not None:
            for start, rows in enumerate(torch.split(batch.scoring.rows, batch.scoring.at_once)):
                batch.scoring.look(start * batch.scoring.at_once, self._logits(hidden.index_select(0, rows)))
        wanted = batch.wanted(hidden)
        if batch.drafts is not None:
            hidden = self.decoder.norm(hidden)
            self._leave(batch, batch.drafts, hidden, levels, cache)
        return self._logits(wanted)

    def _leave(
        self,
        batch: ForwardBatch,
        wished: DraftBatch,
        hidden: torch.Tensor,
        levels: tuple[torch.Tensor, ...],
        cache: KVCache,
    ) -> None:
        """Leave hidden states `[tokens, hidden]`, normed, for the predictor, and its keys and values."""
        wished.hidden.index_copy_(0, wished.rows, hidden)
        if wished.following is None:
            return
        own = self.decoder.embed(batch.input_ids, batch.vision_rows, levels).roll(-1, 0)
        given = self.decoder.embed(wished.following.clamp(min=0))
        embedded = torch.where((wished.following >= 0)[:, None], given, own)
        del own, given  # before what a layer makes of them
        self.mtp(embedded, hidden, batch.positions, cache, batch.attention)

    def predict(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `PredictingNetwork`."""
        result: torch.Tensor = self.mtp(self.decoder.embed(ids), hidden, positions, cache, metadata)
        return result

    def draft(self, predicted: torch.Tensor) -> torch.Tensor:
        """See `PredictingNetwork`."""
        if self._first_rows is None:  # not before the weights have their place
            self._first_rows = (self._head.first(HEAD_ROWS),)
        logits: torch.Tensor = self._first_rows[0](predicted, dtype=torch.float32)
        return logits.argmax(-1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[n, vocab]` in float32 of hidden states `[n, hidden]`."""
        logits: torch.Tensor = self._head(self.decoder.norm(hidden), dtype=torch.float32)
        return logits

    @property
    def _head(self) -> Linear:
        return self.decoder.embed_tokens if self.config.tie_word_embeddings else self.lm_head


class CausalLM(LoadableNetwork):
    """The network of every dense Llama, Mistral, Phi-3, Qwen2, Qwen2.5 and Qwen3."""

    unloaded = ("*.rotary_emb.inv_freq",)  # a table that Llama 2's files still store

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Decoder(config.text))


class Qwen3VL(LoadableNetwork):
    """The network of every dense Qwen3-VL checkpoint (and of pocket), with or without its tower."""

    tower_type: type[Tower] = VisionTower

    def __init__(self, config: ModelConfig) -> None:
        model = nn.ModuleDict({"language_model": Decoder(config.text)})
        if config.vision is not None:
            model["visual"] = self.tower_type(config.vision)
        super().__init__(config, model)
        if config.vision is None:
            self.unloaded = ("model.visual.*",)

    @property
    def decoder(self) -> Decoder:
        """The text part, without the head."""
        part = self.model.get_submodule("language_model")
        assert isinstance(part, Decoder)
        return part

    @property
    def tower(self) -> Tower | None:
        """The vision part, where there is one."""
        if self.config.vision is None:
            return None
        part = self.model.get_submodule("visual")
        assert isinstance(part, Tower)
        return part


class Qwen25VL(Qwen3VL):
    """The network of every Qwen2.5-VL checkpoint. Its names are those of transformers ≥ 4.52."""

    tower_type = Qwen25Tower
    aliases = ALIASES  # the Hub's files are older


class Qwen35(Qwen3VL):
    """The network of every dense Qwen3.5 checkpoint, with or without its tower and its predictor."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.text.predictors:
            self.mtp = Predictor(config.text)
        else:
            self.unloaded = (*self.unloaded, f"{PREDICTOR}*")


def network_of(config: ModelConfig) -> LoadableNetwork:
    """The network of `config`, on torch's present default device."""
    module, _, name = network_class(config.architecture).partition(":")
    network: LoadableNetwork = getattr(import_module(module), name)(config)
    return network
