"""An embedding in main memory against one on the GPU: bytes, the time of a row, of a token, of a first token.

Rows first: the lookup alone, in a CUDA graph, for as many tokens as a step has. Then the same model is loaded
both ways and asked the same: greedy answers have to be equal, and what the GPU holds less is held to the
plan.

    python benchmarks/embedding_place.py CHECKPOINT [--weights int4] [--memory 7200MiB] [--out FILE]

CHECKPOINT's lm_head is a tensor of its own (Qwen3-VL-8B). The rows are of its sizes, in bf16 and int8.
"""

import argparse
import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import machine
import snugvl
from snugvl.backends.native.loading import load_engine
from snugvl.checkpoint.families import read_config
from snugvl.core.options import LoadOptions
from snugvl.layers.linear import Linear
from snugvl.model import Model
from snugvl.models.main_memory import page_locked, to_main_memory

MIB = 1 << 20
TOKENS = (1, 32, 2048)
REPEATS = 100  # so that starting a graph, some 10 µs, is nothing of each
ANSWER = 128
QUESTIONS = 10
SIDE = 1024


def rows(folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of a lookup in a graph, by place, format and tokens."""
    text, found = read_config(folder).text, []
    for head in ("bf16", "int8"):
        made = []
        for place in ("gpu", "cpu"):
            with torch.device("meta"):
                linear = Linear(text.hidden_size, text.vocab_size).to(torch.bfloat16)
            linear.store_as(head)
            if place == "cpu":
                to_main_memory(linear, device)
            else:
                linear.to_empty(device=device)
            with torch.no_grad():
                linear.weight.fill_(3)
                if linear.scale is not None:
                    linear.scale.fill_(0.5)
            made.append(linear)
        for tokens in TOKENS:
            ids = torch.randint(0, text.vocab_size, (tokens,), device=device)
            on_gpu, apart = (_lookup_us(linear, ids) for linear in made)
            found.append({"head": head, "tokens": tokens, "gpu_us": on_gpu, "cpu_us": apart})
            print(
                f"{head}, {tokens:,} tokens: {on_gpu:.1f} µs on the GPU, {apart:.1f} from main memory",
                flush=True,
            )
    return found


def _lookup_us(linear: Linear, ids: torch.Tensor) -> float:
    linear.lookup(ids, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            linear.lookup(ids, torch.bfloat16)
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / REPEATS)
    return statistics.median(times)


def asked(folder: Path, place: Any, weights: Any, memory: str) -> dict[str, Any]:
    """One way: what it holds, its answers, and how long they take."""
    loaded = load_engine(
        LoadOptions(
            str(folder),
            device="cuda",
            weights=weights,
            memory=memory,
            embedding=place,
            context=2048,
            max_pixels=SIDE**2,
        )
    )
    settings, model = loaded.backend.capabilities, Model(loaded.backend)
    greedy = snugvl.SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    answers, firsts, rates = [], [], []
    for number in range(QUESTIONS + 1):  # the first one warms up
        picture = Image.frombytes("RGB", (SIDE, SIDE), random.Random(number).randbytes(3 * SIDE * SIDE))
        began = time.perf_counter()
        deltas = iter(model.stream_chat(snugvl.user(picture, "What is this?"), greedy))
        text = next(deltas).text
        first = time.perf_counter()
        text += "".join(delta.text for delta in deltas)
        ended = time.perf_counter()
        answers.append(text)
        firsts.append(1e3 * (first - began))
        rates.append((ANSWER - 1) / (ended - first))
    row = {
        "place": place,
        "weights": settings.weights,
        "planned_bytes": loaded.planned["text weights"],
        "held_bytes": loaded.weights["text weights"],
        "allocated_bytes": torch.cuda.memory_allocated(),
        "first_token_ms": statistics.median(firsts[1:]),
        "tokens_per_s": statistics.median(rates[1:]),
        "answers": answers,
    }
    loaded.backend.close()
    del model, loaded
    gc.collect()
    torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    began = time.perf_counter()
    page_locked(1 << 30, device)
    print(f"1 GiB page-locked in {time.perf_counter() - began:.2f} s")
    found = rows(arguments.checkpoint, device)
    ways = [
        asked(arguments.checkpoint, place, arguments.weights, arguments.memory) for place in ("gpu", "cpu")
    ]
    same = ways[0]["answers"] == ways[1]["answers"]
    print(
        f"\n{'embedding':<10}{'text weights':>14}{'planned':>10}{'first token':>13}{'tokens/s':>10}   formats"
    )
    for way in ways:
        print(
            f"{way['place']:<10}{way['held_bytes'] / MIB:>10,.0f} MiB{way['planned_bytes'] / MIB:>10,.0f}"
            f"{way['first_token_ms']:>10.1f} ms{way['tokens_per_s']:>10.1f}   {way['weights']}"
        )
    print(f"{QUESTIONS + 1} greedy answers of {ANSWER} tokens: {'equal' if same else 'DIFFERENT'}")
    machine.save("embedding_place", {"rows": found, "ways": ways, "equal": same}, arguments.out)


if __name__ == "__main__":
    main()
