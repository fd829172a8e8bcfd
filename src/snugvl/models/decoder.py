"""The text decoder of Llama, Mistral, Phi-3, Qwen2, 2.5, 3 and 3.5, and of the Qwen-VLs: grouped queries,
rotary positions, SwiGLU or a mixture of such, paged KV cache. What differs between them is `TextConfig`.

`packed` says which checkpoint tensors are rows of one parameter of a module: one product instead of three
for the attention inputs, one instead of two for the MLP's. Phi-3 stores them so.

Source: Hugging Face transformers, `models/{llama,mistral,phi3,qwen2,qwen3,qwen3_vl,qwen3_vl_moe,qwen3_5,
qwen3_5_moe}` (Apache-2.0).
"""

import torch
from torch import nn

from snugvl.checkpoint.architecture import Mixture, TextConfig
from snugvl.core.config import DEFAULT_BLOCK_SIZE
from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.experts import Experts, added, chosen, scored
from snugvl.layers.kv_cache import E4M3, KVCache, StateCache
from snugvl.layers.linear import Linear, RMSNorm
from snugvl.layers.replaced import by_kernels
from snugvl.models.linear_attention import GatedDeltaNet
from snugvl.models.rope import CosSin, rotate, rotation_of

Packed = dict[str, tuple[tuple[str, int], ...]]
"""By parameter of a module: the checkpoint's tensors that are its rows, with how many, in order."""


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden: int, inner: int, *, fused: bool = False) -> None:
        """`fused`: the checkpoint stores gate and up as one tensor."""
        super().__init__()
        self.packed: Packed = {} if fused else {"gate_up_proj": (("gate_proj", inner), ("up_proj", inner))}
        self.gate_up_proj = Linear(hidden, 2 * inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, *, add: bool = True) -> torch.Tensor:
        """`x` `[tokens, hidden]` plus the MLP of its `norm`.

        Without `norm` the MLP is of `x` itself; without `add` it is returned alone.
        """
        inner = self.gate_up_proj(x, norm=norm, swiglu=True)
        result: torch.Tensor = self.down_proj(inner, residual=x if add else None)
        return result


class SparseMLP(nn.Module):
    """Router, experts and, where there is one, the expert that all tokens share.

    x ─ norm ┬─ router ──────┬─ experts ─────────┬─ Σ ─ + x
             ├───────────────┘                   │
             └─ shared expert ─ · sigmoid(gate) ─┘        in Qwen3.5's
    """

    def __init__(self, hidden: int, mixture: Mixture) -> None:
        super().__init__()
        self.count, self.used = mixture.count, mixture.used
        gate = (("shared_expert_gate", 1),) if mixture.shared else ()
        # It sees no quantisation: a few rows that decide what all else is computed with.
        self.scores = Linear(hidden, mixture.count + len(gate), quantises=False)
        self.packed: Packed = {"scores": (("gate", mixture.count), *gate)}
        self.experts = Experts(hidden, mixture.count, mixture.width)
        self.shared_expert = MLP(hidden, mixture.shared) if mixture.shared else None

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, *, add: bool = True) -> torch.Tensor:
        """`x` `[tokens, hidden]` plus the mixture of its `norm`; see `MLP.forward`."""
        normed = x if norm is None else norm(x)
        scores = scored(normed, self.scores)
        ids, shares = chosen(scores, self.count, self.used, x.dtype)
        shared = None if self.shared_expert is None else self.shared_expert(normed, None, add=False)
        parts = self.experts(normed, ids, shares)
        return added(parts, shared, scores, x if add else None)


def norm_of(config: TextConfig, size: int) -> RMSNorm:
    """A norm as the decoder has them."""
    return RMSNorm(size, config.rms_norm_eps, config.norm_offset)


