"""A model's tensors in groups of equal ones, so that a plan needn't walk a thousand names, and the widths of
its vectors, in which the formulas are written."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final, Literal

from snugvl.checkpoint.facts import PREDICTOR, KVLayer, ModelFacts, Role, TensorFact
from snugvl.checkpoint.gguf_network import BLOCKS

Part = Literal["vision", "embedding", "lm_head", "decoder", "predictor"]
Kind = Literal["plain", "matrix", "fp8", "scale", "scale8", "tower", "packed", "blocks"]
PARTS: Final[tuple[Part, ...]] = ("decoder", "predictor", "embedding", "lm_head", "vision")
PLAIN: Final = frozenset(("BF16", "F16", "F32", "F64"))
POSITIONS: Final = "pos_embed.weight"

_PARTS: Final[Mapping[Role, Part]] = {"vision": "vision", "connector": "vision", "embedding": "embedding",
                                      "lm_head": "lm_head"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """`count` tensors of one shape, role and stored dtype.

    `kind`: "plain" weights that stay 16-bit, a "matrix" of the decoder that may be quantised, its stored
    "fp8" form, its "scale"s ("scale8": of 8-bit integers among 4-bit ones), a matrix of the vision "tower",
    "packed" integers of a pre-quantized 4- or 8-bit checkpoint, or the "blocks" of a GGUF, whatever they are
    a matrix of. `expert`: of a mixture's experts, their scales included.
    """

    part: Part
    kind: Kind
    shape: tuple[int, ...]
    nbytes: int
    count: int
    expert: bool = False

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """A model, ready for the planner. Compared by identity, so that what is derived from it can be cached.

    Attributes:
        kv_layers: distinct attention layers, each with its count.
        qk_norm: whether queries and keys are normed, head by head, so that keys are small and alike.
    """

    facts: ModelFacts
    groups: tuple[TensorGroup, ...]
    parameters: int
    kv_layers: tuple[tuple[KVLayer, int], ...]
    qk_norm: bool = False

    @property
    def name(self) -> str:
        """The model's name as the user gave it."""
        return self.facts.name

    @property
    def mixed(self) -> bool:
        """Whether layers are mixtures of experts."""
        return any(group.expert for group in self.groups)

    @property
    def experts_read(self) -> float:
        """Share of the experts of a layer that one token reads; 1 for other models."""
        text = self.facts.text
        if text.mixture is not None:  # files may have each expert by itself
            return text.mixture.used / text.mixture.count
        if not text.experts_used:
            return 1.0
        stored = next((tensor.shape for tensor in self.facts.tensors if tensor.role == "expert"), None)
        return text.experts_used / stored[0] if stored else 1.0

    def has(self, kind: Kind, *parts: Part) -> bool:
        """Whether there are tensors of a kind, in any of these parts, or anywhere."""
        return _has(self, kind, parts)


@lru_cache(maxsize=4096)
def _has(model: Inventory, kind: Kind, parts: tuple[Part, ...]) -> bool:
    return any(group.kind == kind and (not parts or group.part in parts) for group in model.groups)


@lru_cache(maxsize=128)  # more than the catalogue has forms: what is derived of one serves the next plan
def inventory(facts: ModelFacts) -> Inventory:
    """Group the tensors of a model, without a stored lm_head that is tied: no engine loads it."""
    counts = Counter(group_of(tensor) for tensor in facts.tensors if tensor.loaded)
    unused = "lm_head" if facts.tied else None
    groups = tuple(replace(one, count=count) for one, count in counts.items() if one.part != unused)
    parameters = sum(
        each.elements * each.count for each in groups if each.kind not in ("scale", "scale8", "packed")
    )
    normed = any(tensor.role == "norm" and "q_norm" in tensor.name for tensor in facts.tensors)
    return Inventory(facts, groups, parameters, tuple(Counter(facts.text.kv_layers).items()), normed)


def group_of(tensor: TensorFact) -> TensorGroup:
    """One tensor as a group of its own."""
    name, role = tensor.name, tensor.role
    rest: Part = "predictor" if name.startswith(PREDICTOR) else "decoder"
    expert = role == "expert" or (role in ("scale", "scale8") and ".experts." in name)
    part = _PARTS.get(role, rest)
    return _group(part, role, tensor.dtype, tensor.shape, tensor.nbytes, expert, name.endswith(POSITIONS))


@lru_cache(maxsize=4096)  # of hundreds of thousands of tensors few differ
def _group(
    part: Part, role: Role, dtype: str, shape: tuple[int, ...], nbytes: int, expert: bool, positions: bool
) -> TensorGroup:
    """A group of one tensor. `positions`: whether it has learned ones."""
    return TensorGroup(part, _kind(part, role, dtype, shape, positions), shape, nbytes, 1, expert)


def _kind(part: Part, role: Role, dtype: str, shape: tuple[int, ...], positions: bool) -> Kind:
    if role in ("scale", "scale8"):
        return role
    if dtype.startswith("F8"):
        return "fp8"
    if dtype not in PLAIN:
        return "blocks" if dtype in BLOCKS else "packed"
    # Learned positions are looked up, not multiplied; patches are embedded by a tensor of more dimensions.
    if part == "vision" and len(shape) == 2 and not positions:
        return "tower"
    layer = part in ("decoder", "predictor")
    return "matrix" if layer and role in ("linear", "expert") else "plain"


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of the decoder's vectors, in values."""

    h: int
    i: int
    q: int
    k: int
    d: int
    heads: int


def mlp_width(model: Inventory) -> int:
    """Widest MLP that every token of a layer passes: where all layers are mixtures, the shared expert."""
    text = model.facts.text
    if text.mixture is None or not all(text.mixture.layers):
        return text.intermediate_size
    return text.mixture.shared


@lru_cache(maxsize=256)
def widths(model: Inventory) -> Widths:
    """The widths of a model's decoder; where layers differ (Gemma 3, hybrids), those of the widest."""
    text = model.facts.text
    layer = max((layer for layer, _ in model.kv_layers), key=lambda layer: layer.kv_heads * layer.head_dim)
    return Widths(
        text.hidden_size,
        text.intermediate_size,
        text.num_heads * layer.head_dim,
        layer.kv_heads * layer.head_dim,
        layer.head_dim,
        text.num_heads,
    )
