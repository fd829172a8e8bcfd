"""What a family says of itself, in one value: a `Family`, which its module makes.

Facts beyond `config.json` stand here as data; each is interpreted where it acts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families.network import Network
from snugvl.checkpoint.section import Section

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
