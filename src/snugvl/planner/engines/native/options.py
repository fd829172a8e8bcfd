"""Formats of our engine for a model on a device, best first, or why it has none."""

from dataclasses import replace
from itertools import groupby, product

from snugvl.core.formats import FEW_BITS, FORMATS, INTEGERS, Precision
from snugvl.core.reason import Reason
from snugvl.planner.capabilities import Option, Parts, prefers_fp32, stored_format
from snugvl.planner.engines.native.parts import parts_of
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.weights import keeps_fp8
from snugvl.planner.generations import no_kernels, too_old
from snugvl.planner.inventory import Inventory
from snugvl.planner.wishes import Wishes


def native_options(model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
    """Formats of our engine, best first; on a GPU each with all its parts.

    Options that stream the vision tower come last, unless that is wished.
    """
    stored, capability = stored_format(model), device.compute_capability
    if model.facts.gguf is not None and model.facts.gguf.why_not:
        return Reason("native", model.facts.gguf.why_not)
    if not model.facts.native:
        what = f"run the {model.facts.family} family yet"
        if stored in INTEGERS:
            what = f"run this {model.facts.family} in the {stored} form that it is stored in"
        return Reason("native", f"our engine does not {what}")
    if model.has("packed", "embedding", "lm_head", "vision"):
        return Reason("native", "our engine reads ready-made integers of the decoder's layers alone")
    if why := too_old(model.facts, capability, cpu=device.cpu):
        return Reason("native", why)
    tower = "resident" if wishes.language_only else wishes.tower
    every = parts_of(model, device, tower, wishes.embedding)
    if isinstance(every, str):
        return Reason("native", every)
    if device.cpu:
        return _on_cpu(model, device, wishes)
    every = tuple(dict.fromkeys(_as_stored(parts, model) for parts in every))
    formats: list[Precision] = ["fp8", "bf16", "int8", *_few_bits(wishes)]
    if stored in FEW_BITS or model.facts.own or model.has("blocks", "decoder"):
        formats = [stored]
    elif keeps_fp8(model) and wishes.weights != "bf16":
        formats.remove("bf16")  # the same quality in twice the memory
    elif not keeps_fp8(model):
        formats.remove("fp8")
    if wishes.weights in formats and (why := no_kernels(wishes.weights, capability)):
        return Reason("native", f"our engine has no {wishes.weights} weights here: {why}")
    formats = [each for each in formats if not no_kernels(each, capability)]
    wide = bool(wishes.float32)
    return [
        Option(
            model,
            "native",
            "fp32" if wide and weights == "bf16" else weights,
            stored if weights == "bf16" else weights,
            parts,
            float32=wide,
        )
        for _, alike in groupby(every, lambda parts: parts.vision)
        for weights, parts in product(formats, list(alike))
    ]


def _few_bits(wishes: Wishes) -> list[Precision]:
    """Those whose cost is known, and what is asked for."""
    return [each for each in FEW_BITS if FORMATS[each].offered or each == wishes.weights]


def _as_stored(parts: Parts, model: Inventory) -> Parts:
    """The same without rounding what is quantised in the file."""
    head = "bf16" if model.has("blocks", "embedding", "lm_head") else parts.head
    tower = parts.vision_weights if model.has("tower", "vision") else "bf16"
    return replace(parts, head=head, vision_weights=tower)


def _on_cpu(model: Inventory, device: Device, wishes: Wishes) -> list[Option]:
    """Formats of our engine in main memory: as they are, then what makes room and costs time."""
    stored = stored_format(model)
    wide = prefers_fp32(model, device) if wishes.float32 is None else wishes.float32
    kinds = (True, False) if wide and wishes.float32 is None else (wide,)
    formats: list[Precision] = ["fp32"] if wide else ["bf16"]
    if wide and wishes.float32 is None:
        formats.append("bf16")
    formats += [*(("fp8",) if keeps_fp8(model) else ()), "int8", *_few_bits(wishes)]
    if stored in FEW_BITS or model.facts.own or model.has("blocks", "decoder"):
        formats = [stored]
    return [
        Option(
            model,
            "native",
            weights,
            stored if weights in ("fp32", "bf16") else weights,
            float32=weights == "fp32" or (plenty and weights != "bf16"),
        )
        for weights in formats
        for plenty in kinds[: 1 if weights in ("fp32", "bf16") else None]
    ]
