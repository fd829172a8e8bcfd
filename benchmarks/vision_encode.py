"""The vision tower on a GPU: time and peak memory by image size, and what a stream feels meanwhile.

Peaks are what torch allocates beyond the weights, output included: those are the planner's bytes
(`models/vision.py`). The second table has a greedy stream running while a 4096 × 4096 image is encoded and
prefilled: the times between its tokens, with the image encoded in slices and in one go.

With a streamed tower (`models/main_memory.py`) the resident one runs first: encodings are compared bit by
bit, and what the GPU holds less is held to the plan. `crossing_ms` is all of its copies with nothing beside.

    python benchmarks/vision_encode.py CHECKPOINT [--tower int8] [--profile] [--out FILE]
    python benchmarks/vision_encode.py CHECKPOINT --tower streamed --sides 1024 2048
    python benchmarks/vision_encode.py TINY --device cpu --sides 128 256
"""

import argparse
import itertools
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import busy
import machine
from snugvl.checkpoint.read import facts_of
from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, VisionItem
from snugvl.models.loader import Storage, load_model
from snugvl.models.main_memory import WeightStream
from snugvl.models.networks import Qwen3VL
from snugvl.models.vision import ROWS
from snugvl.planner.footprint.weights import crossing_bytes, part_bytes, streaming_sizes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings

SIDES = (1024, 2048, 4096)
REPEATS = 7
TEXT_TOKENS = 400
TOWERS = {
    "bf16": Storage(),
    "int8": Storage(tower="int8"),
    "streamed": Storage(streamed="pinned"),
    "streamed-plain": Storage(streamed="plain"),
    "streamed-int8": Storage(tower="int8", streamed="pinned"),
}


def picture(side: int) -> VisionItem:
    """A picture of noise, as `inputs/pixels.py` hands it over."""
    count = side // 16
    generator = torch.Generator().manual_seed(side)
    patches = torch.randint(0, 256, (count * count, 768), dtype=torch.uint8, generator=generator)
    levels = (torch.arange(256) / 255 - 0.5).div(0.5).repeat(3, 1)
    return VisionItem(patches, (1, count, count), str(side).encode(), levels, 2)


def encode(model: Qwen3VL, item: VisionItem) -> torch.Tensor:
    """All of it in one go."""
    steps = model.encode_in_steps(item.reader(model.device, model.dtype), item.grid_thw)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result


def planned_bytes(model: Qwen3VL, item: VisionItem) -> int:
    """The formula in `models/vision.py`, with the output."""
    config, size = model.config.vision, model.dtype.itemsize
    assert config is not None
    patches, h, d = len(item.patches), config.hidden_size, config.hidden_size // config.num_heads
    chunk = math.ceil(patches / math.ceil(patches / ROWS))
    output = patches * (1 + len(config.deepstack_layers)) * config.out_hidden_size * size
    kept = patches * (3 * h * size + 16)
    work = chunk * (h + config.intermediate_size) * size + 2 * d * max(item.grid_thw)
    return kept + work + output // config.spatial_merge_size**2


def wait(model: Qwen3VL) -> None:
    """Until the GPU has done what it was told."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def allocated(model: Qwen3VL) -> int:
    """Bytes torch holds now; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated() if model.device.type == "cuda" else 0


def peak_allocated(model: Qwen3VL) -> int:
    """The most since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0


def reset_peak(model: Qwen3VL) -> None:
    """Forget the peak of before."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def measure(model: Qwen3VL, side: int) -> dict[str, Any]:
    """Milliseconds and bytes of one size, copying the patches included."""
    item = picture(side)
    encode(model, item)
    times, before = [], allocated(model)
    reset_peak(model)
    for _ in range(REPEATS):
        wait(model)
        start = time.perf_counter()
        encode(model, item)
        wait(model)
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "side": side,
        "patches": len(item.patches),
        "median_ms": round(statistics.median(times), 2),
        "least_ms": round(min(times), 2),
        "most_ms": round(max(times), 2),
        "peak_bytes": peak_allocated(model) - before,
        "planned_bytes": planned_bytes(model, item),
    }


def profiled(model: Qwen3VL, side: int) -> dict[str, Any]:
    """Where the time of a few pictures goes, by kernel; and what the host needs to start them."""
    item = picture(side)

    def work() -> None:
        for _ in range(REPEATS):
            encode(model, item)
            wait(model)

    encode(model, item)
    wait(model)
    start = time.perf_counter()
    encode(model, item)  # returns when all is started, if the GPU is slower
    started = time.perf_counter() - start
    wait(model)
    found = {"side": side, "repeats": REPEATS, "start_ms": 1e3 * started, **busy.kernels(work)}
    print(f"{side}², {REPEATS} times; the host starts one in {found['start_ms']:.1f} ms")
    busy.show([], found)
    return found


