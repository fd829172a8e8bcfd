"""What llama.cpp allocates, by its own log, beside what the plan says: every buffer, on a CPU.

    pip install xllamacpp gguf
    python -m tests.backends.llamacpp.buffers --folder /tmp/ggufs --json …/results/llamacpp/buffers.json

Buffers depend on shapes alone, so the models are files of exact shape without content
(`training/gguf_export.py`); each cell is a start of llama.cpp in a process of its own. On a GPU the compute
buffers lack what lies in host memory there (`planner/engines/llamacpp/graphs.py`).
"""

import argparse
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from training.gguf_export import export

from snugvl.backends.llamacpp.service import BUFFERS
from snugvl.checkpoint.read import facts_of
from snugvl.core.sizes import MIB
from snugvl.planner.engines.llamacpp.footprint import cache_bytes, decoder_bytes, placed, tower_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import KVFormat, Settings

MODELS = {
    "Qwen/Qwen3-VL-2B-Instruct": "Q4_K_M",
    "Qwen/Qwen3-VL-4B-Instruct": "Q4_K_M",
    "Qwen/Qwen3-VL-8B-Instruct": "Q8_0",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "Q4_K_M",
    "Qwen/Qwen3.5-4B": "Q4_K_M",
}
KV: tuple[KVFormat, ...] = ("bf16", "fp8")
CELLS = (
    *product((4096, 16384), (1,), (512,), KV, (256, 2048)),
    *product((8192,), (2,), (128, 1024), KV[1:], (1024,)),
)
CHILD = """
import json, os, sys, xllamacpp as x
given = json.loads(sys.argv[1])
params = x.CommonParams()
params.model.path, params.mmproj.path = given.pop("model"), given.pop("mmproj")
kind = getattr(x.ggml_type, "GGML_TYPE_" + given.pop("kv"))
params.cache_type_k = params.cache_type_v = kind
params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
params.verbosity, params.fit_params, params.no_extra_bufts = 4, False, True
for name, value in given.items():
    setattr(params, name, value)
server = x.Server(params)  # whose end would wait for its threads
os._exit(0)
"""
NOT_PLANNED = "output buffer"  # of a few MiB


def taken(path: Path, settings: Settings, image_tokens: int) -> dict[str, float]:
    """What the log of one start says, in MiB."""
    given = {
        "model": str(path), "mmproj": str(path.with_name(f"mmproj-{path.name}")),
        "kv": "Q8_0" if settings.kv == "fp8" else "F16", "n_ctx": settings.context * settings.concurrency,
        "n_parallel": settings.concurrency, "n_ubatch": settings.chunk, "n_batch": 2048,
        "image_max_tokens": image_tokens, "cache_ram_mib": 0,
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(given)], capture_output=True, text=True, timeout=600
    )
    log = run.stdout + run.stderr
    found = {
        name: sum(float(size) for _, size in re.findall(pattern, log))
        for name, pattern in BUFFERS.items()
        if name != NOT_PLANNED
    }
    if not found["compute buffer"]:
        raise SystemExit(f"llama.cpp did not start:\n{log[-3000:]}")
    return found


def planned(model: Inventory, settings: Settings) -> dict[str, float]:
    """The same by the plan."""
    weights = placed(model, settings, gpu=False)
    tower = weights.pop("vision tower", 0)
    cache, states = cache_bytes(model, settings, gpu=False)
    found = {
        "weights": sum(weights.values()),
        "KV cache": cache,
        "recurrent state": states,
        "compute buffer": decoder_bytes(model, settings, gpu=False),
        "vision tower": tower,
        "mmproj compute buffer": tower_bytes(model, settings.max_pixels),
    }
    return {name: round(nbytes / MIB, 2) for name, nbytes in found.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the files without content are made")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, kind in MODELS.items():
        path = given.folder / f"{name.rpartition('/')[2]}-{kind}.gguf"
        if not path.exists():
            export(name, path, kind)
        model = inventory(facts_of(str(path)))
        assert model.facts.vision is not None
        side = model.facts.vision.patch_size * model.facts.vision.merge_size
        for context, slots, chunk, kv, tokens in CELLS:
            base = Settings("llamacpp", context=context, concurrency=slots, chunk=chunk, on_gpu=False)
            settings = base._replace(kv=kv, max_pixels=tokens * side**2)
            cell = {"model": name, "type": kind, "context": context, "slots": slots, "chunk": chunk, "kv": kv}
            found = planned(model, settings), taken(path, settings, tokens)
            rows.append(cell | {"image_tokens": tokens, "planned": found[0], "taken": found[1]})
            sums = [sum(each.values()) for each in found]
            print(
                *cell.values(),
                tokens,
                *(f"{each:,.0f}" for each in sums),
                f"{sums[0] / sums[1] - 1:+.2%}",
                flush=True,
            )
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
