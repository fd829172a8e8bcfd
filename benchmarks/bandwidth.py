"""How much of the read bandwidth a decode step reaches, where the rest goes, and what a slower card gets.

    python benchmarks/bandwidth.py 2b-fp8=/ck/2b-fp8:fp8 4b-int4=/ck/4b-fp8:int4+int8 … [--out FILE]
    python benchmarks/bandwidth.py 4b-int4=/ck/4b-fp8:int4+int8 --multiprocessors 30
    python benchmarks/bandwidth.py pocket=POCKET:bf16 --device cpu --dtype float32     # without a GPU

Each argument is NAME=FOLDER:LAYERS[+HEAD], formats as in `models.loader.Storage`. One sequence decodes
greedily after a prompt of `--context` tokens: a step reads every weight of the text model once (of an
embedding that is not also the head, one row) and the KV cache of the sequence. The floor is those bytes over
the read bandwidth, measured first. Kernels are timed by torch's profiler over a few steps; what a step lasts
beyond the sum of its kernels is launches, gaps and the host. From Hopper on a kernel starts while the one
before it ends, and its time begins there: the sum may exceed the step.

`--multiprocessors 30` holds the process to so many of the GPU's (a green context), as many as small cards
have; tiles are chosen as for a card with so many, and the bandwidth is what so many reach. It prints how long
a product takes on the whole GPU and held, so that one sees that it is.

On a card of 448 GB/s (RTX 5060) two figures bound what to expect: the same fraction of the bandwidth as here
(low: short kernels waste less of a slower memory), and the floor plus as many milliseconds as here lie above
it (high: those of a smaller chip are no fewer).
"""

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

import machine
from snugvl.checkpoint.locate import locate
from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.layers.kernels.device import described, hardware_of
from snugvl.models.loader import Storage, load_model

WARM_STEPS = 24
SMALL_CARD = 448e9  # bytes per second
GROUPS = (
    ("products", r"gemv|gemm|skinny|lone|dequantize|sixteenth|gated|nvjet|cutlass"),
    ("attention", r"attend|merge_splits|flash|fmha"),
    ("norm, rotary, activation", r"norm|rope|rotary|silu|swiglu"),
    ("recurrent states", r"correct|convolve"),
    ("copies and the rest of a step", r""),
)


@dataclass(frozen=True, slots=True)
class Steps:
    """One sequence that decodes: seconds of each step, and microseconds of each kernel a step."""

    seconds: tuple[float, ...]
    kernels: dict[str, float]


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a sum over more than any cache holds; the best of a few."""
    size = 4 << 30 if device.type == "cuda" else 256 << 20
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    best = 0.0
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        source.sum()
        _wait(device)
        best = max(best, size / (time.perf_counter() - start))
    return best


@contextmanager
def held_to(units: int, device: torch.device, figures: dict[str, Any]) -> Iterator[None]:
    """Hold this thread to so many multiprocessors while the block runs; tiles are chosen as for so many.

    Of some GPUs it is held to a few more, as they come in groups. Before any stream is made: torch makes
    several at once, and each stays in the context that it was made in.
    """
    from torch.cuda.green_contexts import GreenContext

    product = {"whole": product_s(device)}
    context: Any = GreenContext.create(num_sms=units, device_id=device.index or 0)
    context.set_context()
    try:
        product["held"] = product_s(device)
        for name, seconds in product.items():
            print(f"a product, {name}: {seconds * 1e3:.3f} ms")
        figures |= {"multiprocessors": units, "product_s": product}
        with described(replace(hardware_of(device), units=units)):
            yield
    finally:
        context.pop_context()


def product_s(device: torch.device) -> float:
    """Seconds of a product that takes as long as there are few multiprocessors, the least of a few."""
    left = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
    out, times = torch.empty_like(left), []
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        torch.mm(left, left, out=out)
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def step_bytes(model: Any, context: int) -> int:
    """What a decode step of one sequence must read: weights of the text model, and its KV cache."""
    config = model.config
    text, kept = config.text, {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        whole = config.tie_word_embeddings or "embed_tokens" not in name
        if "visual" not in name and whole:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
    layers = sum(kind == "full" for kind in text.kinds)
    cache: int = 2 * layers * text.num_kv_heads * text.head_dim * model.dtype.itemsize * context
    weights: int = sum(kept.values())
    return weights + cache


def decode(model: Any, context: int, steps: int) -> Steps:
    """Time a sequence step by step, then profile some more of its steps."""
    tokens = WARM_STEPS + 2 * steps + 8
    longest = max(1024, context + tokens)
    config = EngineConfig(num_blocks=2 * -(-longest // 16), max_model_len=longest, max_num_seqs=1)
    engine = Engine(model, config)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompt = tuple(100 + index % 200 for index in range(context))
    engine.add(EngineRequest("0", prompt, sampling, ()))
    for _ in range(WARM_STEPS):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    kernels = profile(engine, steps // 2) if model.device.type == "cuda" else {}
    engine.abort("0")
    return Steps(tuple(times), kernels)


def profile(engine: Engine, steps: int) -> dict[str, float]:
    """Microseconds of each kernel in a step, by name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / steps for event in watched.key_averages()}


