"""Models known without a network: their exact configuration, the forms they are published in, their order.

The data is `catalogue.json`; its tensors follow from the configuration. The order by quality is
that of the vendors' own published scores; `quality_source` says which. Revisions are unknown.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from snugvl.checkpoint.assemble import (
    CONFIG,
    IMAGES,
    Material,
    Stored,
    assemble,
    folder_material,
    network_of,
)
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.families.network import Network
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.checkpoint.section import read_json

_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


@dataclass(frozen=True, slots=True)
class Form:
    """One repository (or the folder of pocket) of a model.

    `stores_head`: an lm_head is in the file although the model ties it.
    """

    repo: str
    quantization: Literal["fp8"] | None = None
    stores_head: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One model.

    Attributes:
        name: Hub id of the plain form, or "pocket".
        forms: where it is published, plain weights first.
        sees: takes images.
        grounds: finds boxes, by its vendor's word.
        gated: the Hub asks to accept a licence first.
        quality_rank: 1 is the best of the catalogue among those that see; None: not ranked against them.
        quality_source: where the order comes from.
        small_files_bytes: tokenizer, templates and configuration, about.
    """

    name: str
    forms: tuple[Form, ...]
    sees: bool
    quality_source: str
    small_files_bytes: int
    config: Mapping[str, Any]
    images: Mapping[str, Any] | None
    grounds: bool = False
    gated: bool = False
    quality_rank: int | None = None


@cache
def entries() -> tuple[Entry, ...]:
    """The whole catalogue, best first, then the models without a rank."""
    data = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
    found = [_entry(values, data) for values in data["models"]]
    found.append(_pocket(found, data["quality_sources"]["pocket"]))
    return tuple(sorted(found, key=lambda entry: entry.quality_rank or 1_000_000))


def find(model: str) -> tuple[Entry, Form] | None:
    """The entry and the form that a Hub id names; case doesn't matter, as on the Hub."""
    for entry in entries():
        for form in entry.forms:
            if form.repo.lower() == model.lower():
                return entry, form
    return None


def catalogue_facts(model: str) -> ModelFacts | None:
    """Facts of a model of the catalogue, or None. But for pocket's, no header is read: they are computed."""
    found = find(model)
    if found is None:
        return None
    entry, form = found
    if entry.name == POCKET:  # its headers are here to be read
        return assemble(POCKET, folder_material(locate(POCKET)))
    config = dict(entry.config)
    if form.quantization == "fp8":
        config["quantization_config"] = FP8_BLOCKS
    where = f"catalogue: {form.repo}"
    network = network_of(config, entry.images, where)
    tensors = tuple(_stored(network, form, *_DTYPES[str(config["dtype"])]))
    download = sum(tensor.nbytes for tensor in tensors) + entry.small_files_bytes
    material = Material(where, "catalogue", None, config, entry.images, tensors, download)
    return assemble(model, material, network)


# As published beside Qwen3's FP8 weights. Everything but the matrices of the decoder stays 16-bit.
FP8_BLOCKS: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _stored(network: Network, form: Form, letters: str, itemsize: int) -> Iterator[Stored]:
    """The header that a form has: FP8 matrices with one 16-bit scale a block, everything else plain."""
    heads, (rows, columns) = 0, FP8_BLOCKS["weight_block_size"]
    for name, shape, role in (*network.tensors, *network.unloaded):
        heads += role == "lm_head"
        if form.quantization != "fp8" or role not in ("linear", "expert"):
            yield Stored(name, letters, shape, math.prod(shape) * itemsize)
            continue
        yield Stored(name, "F8_E4M3", shape, math.prod(shape))
        blocks = (*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns))
        yield Stored(f"{name}_scale_inv", letters, blocks, math.prod(blocks) * itemsize)
    if form.stores_head and not heads:
        head = network.text.vocab_size, network.text.hidden_size
        yield Stored("lm_head.weight", letters, head, math.prod(head) * itemsize)


def _pocket(others: list[Entry], source: str) -> Entry:
    """The built-in model, ranked last; its configuration is its own folder's."""
    folder = locate(POCKET)
    return Entry(
        name=POCKET,
        forms=(Form(POCKET),),
        sees=True,
        grounds=True,
        quality_rank=1 + max(entry.quality_rank or 0 for entry in others),
        quality_source=source,
        small_files_bytes=0,
        config=read_json(folder / CONFIG),
        images=read_json(folder / IMAGES),
    )


def _entry(values: Mapping[str, Any], data: Mapping[str, Any]) -> Entry:
    images = values.get("images")
    looked_up = {
        "forms": tuple(Form(**form) for form in values["forms"]),
        "sees": images is not None,
        "quality_source": data["quality_sources"][values["quality_source"]],
        "images": data["image_processors"][images] if images is not None else None,
    }
    return Entry(**{**values, **looked_up})
