"""The choice of a vLLM server, to be started or running already, and the flags of every start; facts of its
checkpoint on this machine that it doesn't report: pictures, template, control tokens.

A model that is not here (vLLM may download it itself, or have it on another machine) stays unknown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from snugvl.backends.child.settings import ChildChoice, Facts, Words, flag_value, with_template
from snugvl.checkpoint.catalogue import thinks_about_pictures
from snugvl.checkpoint.locate import near
from snugvl.checkpoint.section import read_json
from snugvl.errors import RequestError, SnugvlError
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.inputs.settings import read_pixel_settings

VISION = ("vision_config", "vit_config", "vision_model", "vision_tower")


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


def read_facts(model: str) -> Facts:
    """The facts of a model by its name or folder. Reads files: call it in a thread from an event loop."""
    try:
        folder = near(model) if model else None
        config = read_json(folder / "config.json") if folder is not None else {}
    except SnugvlError:
        return Facts()
    if folder is None or not config:
        return Facts()
    template = _template(folder)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    names = config.get("architectures")
    facts = Facts(
        images=any(name in config for name in VISION),
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        dtype=str(config.get("dtype") or text.get("dtype") or config.get("torch_dtype") or ""),
        image_token=_token(config.get("image_token_id", config.get("image_token_index"))),
        control_tokens=_control_tokens(folder),
        thinking=ThinkingDefault(pictures=thinks_about_pictures(str(config.get("model_type")))),
    )
    if template is not None:
        facts = with_template(facts, template)
    if not facts.images:
        return facts
    try:
        pixels = read_pixel_settings(folder)
    except SnugvlError:  # of another kind than Qwen's: vLLM scales pictures by its own rules
        return facts
    return replace(
        facts, min_pixels=pixels.min_pixels, max_pixels=pixels.max_pixels, pixel_factor=pixels.factor
    )


def apply_limits(facts: Facts, arguments: tuple[str, ...]) -> Facts:
    """The facts under the limits that the arguments set."""
    facts = replace(facts, dtype=flag_value(arguments, "--dtype") or facts.dtype)
    if most_images(arguments) == 0 or "--language-model-only" in arguments:
        return replace(facts, images=False, min_pixels=0, max_pixels=0, pixel_factor=0)
    limit = max_pixels(arguments)
    if limit is None or (facts.max_pixels and limit >= facts.max_pixels):
        return facts
    return replace(facts, max_pixels=limit, min_pixels=min(facts.min_pixels, limit))


def _token(value: object) -> int:
    return value if isinstance(value, int) else -1


def _template(folder: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.from_folder(folder)
    except SnugvlError:
        return None


def _control_tokens(folder: Path) -> tuple[str, ...]:
    """Strings that the tokenizer reads as control tokens, longest first."""
    found = set()
    for entry in _added_tokens(folder):
        if isinstance(entry, dict) and entry.get("special") and isinstance(entry.get("content"), str):
            found.add(entry["content"])
    return tuple(sorted(found, key=len, reverse=True))


def _added_tokens(folder: Path) -> list[Any]:
    listed: list[Any] = []
    if (folder / "tokenizer_config.json").exists():
        decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
        listed += decoder.values() if isinstance(decoder, dict) else []
    if not listed and (folder / "tokenizer.json").exists():
        tokens = read_json(folder / "tokenizer.json").get("added_tokens")
        listed += tokens if isinstance(tokens, list) else []
    return listed
