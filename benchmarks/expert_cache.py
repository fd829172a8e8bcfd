"""Experts in host memory on our own engine: tokens a second by how often they are found on the GPU.

    python benchmarks/expert_cache.py CHECKPOINT [--weights int4] [--memory 7200MiB] [--hits 0 40 60 80]
    python benchmarks/expert_cache.py CHECKPOINT [--pageable] [--whole] [--drafts 0 1 2 3] [--out FILE]
    python benchmarks/expert_cache.py CHECKPOINT --device cpu --weights bf16 --slots 2 --tokens 8 --prompt 40

CHECKPOINT may have random weights (`random_checkpoint.py`): its router's choices are replaced in steps of
one token. Of the experts that a token uses, as many as the rate says are drawn from those that have a slot
then, and the others from those that have none. So the slots change as they do in use, and the rate stays.
Where the GPU gives the slots itself, it draws, too, within the CUDA graph.

The plan for --memory says how many slots there are, and runs; --slots takes others. With --pageable the
memory isn't page-locked, as under WSL2, and the host chooses. Printed: seconds to load; for each rate seconds
to the first token of a prompt (1,088 tokens: a picture of 1,024² with its question), tokens a second of one
answer, the rate that was met, bytes across PCI Express a token; with --whole beside the same weights all on
the device.

With --drafts the checkpoint's predictor drafts so many tokens a step, and one and two of them are right in
turn, whatever it guesses. The rate is that of a step's new rows; rows that come again have what they had.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from snugvl.backends.native import loading
from snugvl.core.config import EXPERT_ROUNDS, EngineConfig
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.engine.runner import Runner
from snugvl.engine.scheduler import Schedule
from snugvl.engine.speculation import Speculation
from snugvl.layers.experts import Experts
from snugvl.models.expert_cache import ExpertCache, LayerSlots
from snugvl.models.loader import Storage, load_model
from speculation import decided, guesser_of

MIB = 1 << 20
WARM_TOKENS = 16
KEPT = 16  # rows of a step that are drawn, and whose experts are kept
forward, run_step = Experts.forward, Runner.run


class Draw:
    """Draws the experts of steps of a few tokens, in place of the router."""

    def __init__(self, device: torch.device) -> None:
        self.rate = torch.full((1,), -1.0, device=device)  # below 0: the router's own
        self.drawn: float | None = None
        self._places = torch.zeros(2, dtype=torch.int32, device=device)
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._random = np.random.default_rng(0)

    def at(self, percent: int | None) -> None:
        """Draw by this rate from now on; None: leave them as they are."""
        self.drawn = None if percent is None else percent / 100
        self.rate.fill_(-1.0 if percent is None else percent / 100)

    def begin(self, step: Schedule) -> None:
        """Note where the rows of a step stand in its sequence."""
        chunk = step.chunks[0]
        newest = chunk.end - 1 - len(chunk.drafts)
        self._places.copy_(torch.tensor([chunk.start, newest], dtype=torch.int32).pin_memory(), True)

    def ids(self, experts: Experts, ids: torch.Tensor) -> torch.Tensor:
        """Experts `[tokens, used]` for a layer's step, in place of `ids`."""
        places = experts.places
        if not isinstance(places, LayerSlots) or len(ids) > KEPT:
            return ids
        if places._on_device is not None and ids.numel() <= EXPERT_ROUNDS * places.device_slots:
            return self._by_gpu(experts, places._on_device.state.where, ids)
        if self.drawn is None or len(ids) != 1:
            return ids
        held = np.array(places.held, dtype=np.int64)
        others, used = np.setdiff1d(np.arange(experts.count), held), ids.shape[1]
        most, least = min(used, len(held)), max(used - len(others), 0)
        hits = int(np.clip(self._random.binomial(used, self.drawn), least, most))
        parts = (self._random.choice(each, n, False) for each, n in ((held, hits), (others, used - hits)))
        return torch.from_numpy(np.concatenate([*parts]))[None].to(ids)

    def _by_gpu(self, experts: Experts, where: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from draw_experts import draw  # needs triton

        if id(experts) not in self._of:
            kept = torch.zeros(KEPT, ids.shape[1], dtype=torch.int32, device=ids.device)
            self._of[id(experts)] = torch.full_like(where[:1], len(self._of) << 20), kept
        step, kept = self._of[id(experts)]
        drawn = ids.clone()
        draw[(1,)](
            where, step, self.rate, self._places, kept, drawn, len(ids), COUNT=experts.count,
            WIDE=1 << (experts.count - 1).bit_length(), USED=ids.shape[1], KEPT=KEPT, num_warps=4,
        )  # fmt: skip
        return drawn


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    first_s: float
    tokens_per_s: float
    hit_rate: float
    crossed_bytes: int
    step_tokens: float


def answer(engine: Engine, cache: ExpertCache | None, prompt: int, tokens: int) -> Measured:
    """A prompt of `prompt` tokens, `WARM_TOKENS` and then `tokens` that are counted."""
    vocab = engine.model.config.text.vocab_size
    ids = tuple(int(each) for each in np.random.default_rng(1).integers(10, min(vocab, 90000) - 10, prompt))
    count = WARM_TOKENS + tokens
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    begun = time.perf_counter()
    engine.add(EngineRequest(f"{begun}", ids, sampling))
    times, before, steps = list[float](), (0, 0, 0), engine.steps
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                times.append(time.perf_counter())
                if len(times) == WARM_TOKENS:
                    before, steps = before if cache is None else cache.counts(), engine.steps
    hits, misses, nbytes = np.subtract((0, 0, 0) if cache is None else cache.counts(), before).tolist()
    rate = tokens / (times[-1] - times[-1 - tokens])
    of_step = tokens / (engine.steps - steps)
    return Measured(times[0] - begun, rate, hits / max(hits + misses, 1), nbytes // tokens, of_step)


def planned(arguments: argparse.Namespace) -> tuple[Engine, int | None]:
    """The engine of the plan for --memory, and its slots a layer."""
    options = LoadOptions(
        arguments.checkpoint,
        weights=arguments.weights,
        memory=arguments.memory,
        experts="cpu",
        context=4096,
        speculation="mtp" if arguments.drafts else "off",
    )
    if arguments.pageable:
        own = loading.storage_of
        loading.storage_of = lambda settings: own(settings.with_host_memory(page_locked=False))
    loaded = loading.load_engine(options)
    footprint = loaded.allocation.footprint
    print(f"planned {footprint.total_bytes // MIB:,} MiB with the driver", flush=True)
    for part in footprint.components:
        print(f"    {part.nbytes / MIB:10.1f} MiB  {part.name}")
    return loaded.engine, loaded.allocation.settings.expert_slots


def made(arguments: argparse.Namespace, slots: int | None) -> Engine:
    """An engine without a plan; `slots` None: all experts on the device."""
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    storage = Storage(
        arguments.weights, head=arguments.head, expert_slots=slots, experts_pinned=not arguments.pageable
    )
    network = load_model(Path(arguments.checkpoint), dtype=dtype, device=device, storage=storage)
    config = EngineConfig(num_blocks=arguments.prompt // 8 + 256, max_model_len=4096, prefix_cache=False)
    return Engine(network, config)


def run(arguments: argparse.Namespace, draw: Draw, slots: int | str | None) -> list[dict[str, Any]]:
    """All rates with so many slots, or as planned; None: all experts on the device, by the router's own."""
    begun = time.perf_counter()
    engine, slots = planned(arguments) if isinstance(slots, str) else (made(arguments, slots), slots)
    loading_s = round(time.perf_counter() - begun, 1)
    cache = getattr(engine.model, "expert_cache", None)
    rows = []
    rates = arguments.hits if cache is not None else [None]
    for drafts, rate in product(arguments.drafts or [0], rates):
        draw.at(rate)
        if engine._runner.drafter is not None:
            engine._runner.drafter.most = drafts
            engine._speculation = guesser_of(engine, "mtp" if drafts else "off")
        warm = arguments.tokens if drafts else WARM_TOKENS
        answer(engine, cache, arguments.prompt, warm)  # kernels, graphs, slots
        found = answer(engine, cache, arguments.prompt, arguments.tokens)
        by_gpu = cache is not None and cache.device_slots > 0
        who = ", the GPU chooses" if by_gpu else ""
        said = {"slots": slots, "by_gpu": by_gpu, "asked": rate, "drafts": drafts, "load_s": loading_s}
        rows.append(said | asdict(found))
        print(
            f"{'all' if slots is None else slots:>5} slots, {'-' if rate is None else rate:>3} % asked: "
            f"{found.hit_rate:6.1%} hit, {found.tokens_per_s:8.1f} tokens/s, first after "
            f"{found.first_s:6.2f} s, {found.crossed_bytes / MIB:8.1f} MiB a token, "
            f"{drafts} drafts, {found.step_tokens:.2f} tokens a step, loaded in {loading_s:.0f} s{who}",
            flush=True,
        )
    if torch.cuda.is_available():
        free, held = torch.cuda.mem_get_info()[0] // MIB, torch.cuda.max_memory_reserved() // MIB
        print(f"torch held {held:,} MiB, {free:,} MiB of the card are free")
    engine.close()
    del engine, cache
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return rows


def main() -> None:
    """Read the arguments, measure, save."""
    parser = machine.parser(__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--head", default="int8")
    parser.add_argument("--memory", default="7200MiB")
    parser.add_argument("--slots", type=int, nargs="+")
    parser.add_argument("--hits", type=int, nargs="*", default=[0, 40, 60, 80])
    parser.add_argument("--prompt", type=int, default=1088)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--drafts", type=int, nargs="+", metavar="N", help="of a step; 0: none, in turn")
    parser.add_argument("--pageable", action="store_true", help="in memory that isn't page-locked")
    parser.add_argument("--whole", action="store_true", help="also with all experts on the device")
    arguments = parser.parse_args()
    draw = Draw(torch.device(arguments.device))

    def drawn(self: Experts, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return forward(self, x, draw.ids(self, ids), shares)

    def ran(self: Runner, step: Schedule) -> Any:
        draw.begin(step)
        return run_step(self, step)

    Experts.forward = drawn  # type: ignore[method-assign]
    if arguments.device == "cuda":
        Runner.run = ran  # type: ignore[method-assign]
    Speculation.take = decided(Speculation.take)  # type: ignore[method-assign]
    rows: list[dict[str, Any]] = []
    for slots in arguments.slots or ["planned"]:
        rows += run(arguments, draw, slots)
    if arguments.whole:
        rows += run(arguments, draw, None)
    words = {name: str(value) for name, value in vars(arguments).items()}
    machine.save("expert_cache", {"arguments": words, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
