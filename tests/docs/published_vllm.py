"""What vLLM's logs say, beside what the planner says: weights and buffers, KV cache, and start-up overhead.

The observations are `published_vllm.json`: logs that others published, and ours of an H200. Of each the
planner gets the model, the flags and vLLM's version, and says

    "Model loading took X GiB"           weights with the allocator's rounding, rotary caches, deepstack
                                         buffers
    "GPU KV cache size: N tokens"        from the log's own "Available KV cache memory", so that nothing else
                                         of the plan is in it
    utilisation · total - X - KV memory  everything else that vLLM profiles, where the card's total is known

    python -m tests.docs.published_vllm [--out FILE] [--table]

Goals: weights within 0.5 %, tokens within 0.2 %, each beyond the last digit that the log prints. Exit code 1
where one is missed. `--table` prints the rows of docs/vllm.md.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.checkpoint.catalogue import four_bits as awq
from snugvl.checkpoint.facts import KVLayer, ModelFacts, TensorFact
from snugvl.planner.engines.vllm.footprint import pages
from snugvl.planner.engines.vllm.tensors import MAX_SPLIT_BYTES, loading_bytes
from snugvl.planner.footprint.total import Device, Footprint, footprint
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings

OBSERVATIONS: Final = Path(__file__).with_suffix(".json")
GIB: Final = 1 << 30
WEIGHTS_GOAL: Final = 0.005
TOKENS_GOAL: Final = 0.002
SPLIT_LIMIT_SINCE: Final = (0, 23)  # `max_split_size_mb:20` while weights are loaded
GROUP: Final = 128  # of FP8
LOADED: Final = ("weights", "allocator rounding", "vLLM rotary", "vLLM deepstack")


@dataclass(frozen=True, slots=True)
class Row:
    """One observation beside its plan; None where the log doesn't say it. Sizes in GiB."""

    model: str
    vllm: str
    flags: str
    source: str
    loaded: float | None
    planned_loaded: float | None
    kv_gib: float | None
    tokens: int | None
    planned_tokens: int | None
    overhead: float | None
    planned_overhead: float | None
    met: bool


def observations() -> list[dict[str, Any]]:
    """The cited figures, as they stand in the file."""
    found: list[dict[str, Any]] = json.loads(OBSERVATIONS.read_text(encoding="utf-8"))["observations"]
    return found


def rows() -> list[Row]:
    """Every observation beside its plan."""
    return [row_of(seen) for seen in observations()]


def row_of(seen: Mapping[str, Any]) -> Row:
    """One observation beside its plan."""
    model, settings = model_of(seen), settings_of(seen)
    loaded, planned_loaded = seen.get("loaded_gib"), None
    met = True
    if loaded is not None:
        limit = MAX_SPLIT_BYTES if version_of(seen) >= SPLIT_LIMIT_SINCE else None
        planned_loaded = loading_bytes(model, settings, limit).allocated / GIB
        met = abs(planned_loaded - loaded) <= WEIGHTS_GOAL * loaded + last_digit(loaded)
    tokens, planned_tokens = seen.get("kv_tokens"), None
    if tokens is not None:
        planned_tokens = tokens_of(seen, model, settings, seen["kv_gib"])
        digit = last_digit(seen["kv_gib"])
        low = tokens_of(seen, model, settings, seen["kv_gib"] - digit)
        high = tokens_of(seen, model, settings, seen["kv_gib"] + digit)
        met &= low * (1 - TOKENS_GOAL) <= tokens <= high * (1 + TOKENS_GOAL)
    overhead = planned_overhead = None
    if "cuda_total_gib" in seen:
        overhead = seen["utilisation"] * seen["cuda_total_gib"] - seen["loaded_gib"] - seen["kv_gib"]
        planned_overhead = overhead_of(footprint(model, settings, Device(0))) / GIB
    return Row(
        seen["model"],
        seen["vllm"],
        seen.get("flags", ""),
        seen["source"],
        loaded,
        planned_loaded,
        seen.get("kv_gib"),
        tokens,
        planned_tokens,
        overhead,
        planned_overhead,
        met,
    )


def last_digit(value: float) -> float:
    """Half of the last digit that the log prints: two of them, or four."""
    return 0.00005 if round(value, 2) != value else 0.005


def version_of(seen: Mapping[str, Any]) -> tuple[int, int]:
    """The version's first two numbers."""
    major, minor = str(seen["vllm"]).split(".")[:2]
    return int(major), int(minor)


