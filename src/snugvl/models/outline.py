"""A network's outline: enough to build it once more without its weights, in another process.

Shapes, dtypes and formats as they are in memory, however they came there: what a checkpoint stores, what was
asked for, and what its layers could hold have been settled by the loader.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.layers.linear import Linear
from snugvl.layers.weights import Format
from snugvl.models.loader import without_memory
from snugvl.models.networks import LoadableNetwork


@dataclass(frozen=True, slots=True)
class Outline:
    """A network but for its values.

    Attributes:
        tensors: dtype and shape of each parameter and buffer.
        formats: of each linear layer, with the columns that share a scale.
    """

    config: ModelConfig
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    formats: Mapping[str, tuple[Format, int]]


def outline_of(network: nn.Module, config: ModelConfig) -> Outline:
    """That of a network with or without memory."""
    tensors = chain(network.named_parameters(remove_duplicate=False), network.named_buffers())
    linears = ((n, module) for n, module in network.named_modules() if isinstance(module, Linear))
    return Outline(
        config,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors},
        {name: (linear.format, linear.group) for name, linear in linears},
    )


def drawn(outline: Outline) -> LoadableNetwork:
    """The network on "meta", with one decoder layer of each kind in place of all of them."""
    network = without_memory(outline.config)
    network.requires_grad_(False).eval()
    for name, (kind, group) in outline.formats.items():
        linear = network.get_submodule(name)
        assert isinstance(linear, Linear)
        linear.format, linear.group = kind, group
    for name, (dtype, shape) in outline.tensors.items():
        owner, _, attribute = name.rpartition(".")
        module = network.get_submodule(owner)
        made = torch.empty(shape, dtype=dtype, device="meta")
        is_parameter = attribute in module._parameters
        setattr(module, attribute, nn.Parameter(made, requires_grad=False) if is_parameter else made)
    network.decoder.layers = nn.ModuleList(_kinds(network.decoder.layers))
    return network


def _kinds(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The first of those that compute the same with other values."""
    found: dict[object, nn.Module] = {}
    for layer in layers:
        tensors = chain(layer.named_parameters(), layer.named_buffers())
        form = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
        windows = tuple(getattr(module, "window", None) for module in layer.modules())
        found.setdefault((form, windows), layer)
    return list(found.values())
