"""One client and several on the engine in this process, on a GPU: first token, decode speed, throughput.

    python benchmarks/engine_speed.py CHECKPOINT bf16|fp8|int8+int8|int4+int8 [--out FILE]
    python benchmarks/engine_speed.py TINY bf16 --device cpu --side 128 --tokens 8 --levels 2:4

LAYERS+HEAD formats as in `models.loader.Storage`. Every request has a 1024×1024 picture of noise of its own
and gets 128 tokens, greedy. Medians of six for one client; 32 and 96 requests for 8 and 32 clients, second
run of two. `--profile` shows where the time of one more run goes; `--sampled` draws the tokens with a
temperature, top_k and top_p instead.

Steps with prompts and small pictures are CUDA graphs (`engine/graphs/prefill.py`), as in `snugvl serve` where
memory is plenty. `--step-graphs` measures all of it twice on the same network, launch by launch and with
them, and says whether the same pictures get the same greedy tokens, alone and in company, and what the
graphs' memory is beside the plan. On a CPU, where there are no graphs, a recording does its work again: that
shows the bookkeeping, and no speed.
"""

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

import busy
import machine
from snugvl.backends.native.backend import NativeBackend
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.read import facts_of
from snugvl.core.config import EngineConfig
from snugvl.core.messages import Capabilities, Delta, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.capture import GraphPool
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import Storage, load_model
from snugvl.planner.engines.native.step_graphs import pool_bytes
from snugvl.planner.footprint.total import Device
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings

GENERATOR = np.random.default_rng(0)


SIZES = EngineConfig(
    num_blocks=4000, max_model_len=4096, max_num_seqs=32, max_batched_tokens=2048, state_checkpoints=16
)


class Loaded:
    """A network, for one engine after another with room for 32 sequences."""

    def __init__(self, folder: Path, formats: str, device: torch.device) -> None:
        layers, _, head = formats.partition("+")
        self.processor = Processor.from_folder(folder, read_config(folder), max_pixels=2048 * 2048)
        storage = Storage(layers=layers, head=head or "bf16")  # type: ignore[arg-type]
        self.network = load_model(folder, dtype=torch.bfloat16, device=device, storage=storage)
        wide = Settings("native", layers, head or "bf16", context=4096, sequences=32)  # type: ignore[arg-type]
        hardware, cublas_bytes = Device(0, multiprocessors=4, cpu=True), 0
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(device)
            hardware = Device(
                0, False, (facts.major, facts.minor), multiprocessors=facts.multi_processor_count
            )
            cublas_bytes = hardware.cublas_bytes
        model = inventory(facts_of(str(folder), offline=True))
        self.graph_bytes = pool_bytes(model, wide, hardware.multiprocessors)
        # Another engine's thread has a handle of its own, and cuBLAS something to work in for each.
        self.planned_bytes = self.graph_bytes + cublas_bytes

    def backend(self, *, step_graphs: bool = False) -> NativeBackend:
        """A new engine's."""
        sizes = replace(SIZES, step_graph_bytes=self.graph_bytes if step_graphs else 0)
        engine = Engine(self.network, sizes)
        if step_graphs and self.network.device.type == "cpu":
            engine._runner.use_graph_pool(GraphPool(Again(), self.network, self.graph_bytes))
        capabilities = Capabilities("m", 4096, True, True, 2048 * 2048, 65536)
        return NativeBackend(engine, self.processor, capabilities)


class Again:
    """A recorder for a CPU."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work itself."""
        return work

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def drop_pool(self) -> None:
        """There is no pool."""


def picture(side: int) -> Image.Image:
    """Noise, another each time."""
    return Image.fromarray(GENERATOR.integers(0, 255, (side, side, 3), dtype=np.uint8))


