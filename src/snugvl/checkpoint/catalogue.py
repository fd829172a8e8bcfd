"""Models known without a network: their exact configuration, the forms they are published in, their order.

The data is `catalogue.json`; its tensors follow from the configuration, and the order by quality from the
published scores, each with its source. Revisions are unknown.

Of a GGUF whose file hasn't been read the facts are those of llama.cpp's Q4_K_M, in which nearly every model
is published. Its types follow from names and shapes alone: four bits, but six for the values and second
products of every third layer and those at both ends, and for the head; norms in 32 bits, the vision tower in
16. The bytes are those of a file with these tensors (`tests/checkpoint/test_gguf_editions.py`).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from snugvl.checkpoint.assemble import (
    CONFIG,
    IMAGES,
    assemble,
    folder_material,
    network_of,
)
from snugvl.checkpoint.facts import GgufFacts, Material, ModelFacts, Stored, TensorFact
from snugvl.checkpoint.families.traits import Network
from snugvl.checkpoint.image_rules import SmartResize
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.checkpoint.section import read_json
from snugvl.core.formats import PREQUANTIZED

RANKED_BY: Final = "MMMU"  # of the validation set: the one benchmark that every vendor publishes
_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


FILE_TYPE: Final = "Q4_K_M"
MOST_TOKENS: Final = 4096  # of a picture of Qwen's families in llama.cpp
BLOCKS_OF: Final[dict[str, tuple[int, int]]] = {  # values and bytes
    "Q4_K": (256, 144), "Q6_K": (256, 210), "Q8_0": (32, 34), "Q5_0": (32, 22), "F16": (1, 2), "F32": (1, 4),
}  # fmt: skip
FINER: Final = ("v_proj.weight", "down_proj.weight", "down_proj")
FLOAT: Final = ("conv1d.weight", "mlp.gate.weight", "pos_embed.weight")  # the second: a mixture's router
UNREAD: Final = "its file has not been read; only llama.cpp is planned for it"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Form:
    """One repository of a model (or pocket's folder), in one format.

    `stores_head`: whether an lm_head is in the file although the model ties it.
    """

    repo: str
    quantization: Literal["fp8"] | None = None
    stores_head: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """A model's published score on a benchmark, in per cent. None: not published, or not found.

    `plain`: without thinking before the answer. `thinking`: with it. `source`: the document, and how it was
    read.
    """

    benchmark: str
    source: str
    plain: float | None = None
    thinking: float | None = None

    @property
    def value(self) -> float:
        """The score that counts: without thinking where that is known, else with it."""
        known = self.plain if self.plain is not None else self.thinking
        assert known is not None, "the catalogue has no empty score"
        return known


@dataclass(frozen=True, slots=True)
class Entry:
    """One model.

    Attributes:
        name: Hub id of the plain form, or "pocket".
        forms: where it is published, plain weights first.
        sees: whether it takes images.
        grounds: whether it finds boxes, as its vendor says.
        gated: whether the Hub asks to accept a licence first.
        scores: published for pictures.
        quality_rank: 1 is the best of the catalogue among those that see; None: not ranked against them.
        small_files_bytes: approximate bytes of tokenizer, templates and configuration.
        gguf: name of a GGUF of it, published by its maker or llama.cpp's, with its mmproj; or "".
    """

    name: str
    forms: tuple[Form, ...]
    sees: bool
    small_files_bytes: int
    config: Mapping[str, Any]
    images: Mapping[str, Any] | None
    grounds: bool = False
    gated: bool = False
    scores: tuple[Score, ...] = ()
    quality_rank: int | None = None
    gguf: str = ""

    @property
    def quality_source(self) -> str:
        """The source of its place in the order by quality."""
        if self.name == POCKET:
            return (
                "last: a demonstration model of this project for drawn shapes and words, not for photographs"
            )
        if not self.scores:
            return "not ranked: text only"
        ranked = next((each for each in self.scores if each.benchmark == RANKED_BY), None)
        if ranked is None:
            names = ", ".join(each.benchmark for each in self.scores)
            return f"no {RANKED_BY}; above those that it beats on {names}: {self.scores[0].source}"
        how = ", with thinking" if ranked.plain is None and ranked.thinking is not None else ""
        return f"{ranked.value} % on {RANKED_BY}{how}: {ranked.source}"


@cache
def entries() -> tuple[Entry, ...]:
    """The whole catalogue, best first, then the models without a rank."""
    data = _data()
    found = [_entry(values, data) for values in data["models"]]
    order = [*_ordered(found), _pocket()]
    ranked = (replace(entry, quality_rank=place) for place, entry in enumerate(order, 1))
    return (*ranked, *(entry for entry in found if not entry.scores))


def thinks_about_pictures(model_type: str) -> bool | None:
    """Whether models of a family should think before they answer about pictures; None: as their chat template
    has it. `catalogue.json` has the reasons and sources."""
    known = _data()["thinking"].get(model_type)
    return None if known is None else known["pictures"]


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
    return found


def _ordered(found: list[Entry]) -> list[Entry]:
    """Entries with scores, best first. One without the ranking benchmark stands right above the best that it
    beats on all that both have; of equals the file's first is first."""
    scores = {entry.name: {each.benchmark: each.value for each in entry.scores} for entry in found}
    order = [entry for entry in found if RANKED_BY in scores[entry.name]]
    order.sort(key=lambda entry: -scores[entry.name][RANKED_BY])
    for entry in found:
        mine = scores[entry.name]
        if not mine or RANKED_BY in mine:
            continue
        for place, other in enumerate(order):
            theirs = scores[other.name]
            both = mine.keys() & theirs.keys()
            if both and all(mine[name] > theirs[name] for name in both):
                order.insert(place, entry)
                break
        else:
            raise AssertionError(f"the catalogue has nothing to rank {entry.name} by")
    return order


def find(model: str) -> tuple[Entry, Form] | None:
    """The entry and the form that a Hub id names; case doesn't matter, as on the Hub."""
    for entry in entries():
        for form in entry.forms:
            if form.repo.lower() == model.lower():
                return entry, form
    return None


def published_as(gguf: str) -> Entry | None:
    """The entry whose `gguf` has this name, or None."""
    return next((entry for entry in entries() if entry.gguf and entry.gguf.lower() == gguf.lower()), None)


def did_you_mean(model: str) -> str:
    """`; did you mean OWNER/NAME?` where the catalogue has a name much like `model`, of the same owner where
    one was given; else the empty string."""
    from difflib import get_close_matches

    owner, _, name = model.strip().lower().rpartition("/")
    names: dict[str, str] = {}
    for repo in (form.repo for entry in entries() for form in entry.forms):
        its_owner, _, its_name = repo.lower().rpartition("/")
        if owner in ("", its_owner):
            names[its_name] = repo
    if not name or names.get(name, "").lower() == model.strip().lower():
        return ""
    begun = sorted((known for known in names if len(name) > 3 and known.startswith(name)), key=len)
    found = begun[:1] or get_close_matches(name, names, n=1, cutoff=0.8)
    return f"; did you mean {names[found[0]]}?" if found else ""


def meant_or(model: str, hint: str) -> str:
    """End of an error about a missing model: a likely name of the catalogue, else `hint`."""
    meant = did_you_mean(model)
    return f"{meant} If not, {hint}" if meant else f"; {hint}"


def catalogue_facts(model: str) -> ModelFacts | None:
    """Facts of a model of the catalogue, or None. But for pocket's, no header is read: they are computed."""
    found = find(model)
    if found is None:
        if (entry := published_as(model)) is None or (facts := catalogue_facts(entry.name)) is None:
            return None
        return q4_k_m(facts, entry.gguf)
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
    """The tensors that a form stores: FP8 matrices with one 16-bit scale a block, everything else plain."""
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


def _pocket() -> Entry:
    """The built-in model, ranked last; its configuration is its own folder's."""
    folder = locate(POCKET)
    return Entry(
        name=POCKET,
        forms=(Form(POCKET),),
        sees=True,
        grounds=True,
        small_files_bytes=0,
        config=read_json(folder / CONFIG),
        images=read_json(folder / IMAGES),
    )


def _entry(values: Mapping[str, Any], data: Mapping[str, Any]) -> Entry:
    images = values.get("images")
    looked_up = {
        "forms": tuple(Form(**form) for form in values["forms"]),
        "sees": images is not None,
        "scores": tuple(
            Score(**{**score, "source": data["sources"][score["source"]]})
            for score in values.get("scores", ())
        ),
        "images": data["image_processors"][images] if images is not None else None,
    }
    return Entry(**{**values, **looked_up})


def q4_k_m(facts: ModelFacts, name: str) -> ModelFacts:
    """The model as a GGUF in Q4_K_M that goes by `name`."""
    tensors = tuple(_q4_k_m_tensors(facts))
    vision = facts.vision
    if vision is not None and isinstance(vision.rule, SmartResize):
        most = MOST_TOKENS * (vision.patch_size * vision.merge_size) ** 2
        vision = replace(vision, rule=replace(vision.rule, max_pixels=min(vision.rule.max_pixels, most)))
    layers = tuple(replace(each, state_bytes=each.state(4), state_values=0) for each in facts.text.kv_layers)
    return replace(
        facts,
        name=name,
        tensors=tensors,
        text=replace(facts.text, kv_layers=layers),
        vision=vision,
        quantization=PREQUANTIZED[4],
        native=False,
        predictor=None,
        download_bytes=sum(tensor.nbytes for tensor in tensors if tensor.loaded),
        gguf=GgufFacts(FILE_TYPE, vision.deepstack_levels if vision else 0, why_not=UNREAD),
    )


def _q4_k_m_tensors(facts: ModelFacts) -> Iterator[TensorFact]:
    for tensor in facts.tensors:
        if not tensor.loaded or (tensor.role == "lm_head" and facts.tied):
            continue
        match = _LAYER.search(tensor.name)
        sees = tensor.role in ("vision", "connector")
        dtype = _q4_k_m_type(tensor, facts, -1 if match is None else int(match[1]))
        values, nbytes = BLOCKS_OF[dtype]
        prefix = "v." if sees else "" if match is None else f"blk.{match[1]}."
        yield tensor._replace(
            name=prefix + tensor.name, dtype=dtype, nbytes=prod(tensor.shape) // values * nbytes
        )


def _q4_k_m_type(tensor: TensorFact, facts: ModelFacts, layer: int) -> str:
    """The type that `llama-quantize` chooses for a tensor in Q4_K_M."""
    if len(tensor.shape) == 1 or tensor.name.endswith(FLOAT):
        return "F32"
    if tensor.role in ("vision", "connector"):
        return "F16"
    layers = facts.text.num_layers
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    finer = tensor.role == "lm_head" or (tensor.role == "embedding" and facts.tied)
    finer = finer or (layer >= 0 and more and tensor.name.endswith(FINER))
    kinds = ("Q6_K", "Q8_0", "F16") if finer else ("Q4_K", "Q5_0", "F16")
    return next(kind for kind in kinds if tensor.shape[-1] % BLOCKS_OF[kind][0] == 0)
