"""`config.json` of the families we know, one module each, by the name of transformers' class.

Each is read once, for two views: `describe` gives what the plan of any engine needs, `parse_config` what our
own engine does, which refuses by name what it doesn't run. Nothing is guessed: an unknown architecture is
refused, a field that is missing or contradicts another one is named together with the file, and the few
defaults are those of Hugging Face's own configuration classes.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import gemma3, internvl, qwen2_5_vl, qwen3_5, qwen3_vl, smolvlm, text
from snugvl.checkpoint.families.network import Network
from snugvl.checkpoint.families.traits import Traits
from snugvl.checkpoint.section import Section, plain, read_json, shown
from snugvl.errors import UnsupportedModel

_NATIVE: tuple[ModuleType, ...] = (qwen3_vl, qwen3_5, qwen2_5_vl, text)
_PLANNED: tuple[ModuleType, ...] = (qwen3_vl, qwen3_5, qwen2_5_vl, internvl, gemma3, smolvlm, text)
_BY_ARCHITECTURE = {name: module for module in _PLANNED for name in module.ARCHITECTURES}
_TRAITS: dict[str, Traits] = {
    family: traits for module in _PLANNED for family, traits in getattr(module, "TRAITS", {}).items()
}
_OF_GGUF = {architecture: family for family, traits in _TRAITS.items() for architecture in traits.gguf}
ARCHITECTURES = tuple(_BY_ARCHITECTURE)
SUPPORTED: tuple[str, ...] = tuple(name for module in _NATIVE for name in module.NATIVE)


def traits_of(family: str) -> Traits:
    """Traits of a family; the defaults for one whose module says nothing."""
    return _TRAITS.get(family, Traits())


def family_of_gguf(architecture: str) -> str:
    """The family of an architecture as GGUF files name it; its own name where no family claims it."""
    return _OF_GGUF.get(architecture, architecture)


def describe(root: Section, images: Section | None) -> Network:
    """What a `config.json` says, together with the image processor's settings.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture that no module here knows.
    """
    name = _architecture(root)
    module = _BY_ARCHITECTURE.get(name)
    if module is None:
        raise UnsupportedModel(
            f"{root.where} is a {plain(name)}, whose tensors, cache and image tokens snugvl doesn't "
            f"know; it knows {', '.join(ARCHITECTURES)}"
        )
    network: Network = module.describe(root, name, images)
    return network


def read_config(folder: Path) -> ModelConfig:
    """Parse and check `config.json` of a checkpoint folder for our own engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture or a quantisation this engine doesn't run.
    """
    path = folder / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The same from an object that is read already; `where` names it in errors."""
    root = Section(values, where)
    name = _architecture(root)
    if name not in SUPPORTED:
        raise UnsupportedModel(f"{where} is a {plain(name)}; our own engine runs {', '.join(SUPPORTED)}")
    config: ModelConfig = _BY_ARCHITECTURE[name].parse(root, name)
    return config


def _architecture(root: Section) -> str:
    names = root.values.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = shown(root.values.get("model_type"))
    raise UnsupportedModel(
        f"{root.where} names no architecture (model_type {kind}); without one its network is unknown"
    )
