"""Where an engine legitimately differs from the others: the rows of docs/backends.md's second table.

The suite holds every engine to all the rest, and to these.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One row: what, and what it is on each backend."""

    what: str
    native: str
    transformers: str
    vllm: str


DIFFERENCES = (
    Difference(
        "the same seed",
        "the same tokens again",
        "the same tokens as native",
        "the same tokens again, other ones than native",
    ),
)


def same_sampler(engine: str) -> bool:
    """Whether a seed gives the tokens that it gives on our own engine."""
    return engine in ("native", "transformers")
