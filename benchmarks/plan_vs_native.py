"""Does the native engine keep to its plan? Loaded under a limit, filled to the brim, measured by component.

    python benchmarks/plan_vs_native.py CHECKPOINT… [--weights auto int4] [--memory 3700MiB …] [--out FILE]

Each cell is a process of its own, held to `memory` as `snugvl serve --memory` holds it: one request with the
largest image allowed and a prompt that fills the context, then as many at once as there are seats, greedy and
drawn. Prints planned and measured bytes of every row of the ledger; running out of memory is a failure.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20


def cell(checkpoint: Path, weights: Any, memory: str) -> dict[str, Any]:
    """One process: load, fill, measure."""
    import torch

    import snugvl
    from snugvl.backends.measure import Meter
    from snugvl.loading import load_engine
    from snugvl.model import Model
    from snugvl.remember import keeper

    try:
        loaded = load_engine(checkpoint, device="cuda", dtype="auto", weights=weights, memory=memory)
    except snugvl.DoesNotFit as error:
        return {"refused": str(error)}
    after_loading = torch.cuda.max_memory_reserved()
    memory_now = loaded.backend.memory()
    keep = keeper(loaded.place, loaded.subject)
    meter = Meter(
        loaded.place.device,
        loaded.planned,
        loaded.weights,
        memory_now["kv_cache"],
        cap_bytes=loaded.cap_bytes,
        keep=keep,
    )
    found = loaded.backend.capabilities
    fill(Model(loaded.backend))
    ledger = meter.read(loaded.backend.memory(), loaded.backend.stats())
    result = {
        "weights": found.weights,
        "context": found.context_tokens,
        "max_pixels": found.max_pixels,
        "planned_bytes": sum(loaded.planned.values()),
        "process_bytes": ledger.process_bytes,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
        "loading_peak_bytes": after_loading,
        "cap_bytes": loaded.cap_bytes,
        "faults": loaded.backend.stats().faults,
        "rows": {row.name: [row.planned_bytes, row.measured_bytes] for row in ledger.rows},
        "subject": loaded.subject,
    }
    loaded.backend.close()
    return result


def fill(model: Any) -> None:
    """The largest request, then many: every graph is captured, every filter is used."""
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    import snugvl

    can = model.capabilities
    side = int(can.max_pixels**0.5)
    picture = Image.effect_noise((side, side), 80).convert("RGB")
    words = "word " * max(can.context_tokens - can.max_pixels // 1024 - 256, 1)
    longest = snugvl.SamplingParams(max_tokens=32, ignore_eos=True)
    model.chat(snugvl.user(picture, words), longest)
    drawn = snugvl.SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1)
    for together in (1, 2, 4, 8, 16):
        with ThreadPoolExecutor(together) as pool:
            for params in (snugvl.SamplingParams(max_tokens=16, ignore_eos=True), drawn):
                list(pool.map(lambda _, p=params: model.chat(snugvl.user("hello"), p), range(together)))


def main() -> None:
    """Every checkpoint in every format in every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--weights", nargs="+", default=["auto"])
    parser.add_argument("--memory", nargs="+", default=["3700MiB", "6GiB", "7200MiB"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(cell(arguments.checkpoints[0], arguments.weights[0], arguments.memory[0])))
        return
    rows = []
    for checkpoint in arguments.checkpoints:
        for weights in arguments.weights:
            for memory in arguments.memory:
                rows.append({"checkpoint": checkpoint.name, "memory": memory, "wished": weights})
                rows[-1] |= run(checkpoint, weights, memory)
                show(rows[-1])
    if arguments.out:
        arguments.out.write_text(json.dumps({"results": rows}, indent=1) + "\n")


def run(checkpoint: Path, weights: str, memory: str) -> dict[str, Any]:
    """A cell in a process of its own."""
    command = [sys.executable, __file__, str(checkpoint), "--weights", weights, "--memory", memory, "--cell"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return {"failed": (ran.stderr.strip().splitlines() or ["nothing"])[-1]}
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def show(row: dict[str, Any]) -> None:
    """One cell for people, MiB."""
    print(f"{row['checkpoint']} {row['wished']} in {row['memory']}:", end=" ")
    if "rows" not in row:
        print(row.get("refused") or row.get("failed"))
        return
    print(
        f"{row['weights']}, {row['context']:,} tokens, {row['max_pixels']:,} pixels, faults {row['faults']}"
    )
    for name, (planned, measured) in row["rows"].items():
        print(f"    {name:<28}{(planned or 0) / MIB:>9.0f}{(measured or 0) / MIB:>9.0f}")
    total = (row["planned_bytes"] / MIB, row["process_bytes"] / MIB, row["loading_peak_bytes"] / MIB)
    print(f"    {'in all':<28}{total[0]:>9.0f}{total[1]:>9.0f}   while loading {total[2]:.0f}", flush=True)


if __name__ == "__main__":
    main()
