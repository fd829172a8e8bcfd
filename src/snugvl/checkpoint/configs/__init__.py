"""`config.json` of the networks that our engine runs, as frozen, checked values: one module a family.

An architecture we don't know is refused with its name; a field that is missing is named together with the
file. Nothing is guessed: the few defaults are those of Hugging Face's own configuration classes.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.configs import qwen2_5_vl, qwen3_5, qwen3_vl, text
from snugvl.checkpoint.section import Section, plain, read_json, shown
from snugvl.errors import UnsupportedModel

_MODULES: tuple[ModuleType, ...] = (qwen3_vl, qwen3_5, qwen2_5_vl, text)
_BY_ARCHITECTURE = {name: module for module in _MODULES for name in module.ARCHITECTURES}
SUPPORTED = tuple(_BY_ARCHITECTURE)


def read_config(folder: Path) -> ModelConfig:
    """Parse and check `config.json` of a checkpoint folder.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture or a quantisation this engine doesn't run.
    """
    path = folder / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The same from an object that is read already; `where` names it in errors."""
    root = Section(values, where)
    names = values.get("architectures") or [f"model_type {shown(values.get('model_type'))}"]
    name = str(names[0]) if isinstance(names, list) else str(names)
    module = _BY_ARCHITECTURE.get(name)
    if module is None:
        raise UnsupportedModel(f"{where} is a {plain(name)}; our own engine runs {', '.join(SUPPORTED)}")
    config: ModelConfig = module.parse(root, name)
    return config
