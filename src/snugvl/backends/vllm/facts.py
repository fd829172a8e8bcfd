"""Facts of a checkpoint on this machine that vLLM doesn't report: pictures, template, control tokens.

A model that is not here (vLLM may download it itself, or have it on another machine) stays unknown.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from snugvl.backends.child.settings import Facts, flag_value, with_template
from snugvl.backends.vllm.settings import max_pixels, most_images
from snugvl.checkpoint.catalogue import thinks_about_pictures
from snugvl.checkpoint.locate import near
from snugvl.checkpoint.section import read_json
from snugvl.errors import SnugvlError
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.inputs.settings import read_pixel_settings

VISION = ("vision_config", "vit_config", "vision_model", "vision_tower")


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
