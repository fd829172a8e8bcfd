"""Layers in main memory: is the price what the plan said? Planned, run and timed on a small card.

    python benchmarks/offload.py CHECKPOINT [--card 7200] [--context 2048] [--tokens 24] [--out FILE]

The GPU looks as if it had `card` MiB free (`ballast.py`). A process of its own plans the checkpoint in bf16
through transformers, loads it by the plan's placement, reads one prompt and decodes greedily, one request
alone. Prints tokens/s as predicted, as predicted with the copy rate of this machine, and as measured, their
ratio (1.5 is what we promise), and the memory of both sides beside the plan. Needs an NVIDIA GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ballast import Ballast
from snugvl.planner.plan import Choice

MIB = 1 << 20
GIB = 1 << 30
PIECE_BYTES = 96 * MIB  # a matrix of an 8B's layer
COPIES = 20
PROMISED = 1.5


def choose(checkpoint: Path, context: int) -> Choice:
    """The plan for what is free now."""
    from snugvl.checkpoint.read import facts_of
    from snugvl.hardware.probe import probe
    from snugvl.planner.solve import Candidate, require, solve
    from snugvl.planner.wishes import Wishes

    wishes = Wishes(context=context, max_pixels=1 << 20, backend="transformers", weights="bf16")
    facts = facts_of(str(checkpoint), offline=True)
    if facts.vision is None:
        wishes = replace(wishes, images=0, max_pixels=None)
    return require(solve([Candidate(facts)], probe(), wishes))


def copy_rate() -> float:
    """Bytes per second from pageable memory, as accelerate copies: one tensor after the other."""
    import torch

    source = torch.ones(PIECE_BYTES, dtype=torch.uint8)
    source.to("cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(COPIES):
        source.to("cuda")
    torch.cuda.synchronize()
    return COPIES * PIECE_BYTES / (time.perf_counter() - started)


def cell(checkpoint: Path, context: int, tokens: int) -> dict[str, Any]:
    """Plan, load, decode, measure."""
    import psutil
    import torch

    from snugvl.backends.transformers.loading import load_engine
    from snugvl.core.options import LoadOptions
    from snugvl.planner.engines.transformers.footprint import host_bytes
    from snugvl.planner.engines.transformers.rules import placement

    choice = choose(checkpoint, context)
    gpu, speed, settings = choice.gpus[0], choice.speed, choice.settings
    options = LoadOptions(
        str(checkpoint),
        device=f"cuda:{gpu.index}",
        dtype="bfloat16",
        context=settings.context,
        max_pixels=settings.max_pixels,
    )
    loaded = load_engine(options, placement=placement(choice))
    first_s, rate = decode(loaded.backend, tokens)
    result = {
        "model": checkpoint.name,
        "offloaded_layers": settings.offloaded,
        "crossing_bytes": speed.crossing_bytes,
        "link_bandwidth": gpu.link_bandwidth,
        "predicted_tokens_per_s": speed.decode_tokens_per_s,
        "predicted_first_s": speed.first_token_s,
        "measured_tokens_per_s": rate,
        "measured_first_s": first_s,
        "planned_bytes": choice.footprint.total_bytes,
        "peak_torch_bytes": torch.cuda.max_memory_reserved(),
        "planned_host_bytes": host_bytes(choice.option.model, settings),
        "host_bytes": psutil.Process().memory_info().rss,
    }
    loaded.backend.close()
    result["copy_rate"] = measured = copy_rate()
    if speed.decode_tokens_per_s and speed.crossing_bytes:
        from snugvl.planner.speed import copy_rate as assumed

        seconds = 1 / speed.decode_tokens_per_s
        seconds += speed.crossing_bytes * (1 / measured - 1 / assumed(gpu))
        result["predicted_with_copy_rate"] = 1 / seconds
    return result


def decode(backend: Any, tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and tokens per second after it. The first request warms up."""
    import snugvl
    from snugvl.core.messages import Request, user

    asked = Request(
        (user("Tell me about the sea."),), snugvl.SamplingParams(max_tokens=tokens, ignore_eos=True)
    )
    warm = replace(asked, sampling=snugvl.SamplingParams(max_tokens=2, ignore_eos=True))
    with backend.submit(warm) as stream:
        list(stream)
    started = time.perf_counter()
    times = []
    with backend.submit(asked) as stream:
        times += [time.perf_counter() for _ in stream]
    return times[0] - started, (tokens - 1) / (times[-1] - times[0])


def show(result: dict[str, Any]) -> None:
    """For people."""
    predicted, measured = result["predicted_tokens_per_s"], result["measured_tokens_per_s"]
    print(
        f"{result['model']}: {result['offloaded_layers']} layers in main memory, "
        f"{result['crossing_bytes'] / GIB:.2f} GiB cross"
    )
    link = result["link_bandwidth"]
    print(f"    link {link / 1e9:.1f} GB/s" if link else "    link unknown", end="")
    print(f", pageable copies {result['copy_rate'] / 1e9:.1f} GB/s")
    print(f"    tokens/s: predicted {predicted:.2f}, with that rate "
          f"{result.get('predicted_with_copy_rate', predicted):.2f}, measured {measured:.2f}")  # fmt: skip
    ratio = max(predicted / measured, measured / predicted)
    print(f"    ratio {ratio:.2f}, {'kept' if ratio <= PROMISED else 'NOT kept'} (at most {PROMISED})")
    first = result["predicted_first_s"] or 0.0, result["measured_first_s"]
    print(f"    first token: predicted {first[0]:.2f} s, measured {first[1]:.2f} s")
    for name, plan, found in (
        ("GPU, all / torch alone", "planned_bytes", "peak_torch_bytes"),
        ("main memory", "planned_host_bytes", "host_bytes"),
    ):
        print(f"    {name:<24}{result[plan] / MIB:>9.0f}{result[found] / MIB:>9.0f} MiB")


def main() -> None:
    """One checkpoint on one card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--card", type=int, default=7200, help="MiB that are free on the emulated card")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(cell(arguments.checkpoint, arguments.context, arguments.tokens)))
        return
    command = [sys.executable, __file__, str(arguments.checkpoint), "--cell"]
    command += ["--context", str(arguments.context), "--tokens", str(arguments.tokens)]
    with Ballast(arguments.card):
        ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stderr[-3000:] or "the process said nothing")
    result = json.loads(ran.stdout.splitlines()[-1])
    show(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
