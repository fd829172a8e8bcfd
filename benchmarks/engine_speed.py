"""One client and several on the engine in this process, on a GPU: first token, decode speed, throughput.

    python benchmarks/engine_speed.py CHECKPOINT bf16|fp8|int8+int8|int4+int8 [--out FILE]
    python benchmarks/engine_speed.py TINY bf16 --device cpu --side 128 --tokens 8 --levels 2:4

LAYERS+HEAD formats as in `models.loader.Storage`. Every request has a 1024×1024 picture of noise of its own
and gets 128 tokens, greedy. Medians of six for one client; 32 and 96 requests for 8 and 32 clients, second
run of two.
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

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


def ask(backend: NativeBackend, image: Image.Image, tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and tokens a second after it."""
    start = time.perf_counter()
    first = last = 0.0
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for _ in backend.submit(Request((user(image, "Describe this picture."),), sampling)):
        last = time.perf_counter()
        first = first or last
    return first - start, (tokens - 1) / (last - first)


def level(backend: NativeBackend, clients: int, requests: int, side: int, tokens: int) -> dict[str, float]:
    """Tokens a second of all clients, and the median time to the first token."""
    left = [picture(side) for _ in range(requests)]
    lock, times = threading.Lock(), []

    def client() -> None:
        while True:
            with lock:
                if not left:
                    return
                image = left.pop()
            times.append(ask(backend, image, tokens)[0])

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {"clients": clients, "tokens_s": requests * tokens / seconds, "ttft_s": median(times)}


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
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0005)  # many client threads share the engine's process here
    backend = load(arguments.checkpoint, arguments.formats, arguments.device)
    side, tokens = arguments.side, arguments.tokens
    for _ in range(3):
        ask(backend, picture(side), tokens)
    alone = [ask(backend, picture(side), tokens) for _ in range(6)]
    one = {"ttft_s": median(t for t, _ in alone), "tokens_s": median(rate for _, rate in alone)}
    print(f"1 client: first token {one['ttft_s'] * 1000:.1f} ms, decode {one['tokens_s']:.1f} tokens/s")
    levels = []
    for pair in arguments.levels.split(","):
        clients, requests = map(int, pair.split(":"))
        level(backend, clients, requests, side, tokens)
        row = level(backend, clients, requests, side, tokens)
        levels.append(row)
        print(
            f"{clients} clients: {row['tokens_s']:,.0f} tokens/s, first token {row['ttft_s'] * 1000:.0f} ms"
        )
    backend.close()
    values = {"checkpoint": arguments.checkpoint.name, "formats": arguments.formats, "one": one}
    machine.save("engine_speed", {**values, "levels": levels}, arguments.out)


if __name__ == "__main__":
    main()
