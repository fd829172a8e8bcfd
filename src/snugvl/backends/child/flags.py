"""The flags of a child server as words: looked up, and changed as a diagnosis says."""

from collections.abc import Sequence

from snugvl.diagnose.result import Change
from snugvl.errors import RequestError

Words = tuple[str, ...]


def check(arguments: Words, ours: Sequence[str], engine: str) -> None:
    """Refuse flags that snugvl sets itself.

    Raises:
        RequestError: names them.
    """
    taken = [word for word in arguments if word.partition("=")[0].replace("_", "-") in ours]
    if taken:
        raise RequestError(
            f"{', '.join(taken)}: snugvl decides where its {engine} listens and what it is called; leave "
            "it out",
            field="arguments",
        )


def value(arguments: Words, flag: str) -> str | None:
    """The value of a flag, or None; the last one counts, as in the engines."""
    found = None
    for index, word in enumerate(arguments):
        name, equals, joined = word.partition("=")
        if name == flag:
            found = joined if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def apply(arguments: Words, changes: Sequence[Change]) -> Words:
    """The arguments with flags changed, added and removed. Changes of variables are left to `variables`."""
    for change in changes:
        if not change.flag.startswith("-"):
            continue
        arguments = _without(arguments, change.flag)
        if change.new is not None:
            several = change.flag == "--cudagraph-capture-sizes"  # of vLLM
            words = change.new.split() if several else [change.new] if change.new else []
            arguments = (*arguments, change.flag, *words)
    return arguments


def variables(changes: Sequence[Change]) -> tuple[tuple[str, str], ...]:
    """The environment variables among the changes."""
    return tuple((c.flag, c.new) for c in changes if not c.flag.startswith("-") and c.new is not None)


def _without(arguments: Words, flag: str) -> Words:
    kept: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit()):
            dropping = word.partition("=")[0] == flag
        if not dropping:
            kept.append(word)
    return tuple(kept)