def ask(
    backend: NativeBackend, image: Image.Image, tokens: int, *, sampled: bool = False
) -> tuple[float, float]:
    """Seconds to the first token, and tokens a second after it."""
    start = time.perf_counter()
    first = last = 0.0
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if sampled:
        sampling = replace(sampling, temperature=0.7, top_k=20, top_p=0.8)
    for _ in backend.submit(Request((user(image, "Describe this picture."),), sampling)):
        last = time.perf_counter()
        first = first or last
    return first - start, (tokens - 1) / (last - first)


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request is."""

    side: int
    tokens: int
    sampled: bool


def level(backend: NativeBackend, clients: int, requests: int, shape: Shape) -> dict[str, float]:
    """Tokens a second of all clients, and the median time to the first token."""
    side, tokens = shape.side, shape.tokens
    left = [picture(side) for _ in range(requests)]
    lock, times = threading.Lock(), []

    def client() -> None:
        while True:
            with lock:
                if not left:
                    return
                image = left.pop()
            times.append(ask(backend, image, tokens, sampled=shape.sampled)[0])

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {"clients": clients, "tokens_s": requests * tokens / seconds, "ttft_s": median(times)}


def alone(backend: NativeBackend, shape: Shape) -> dict[str, float]:
    """Medians of one client, once everything is compiled."""
    times = [ask(backend, picture(shape.side), shape.tokens, sampled=shape.sampled) for _ in range(9)][3:]
    return {"ttft_s": median(t for t, _ in times), "tokens_s": median(rate for _, rate in times)}


def profiled(backend: NativeBackend, clients: int, requests: int, shape: Shape) -> dict[str, Any]:
    """Where the time of such a run goes, by phase and by kernel."""
    engine = backend._engine
    with busy.watched(engine) as phases:
        row = level(backend, clients, requests, shape)
    found: dict[str, Any] = {"tokens_s": row["tokens_s"], "phases": phases.table()}
    found["kernels"] = None
    if engine.model.device.type == "cuda":
        found["kernels"] = busy.kernels(lambda: level(backend, clients, requests // 2, shape))
    busy.show(found["phases"], found["kernels"])
    return found


def measured(backend: NativeBackend, shape: Shape, levels: str, *, profile: bool) -> dict[str, Any]:
    """One client, then several."""
    one = alone(backend, shape)
    print(f"1 client: first token {one['ttft_s'] * 1000:.1f} ms, decode {one['tokens_s']:.1f} tokens/s")
    profiles = [profiled(backend, 1, 4, shape)] if profile else []
    rows = []
    for pair in levels.split(","):
        clients, requests = map(int, pair.split(":"))
        level(backend, clients, requests, shape)
        row = level(backend, clients, requests, shape)
        rows.append(row)
        print(
            f"{clients} clients: {row['tokens_s']:,.0f} tokens/s, first token {row['ttft_s'] * 1000:.0f} ms"
        )
        if profile:
            profiles.append(profiled(backend, clients, requests, shape))
    return {"one": one, "levels": rows, "profiles": profiles}


Answer = list[tuple[str, float]]
"""Tokens and their logarithms of probability."""


def greedy(backend: NativeBackend, images: list[Image.Image], tokens: int, *, together: bool) -> list[Answer]:
    """What a model says to each picture, one after the other or all at once."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=1)
    made = (Request((user(image, "Describe this picture."),), sampling) for image in images)

    def read(stream: Iterable[Delta]) -> Answer:
        return [(each.token, each.logprob) for delta in stream for each in delta.logprobs]

    if not together:
        return [read(backend.submit(request)) for request in made]
    return [read(stream) for stream in [backend.submit(request) for request in made]]


def compared(name: str, eager: list[Answer], graphs: list[Answer]) -> dict[str, Any]:
    """How far answers agree."""
    same = [[t for t, _ in one] == [t for t, _ in other] for one, other in zip(eager, graphs, strict=True)]
    firsts = [abs(one[0][1] - other[0][1]) for one, other in zip(eager, graphs, strict=True)]
    agreed = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a[0] != b[0]), len(one))
        for one, other in zip(eager, graphs, strict=True)
    ]
    print(
        f"{name}: greedy tokens equal {'yes' if all(same) else 'NO'} ({sum(same)} of {len(same)} answers; "
        f"all agree for {min(agreed)} tokens; the first one's logprob differs by {max(firsts):.4f} at most)"
    )
    return {"equal": sum(same), "answers": len(same), "agreed": agreed, "first_logprob": max(firsts)}


def pooled(device: torch.device) -> int:
    """Bytes of the private pools of all CUDA graphs."""
    if device.type != "cuda":
        return 0
    segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))


def both(loaded: Loaded, shape: Shape, levels: str, *, profile: bool) -> dict[str, Any]:
    """Launch by launch against recorded, and whether the tokens are the same."""
    device, images = loaded.network.device, [picture(shape.side) for _ in range(16)]
    found: dict[str, Any] = {}
    said: dict[str, list[list[Answer]]] = {}
    for name, step_graphs in (("eager", False), ("step_graphs", True)):
        print(f"{name}:")
        backend = loaded.backend(step_graphs=step_graphs)
        found[name] = measured(backend, shape, levels, profile=profile)
        said[name] = [
            greedy(backend, images[:8], shape.tokens, together=False),
            greedy(backend, images[8:], shape.tokens, together=True),
        ]
        found[name]["pool_bytes"] = pooled(device)
        graph_pool = backend._engine._runner.graph_pool
        if graph_pool is not None:
            found["recorded"] = {"on": graph_pool.on, "made": graph_pool.captures, "used": graph_pool.replays}
        backend.close()
        del backend, graph_pool
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    pairs = zip(("alone", "in company"), *said.values(), strict=True)
    found["tokens"] = {name: compared(name, one, other) for name, one, other in pairs}
    found["planned_bytes"] = loaded.planned_bytes
    grown = found["step_graphs"]["pool_bytes"] - found["eager"]["pool_bytes"]
    print(f"recordings: {found['recorded']}")
    print(f"their pool: {grown / 2**20:.0f} MiB, planned {loaded.planned_bytes / 2**20:.0f} MiB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("formats")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--levels", default="8:32,32:96")
    parser.add_argument("--profile", action="store_true", help="where the time of one more run goes")
    parser.add_argument("--sampled", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--step-graphs", action="store_true", help="with and without prompts as CUDA graphs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0005)  # many client threads share the engine's process here
    loaded = Loaded(arguments.checkpoint, arguments.formats, arguments.device)
    shape = Shape(arguments.side, arguments.tokens, arguments.sampled)
    if arguments.step_graphs:
        found = both(loaded, shape, arguments.levels, profile=arguments.profile)
    else:
        backend = loaded.backend(step_graphs=True)
        found = measured(backend, shape, arguments.levels, profile=arguments.profile)
        backend.close()
    values = {"checkpoint": arguments.checkpoint.name, "formats": arguments.formats}
    machine.save("engine_speed", {**values, "sampled": arguments.sampled, **found}, arguments.out)


if __name__ == "__main__":
    main()
