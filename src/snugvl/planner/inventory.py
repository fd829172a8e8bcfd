"""A model's tensors grouped by what the planner asks of them: a plan needn't walk a thousand names."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from snugvl.checkpoint.facts import KVLayer, ModelFacts, Role, TensorFact

Part = Literal["vision", "embedding", "lm_head", "decoder"]
PARTS: Final[tuple[Part, ...]] = ("decoder", "embedding", "lm_head", "vision")
PLAIN: Final = frozenset(("BF16", "F16", "F32", "F64"))

_PARTS: Final[Mapping[Role, Part]] = {"vision": "vision", "connector": "vision", "embedding": "embedding",
                                      "lm_head": "lm_head"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """`count` tensors of one shape, role and stored dtype.

    `kind`: "plain" weights that stay 16-bit, a "matrix" of the decoder that may be quantised, its stored
    "fp8" form, its "scale"s, a matrix of the vision "tower", or "packed" integers of a ready-made 4- or 8-bit
    checkpoint.
    """

    part: Part
    kind: Literal["plain", "matrix", "fp8", "scale", "tower", "packed"]
    shape: tuple[int, ...]
    nbytes: int
    count: int

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """A model, ready for the planner. Compared by identity, so that what is derived from it can be cached.

    Attributes:
        kv_layers: distinct attention layers and how many there are of each.
    """

    facts: ModelFacts
    groups: tuple[Group, ...]
    parameters: int
    kv_layers: tuple[tuple[KVLayer, int], ...]

    @property
    def name(self) -> str:
        """As the user said it."""
        return self.facts.name


def inventory(facts: ModelFacts) -> Inventory:
    """Group the tensors of a model. A stored head that is tied is left out: no engine loads it."""
    counts: dict[tuple[str, str, tuple[int, ...], int], int] = defaultdict(int)
    parameters = 0
    for tensor in facts.tensors:
        part = _part(tensor)
        if not tensor.loaded or (part == "lm_head" and facts.tied):
            continue
        kind = _kind(tensor, part)
        counts[part, kind, tensor.shape, tensor.nbytes] += 1
        if kind in ("plain", "matrix", "fp8", "tower"):
            parameters += prod(tensor.shape)
    groups = tuple(Group(*key, count) for key, count in counts.items())  # type: ignore[arg-type]
    return Inventory(facts, groups, parameters, tuple(Counter(facts.text.kv_layers).items()))


def _part(tensor: TensorFact) -> Part:
    return _PARTS.get(tensor.role, "decoder")


def _kind(tensor: TensorFact, part: Part) -> str:
    if tensor.role == "scale":
        return "scale"
    if tensor.dtype.startswith("F8"):
        return "fp8"
    if tensor.dtype not in PLAIN:
        return "packed"
    # Learned positions are looked up, not multiplied; patches are embedded by a tensor of more dimensions.
    if part == "vision" and len(tensor.shape) == 2 and not tensor.name.endswith("pos_embed.weight"):
        return "tower"
    return "matrix" if part == "decoder" and tensor.role in ("linear", "expert") else "plain"
