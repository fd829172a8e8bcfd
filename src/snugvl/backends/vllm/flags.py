"""The flags of `vllm serve` as words: looked up, changed, and completed with what we add to every start."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from snugvl.diagnose.result import Change
from snugvl.errors import RequestError

# What the server decides itself. A user's words for them would be overruled in silence.
OURS: Final = ("--host", "--port", "--uds", "--api-key", "--served-model-name", "--model")
Words = tuple[str, ...]


def common(model: str, address: str, sleep: bool) -> Words:
    """What every start of ours has, whatever the plan says. `address`: the socket it listens on.

    Defaults of sampling are ours, not the checkpoint's generation_config; grammars are llguidance's, as in
    our own engine; the usage tells which tokens of a prompt are pictures'.
    """
    words: Words = ("--uds", address, "--served-model-name", model)
    words += ("--generation-config", "vllm", "--enable-prompt-tokens-details")
    words += ("--disable-uvicorn-access-log",)  # it is asked for its health every second
    words += ("--structured-outputs-config", '{"backend":"guidance"}')
    return (*words, "--enable-sleep-mode") if sleep else words


def check(arguments: Words) -> None:
    """Refuse flags that are ours to set.

    Raises:
        RequestError: names them.
    """
    taken = [word for word in arguments if word.partition("=")[0].replace("_", "-") in OURS]
    if taken:
        raise RequestError(
            f"{', '.join(taken)}: snugvl decides where its vLLM listens and what it is called; leave it out",
            field="arguments",
        )


def value(arguments: Words, flag: str) -> str | None:
    """The value of a flag; the last one counts, as in vLLM."""
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
            several = change.flag == "--cudagraph-capture-sizes"
            words = change.new.split() if several else [change.new] if change.new else []
            arguments = (*arguments, change.flag, *words)
    return arguments


def variables(changes: Sequence[Change]) -> tuple[tuple[str, str], ...]:
    """The environment variables among the changes."""
    return tuple((c.flag, c.new) for c in changes if not c.flag.startswith("-") and c.new is not None)


def max_pixels(arguments: Words) -> int | None:
    """The most pixels of an image that the arguments let vLLM encode, or None."""
    found = _object(arguments, "--mm-processor-kwargs").get("max_pixels")
    return found if isinstance(found, int) else None


def most_images(arguments: Words) -> int | None:
    """Images that a request may have by the arguments, or None."""
    found = _object(arguments, "--limit-mm-per-prompt").get("image")
    if isinstance(found, dict):
        found = found.get("count")
    return found if isinstance(found, int) else None


def _object(arguments: Words, flag: str) -> Mapping[str, object]:
    text = value(arguments, flag)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _without(arguments: Words, flag: str) -> Words:
    kept: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit()):
            dropping = word.partition("=")[0] == flag
        if not dropping:
            kept.append(word)
    return tuple(kept)