def settings_of(seen: Mapping[str, Any]) -> Settings:
    """The flags of an observation; vLLM's own defaults where it names none."""
    return Settings(
        "vllm",
        seen.get("weights", "bf16"),
        kv=seen.get("kv", "bf16"),
        context=seen.get("context", 4096),
        images=seen.get("images", 1),
        chunk=seen.get("chunk", 2048),
        sequences=seen.get("sequences", 256),
        tensor_parallel=seen.get("tensor_parallel", 1),
        eager=not seen.get("graphs", True),
    )


def tokens_of(seen: Mapping[str, Any], model: Inventory, settings: Settings, kv_gib: float) -> int:
    """The log's "GPU KV cache size" of so much memory. `by_block`: as it was computed until 0.20."""
    pool, nbytes = pages(model, settings), int(kv_gib * GIB)
    if seen.get("by_block"):
        return nbytes // pool.block_bytes // len(pool.groups) * pool.block_tokens
    blocks = pool.blocks(settings.context, settings.chunk, states=2 if seen.get("prefix_cache", True) else 1)
    return nbytes // pool.block_bytes * settings.context // blocks


def overhead_of(planned: Footprint) -> int:
    """What the plan has beside weights, buffers and KV cache."""
    known = sum(planned.named(name) for name in (*LOADED, "KV cache"))
    return planned.total_bytes - known


def model_of(seen: Mapping[str, Any]) -> Inventory:
    """The model of the catalogue, with the changes that `as` names."""
    change = seen.get("as", {})
    facts = catalogue_facts(change.get("like", seen["model"]))
    assert facts is not None, f'{seen["model"]} is not in the catalogue; say under "as" what it is like'
    text = facts.text
    if "max_positions" in change:
        text = replace(text, max_position_embeddings=change["max_positions"])
    if "kv_layers" in change:
        layers = [KVLayer(**layer) for count, layer in change["kv_layers"] for _ in range(count)]
        text = replace(text, kv_layers=tuple(layers))
    facts = replace(facts, text=text, family=change.get("family", facts.family))
    stored = {"awq": awq, "fp8": fp8}.get(change.get("format", ""))
    return inventory(stored(facts) if stored else facts)


def fp8(facts: ModelFacts) -> ModelFacts:
    """The same with the decoder's matrices in FP8: values, and a scale for 128 x 128 of them."""
    tensors: list[TensorFact] = []
    for tensor in facts.tensors:
        if tensor.role != "linear":
            tensors.append(tensor)
            continue
        rows, columns = tensor.shape
        blocks = (rows // GROUP, columns // GROUP)
        tensors += [
            TensorFact(tensor.name, "linear", "F8_E4M3", tensor.shape, rows * columns),
            TensorFact(f"{tensor.name}_scale_inv", "scale", "BF16", blocks, 2 * blocks[0] * blocks[1]),
        ]
    return replace(facts, tensors=tuple(tensors), quantization="fp8")


def line(row: Row) -> str:
    """One row of the table."""
    loaded = tokens = overhead = ""
    if row.loaded is not None and row.planned_loaded is not None:
        loaded = f"{row.loaded:g} | {row.planned_loaded:.4f} | {row.planned_loaded / row.loaded - 1:+.2%}"
    if row.tokens is not None and row.planned_tokens is not None:
        difference = row.planned_tokens / row.tokens - 1
        tokens = f"{row.kv_gib:g}: {row.tokens:,} | {row.planned_tokens:,} | {difference:+.2%}"
    if row.overhead is not None and row.planned_overhead is not None:
        overhead = f"{row.overhead:.2f} | {row.planned_overhead:.2f}"
    cells = (f"{row.model}{f' ({row.flags})' if row.flags else ''}", row.vllm, loaded or " | | ")
    return f"| {' | '.join((*cells, tokens or ' | | ', overhead or ' | '))} |"


def table(found: Sequence[Row]) -> list[str]:
    """The rows under their heads."""
    heads = "model | vLLM | loaded, GiB | planned | | KV, GiB: tokens | planned | | the rest, GiB | planned"
    return [f"| {heads} |", f"|{'---|' * 10}", *(line(row) for row in found)]


def main(words: Sequence[str] | None = None) -> int:
    """0 when every goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")
    parser.add_argument("--table", action="store_true", help="only the table, for docs/vllm.md")
    options = parser.parse_args(words)
    found = rows()
    sys.stdout.write("\n".join(table(found)) + "\n")
    missed = [row for row in found if not row.met]
    if not options.table:
        counts = [sum(value is not None for value in column) for column in zip(
            *((row.loaded, row.tokens, row.overhead) for row in found), strict=True)]  # fmt: skip
        sys.stdout.write(f"{counts[0]} figures of weights, {counts[1]} of KV, {counts[2]} of the rest; ")
        sys.stdout.write(f"missed: {', '.join(row.model for row in missed) or 'none'}\n")
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n", "utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