class Attention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window = config.place_of(layer), config.window_of(layer)
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.gated = config.gated
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.o_proj = Linear(queries, config.hidden_size, bias=config.o_bias)
        queries *= 1 + self.gated  # each head is followed by its gate
        self.qkv_proj = Linear(config.hidden_size, queries + 2 * keys, bias=config.qkv_bias)
        self.packed: Packed = {"qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))}
        if config.fused:
            self.packed = {}
        self.q_norm = norm_of(config, self.head_dim) if config.qk_norm else None
        self.k_norm = norm_of(config, self.head_dim) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        rotation: CosSin,
        cache: KVCache,
        metadata: AttentionMetadata,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """`x` `[tokens, hidden]` plus attention over its `norm`; the new keys and values are cached first.

        Without `norm` attention is over `x` itself; without `add` it is returned alone.
        """
        qkv = self.qkv_proj(x, norm=norm).view(x.shape[0], -1, self.head_dim)
        output = paged_attention(
            self._queries(qkv, rotation, cache, metadata),
            cache,
            self.layer,
            metadata,
            self.head_dim**-0.5,
            self.window,
            qkv[:, 1 : 2 * self.heads : 2] if self.gated else None,
        )
        result: torch.Tensor = self.o_proj(output.flatten(1), residual=x if add else None)
        return result

    def _queries(
        self, qkv: torch.Tensor, rotation: CosSin, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values into the cache; `[tokens, heads, dim]`."""
        if by_kernels(qkv, "rope_and_cache"):
            from snugvl.layers.kernels.attention.paged import write  # needs triton, which only GPUs bring

            norms, eps, offset = None, 0.0, 0.0
            if self.q_norm is not None and self.k_norm is not None:
                norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
                offset = self.q_norm.offset
            where = (metadata.slot_mapping, *cache.layer(self.layer))
            return write(qkv, norms, eps, rotation, *where, self.heads, offset=offset, gated=self.gated)
        q, k, v = torch.split(qkv, [self.heads * (1 + self.gated), self.kv_heads, self.kv_heads], dim=1)
        if self.gated:
            q = q[:, ::2]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotation), rotate(k, rotation)
        cache.write(self.layer, metadata.slot_mapping, k, v)
        return q


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config, config.hidden_size)
        self.post_attention_layernorm = norm_of(config, config.hidden_size)
        self.linear = config.kinds[layer] == "linear"
        if self.linear:
            self.linear_attn = GatedDeltaNet(config, layer)
        else:
            self.self_attn = Attention(config, layer)
        mixture = config.mixture_of(layer)
        self.mlp: MLP | SparseMLP
        if mixture is None:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, fused=config.fused)
        else:
            self.mlp = SparseMLP(config.hidden_size, mixture)

    def forward(
        self, x: torch.Tensor, rotation: CosSin, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        if self.linear:
            x = self.linear_attn(x, self.input_layernorm, cache, metadata)
        else:
            x = self.self_attn(x, self.input_layernorm, rotation, cache, metadata)
        result: torch.Tensor = self.mlp(x, self.post_attention_layernorm)
        return result


class Decoder(nn.Module):
    """Embeddings, layers and the last norm. Deepstack levels enter after the first layers.

    `layer`: makes each of the layers; a family whose layers are of another build gives its own class.
    """

    def __init__(self, config: TextConfig, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_layers))
        self.norm = norm_of(config, config.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        vision_rows: torch.Tensor | None = None,
        vision_levels: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]`, before the last norm.

        `vision_levels[0]` `[k, hidden]` replaces the embeddings of `vision_rows` `[k]`; level `i > 0` is
        added to them after layer `i - 1`. `vision_rows` may be `[tokens]` bool: see `ForwardBatch`.
        """
        x = self.embed(input_ids, vision_rows, vision_levels)
        rotation = rotation_of(positions, self.config.rope, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, cache, metadata)
            if vision_rows is not None and index + 1 < len(vision_levels):
                level = vision_levels[index + 1].to(x.dtype)
                masked = vision_rows.dtype == torch.bool
                x = x.add_(level) if masked else x.index_add_(0, vision_rows, level)
        return x

    def embed(
        self,
        input_ids: torch.Tensor,
        vision_rows: torch.Tensor | None = None,
        vision_levels: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """Embeddings `[tokens, hidden]` of tokens and pictures; see `forward`."""
        x = self.embed_tokens.lookup(input_ids, self.norm.weight.dtype)
        return x if vision_rows is None else _replaced(x, vision_rows, vision_levels[0].to(x.dtype))


def _replaced(x: torch.Tensor, rows: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    if rows.dtype == torch.bool:
        return torch.where(rows[:, None], level, x)
    return x.index_copy_(0, rows, level)


def cache_of(
    text: TextConfig,
    dtype: torch.dtype,
    device: torch.device,
    blocks: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
    *,
    fp8: bool = False,
    slots: int = 1,
    snapshots: int = 0,
    whole: bool = True,
) -> KVCache:
    """The cache of a decoder. Layers of linear attention have no keys and values, and others no state.

    `dtype`: of activations; `whole`: for all layers, else for one of each kind.
    """
    states, linear = None, text.linear
    if linear is not None:
        states = StateCache(
            num_layers=text.linear_layers if whole else 1,
            slots=slots,
            heads=(linear.value_heads, linear.key_dim, linear.value_dim),
            inputs=(linear.kernel - 1, linear.channels),
            dtype=dtype,
            device=device,
            snapshots=snapshots,
        )
    return KVCache(
        num_layers=text.kv_layers if whole else 1,
        num_blocks=blocks,
        block_size=block_size,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        dtype=E4M3 if fp8 else dtype,
        device=device,
        states=states,
    )
