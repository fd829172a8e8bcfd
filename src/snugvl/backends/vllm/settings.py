"""The choice of a vLLM server, to be started or running already, and the flags of every start."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from snugvl.backends.child.settings import ChildChoice, Words, flag_value
from snugvl.errors import RequestError


@dataclass(frozen=True, slots=True)
class VllmChoice(ChildChoice):
    """A vLLM to launch, or with `attach` one that runs already: see `ChildChoice`.

    Attributes:
        sleep_after_s: seconds without a request after which the GPU's memory is given back; None: never.
        sleep_level: 1 keeps the weights in host memory; 2 drops them, and waking reads them again.

    Raises:
        RequestError: settings that contradict each other.
    """

    sleep_after_s: float | None = None
    sleep_level: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        self.check("vLLM", chosen=bool(self.sleep_after_s))
        if self.sleep_after_s is not None and self.sleep_after_s <= 0:
            raise RequestError(
                f"seconds until vLLM sleeps are more than 0, not {self.sleep_after_s:g}",
                field="sleep_after_s",
            )


# What the server decides itself. A user's words for them would be overruled in silence.
OURS: Final = ("--host", "--port", "--uds", "--api-key", "--served-model-name", "--model")


def common_flags(model: str, address: str, sleep: bool) -> Words:
    """Flags of every start of ours, whatever the plan says. `address`: the socket it listens on.

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
    text = flag_value(arguments, flag)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
