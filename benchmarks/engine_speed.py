"""One client and several on the engine in this process, on a GPU: first token, decode speed, throughput.

    python benchmarks/engine_speed.py CHECKPOINT bf16|fp8|int8+int8|int4+int8 [--out FILE]
    python benchmarks/engine_speed.py TINY bf16 --device cpu --side 128 --tokens 8 --levels 2:4

LAYERS+HEAD formats as in `models.loader.Storage`. Every request has a 1024×1024 picture of noise of its own
and gets 128 tokens, greedy. Medians of six for one client; 32 and 96 requests for 8 and 32 clients, second
run of two. `--profile` shows where the time of one more run goes; `--sampled` draws the tokens with a
temperature, top_k and top_p instead.
"""

import argparse
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

import busy
import machine
from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Capabilities, Request, user
from snugvl.checkpoint.configs import read_config
from snugvl.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import Storage, load_model
from snugvl.sampling import SamplingParams

GENERATOR = np.random.default_rng(0)


def load(folder: Path, formats: str, device: torch.device) -> NativeBackend:
    """A backend with room for 32 sequences."""
    layers, _, head = formats.partition("+")
    config = read_config(folder)
    processor = Processor.from_folder(folder, config, max_pixels=2048 * 2048)
    storage = Storage(layers=layers, head=head or "bf16")  # type: ignore[arg-type]
    network = load_model(folder, dtype=torch.bfloat16, device=device, storage=storage)
    sizes = EngineConfig(num_blocks=4000, max_model_len=4096, max_num_seqs=32, max_batched_tokens=2048)
    capabilities = Capabilities("m", 4096, True, True, 2048 * 2048, 65536)
    return NativeBackend(Engine(network, sizes), processor, capabilities)


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
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0005)  # many client threads share the engine's process here
    backend = load(arguments.checkpoint, arguments.formats, arguments.device)
    shape = Shape(arguments.side, arguments.tokens, arguments.sampled)
    one = alone(backend, shape)
    print(f"1 client: first token {one['ttft_s'] * 1000:.1f} ms, decode {one['tokens_s']:.1f} tokens/s")
    profiles = [profiled(backend, 1, 4, shape)] if arguments.profile else []
    levels = []
    for pair in arguments.levels.split(","):
        clients, requests = map(int, pair.split(":"))
        level(backend, clients, requests, shape)
        row = level(backend, clients, requests, shape)
        levels.append(row)
        print(
            f"{clients} clients: {row['tokens_s']:,.0f} tokens/s, first token {row['ttft_s'] * 1000:.0f} ms"
        )
        if arguments.profile:
            profiles.append(profiled(backend, clients, requests, shape))
    backend.close()
    values = {"checkpoint": arguments.checkpoint.name, "formats": arguments.formats, "one": one}
    more = {"sampled": arguments.sampled, "profiles": profiles}
    machine.save("engine_speed", {**values, "levels": levels, **more}, arguments.out)


if __name__ == "__main__":
    main()
