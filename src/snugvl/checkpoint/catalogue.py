"""Models known without a network: their exact configuration, the forms they are published in, their order.

The data is `catalogue.json`; its tensors follow from the configuration, and the order by quality from the
published scores, each with its source. Revisions are unknown.

Of a GGUF whose file hasn't been read the facts are those that `llama-quantize` would make: nearly every
model is published in Q4_K_M, mixtures in Q3_K_M to Q8_0. Types follow from names and shapes alone (`_Mix`):
of Q4_K_M four bits, but six for the values and second products of every third layer and those at both ends,
and for the head; norms in 32 bits, the vision tower in 16. The bytes are those of a file with these
tensors; published files of mixtures, whose makers choose some types themselves, are up to 8 % larger
(`tests/checkpoint/test_gguf_editions.py`).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from snugvl.checkpoint.assemble import CONFIG, IMAGES, assemble, folder_material, network_of
from snugvl.checkpoint.facts import GgufFacts, Material, ModelFacts, Role, Stored, TensorFact
from snugvl.checkpoint.families import is_of, traits_of
from snugvl.checkpoint.families.traits import Network
from snugvl.checkpoint.image_rules import SmartResize
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.checkpoint.section import read_json
from snugvl.core.formats import PREQUANTIZED

RANKED_BY: Final = "MMMU"  # of the validation set: the one benchmark that every vendor publishes
_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


FILE_TYPE: Final = "Q4_K_M"
GROUP: Final = 128  # inputs that share a scale in nearly all pre-quantized 4-bit editions
MOST_TOKENS: Final = 4096  # of a picture of Qwen's families in llama.cpp
BLOCKS_OF: Final[dict[str, tuple[int, int]]] = {  # values and bytes
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_0": (32, 34),
    "IQ4_NL": (32, 18), "Q5_0": (32, 22), "Q5_1": (32, 24), "F16": (1, 2), "F32": (1, 4),
}  # fmt: skip
DOWN: Final = ("down_proj.weight", "down_proj")
VALUES: Final = "v_proj.weight"
JOINED: Final = "in_proj_qkv.weight"  # queries, keys and values of linear attention
# The second: a mixture's router; the third: the gate of its shared expert, a vector there.
FLOAT: Final = (
    "conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight", "pos_embed.weight", "router.proj.weight",
    "position_embedding_table",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Mix:
    """Types of one file type as `llama-quantize` chooses them (llama.cpp, src/llama-quant.cpp).

    Attributes:
        base: type of all tensors that no other attribute names.
        more: type of values and second products, in every third layer and those at both ends (`first` 0).
        first: the first layers, one of so many, have second products of type `early`; 0: see `more`.
        early, rest: types of second products in the first layers, and in the others.
        values: types of the first two layers' values, and of the others'.
        joined, out: types of `JOINED` in mixtures, and of the attention's output.
    """

    base: str
    more: str = ""
    first: int = 0
    early: str = ""
    rest: str = ""
    values: tuple[str, str] = ("", "")
    joined: str = ""
    out: str = ""


MIXES: Final[Mapping[str, _Mix]] = {
    "Q3_K_M": _Mix("Q3_K", "", 16, "Q5_K", "Q4_K", ("Q5_K", "Q4_K"), joined="Q4_K", out="Q4_K"),
    "Q4_K_M": _Mix("Q4_K", "Q6_K", joined="Q5_K"),
    "Q5_K_M": _Mix("Q5_K", "Q6_K", joined="Q6_K"),
    "Q6_K": _Mix("Q6_K"),
    "Q8_0": _Mix("Q8_0"),
}
# Of tensors whose rows aren't whole blocks of 256.
NARROW: Final = {"Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
UNREAD: Final = "its file has not been read; only llama.cpp is planned for it"
_VERSION = re.compile(r"\d+\.\d+")
_LETTERS = re.compile(r"[^a-z0-9]+")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Form:
    """One repository of a model (or pocket's folder), in one format.

    `stores_head`: whether an lm_head is in the file although the model ties it. `led`: whether it may be
    recommended; else it is of others than the vendor, and known for those who name it.
    """

    repo: str
    quantization: Literal["fp8", "gptq", "awq"] | None = None
    stores_head: bool = False
    led: bool = True


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
        forms: repositories that publish it, plain weights first.
        sees: whether it takes images.
        grounds: whether it finds boxes, as its vendor says.
        gated: whether the Hub asks to accept a licence first.
        scores: scores on pictures that were published.
        quality_rank: 1 is the best of the catalogue among those that see; None: not ranked against them.
        small_files_bytes: approximate bytes of tokenizer, templates and configuration.
        gguf: name of a GGUF of it to be led to, published by its maker or llama.cpp's, with its mmproj; "" as
            of Gemma 4, whose pictures have too few tokens in llama.cpp.
        ggufs: other GGUFs of it that people hold.
        above: (model right above which it is ranked, why), for a model without scores; else None.
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
    ggufs: tuple[str, ...] = ()
    above: tuple[str, str] | None = None

    @property
    def editions(self) -> tuple[str, ...]:
        """Names of all GGUFs, the recommended one first."""
        return tuple(filter(None, (self.gguf, *self.ggufs)))


@cache
def entries() -> tuple[Entry, ...]:
    """The whole catalogue, best first, then the models without a rank."""
    data = _data()
    found = [_entry(values, data) for values in data["models"]]
    order = [*_ordered(found), _pocket()]
    ranked = (replace(entry, quality_rank=place) for place, entry in enumerate(order, 1))
    return (*ranked, *(entry for entry in found if not entry.scores and entry.above is None))


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
    beats on all that both have; of equals the file's first is first. Last come those whose place is said."""
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
    for entry in found:
        if entry.above is not None:
            order.insert([each.name for each in order].index(entry.above[0]), entry)
    return order


def find(model: str) -> tuple[Entry, Form] | None:
    """The entry and the form that a Hub id names; case doesn't matter, as on the Hub."""
    for entry in entries():
        for form in entry.forms:
            if form.repo.lower() == model.lower():
                return entry, form
    return None


def published_as(gguf: str) -> Entry | None:
    """The entry of which a GGUF has this name, or None."""
    return _published().get(gguf.lower())


@cache
def _published() -> dict[str, Entry]:
    return {name.lower(): entry for entry in entries() for name in entry.editions}


def alike(facts: ModelFacts) -> Entry | None:
    """The ranked entry that a model under another name is of, by family and shapes; or None.

    Of several alike it is the one whose version the name says, else the one of the lowest rank.
    """
    shapes = facts.text.hidden_size, facts.text.num_layers
    found = []
    for entry in entries():
        text = entry.config.get("text_config", entry.config)
        if (text.get("hidden_size"), text.get("num_hidden_layers")) != shapes or entry.quality_rank is None:
            continue
        if is_of(facts.family, entry.config.get("architectures")):
            found.append(entry)
    said = (entry for entry in found if (version := _VERSION.search(entry.name)) and version[0] in facts.name)
    return next(said, found[-1]) if found else None


def did_you_mean(model: str) -> str:
    """`; did you mean OWNER/NAME?` where the catalogue has a name much like `model`, of the same owner where
    one was given; else the empty string."""
    from difflib import get_close_matches

    if published_as(model) is None and (edition := _edition(*model.strip().lower().split(":", 1))):
        return f"; did you mean {edition}?"
    owner, _, name = model.strip().lower().rpartition("/")
    names: dict[str, str] = {}
    for repo in (form.repo for entry in entries() for form in entry.forms):
        its_owner, _, its_name = repo.lower().rpartition("/")
        if owner in ("", its_owner):
            names[its_name] = repo
    if not name or names.get(name, "").lower() == model.strip().lower():
        return ""
    bare = {known: _LETTERS.sub("", known) for known in names}  # Ollama's qwen2.5vl:7b begins one as well
    start = _LETTERS.sub("", name)
    begun = sorted((known for known in names if len(start) > 3 and bare[known].startswith(start)), key=len)
    found = begun[:1] or get_close_matches(name, names, n=1, cutoff=0.8)
    return f"; did you mean {names[found[0]]}?" if found else ""


def _edition(repo: str, file_type: str = "") -> str:
    """The GGUF that a repository and a file type, in lower case, may stand for; "" where none is known."""
    held = [each for entry in entries() for each in entry.editions if each.lower().startswith(f"{repo}:")]
    known = find(repo) if file_type else None
    held = held or list(known[0].editions if known else ())
    alike = (each for each in held if each.lower().rpartition(":")[2].startswith(file_type))
    return next(alike, (*held, "")[0])


def meant_or(model: str, hint: str) -> str:
    """End of an error about a missing model: a likely name of the catalogue, else `hint`."""
    meant = did_you_mean(model)
    return f"{meant} If not, {hint}" if meant else f"; {hint}"


@lru_cache(maxsize=128)  # more than the forms that a plan looks at
def catalogue_facts(model: str) -> ModelFacts | None:
    """Facts of a model of the catalogue, or None. But for pocket's, no header is read: they are computed."""
    found = find(model)
    if found is None:
        if (entry := published_as(model)) is None or (facts := catalogue_facts(entry.name)) is None:
            return None
        return gguf_edition(facts, next(each for each in entry.editions if each.lower() == model.lower()))
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
    facts = assemble(model, material, network)
    return four_bits(facts, experts_alone=True) if form.quantization in ("gptq", "awq") else facts


@lru_cache(maxsize=32)
def four_bits(facts: ModelFacts, *, experts_alone: bool = False) -> ModelFacts:
    """Facts of a model's 4-bit edition: codes, scales and zero points of the decoder, of 128 inputs each.

    Args:
        experts_alone: attention and shared experts stay as they are, as in Qwen's own GPTQ editions, and in
            AWQ ones, whose tensors have as many bytes.
    """
    tensors: list[TensorFact] = []
    kinds = ("expert",) if experts_alone else ("linear", "expert")
    for tensor in facts.tensors:
        if tensor.role not in kinds or not tensor.loaded or len(tensor.shape) < 2:
            tensors.append(tensor)
            continue
        *experts, rows, columns = tensor.shape
        name, role = tensor.name.removesuffix("weight"), tensor.role
        groups, many = columns // GROUP, prod(experts)
        parts: tuple[tuple[str, Role, str, int, int], ...] = (
            ("qweight", role, "I32", columns, 4),
            ("qzeros", role, "I32", groups, 4),
            ("scales", "scale", "F16", groups, 16),
        )
        for part, kind, dtype, inputs, bits in parts:
            shape = (*experts, inputs, rows // 8 if dtype == "I32" else rows)
            tensors.append(TensorFact(f"{name}{part}", kind, dtype, shape, many * inputs * rows * bits // 8))
    stored = sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in facts.tensors)
    return replace(
        facts,
        tensors=tuple(tensors),
        quantization=PREQUANTIZED[4],
        download_bytes=facts.download_bytes + stored,
    )


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
        "ggufs": tuple(
            f"{repo}:{kind}" for repo, kinds in values.get("ggufs", {}).items() for kind in kinds.split()
        ),
        "above": tuple(values["above"]) if "above" in values else None,
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
    return gguf_edition(facts, f"{name}:{FILE_TYPE}", called=name)


@lru_cache(maxsize=32)
def gguf_edition(facts: ModelFacts, name: str, *, called: str = "") -> ModelFacts:
    """Facts of the model as the GGUF `name`, "owner/name:QUANT" with QUANT a key of `MIXES`.

    Args:
        called: the name of the facts, if not `name`.
    """
    file_type = name.rpartition(":")[2]
    tensors = tuple(_gguf_tensors(facts, MIXES[file_type]))
    vision = facts.vision
    if vision is not None and isinstance(vision.rule, SmartResize):
        most = MOST_TOKENS * (vision.patch_size * vision.merge_size) ** 2
        vision = replace(vision, rule=replace(vision.rule, max_pixels=min(vision.rule.max_pixels, most)))
    elif vision is not None and (pictures := traits_of(facts.family).pictures) is not None:
        patch, merge = vision.patch_size, vision.merge_size
        least, most = pictures.least * (patch * merge) ** 2, pictures.most * (patch * merge) ** 2
        vision = replace(vision, rule=SmartResize(patch, merge, min_pixels=least, max_pixels=most))
    layers = tuple(replace(each, state_bytes=each.state(4), state_values=0) for each in facts.text.kv_layers)
    return replace(
        facts,
        name=called or name,
        tensors=tensors,
        text=replace(facts.text, kv_layers=layers),
        vision=vision,
        quantization=PREQUANTIZED[8 if MIXES[file_type].base in ("Q6_K", "Q8_0") else 4],
        native=False,
        predictor=None,
        download_bytes=sum(tensor.nbytes for tensor in tensors if tensor.loaded),
        gguf=GgufFacts(file_type, vision.deepstack_levels if vision else 0, why_not=UNREAD),
    )


def _gguf_tensors(facts: ModelFacts, mix: _Mix) -> Iterator[TensorFact]:
    for tensor in facts.tensors:
        if not tensor.loaded or (tensor.role == "lm_head" and facts.tied):
            continue
        match = _LAYER.search(tensor.name)
        sees = tensor.role in ("vision", "connector")
        dtype = _gguf_type(tensor, facts, -1 if match is None else int(match[1]), mix)
        values, nbytes = BLOCKS_OF[dtype]
        prefix = "v." if sees else "" if match is None else f"blk.{match[1]}."
        yield tensor._replace(
            name=prefix + tensor.name, dtype=dtype, nbytes=prod(tensor.shape) // values * nbytes
        )


def _gguf_type(tensor: TensorFact, facts: ModelFacts, layer: int, mix: _Mix) -> str:
    """The type that `llama-quantize` chooses for a tensor."""
    if len(tensor.shape) == 1 or tensor.name.endswith(FLOAT):
        return "F32"
    if tensor.role in ("vision", "connector"):
        return "F16"
    kind = mix.base
    if tensor.role == "lm_head" or (tensor.role == "embedding" and facts.tied):
        kind = "Q8_0" if mix.base == "Q8_0" else "Q6_K"
    elif layer >= 0:
        kind = _layer_type(tensor.name, layer, facts, mix) or mix.base
    if tensor.shape[-1] % BLOCKS_OF[kind][0]:
        kind = NARROW.get(kind, "F16")
    return kind if tensor.shape[-1] % BLOCKS_OF[kind][0] == 0 else "F16"


def _layer_type(name: str, layer: int, facts: ModelFacts, mix: _Mix) -> str:
    """Type of a layer's matrix where it isn't `mix.base`; else ""."""
    layers = facts.text.num_layers
    if name.endswith(JOINED):
        # Dense files were planned, and measured, without it; a third of a per cent there.
        return mix.joined if facts.text.experts_used else ""
    if mix.more and name.endswith((VALUES, *DOWN)):
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        return mix.more if more else ""
    if name.endswith(VALUES):
        return mix.values[0 if layer < 2 else 1]
    if name.endswith(DOWN) and mix.first:
        return mix.early if layer < layers // mix.first else mix.rest
    return mix.out if name.endswith("self_attn.o_proj.weight") else ""
