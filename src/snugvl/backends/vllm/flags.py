"""The flags of `vllm serve`: those that every start has, and the limits that they set."""

import json
from collections.abc import Mapping
from typing import Final

from snugvl.backends.child.flags import Words, value

# What the server decides itself. A user's words for them would be overruled in silence.
OURS: Final = ("--host", "--port", "--uds", "--api-key", "--served-model-name", "--model")


def common(model: str, address: str, sleep: bool) -> Words:
    """The flags of every start by snugvl, whatever the plan. `address`: the socket it listens on.

    Defaults of sampling are ours, not the checkpoint's generation_config; grammars are llguidance's, as in
    our own engine; the usage tells which tokens of a prompt are pictures'.
    """
    words: Words = ("--uds", address, "--served-model-name", model)
    words += ("--generation-config", "vllm", "--enable-prompt-tokens-details")
    words += ("--disable-uvicorn-access-log",)  # it is asked for its health every second
    words += ("--structured-outputs-config", '{"backend":"guidance"}')
    return (*words, "--enable-sleep-mode") if sleep else words


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
