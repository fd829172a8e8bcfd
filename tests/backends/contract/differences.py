"""Where a backend legitimately differs from the others: the second table of docs/backends.md.

The suite holds every backend to everything else, and each to its column here.
"""

from dataclasses import dataclass, fields


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
    Difference(
        "prompts that begin alike",
        "computed once (prefix cache)",
        "computed each time",
        "computed once (prefix cache)",
    ),
    Difference(
        "memory of conversations",
        "taken when it starts",
        "grows with the requests that run",
        "taken when it starts",
    ),
    Difference(
        "pictures of one request with limits of their own",
        "each its own",
        "the smallest counts for all",
        "each its own",
    ),
    Difference(
        "videos",
        "yes",
        "where its processor has what it needs (torchvision)",
        "refused: send frames as pictures",
    ),
)
SAME_SAMPLER = ("native", "transformers")
PREFIX_CACHE = ("native", "vllm")
FIXED_MEMORY = ("native", "vllm")
OWN_LIMITS = ("native", "vllm")
BACKENDS = tuple(field.name for field in fields(Difference))[1:]


def table() -> str:
    """The rows as docs/backends.md shows them."""
    head = [f"| | {' | '.join(BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    rows = [
        f"| {row.what} | {' | '.join(getattr(row, backend) for backend in BACKENDS)} |" for row in DIFFERENCES
    ]
    return "\n".join([*head, *rows])
