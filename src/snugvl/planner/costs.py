"""Costs of formats: how far they move answers (`core/formats.py`), and whether they make waiting longer."""

import shlex
from typing import Final

from snugvl.core.formats import FEW_BITS, FORMATS, LOW_BIT, Format
from snugvl.planner.capabilities import Option, older
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.total import Device
from snugvl.planner.settings import KVFormat, Settings

UNIT: Final = 1e-5  # of the costs below, nats a token
_WORST: Final = max(kl for form in FORMATS.values() for kl in form.measured.values())
WEIGHT_COST: Final[dict[str, int]] = {"fp32": 0, "bf16": 0} | {
    # What wasn't measured counts as the worst of what was.
    kind: round(max(FORMATS[kind].measured.values(), default=_WORST) / UNIT)
    for kind in LOW_BIT
}
HEAD_COST, TOWER_COST, CACHE_COST = 1, 3, 35
# Below the first, formats count alike until images, context and pool are decided; so do those between two.
# FP8 is below it: an FP8 edition is half the download of what is rounded to int8, for 0.002 nats a token.
NOTICEABLE: Final = (400, 2000, 10000)


def cost(option: Option, settings: Settings) -> int:
    """Cost of all formats together, in `UNIT`s; weights cost at least what the stored ones do."""
    stored = option.model.facts.quantization or "bf16"
    parts = {
        HEAD_COST: settings.head != "bf16",
        TOWER_COST: settings.vision_weights != "bf16",
        CACHE_COST: settings.kv == "fp8",
    }
    weights = max(WEIGHT_COST[option.weights], WEIGHT_COST[stored])
    return weights + sum(each for each, so in parts.items() if so)


def tier(option: Option, settings: Settings, *, cpu: bool) -> int:
    """How noticeable the formats' cost is: the number of thresholds of `NOTICEABLE` it reaches, plus 1 where
    they are slow (bitsandbytes' on transformers; low bits on a CPU, which widens them for every token).

    0 is as good as bf16, and as quick.
    """
    slow = option.by_bits or (cpu and option.weights in LOW_BIT)
    return sum(cost(option, settings) >= least for least in NOTICEABLE) + slow


def _rounded(option: Option) -> Format | None:
    """The format of few bits that our engine rounds an option's weights to; None where it rounds none."""
    made = rules_of(option.engine).own_layout and option.weights in FEW_BITS and option.made
    return FORMATS[option.weights] if made else None


def told(option: Option, settings: Settings) -> list[str]:
    """Sentences for people: how noticeable the formats are that our engine rounds to (`figures`: numbers)."""
    said = []
    if form := _rounded(option):
        finer = next(kind for kind in ("int8", *FEW_BITS) if WEIGHT_COST[kind] < WEIGHT_COST[option.weights])
        said.append(
            f"{option.weights}: answers {form.differ} from those of the original weights. "
            f"--quality {finer} keeps it out; --verbose has figures."
            if form.measured
            else f"{option.weights}: how far answers differ from the original's was never measured."
        )
        if form.written and option.model.facts.text.mixture is None:  # which can't be calibrated yet
            bits = form.written[0]
            copy = f"snugvl quantize {shlex.quote(option.model.name)} OUT --with photos/ --bits {bits:g}"
            said.append(
                "A copy that differs less, as it is rounded for your own pictures, and that starts sooner: "
                f"{copy} (docs/quantize.md)."
            )
    if settings.kv_name == "fp8":
        said.append("The fp8 cache hardly changes the answers of such a model; --kv-cache bf16 keeps it out.")
    return said


def figures(option: Option) -> list[str]:
    """Sentences with the measured figures of the format that our engine rounds an option's weights to."""
    form = _rounded(option)
    if form is None or not form.measured:
        return []
    costs = ", ".join(f"{kl:.2g} on {model}" for model, kl in form.measured.items())
    said = [f"{option.weights}: {costs} (nats a token against the original weights; docs/plan.md)"]
    if form.written and option.model.facts.text.mixture is None:
        _, loaded, written = form.written
        said.append(
            f"snugvl quantize: {written:.2g} instead of {loaded:.2g} on other answers of SmolLM2-135M"
        )
    return said


def kv_formats_on(option: Option, device: Device, wished: KVFormat | None = None) -> tuple[KVFormat, ...]:
    """KV formats to try for an option on a device, best first; a wished one alone, or none if impossible.

    Without a wish FP8 is tried on GPUs alone, where memory is short, and for models alone that norm their
    keys. Our kernels need no hardware for FP8, vLLM's do.
    """
    able, since = option.kv_formats, rules_of(option.engine).fp8_cache_since
    if no_fp8_cache(option) or (since and older(device.compute_capability, since)):
        able = able[:1]
    if wished is not None:
        return tuple(kind for kind in able if kind == wished)
    return able if option.model.qk_norm and not device.cpu else able[:1]


def no_fp8_cache(option: Option) -> str | None:
    """Why an engine refuses keys and values in FP8 for a model, as a clause; None where it takes them.

    An e4m3 value has no scale here, so outliers of keys that aren't normed saturate. llama.cpp's eight bits
    have a scale for every 32 values.
    """
    if rules_of(option.engine).scales_cache or option.model.qk_norm:
        return None
    return (
        "its keys have no norm, and an FP8 cache spoils them: Qwen2.5-Coder-1.5B loses 0.55 nats a token "
        "by it "
        "(perplexity 11.96 instead of 6.81); leave --kv-cache fp8 out"
    )
