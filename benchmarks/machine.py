"""Names the machine a figure comes from, and saves raw results beside the others; speed of one answer."""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from snugvl.version import __version__

RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A script's command line: its help is its docstring, and `--out` is where raw results go."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path)
    return made


def describe() -> dict[str, Any]:
    """Processor, memory, GPU and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "snugvl": __version__,
    }


def save(name: str, values: Any, path: Path | None = None) -> Path:
    """Write `values` with the machine they were measured on; prints and returns where."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), **values}, indent=1) + "\n")
    print(f"\nraw results: {path}")
    return path


def answer_speed(path: str | Path, question: str, tokens: int = 256, **options: Any) -> float:
    """Tokens a second of one answer, after the first, as our own engine loads `path` with these options.

    Of random tokens most text comes with the last, so it is the time of a long answer less that of one token,
    each the least of three.
    """
    import snugvl
    from snugvl.core.messages import Request, user
    from snugvl.core.sampling import SamplingParams

    with snugvl.load(path, backend="native", context=4096, **options) as model:

        def seconds(tokens: int) -> float:
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            start = time.perf_counter()
            *_, last = model.backend.submit(Request((user(question),), sampling))
            assert last.completion_tokens == tokens
            return time.perf_counter() - start

        for count in (tokens, 1, tokens):  # kernels are compiled and steps recorded
            seconds(count)
        long, one = (min(seconds(count) for _ in range(3)) for count in (tokens, 1))
        return (tokens - 1) / (long - one)
