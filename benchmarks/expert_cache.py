"""Experts in host memory on our own engine: tokens a second by how often they are found on the GPU.

    python benchmarks/expert_cache.py CHECKPOINT [--weights int4] [--memory 7200MiB] [--hits 0 40 60 80]
    python benchmarks/expert_cache.py CHECKPOINT --slots 32 64 [--against 42.3] [--out FILE]
    python benchmarks/expert_cache.py CHECKPOINT --device cpu --weights bf16 --slots 2 --tokens 8 --prompt 40

CHECKPOINT may have random weights (`random_checkpoint.py`): its router's choices are replaced in steps of
one token. Of the experts that a token uses, as many as the rate says are drawn from those that have a slot
then, and the others from those that have none. So the slots change as they do in use, and the rate stays.

Without --slots there are as many as the plan has room for in --memory. Printed for each: seconds to load,
seconds to the first token of a prompt (1,088 tokens, a picture of 1024² with its question), tokens a second
of one answer, the rate that was met, bytes across PCI Express a token, beside the same weights all on the
device where they fit (--whole). With --against, the rate at which another engine's tokens a second are met.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from snugvl.backends.native.loading import load_engine
from snugvl.core.config import EngineConfig
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.layers.experts import Experts
from snugvl.models.expert_cache import ExpertCache, LayerSlots
from snugvl.models.loader import Storage, load_model

MIB = 1 << 20
WARM_TOKENS = 16


class Drawn:
    """Stands for a layer's experts: a step of one token has experts drawn by the rate."""

    rate: float | None = None

    def __init__(self, experts: Experts, layer: LayerSlots, seed: int) -> None:
        self._forward, self._count, self._layer = experts.forward, experts.count, layer
        self._random = np.random.default_rng(seed)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        if len(ids) == 1 and Drawn.rate is not None:
            held = np.array(self._layer.held, dtype=np.int64)
            others = np.setdiff1d(np.arange(self._count), held)
            used = ids.shape[1]
            most, least = min(used, len(held)), max(used - len(others), 0)
            hits = int(np.clip(self._random.binomial(used, Drawn.rate), least, most))
            parts = (self._random.choice(each, n, False) for each, n in ((held, hits), (others, used - hits)))
            ids = torch.from_numpy(np.concatenate([*parts]))[None].to(ids)
        return self._forward(x, ids, shares)


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    first_s: float
    tokens_per_s: float
    hit_rate: float
    crossed_bytes: int


def answer(engine: Engine, cache: ExpertCache | None, prompt: int, tokens: int, vocab: int) -> Measured:
    """A prompt of `prompt` tokens, `WARM_TOKENS` and then `tokens` that are counted."""
    ids = tuple(int(each) for each in np.random.default_rng(1).integers(10, vocab - 10, prompt))
    count = WARM_TOKENS + tokens
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    begun = time.perf_counter()
    engine.add(EngineRequest(f"{begun}", ids, sampling))
    times, before = list[float](), (0, 0, 0)
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                times.append(time.perf_counter())
                if len(times) == WARM_TOKENS and cache is not None:
                    before = cache.counts()
    hits, misses, nbytes = np.subtract((0, 0, 0) if cache is None else cache.counts(), before).tolist()
    rate = tokens / (times[-1] - times[-1 - tokens])
    return Measured(times[0] - begun, rate, hits / max(hits + misses, 1), nbytes // tokens)


def planned_slots(arguments: argparse.Namespace) -> int:
    """Slots a layer of the plan for --memory; the engine that it loads is let go."""
    options = LoadOptions(
        arguments.checkpoint, weights=arguments.weights, memory=arguments.memory, experts="cpu", context=4096
    )
    loaded = load_engine(options)
    slots = loaded.allocation.settings.expert_slots
    held = torch.cuda.max_memory_reserved() // MIB
    planned = loaded.allocation.footprint.total_bytes // MIB
    print(f"planned {planned:,} MiB with the driver, torch holds {held:,} MiB")
    loaded.engine.close()
    del loaded
    torch.cuda.empty_cache()
    assert slots is not None
    return slots


def run(arguments: argparse.Namespace, slots: int | None) -> list[dict[str, Any]]:
    """All rates with so many slots; None: all experts on the device, by the router's own choices."""
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    storage = Storage(arguments.weights, head=arguments.head, expert_slots=slots)
    begun = time.perf_counter()
    network = load_model(Path(arguments.checkpoint), dtype=dtype, device=device, storage=storage)
    loading = time.perf_counter() - begun
    cache = network.expert_cache
    engine = Engine(
        network, EngineConfig(num_blocks=arguments.prompt // 8 + 256, max_model_len=4096, prefix_cache=False)
    )
    if cache is not None:
        experts = [each for each in network.decoder.modules() if isinstance(each, Experts)]
        for number, (each, layer) in enumerate(zip(experts, cache.layers, strict=True)):
            object.__setattr__(each, "forward", Drawn(each, layer, number))
    rows = []
    for rate in arguments.hits if cache is not None else [None]:
        Drawn.rate = None if rate is None else rate / 100
        answer(engine, cache, arguments.prompt, WARM_TOKENS, network.config.text.vocab_size)  # kernels, slots
        found = answer(engine, cache, arguments.prompt, arguments.tokens, network.config.text.vocab_size)
        rows.append({"slots": slots, "asked": rate, "load_s": round(loading, 1), **vars_of(found)})
        print(
            f"{'all' if slots is None else slots:>5} slots, {'-' if rate is None else rate:>3} % asked: "
            f"{found.hit_rate:6.1%} hit, {found.tokens_per_s:8.1f} tokens/s, first after "
            f"{found.first_s:6.2f} s, {found.crossed_bytes / MIB:8.1f} MiB a token, loaded in "
            f"{loading:.0f} s",
            flush=True,
        )
    engine.close()
    return rows


def vars_of(found: Measured) -> dict[str, float]:
    """Its fields by name."""
    return {name: getattr(found, name) for name in Measured.__slots__}


def break_even(rows: Sequence[dict[str, Any]], against: float) -> float | None:
    """The rate at which a token takes as long as another engine's: seconds are linear in it."""
    drawn = [row for row in rows if row["asked"] is not None]
    if len({row["hit_rate"] for row in drawn}) < 2:
        return None
    rates = [row["hit_rate"] for row in drawn]
    slope, start = np.polyfit(rates, [1 / row["tokens_per_s"] for row in drawn], 1)
    return float((1 / against - start) / slope)  # below 0: always quicker; above 1: never


def main() -> None:
    """Read the arguments, measure, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--head", default="int8")
    parser.add_argument("--memory", default="7200MiB")
    parser.add_argument("--slots", type=int, nargs="*")
    parser.add_argument("--hits", type=int, nargs="*", default=[0, 40, 60, 80])
    parser.add_argument("--prompt", type=int, default=1088)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--against", type=float, help="another engine's tokens a second on this machine")
    parser.add_argument("--whole", action="store_true", help="also with all experts on the device")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for slots in arguments.slots if arguments.slots is not None else [planned_slots(arguments)]:
        found = run(arguments, slots)
        if arguments.against and (even := break_even(found, arguments.against)) is not None:
            print(f"{slots:>5} slots: as quick as {arguments.against:g} tokens/s at a hit rate of {even:.0%}")
        rows += found
    if arguments.whole:
        rows += run(arguments, None)
    machine.save(
        "expert_cache",
        {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "rows": rows},
        arguments.out,
    )


if __name__ == "__main__":
    main()
