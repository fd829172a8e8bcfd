"""What formats cost: how far they move answers, as it was measured, and whether they make waiting longer.

No larger language model than these two could be had where it was measured; docs/plan.md has the tables, of
`training/format_cost.py` and `training/pocket/format_error.py`.
"""

import shlex
from typing import Final

from snugvl.planner.capabilities import Option
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.total import Device
from snugvl.planner.generations import older
from snugvl.planner.settings import FEW_BITS, LOW_BIT, KVFormat, Settings, WeightFormat

# KL to float32, nats a token. SmolLM2's matrices don't divide into groups of 128, so that its int4 is in
# groups of 64, and what it loses in int8 and FP8 can't be said.
MEASURED: Final[dict[WeightFormat, dict[str, float]]] = {
    "fp32": {},
    "bf16": {},
    "int8": {"pocket": 0.00008},
    "fp8": {"pocket": 0.00031},
    "int6": {"pocket": 0.00028, "SmolLM2-135M": 0.011},
    "int5": {"pocket": 0.00111, "SmolLM2-135M": 0.0337},
    "int4": {"pocket": 0.00352, "SmolLM2-135M": 0.141},
}
# The same in words. With int4 the small SmolLM2 takes another likeliest word at about every fourth place.
SEEN: Final[dict[WeightFormat, str]] = {
    "int6": "hardly differ",
    "int5": "differ little",
    "int4": "differ noticeably (small models more, large ones less)",
}  # fmt: skip
# What `snugvl quantize --with` makes of it instead: mean bits; KL of answers that calibrated nothing, of what
# is rounded while loading, and of that (docs/quantize.md).
QUANTIZED: Final[dict[WeightFormat, tuple[float, float, float]]] = {
    "int5": (5.5, 0.0335, 0.0195),
    "int4": (4.75, 0.131, 0.0509),
}
UNIT: Final = 1e-5  # of the costs below, nats a token
WEIGHT_COST: Final[dict[WeightFormat, int]] = {
    kind: round(max(found.values(), default=0.0) / UNIT) for kind, found in MEASURED.items()
}
HEAD_COST, TOWER_COST, CACHE_COST = 1, 3, 35
# Below the first, formats count alike until images, context and pool are decided; so do those between two.
NOTICEABLE: Final = (100, 2000, 10000)


def cost(option: Option, settings: Settings) -> int:
    """Of the formats together, in `UNIT`s; weights are no better than those they are made of."""
    stored = option.model.facts.quantization or "bf16"
    parts = {
        HEAD_COST: settings.head != "bf16",
        TOWER_COST: settings.vision_weights != "bf16",
        CACHE_COST: settings.kv == "fp8",
    }
    weights = max(WEIGHT_COST[option.weights], WEIGHT_COST[stored])
    return weights + sum(each for each, so in parts.items() if so)


def tier(option: Option, settings: Settings, *, cpu: bool) -> int:
    """0: as good as bf16, and as quick; higher: what is noticed of the format, in the answers or the waiting.

    transformers reads low bits by bitsandbytes, and a CPU widens them for every token.
    """
    slow = option.by_bits or (cpu and option.weights in LOW_BIT)
    return sum(cost(option, settings) >= least for least in NOTICEABLE) + slow


def told(option: Option, settings: Settings) -> list[str]:
    """How noticeable formats are that our engine makes, for people; `figures` has the numbers."""
    said = []
    if rules_of(option.engine).own_layout and option.weights in FEW_BITS and option.made:
        finer = next(kind for kind in ("int8", *FEW_BITS) if WEIGHT_COST[kind] < WEIGHT_COST[option.weights])
        said.append(
            f"{option.weights}: answers {SEEN[option.weights]} from those of the original weights. "
            f"--quality {finer} keeps it out; --verbose has figures."
        )
        if option.weights in QUANTIZED:
            bits = QUANTIZED[option.weights][0]
            copy = f"snugvl quantize {shlex.quote(option.model.name)} OUT --with photos/ --bits {bits:g}"
            said.append(
                "A copy that differs less, as it is rounded for your own pictures, and that starts sooner: "
                f"{copy} (docs/quantize.md)."
            )
    if settings.kv_name == "fp8":
        said.append("The fp8 cache hardly changes the answers of such a model; --kv-cache bf16 keeps it out.")
    return said


def figures(option: Option) -> list[str]:
    """Sentences with the figures that were measured of a format which our engine makes."""
    if not rules_of(option.engine).own_layout or option.weights not in FEW_BITS or not option.made:
        return []
    costs = ", ".join(f"{kl:.2g} on {model}" for model, kl in MEASURED[option.weights].items())
    said = [f"{option.weights}: {costs} (nats a token against the original weights; docs/plan.md)"]
    if option.weights in QUANTIZED:
        _, loaded, written = QUANTIZED[option.weights]
        said.append(
            f"snugvl quantize: {written:.2g} instead of {loaded:.2g} on other answers of SmolLM2-135M"
        )
    return said


def kv_formats_on(option: Option, device: Device, wished: KVFormat | None = None) -> tuple[KVFormat, ...]:
    """KV formats for an option on a device, best first; of a wished one that alone, or none.

    Unasked it is FP8 on a GPU alone, where memory is what is short, and for models alone that norm their
    keys. Our kernels need no hardware for FP8, vLLM's do.
    """
    able, since = option.kv_formats, rules_of(option.engine).fp8_cache_since
    if no_fp8_cache(option) or (since and older(device.compute_capability, since)):
        able = able[:1]
    if wished is not None:
        return tuple(kind for kind in able if kind == wished)
    return able if option.model.qk_norm and not device.cpu else able[:1]


def no_fp8_cache(option: Option) -> str | None:
    """Why an engine refuses keys and values in FP8 for a model, as a clause, or None.

    e4m3 has no scale here, and outliers of keys that aren't normed saturate. llama.cpp's eight bits have a
    scale for every 32 values.
    """
    if rules_of(option.engine).scales_cache or option.model.qk_norm:
        return None
    return (
        "its keys have no norm, and an FP8 cache spoils them: Qwen2.5-Coder-1.5B loses 0.55 nats a token "
        "by it "
        "(perplexity 11.96 instead of 6.81); leave --kv-cache fp8 out"
    )
