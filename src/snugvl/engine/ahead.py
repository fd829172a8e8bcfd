"""Compiling all kernels that an engine will need, in a process of its own: `snugvl/kernel_process.py`."""

from dataclasses import dataclass

import torch

from snugvl.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.engine.rehearsal import rehearse
from snugvl.layers.kernels.device import Hardware, hardware_of
from snugvl.models.outline import Outline, drawn, outline_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """What runs, and on what.

    Attributes:
        threads: that compile.
    """

    outline: Outline
    engine: EngineConfig
    hardware: Hardware
    threads: int


def wanted_of(engine: Engine, threads: int) -> Wanted:
    """What an engine on a GPU needs, without what differs from start to start and decides nothing here."""
    model, config = engine.model, engine.config
    assert isinstance(model, torch.nn.Module), "a network of ours"
    sizes = EngineConfig(
        num_blocks=1,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        kv_cache=config.kv_cache,
    )
    return Wanted(outline_of(model, model.config), sizes, hardware_of(model.device), threads)


@dataclass(frozen=True, slots=True)
class Report:
    """How it went: kernels in all, and what was said of those that can't be compiled."""

    kernels: int
    failed: tuple[str, ...]


def compile_ahead(wanted: Wanted) -> Report:
    """Find out what kernels the engine's steps need, and compile them into Triton's folder."""
    from snugvl.layers.kernels.compiler.compiling import compile_all  # needs triton, which only GPUs bring
    from snugvl.layers.kernels.compiler.dry_run import dry_run

    with torch.inference_mode(), dry_run(wanted.hardware) as launches:
        rehearse(drawn(wanted.outline), wanted.engine)
    done = compile_all(launches, wanted.hardware, wanted.threads)
    return Report(len(launches), tuple(f"{each.name}: {error}" for each, error in done if error is not None))