def grouped(kernels: dict[str, float]) -> dict[str, float]:
    """Microseconds a step by what kernels are for."""
    found: dict[str, float] = {}
    for name, us in kernels.items():
        group = next(group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE))
        found[group] = found.get(group, 0.0) + us
    return found


def measure(
    argument: str, device: torch.device, dtype: torch.dtype, bandwidth: float, context: int, steps: int
) -> dict[str, Any]:
    """One model in one format."""
    name, _, rest = argument.partition("=")
    folder, _, formats = rest.rpartition(":")
    layers, _, head = formats.partition("+")
    storage = Storage(layers=layers, head=head or "bf16")  # type: ignore[arg-type]
    model = load_model(locate(folder), dtype=dtype, device=device, storage=storage)
    nbytes = step_bytes(model, context + WARM_STEPS + steps // 2)
    found = decode(model, context, steps)
    step_s = median(found.seconds)
    floor_s = nbytes / bandwidth
    return {
        "name": name,
        "formats": formats,
        "bytes": nbytes,
        "step_s": step_s,
        "step_least_s": min(found.seconds),
        "floor_s": floor_s,
        "fraction": floor_s / step_s,
        "kernels_s": sum(found.kernels.values()) / 1e6,
        "groups_us": grouped(found.kernels),
        "kernels_us": dict(sorted(found.kernels.items(), key=lambda item: -item[1])[:24]),
        "small_card_tokens_s": [
            SMALL_CARD * (floor_s / step_s) / nbytes,
            1 / (nbytes / SMALL_CARD + max(step_s - floor_s, 0)),
        ],
    }


def show(row: dict[str, Any]) -> None:
    """One model, in a few lines."""
    low, high = row["small_card_tokens_s"]
    times = f"{row['floor_s'] * 1e3:>8.3f}{row['step_s'] * 1e3:>8.3f} ms"
    print(
        f"{row['name']:<12}{row['bytes'] / 2**30:>7.2f} GiB{times}"
        f"{row['fraction']:>7.0%}{1 / row['step_s']:>8.0f} tokens/s   at 448 GB/s: {low:.0f} – {high:.0f}"
    )
    parts = [f"{group} {us:.0f}" for group, us in row["groups_us"].items()]
    if parts:
        between = (row["step_s"] - row["kernels_s"]) * 1e6
        print(f"            µs: {', '.join(parts)}, between kernels {between:.0f}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--multiprocessors", type=int, help="to which the process is held")
    arguments = parser.parse_args()
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    figures: dict[str, Any] = {}
    with ExitStack() as held:
        if arguments.multiprocessors:
            held.enter_context(held_to(arguments.multiprocessors, device, figures))
        figures |= compare(arguments, device, dtype)
    machine.save("bandwidth", figures, arguments.out)


def compare(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """All models."""
    bandwidth = read_bandwidth(device)
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    print(f"{'':<12}{'reads':>11}{'floor':>8}{'step':>8}   {'share':>7}")
    rows = []
    for model in arguments.models:
        rows.append(measure(model, device, dtype, bandwidth, arguments.context, arguments.steps))
        show(rows[-1])
    return {"read_bytes_per_s": bandwidth, "results": rows}


if __name__ == "__main__":
    main()
