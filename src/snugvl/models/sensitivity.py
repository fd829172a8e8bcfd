"""How much each input of the decoder's matrices matters: the mean square of what a text brings to it.

A rounded weight changes an output by its error times its input. Some inputs are a hundred times larger than
others, the same ones whatever is read, and the groups of columns that they are in should be rounded for them.
So before weights are rounded to few bits, a short text passes through the decoder as it is stored: a layer at
a time, which is read, used and forgotten, so that this takes no more memory than the largest layer. In plain
torch, on a GPU, too: a start that had to compile kernels for it would take seconds longer.

On SmolLM2 this takes away three quarters of what four bits cost (`training/format_cost.py`; docs/plan.md).

Sources: that inputs, not weights, say which weights matter: AWQ, Lin et al. 2023
(https://arxiv.org/abs/2306.00978); rounding by the mean square of inputs: llama.cpp's importance matrix
(https://github.com/ggml-org/llama.cpp/pull/4861). That some inputs are large in any text: Sun et al. 2024,
"Massive Activations in Large Language Models" (https://arxiv.org/abs/2402.17762).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache, StateCache
from snugvl.layers.linear import Linear
from snugvl.layers.weights import FEW_BITS
from snugvl.models.networks import LoadableNetwork
from snugvl.models.rope import rotation_of

BLOCK = 16  # tokens of a block of the cache


TOKENS = 256  # of a text that is anything


class _Plain(torch.Tensor):
    """Takes the path of a CPU wherever it is, as does what is made of it."""

    is_cuda = False


def weigh_inputs(
    model: LoadableNetwork,
    wide: LoadableNetwork,
    embedded: torch.Tensor,
    layer_ready: Callable[[nn.Module], None],
) -> None:
    """Set `squares` of the decoder's matrices of `model`, for `Linear.put`.

    Args:
        wide: the same network, without memory and as wide as activations are.
        embedded: the text, `[tokens, hidden]`, on the device where this is computed.
        layer_ready: gives a layer of `wide` memory on that device, and its weights.
    """
    tokens, device = len(embedded), embedded.device
    positions = torch.arange(tokens, device=device).expand(3, tokens).as_subclass(_Plain)
    rotation = rotation_of(positions, wide.config.text.rope, embedded.dtype)
    cache, metadata = _cache(wide, embedded), _metadata(tokens, device)
    x: torch.Tensor = embedded.as_subclass(_Plain)
    for layer, rounded in zip(wide.decoder.layers, model.decoder.layers, strict=True):
        layer_ready(layer)
        for name, linear in rounded.named_modules():
            if isinstance(linear, Linear) and linear.format in FEW_BITS:
                layer.get_submodule(name).register_forward_pre_hook(_squares_to(linear), with_kwargs=True)
        x = layer(x, rotation, cache, metadata)
        layer.to("meta")


def forget(model: LoadableNetwork) -> None:
    """The weights are rounded."""
    for module in model.decoder.layers.modules():
        if isinstance(module, Linear):
            module.squares = None


def some_ids(vocab: int) -> list[int]:
    """Any tokens: what is large is so in any text, so none has to be chosen, nor a tokenizer read."""
    chance = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(vocab, (TOKENS,), generator=chance).tolist()
    return ids


def _squares_to(linear: Linear) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, norm = args[0], kwargs.get("norm")
        squares = (x if norm is None else norm(x)).float().square().mean(0).as_subclass(torch.Tensor)
        linear.squares = squares if squares.isfinite().all() else None  # float16 may be too narrow

    return keep


def _metadata(tokens: int, device: torch.device) -> AttentionMetadata:
    """One sequence, which has the cache alone."""
    places = torch.arange(tokens, device=device)
    table = torch.arange(-(-tokens // BLOCK), device=device)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    return AttentionMetadata((tokens,), (tokens,), places, table, BLOCK, state_slots=slots)


def _cache(model: LoadableNetwork, embedded: torch.Tensor) -> KVCache:
    text, linear = model.config.text, model.config.text.linear
    dtype, device = embedded.dtype, embedded.device
    states = None
    if linear is not None:
        states = StateCache(
            num_layers=text.linear_layers,
            slots=1,
            heads=(linear.value_heads, linear.key_dim, linear.value_dim),
            inputs=(linear.kernel - 1, linear.channels),
            dtype=dtype,
            device=device,
        )
    return KVCache(
        num_layers=text.kv_layers,
        num_blocks=-(-len(embedded) // BLOCK),
        block_size=BLOCK,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        dtype=dtype,
        device=device,
        states=states,
    )
