"""The two views of a configuration: `Network` for the plan of any engine, `ModelConfig` for our own.

Names of tensors are those of transformers' state_dict; `aliases` turn what older files on the Hub store into
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snugvl.checkpoint.architecture import ModelConfig, TextConfig, VisionConfig, VisionTokens
from snugvl.checkpoint.facts import KVLayer, Role, TextFacts, VisionFacts
from snugvl.checkpoint.quantized import read_layout
from snugvl.checkpoint.section import Section, shown
from snugvl.errors import CheckpointError


class Expected(NamedTuple):
    """One tensor that a checkpoint of this configuration must have (a tuple: there are 10,000s of them)."""

    name: str
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class Network:
    """What the planner needs of a configuration: shapes, image-token rule, and the tensors that follow.

    Attributes:
        tied: lm_head is the embedding; a file may store it all the same.
        unloaded: what published files store besides, and no engine loads unasked.
        predictor: keys and values of the multi-token predictor among them; None without one.
        aliases: (prefix in older files, prefix in transformers' state_dict), the first match counts.
    """

    family: str
    architecture: str
    text: TextFacts
    vision: VisionFacts | None
    tied: bool
    tensors: tuple[Expected, ...]
    unloaded: tuple[Expected, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    predictor: KVLayer | None = None

    def canonical(self, name: str) -> str:
        """transformers' name of a tensor as the file calls it."""
        for old, new in self.aliases:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


def model_config(
    root: Section,
    architecture: str,
    text: TextConfig,
    *,
    tied: bool,
    inner: Section | None = None,
    vision: VisionConfig | None = None,
    tokens: VisionTokens | None = None,
    predictor: bool = False,
) -> ModelConfig:
    """What our engine needs, with what `root`, or the decoder's own `inner` section, says of all weights.

    Raises:
        CheckpointError: the quantisation lacks a field.
        UnsupportedModel: a quantisation that this engine doesn't run.
    """
    dtypes = (root.values.get("dtype"), (inner or root).values.get("dtype"), root.values.get("torch_dtype"))
    return ModelConfig(
        architecture=architecture,
        text=text,
        vision=vision,
        vision_tokens=tokens,
        tie_word_embeddings=tied,
        dtype=str(next((value for value in dtypes if value), "bfloat16")),
        quantization=read_layout(root),
        predictor=predictor,
    )


def ties(root: Section, text: Section, *, default: bool = False) -> bool:
    """Whether lm_head is the embedding. transformers ≥ 5 reads the top level; older files the text's."""
    key = "tie_word_embeddings"
    section = text if root.values.get(key) is None else root
    tied: bool = section.get(key, bool, default)
    return tied


def layer_types(section: Section, default: Sequence[str], known: Sequence[str]) -> list[str]:
    """`layer_types`, or `default`, which is as long as the model, where the file has none.

    Raises:
        CheckpointError: the list is not as long as the model, or names a kind of layer we don't know.
    """
    types: list[str] = section.get("layer_types", list, list(default))
    unknown = [kind for kind in types if kind not in known]
    if len(types) != len(default) or unknown:
        raise CheckpointError(
            f"{section.where} has {len(types)} layer_types for {len(default)} layers"
            + (f", of an unknown kind {shown(unknown[0])}" if unknown else "")
        )
    return types


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
