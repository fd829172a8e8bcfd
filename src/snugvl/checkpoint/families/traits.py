"""`Family`: the one value in which a family's module says all that is known of it.

Its `config.json` has two views: `Network` for the plan of any engine, `ModelConfig` for our own. Names of
tensors are those of transformers' state_dict; `aliases` turn the names of older files on the Hub into them.
Facts beyond `config.json` are data here; each is interpreted where it acts.
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
    """The planner's view of a configuration: shapes, image-token rule, and the tensors that follow.

    Attributes:
        tied: whether lm_head is the embedding; a file may store it all the same.
        unloaded: tensors that published files also store, and that are loaded on request alone.
        predictor: sizes of the keys and values that the multi-token predictor (its weights are in `unloaded`)
            keeps of a token; None without one.
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
        """transformers' name of a tensor, from its name in the file."""
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
    """Our engine's configuration, with the quantisation that `root`, or the decoder's `inner` section, has.

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
    """Whether lm_head is the embedding: by the top level, as in transformers 5, else by the text section."""
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
    """The tensors of a matrix: its weight and, with `bias`, its bias, which has role "other" in a decoder."""
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


class Pictures(NamedTuple):
    """Pictures that keep their aspect in llama.cpp: the least and most tokens of one, and the patches of a
    token's side where the file doesn't say it."""

    least: int
    most: int
    merge: int = 2


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of one family for engines' plans.

    Attributes:
        gguf: architectures in GGUF files that are this family.
        mrope: whether vLLM keeps a rotary table of several axes.
        rotary_divisor: one in so many values of a head is rotated.
        stretched: factor by which vLLM stretches the positions of the second of two kinds of layers; None
            where all rotate alike.
        gated_queries: whether queries of full attention come with a gate of their width.
        recurrent: whether the planner knows the size of its recurrent states.
        full_every: one in so many layers has full attention, where its GGUF files don't say it.
        pictures: those in llama.cpp, where the checkpoint's own rule is another.
    """

    gguf: tuple[str, ...] = ()
    mrope: bool = False
    rotary_divisor: int = 1
    stretched: int | None = None
    gated_queries: bool = False
    recurrent: bool = False
    full_every: int | None = None
    pictures: Pictures | None = None


@dataclass(frozen=True, slots=True)
class Resized:
    """Size of a picture as a model reads it: sides are multiples of `factor`, the area within the limits."""

    factor: int
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Prompting:
    """How models of an architecture are asked about pictures.

    Attributes:
        family: its name for people.
        convention: the words they are asked in, and how they write boxes.
        resized: limits of the resized picture, for models whose boxes are in its pixels, and engines that
            don't tell its size.
    """

    family: str
    convention: ConventionName = "thousandths"
    resized: Resized | None = None


@dataclass(frozen=True, slots=True)
class GgufNetwork:
    """How our own engine runs an architecture of GGUF files.

    Attributes:
        text: transformers' name of the architecture of the decoder alone.
        sees: transformers' name of decoder and tower together, or "".
        projector: kind of the tower that our engine has, a key of `Family.projectors`.
        alternating: whether the two halves of a head alternate, row by row, in queries' and keys' matrices.
        nested: whether the decoder alone is that of `sees`, without its tower.
        recurrent: whether most layers have gated delta-rule attention.
        mixture: whether layers are mixtures of experts.
    """

    text: str
    sees: str = ""
    projector: str = ""
    alternating: bool = False
    nested: bool = False
    recurrent: bool = False
    mixture: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """All that is known of a family, or of several with one plan.

    Attributes:
        architectures: transformers' names of those that `describe` reads for the plan of any engine.
        native: those of `architectures` that our own engine runs, from the result of `parse`.
        network: class of their network, as "module:class", a name because the module imports torch.
        traits: traits by the family's name in the plan (`Network.family`), or by architecture of GGUF files.
        prompting: how models that see are asked, by architecture, on any engine.
        gguf: names and shapes in GGUF files that our own engine runs, by the files' architecture.
        projectors: sizes of pictures in llama.cpp, by a tower's kind in GGUF files; None where every picture
            becomes one square.
    """

    architectures: tuple[str, ...] = ()
    describe: Callable[[Section, str, Section | None], Network] | None = None
    native: tuple[str, ...] = ()
    parse: Callable[[Section, str], ModelConfig] | None = None
    network: str = ""
    traits: Mapping[str, Traits] = field(default_factory=dict)
    prompting: Mapping[str, Prompting] = field(default_factory=dict)
    gguf: Mapping[str, GgufNetwork] = field(default_factory=dict)
    projectors: Mapping[str, Pictures | None] = field(default_factory=dict)
