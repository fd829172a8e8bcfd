"""Facts of a family beyond its `config.json`: said by the family's module, read by engines' plans."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Frozen facts of one family.

    Attributes:
        gguf: architectures in GGUF files that are this family.
        mrope: vLLM keeps a rotary table of several axes.
        rotary_divisor: one of so many values of a head is rotated.
        stretched: layers of two kinds rotate differently in vLLM, and the second kind's positions are
            stretched so many times; None where all rotate alike.
        gated_queries: queries of full attention come with a gate of their width.
        recurrent: its recurrent states are those that are planned for.
    """

    gguf: tuple[str, ...] = ()
    mrope: bool = False
    rotary_divisor: int = 1
    stretched: int | None = None
    gated_queries: bool = False
    recurrent: bool = False
