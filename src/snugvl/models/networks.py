"""The networks that a configuration can describe. Parameter names are the checkpoint's."""

from collections.abc import Generator, Iterable
from dataclasses import replace
from importlib import import_module
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from snugvl.checkpoint.architecture import ModelConfig, TextConfig
from snugvl.checkpoint.facts import PREDICTOR
from snugvl.checkpoint.families import network_class
from snugvl.checkpoint.families.qwen2_5_vl import ALIASES
from snugvl.core.config import EXPERT_ROUNDS
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import Linear
from snugvl.models.batch import DraftBatch, ForwardBatch, GridTHW, PatchReader
from snugvl.models.decoder import Decoder, Layer, norm_of
from snugvl.models.expert_cache import ExpertCache
from snugvl.models.host_memory import Resident
from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.rope import rotation_of
from snugvl.models.vision import VisionTower

HEAD_ROWS: Final = 32_768  # of the head that a draft reads


class Predictor(nn.Module):
    """The multi-token predictor (MTP) of Qwen3.5, the module `mtp` of a checkpoint.

    It computes from a hidden state and the next token the token after it:

    hidden state of token i ── norm ─┐
                                     ├─ fc ─ a decoder layer ─ norm ─┬─ head ─ token i + 2, drafted
    embedding of token i + 1 ─ norm ─┘        its own KV at i        └─ "hidden state of token i + 1", drafted

    Its hidden states are those behind the decoder's last norm. A longer draft goes on from its own output and
    its own token, one place further. Embedding and head are the decoder's. Keys and values of place `i`
    follow from the tokens up to `i + 1`: so a place has its entry when the token behind it is known, in the
    block of place `i` and turned by its position. Whatever stands there, answers are the same: drafts are
    checked (`engine/speculation.py`).

    Of a large vocabulary only the first `HEAD_ROWS` rows of the head are read: a draft that reads all of
    248,000 would take as long as a few layers do. A byte-pair tokenizer numbers its tokens in the order in
    which they were merged, which is how often they came (Sennrich et al. 2016,
    https://arxiv.org/abs/1508.07909, section 3.2), so low numbers are the likeliest tokens without looking at
    any text. Others are never drafted, among them control tokens.

    Source: vLLM, `vllm/model_executor/models/qwen3_5_mtp.py` (the order of both halves, the norms, the layer)
    and `vllm/v1/spec_decode/eagle.py` (shifted tokens, positions and what is fed back), Apache-2.0;
    multi-token prediction, DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2. transformers leaves
    `mtp.*` out.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        own = replace(config, kinds=(*config.kinds, "full"))  # its layer comes after the decoder's
        self.rope = config.rope
        self.pre_fc_norm_embedding = norm_of(config, config.hidden_size)
        self.pre_fc_norm_hidden = norm_of(config, config.hidden_size)
        # It sees no quantisation: one product, on which all drafts depend.
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, quantises=False)
        self.layers = nn.ModuleList([Layer(own, config.num_layers)])
        self.norm = norm_of(config, config.hidden_size)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` from each token's hidden state and the next one's embedding.

        Args:
            embedded: `[tokens, hidden]`, of the tokens that follow.
            hidden: `[tokens, hidden]`, behind the decoder's last norm or from this.
            positions: `[3, tokens]`, of the tokens themselves, as are `metadata`'s slots.
        """
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x = self.fc(both)
        rotation = rotation_of(positions, self.rope, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, cache, metadata)
        result: torch.Tensor = self.norm(x)
        return result


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
        self._first_rows: tuple[Linear] | None = None  # of the head; in a tuple, as they are not part of it
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
        return EXPERT_ROUNDS * self.expert_cache.device_slots // mixture.used

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
        part = self.model.get_submodule("language_model")
        assert isinstance(part, Decoder)
        return part

    @property
    def tower(self) -> Tower | None:
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


class _NoInitialValues(TorchFunctionMode):
    """Makes `torch.nn.init` do nothing.

    The values come from the files; and drawing them for a tensor without memory imports all of
    `torch._dynamo`, which takes longer than loading a small model.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":  # a C method has no module
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def without_memory(config: ModelConfig) -> LoadableNetwork:
    """The network that a configuration describes, on torch's device for tensors without memory."""
    with torch.device("meta"), _NoInitialValues():
        return network_of(config)


def give_memory(model: nn.Module, device: torch.device, beside: Iterable[int] = ()) -> None:
    """`model.to_empty(device=device)`, which imports all of sympy for a second on the way.

    On a GPU in one piece, of which torch's allocator then cuts the tensors: pieces of their own would be
    rounded up to 2 MiB each, or lie in 20 MiB with holes (`planner/footprint/total.py`). `beside`: bytes
    of the next tensors after these.
    """
    if device.type == "cuda":
        sizes = [tensor.nbytes for tensor in chain(model.parameters(), model.buffers()) if tensor.is_meta]
        torch.empty(segment_bytes([*sizes, *beside]), dtype=torch.uint8, device=device)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # it has a place in host memory
                continue
            made = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(made, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty(tuple(buffer.shape), dtype=buffer.dtype, device=device))


def segment_bytes(sizes: Iterable[int]) -> int:
    """Bytes of one segment for tensors of more than 1 MiB, each to 512 bytes: torch keeps others apart."""
    return sum(-(-size // 512) * 512 for size in sizes if size > 1 << 20)
