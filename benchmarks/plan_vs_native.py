"""Does the native engine keep to its allocation? Loaded under a hard cap, filled to the brim, measured.

    python benchmarks/plan_vs_native.py CHECKPOINT… [--free-gib 6 8 12] [--out FILE]

Each cell is a process of its own: torch is capped at the given free memory (its CUDA context not counted),
`snugvl.allocation` sizes the engine for it, and one request with the largest image allowed and a prompt that
fills the context runs to its end. Prints planned and measured peak; an out-of-memory error is a failure.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

GIB = 1 << 30


def cell(checkpoint: Path, free_bytes: int) -> dict[str, Any]:
    """One process: load, fill, measure."""
    import torch
    from PIL import Image

    import snugvl
    from snugvl import loading
    from snugvl.allocation import Place, allocate
    from snugvl.checkpoint.read import facts_of

    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(free_bytes / total)
    place = Place(device, "capped", free_bytes, torch.cuda.get_device_capability(device))
    loading._place = lambda _: place  # type: ignore[assignment]
    facts = facts_of(str(checkpoint), offline=True)
    try:
        planned = allocate(facts, torch.bfloat16, place, context=None, max_pixels=None)
    except snugvl.DoesNotFit as error:
        return {"refused": str(error)}
    with snugvl.load(checkpoint, device="cuda") as model:
        side = int(planned.max_pixels**0.5)
        picture = Image.effect_noise((side, side), 80).convert("RGB")
        words = "word " * (planned.engine.max_model_len - planned.max_pixels // 1024 - 256)
        sampling = snugvl.SamplingParams(max_tokens=32, ignore_eos=True)
        usage = model.chat(snugvl.user(picture, words), sampling).usage
    assert usage is not None
    extra = planned.engine.cache_tokens - planned.engine.max_model_len
    pool = extra * facts_kv(facts)
    return {
        "context": planned.engine.max_model_len,
        "max_pixels": planned.max_pixels,
        "prompt_tokens": usage.prompt_tokens,
        "planned_bytes": planned.footprint.total_bytes + pool,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def facts_kv(facts: Any) -> int:
    """Bytes of keys and values of one token, bf16."""
    return sum(2 * layer.kv_heads * layer.head_dim * 2 for layer in facts.text.kv_layers)


def main() -> None:
    """Every checkpoint at every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--free-gib", type=float, nargs="+", default=[5, 6, 7, 8, 12, 16])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(cell(arguments.checkpoints[0], arguments.cell)))
        return
    rows = []
    heads = "".join(f"{name:>9}" for name in ("planned", "peak", "reserved"))
    print(f"{'checkpoint':<10}{'free':>6}{'context':>9}{'pixels':>11}{heads}  GiB")
    for checkpoint in arguments.checkpoints:
        for free in arguments.free_gib:
            command = [sys.executable, __file__, str(checkpoint), "--cell", str(int(free * GIB))]
            run = subprocess.run(command, capture_output=True, text=True)
            row: dict[str, Any] = {"failed": run.stderr[-600:]}
            if run.returncode == 0:
                row = json.loads(run.stdout.splitlines()[-1])
            rows.append({"checkpoint": checkpoint.name, "free_gib": free, **row})
            if "planned_bytes" not in row:
                print(f"{checkpoint.name:<10}{free:>6}  {next(iter(row.items()))}")
                continue
            sizes = "".join(
                f"{row[k] / GIB:>9.2f}" for k in ("planned_bytes", "allocated_bytes", "reserved_bytes")
            )
            print(f"{checkpoint.name:<10}{free:>6}{row['context']:>9,}{row['max_pixels']:>11,}{sizes}")
    import machine

    machine.save("plan_vs_native", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
