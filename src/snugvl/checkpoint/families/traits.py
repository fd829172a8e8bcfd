"""What a family says of itself, in one value: a `Family`, which its module makes.

Its `config.json` has two views: `Network` for the plan of any engine, `ModelConfig` for our own. Names of
tensors are those of transformers' state_dict; `aliases` turn what older files on the Hub store into them.
Facts beyond `config.json` stand here as data; each is interpreted where it acts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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


ConventionName = Literal["thousandths", "pixels", "y first", "tags", "locations", "no boxes"]
"""A row of `tasks/conventions.py`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of one family for engines' plans.

    Attributes:
        gguf: architectures in GGUF files that are this family.
        mrope: vLLM keeps a rotary table of several axes.
        rotary_divisor: one of so many values of a head is rotated.
        stretched: layers of two kinds rotate differently in vLLM, and the second kind's positions are
            stretched so many times; None where all rotate alike.
        gated_queries: queries of full attention come with a gate of their width.
        recurrent: its recurrent states are those that are planned for.
        full_every: of so many layers one looks at everything, where its GGUF files don't say it.
    """

    gguf: tuple[str, ...] = ()
    mrope: bool = False
    rotary_divisor: int = 1
    stretched: int | None = None
    gated_queries: bool = False
    recurrent: bool = False
    full_every: int | None = None


@dataclass(frozen=True, slots=True)
class Resized:
    """Size of a picture as a model reads it: sides are multiples of `factor` pixels, the area is between the
    limits."""

    factor: int
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Prompting:
    """How models of an architecture are asked about pictures.

    Attributes:
        family: as people call it.
        convention: the words they are asked in, and how they write boxes.
        resized: of models whose boxes are pixels of the picture as they read it, for engines that don't tell.
    """

    family: str
    convention: ConventionName = "thousandths"
    resized: Resized | None = None


@dataclass(frozen=True, slots=True)
class GgufNetwork:
    """How our own engine runs an architecture of GGUF files.

    Attributes:
        text: the architecture, as transformers calls it, of the decoder alone.
        sees: the one of decoder and tower together, or "".
        projector: the tower's, which our engine has; a key of `Family.projectors`.
        alternating: the two halves of a head alternate, row by row, in matrices of queries and keys.
    """

    text: str
    sees: str = ""
    projector: str = ""
    alternating: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """All that is known of a family, or of several with one plan.

    Attributes:
        architectures: those that `describe` reads for the plan of any engine, as transformers calls them.
        native: those of them that our own engine runs, from what `parse` reads.
        network: the class of their network, as "module:class"; it imports torch, so it stands here by name.
        traits: by the family's name in the plan (`Network.family`), or of an architecture in GGUF files.
        prompting: by architecture, of those that see, whichever engine runs them.
        gguf: by architecture of GGUF files, of those that our own engine runs.
        projectors: by what GGUF files of towers call them, the least and most tokens of a picture that keeps
            its aspect in llama.cpp; None where every picture becomes one square.
    """

    architectures: tuple[str, ...] = ()
    describe: Callable[[Section, str, Section | None], Network] | None = None
    native: tuple[str, ...] = ()
    parse: Callable[[Section, str], ModelConfig] | None = None
    network: str = ""
    traits: Mapping[str, Traits] = field(default_factory=dict)
    prompting: Mapping[str, Prompting] = field(default_factory=dict)
    gguf: Mapping[str, GgufNetwork] = field(default_factory=dict)
    projectors: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)
