"""What a family knows from a configuration alone: the expected tensors and the shapes the planner needs.

Names are those of transformers' state_dict; `aliases` turn what older files on the Hub store into them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from snugvl.checkpoint.facts import Role, TextFacts, VisionFacts
from snugvl.checkpoint.section import Section
from snugvl.errors import CheckpointError


class Expected(NamedTuple):
    """One tensor that a checkpoint of this configuration must have (a tuple: there are 10,000s of them)."""

    name: str
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class Network:
    """A configuration, understood.

    Attributes:
        tied: lm_head is the embedding; a file may store it all the same.
        unloaded: what published files store besides, and no engine loads.
        aliases: (prefix in older files, prefix in transformers' state_dict), the first match counts.
        native: our own engine has this network (a quantisation may still exclude it).
    """

    family: str
    architecture: str
    text: TextFacts
    vision: VisionFacts | None
    tied: bool
    tensors: tuple[Expected, ...]
    unloaded: tuple[Expected, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    native: bool = False

    def canonical(self, name: str) -> str:
        """transformers' name of a tensor as the file calls it."""
        for old, new in self.aliases:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


def linear(name: str, rows: int, columns: int, role: Role, *, bias: bool = False) -> Iterator[Expected]:
    """A matrix and, if it has one, its bias. The bias of a decoder's matrix is "other"."""
    yield Expected(f"{name}.weight", (rows, columns), role)
    if bias:
        yield Expected(f"{name}.bias", (rows,), "other" if role == "linear" else role)


def norm(name: str, width: int, role: Role = "norm", *, bias: bool = False) -> Iterator[Expected]:
    """A norm's weight and, for a LayerNorm, its bias."""
    yield Expected(f"{name}.weight", (width,), role)
    if bias:
        yield Expected(f"{name}.bias", (width,), role)


def head(tied: bool, vocab: int, hidden: int) -> Iterator[Expected]:
    """The output matrix, unless it is the embedding."""
    if not tied:
        yield Expected("lm_head.weight", (vocab, hidden), "lm_head")


def one_side(section: Section, key: str, default: int | None = None) -> int:
    """A size that some files write as a pair of equal numbers.

    Raises:
        CheckpointError: it is a pair of different ones, or no size.
    """
    value: Any = section.values.get(key)
    if isinstance(value, list) and value and all(part == value[0] for part in value):
        return Section({key: value[0]}, section.where).count(key)
    return section.count(key, default)


def check_patch(patch: int, image: int, where: str) -> None:
    """Refuse a tower whose square has no patch."""
    if patch > image:
        raise CheckpointError(f"{where} has patches of {patch} pixels in an image of {image}")


def edge(section: Section, key: str, side: str, *, default: int | None = None) -> int:
    """A side of a size that image processors write as {"longest_edge": n}, {"height": n, "width": n} or n."""
    value = section.values.get(key)
    if isinstance(value, Mapping):
        return Section(value, f"{section.where}: {key}").count(side, default)
    return section.count(key, default)


def images_of(images: Section | None, where: str) -> Section:
    """The image processor's settings, which a model that sees must have."""
    if images is None:
        raise CheckpointError(
            f"{where} is a model that sees, but there is no preprocessor_config.json beside it; "
            "without it the tokens of an image are unknown"
        )
    return images
