"""Run by `compiled.py` where kernels are not interpreted.

A network of every family that our engine runs, without memory, in the sizes of a published one and in three
formats, makes the kinds of step that differ in their kernels: one token, a few, many, a picture.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from snugvl.checkpoint.architecture import Fp8Blocks, ModelConfig, TextConfig
from snugvl.checkpoint.catalogue import entries
from snugvl.checkpoint.families import SUPPORTED, parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine.memory import allocate
from snugvl.engine.precompile import _batch, _encode, network_from, outline_of
from snugvl.layers.kernels.compiler.ahead_of_time import dry_run
from snugvl.layers.kernels.device import Hardware
from snugvl.models.linear_attention import join_projections
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import LoadableNetwork, without_memory
from tests.engine.serving_mix import QWEN3_5_MOE

ALONE = ((1,),)
STEPS = (*ALONE, (1,) * 5, (300,))
CARDS = {"H200": (Hardware((9, 0), 132), STEPS), "RTX 2080": (Hardware((7, 5), 46), ALONE)}
STORAGES = (Storage("bf16"), Storage("fp8"), Storage("int4", "int8"))
SIZES = EngineConfig(num_blocks=64, max_num_seqs=33)


def models() -> dict[str, ModelConfig]:
    """The smallest of the catalogue of each architecture, and of each way to have biases and norms."""
    found: dict[object, tuple[str, ModelConfig]] = {}
    published = [(entry.name, entry.config) for entry in entries()]
    published.append(("Qwen3.5, mixture", QWEN3_5_MOE))
    for name, values in published:
        if values["architectures"][0] not in SUPPORTED:
            continue
        config = parse_config(values, name)
        text = config.text
        kind = config.architecture, text.qkv_bias, text.o_bias, text.qk_norm, text.fused, text.gated
        best = found.get(kind)
        if best is None or text.hidden_size < best[1].text.hidden_size:
            found[kind] = name, config
    return dict(found.values())


def network_in(config: ModelConfig, storage: Storage) -> LoadableNetwork:
    network = without_memory(replace(config, text=_short(config)))
    network.to(torch.bfloat16)
    choose_formats(network, storage, Fp8Blocks(128, 128) if storage.layers == "fp8" else None)
    join_projections(network.decoder.layers)
    return network_from(outline_of(network, network.config))


def _short(config: ModelConfig) -> TextConfig:
    """As many of the first layers as have one of each kind."""
    text = config.text
    count = max(text.kinds.index(kind) for kind in text.kinds) + 1
    return replace(text, num_layers=count, kinds=text.kinds[:count])


def alone(network: LoadableNetwork, hardware: Hardware, steps: Sequence[tuple[int, ...]]) -> list[str]:
    """Kernels of the first of the steps; the others are made, too, and a picture is seen."""
    cache = allocate(network, SIZES)
    with torch.inference_mode(), dry_run(hardware) as launches:
        network.forward(_batch(steps[0], cache), cache)
        first = {launch.name for launch in launches}
        for lengths in steps[1:]:
            network.forward(_batch(lengths, cache), cache)
        if network.tower is not None and steps is STEPS:
            _encode(network, (1, 16, 16))
    return sorted(first)


def found() -> dict[str, list[str] | str]:
    """By model, format and card the kernels of one token's step, or what failed."""
    made: dict[str, list[str] | str] = {}
    for name, config in models().items():
        for storage in STORAGES:
            network = network_in(config, storage)
            for card, case in CARDS.items():
                try:
                    kernels: list[str] | str = alone(network, *case)
                except Exception as error:  # all of them are wanted
                    kernels = f"{type(error).__name__}: {error}"
                made[f"{name}, {storage.layers}, {card}"] = kernels
    return made