def stream(model: Qwen3VL, side: int, *, sliced: bool) -> dict[str, Any]:
    """Times between the tokens of a stream while a large image comes in."""
    engine = Engine(model, EngineConfig(num_blocks=1400, max_model_len=20_000, max_num_seqs=4))
    engine._scheduler.prefill_beside_decodes = 512  # as beside streams on a small card
    if not sliced:
        engine._encoder.slice = math.inf
    greedy = SamplingParams(max_tokens=TEXT_TOKENS, ignore_eos=True)
    engine.add(EngineRequest("text", tuple(range(100, 164)), greedy))
    config, item = model.config, picture(side)
    tokens = config.vision_tokens
    assert tokens is not None
    prompt = (tokens.start, *[tokens.image] * (len(item.patches) // 4), tokens.end, 100)
    arrivals: list[float] = []
    added = first = 0.0
    while engine.has_work:
        for output in engine.step():
            if output.request_id == "text":
                arrivals.append(time.perf_counter())
            else:
                first = first or time.perf_counter()
        if len(arrivals) >= TEXT_TOKENS // 4 and not added:
            added = time.perf_counter()
            engine.add(EngineRequest("image", prompt, SamplingParams(max_tokens=1, ignore_eos=True), (item,)))
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(arrivals) if added < b <= first]
    calm = [1e3 * (b - a) for a, b in itertools.pairwise(arrivals) if b <= added]
    return {
        "sliced": sliced,
        "calm_median_ms": round(statistics.median(calm), 2),
        "tokens_meanwhile": len(gaps),
        "median_ms": round(statistics.median(gaps), 2),
        "most_ms": round(max(gaps), 2),
        "image_first_token_ms": round(1e3 * (first - added), 1),
    }


def load(folder: Path, device: torch.device, storage: Storage) -> tuple[Qwen3VL, int]:
    """The model, and the bytes that it holds on a GPU."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = load_model(folder, dtype=torch.bfloat16, device=device, storage=storage)
    assert isinstance(model, Qwen3VL)
    return model, allocated(model) - before


def resident(folder: Path, device: torch.device, storage: Storage, sides: list[int]) -> dict[str, Any]:
    """What a streamed tower is compared with: encodings, times, bytes. Nothing of it stays on the GPU."""
    model, held = load(folder, device, replace(storage, streamed=None))
    found: dict[str, Any] = {
        "encodings": [encode(model, picture(side)).cpu() for side in sides],
        "sizes": [measure(model, side) for side in sides],
        "held_bytes": held,
    }
    for row in found["sizes"]:
        print("resident {side}²: {median_ms} ms ({least_ms} … {most_ms})".format(**row))
    return found


def compared(
    model: Qwen3VL, folder: Path, storage: Storage, held: int, other: dict[str, Any], sides: list[int]
) -> dict[str, Any]:
    """A streamed tower beside the resident one."""
    assert model.tower is not None
    weights = model.tower.weights
    assert isinstance(weights, WeightStream)
    wanted = Settings(
        "native", vision="streamed", vision_weights="int8" if storage.tower == "int8" else "bf16"
    )
    counted = inventory(facts_of(str(folder), offline=True))
    found = [encode(model, picture(side)).cpu() for side in sides]
    times = []
    for _ in range(REPEATS):
        wait(model)
        start = time.perf_counter()
        for place, source in zip(weights.places, weights.host, strict=True):
            place.copy_(source, non_blocking=True)
        wait(model)
        times.append(1e3 * (time.perf_counter() - start))
    crossing_ms = statistics.median(times)
    result = {
        "identical": all(torch.equal(a, b) for a, b in zip(found, other["encodings"], strict=True)),
        "pinned": weights.ahead,
        "on_gpu_bytes": sum(size * count for size, count in streaming_sizes(counted, wanted)),
        "saved_bytes": other["held_bytes"] - held,
        "planned_saved_bytes": part_bytes(counted, wanted, "vision")
        - sum(size * count for size, count in streaming_sizes(counted, wanted)),
        "crossing_bytes": crossing_bytes(counted, wanted),
        "crossing_ms": round(crossing_ms, 2),
        "crossing_gb_per_s": round(crossing_bytes(counted, wanted) / crossing_ms / 1e6, 1),
        "resident_sizes": other["sizes"],
    }
    print({name: value for name, value in result.items() if name != "resident_sizes"})
    return result


@torch.inference_mode()
def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--sides", type=int, nargs="+", default=list(SIDES))
    parser.add_argument("--tower", choices=TOWERS, default="bf16", help="its weights' format and place")
    parser.add_argument("--profile", action="store_true", help="kernels of the smallest picture")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    storage, sides, folder = TOWERS[arguments.tower], arguments.sides, arguments.checkpoint
    other = resident(folder, arguments.device, storage, sides) if storage.streamed else None
    model, held = load(folder, arguments.device, storage)
    streamed = None if other is None else compared(model, folder, storage, held, other, sides)
    sizes = [measure(model, side) for side in sides]
    for row in sizes:
        print("{side}²: {median_ms} ms ({least_ms} … {most_ms}),".format(**row), end=" ")
        print(f"peak {row['peak_bytes'] / 2**20:.0f} MiB, planned {row['planned_bytes'] / 2**20:.0f} MiB")
    profile = profiled(model, sides[0]) if arguments.profile else None
    stream(model, sides[-1], sliced=True)  # captures graphs and compiles kernels
    streams = [stream(model, sides[-1], sliced=sliced) for sliced in (False, True)]
    for values in streams:
        print(values)
    result = {"rows": ROWS, "tower": arguments.tower, "sizes": sizes, "streams": streams}
    machine.save("vision_encode", {**result, "profile": profile, "streamed": streamed}, arguments.out)


if __name__ == "__main__":
    main()
