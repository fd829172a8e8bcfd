"""How much each input of the decoder's matrices matters: the mean square of what a text brings to it.

A rounded weight changes an output by its error times its input. Some inputs are a hundred times larger than
others, the same ones whatever is read, and the groups of columns that they are in should be rounded for them.
So before weights are rounded to few bits, a short text passes through the decoder as it is stored: a layer at
a time, which is read, used and forgotten, so that this takes no more memory than the largest layer. In plain
torch, on a GPU, too: a start that had to compile kernels for it would take seconds longer. What came out is
kept for later starts of the same files, some megabytes with their hash before them (`recall`, `remember`).

On SmolLM2 this takes away three quarters of what four bits cost (`training/format_cost.py`; docs/plan.md).

Sources: that inputs, not weights, say which weights matter: AWQ, Lin et al. 2023
(https://arxiv.org/abs/2306.00978); rounding by the mean square of inputs: llama.cpp's importance matrix
(https://github.com/ggml-org/llama.cpp/pull/4861). That some inputs are large in any text: Sun et al. 2024,
"Massive Activations in Large Language Models" (https://arxiv.org/abs/2402.17762).
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.core.folders import sources_digest, write_whole
from snugvl.core.formats import FEW_BITS
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.linear import Linear
from snugvl.models.decoder import cache_of
from snugvl.models.networks import LoadableNetwork
from snugvl.models.rope import rotation_of

BLOCK = 16  # tokens of a block of the cache
TOKENS = 256  # of a text that is anything
KEEP = 16  # checkpoints whose squares are kept
HASH_BYTES = sha256().digest_size


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
    blocks = -(-len(embedded) // BLOCK)
    cache = cache_of(wide.config.text, embedded.dtype, embedded.device, blocks, BLOCK)
    metadata = _metadata(tokens, device)
    x: torch.Tensor = embedded.as_subclass(_Plain)
    for layer, rounded in zip(wide.decoder.layers, model.decoder.layers, strict=True):
        layer_ready(layer)
        for name, linear in rounded_matrices(rounded).items():
            heard = name.removesuffix(".gate_up_proj") if linear.unit else name  # experts see all tokens
            layer.get_submodule(heard).register_forward_pre_hook(_squares_to(linear), with_kwargs=True)
        x = layer(x, rotation, cache, metadata)
        layer.to("meta")


def squares_file(folder: Path, model: LoadableNetwork, tensors: Iterable[TensorEntry]) -> Path:
    """Where the squares of its matrices are kept: those of such a network, these tensors and our sources.

    Files are known by their path, size and time, as hashing gigabytes would take longer than to weigh anew.
    """
    wanted = sorted(rounded_matrices(model.decoder.layers))
    text = replace(model.config, vision=None)
    named = f"{sources_digest('layers', 'models')} {torch.__version__} {model.dtype} {text} {wanted}"
    digest = sha256(named.encode())
    files = set[Path]()
    for each in sorted(tensors, key=lambda entry: entry.name):
        digest.update(repr((each.name, each.dtype, each.shape, str(each.file), each.offset)).encode())
        files.add(each.file)
    for file in sorted(files):
        real = file.resolve()
        state = real.stat()
        digest.update(repr((str(real), state.st_size, state.st_mtime_ns)).encode())
    return folder / f"{digest.hexdigest()[:32]}.safetensors"


def recall(model: LoadableNetwork, file: Path, device: torch.device) -> bool:
    """Set the squares that an earlier start has kept; whether there are any, whole and of these matrices."""
    linears = rounded_matrices(model.decoder.layers)
    try:
        raw = file.read_bytes()
        digest, raw = raw[:HASH_BYTES], raw[HASH_BYTES:]
        if sha256(raw).digest() != digest:
            return False
        found = load(raw)
    except (OSError, SafetensorError):
        return False
    with suppress(OSError):  # a folder that can only be read
        file.touch()
    if {name: (each.columns,) for name, each in linears.items()} != {
        n: tuple(s.shape) for n, s in found.items()
    }:
        return False
    for name, linear in linears.items():
        linear.squares = found[name].to(device)
    return True


def remember(model: LoadableNetwork, file: Path) -> None:
    """Keep the squares for later starts, where the folder can be written; those used last longest."""
    linears = rounded_matrices(model.decoder.layers)
    squares = {name: each.squares.cpu() for name, each in linears.items() if each.squares is not None}
    if len(squares) < len(linears):
        return
    raw = save(squares)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda path: path.write_bytes(sha256(raw).digest() + raw))
        old = sorted(file.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime)
        for each in old[:-KEEP]:
            each.unlink(missing_ok=True)


def rounded_matrices(layers: nn.Module) -> dict[str, Linear]:
    """The matrices that are rounded to few bits for what comes in, by name.

    None of those below one another that each have inputs of their own, as experts' last ones do.
    """
    return {
        name: each
        for name, each in layers.named_modules()
        if isinstance(each, Linear)
        and each.format in FEW_BITS
        and not (each.unit and name.endswith("down_proj"))
    }


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
