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
    llamacpp: str


DIFFERENCES = (
    Difference(
        "the same seed",
        "the same tokens again",
        "the same tokens as native",
        "the same tokens again, other ones than native",
        "the same tokens again, other ones than native",
    ),
    Difference(
        "prompts that begin alike",
        "computed once (prefix cache; `--no-prefix-cache`)",
        "computed each time",
        "computed once (prefix cache; `--no-prefix-cache`)",
        "computed once in a slot (`--no-prefix-cache`)",
    ),
    Difference(
        "memory of conversations",
        "taken when it starts",
        "grows with the requests that run",
        "taken when it starts",
        "taken when it starts",
    ),
    Difference(
        "pictures of one request with limits of their own",
        "each its own",
        "the smallest counts for all",
        "each its own",
        "each its own",
    ),
    Difference(
        "a limit that cuts a character in two",
        "a replacement character stands for its first part",
        "as native",
        "its first part is left out, of log-probabilities' bytes, too",
        "its first part is left out, of log-probabilities' bytes, too",
    ),
    Difference(
        "prompt and `max_tokens` together longer than the context",
        "refused with the numbers",
        "refused with the numbers",
        "the answer ends at the context",
        "refused with the numbers",
    ),
    Difference(
        "log-probabilities of a bare prompt's tokens (`echo`)",
        "yes",
        "yes",
        "yes",
        "refused",
    ),
    Difference(
        "presence and frequency penalties",
        "of what was generated",
        "as native",
        "as native",
        "of the prompt's tokens, too",
    ),
    Difference(
        "videos",
        "yes",
        "where its processor has what it needs (torchvision)",
        "refused: send frames as pictures",
        "refused: send frames as pictures",
    ),
)
JUDGES_PROMPTS = ("native", "transformers", "vllm")
PENALISES_PROMPTS = ("llamacpp",)
SAME_SAMPLER = ("native", "transformers")
PREFIX_CACHE = ("native", "vllm", "llamacpp")
FIXED_MEMORY = ("native", "vllm", "llamacpp")
OWN_LIMITS = ("native", "vllm", "llamacpp")
WHOLE_CHARACTERS = ("vllm", "llamacpp")
CUTS_AT_THE_CONTEXT = ("vllm",)
BACKENDS = tuple(field.name for field in fields(Difference))[1:]


def as_shown(backend: str, text: str) -> str:
    """A text of our own engine as a backend gives it where a limit cuts it."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}") if backend in WHOLE_CHARACTERS else text


def table() -> str:
    """The rows as docs/backends.md shows them."""
    head = [f"| | {' | '.join(BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    rows = [
        f"| {row.what} | {' | '.join(getattr(row, backend) for backend in BACKENDS)} |" for row in DIFFERENCES
    ]
    return "\n".join([*head, *rows])
