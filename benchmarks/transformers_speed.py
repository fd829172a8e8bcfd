"""Tokens a second of processor time of the transformers backend: one request alone, and several at once.

    python benchmarks/transformers_speed.py [MODEL] [--together 4] [--tokens 64] [--repeat 3] [--out FILE]

In this process, on one core of the CPU. Processor time, because other programs on the machine don't change it
much; two versions of the package are compared by runs in turn, with PYTHONPATH.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import machine
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams


def answer(backend: Any, tokens: int) -> None:
    """One whole answer of so many tokens."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with backend.submit(Request((user("Tell me about the sea."),), sampling)) as stream:
        for _ in stream:
            pass


def rate(backend: Any, requests: int, tokens: int) -> float:
    """Tokens a second of processor time, with so many requests at once."""
    began = time.process_time()
    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(lambda _: answer(backend, tokens), range(requests)))
    return requests * tokens / (time.process_time() - began)


def main() -> None:
    """Both, in turn."""
    from snugvl.backends.transformers.loading import load_engine
    from snugvl.core.options import LoadOptions

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = LoadOptions(arguments.model, device="cpu", dtype="float32", context=1024)
    backend = load_engine(options).backend
    answer(backend, 8)  # warms up
    rates: dict[int, list[float]] = {1: [], arguments.together: []}
    for _ in range(arguments.repeat):
        for requests, found in rates.items():
            found.append(rate(backend, requests, arguments.tokens))
    backend.close()
    for requests, found in rates.items():
        print(
            f"{requests} at once: {mean(found):7.1f} tokens a CPU second ({min(found):.1f}–{max(found):.1f})"
        )
    machine.save("transformers_speed", {"model": arguments.model, "tokens_per_cpu_s": rates}, arguments.out)


if __name__ == "__main__":
    main()
