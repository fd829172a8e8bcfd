"""The families we know, by the name of transformers' class. An unknown one is refused, never guessed."""

from types import ModuleType

from snugvl.checkpoint.families import (
    gemma3,
    internvl,
    phi3,
    qwen2_5_vl,
    qwen3_5,
    qwen3_vl,
    smolvlm,
    text,
)  # fmt: skip
from snugvl.checkpoint.families.network import Network
from snugvl.checkpoint.section import Section, plain, shown
from snugvl.errors import CheckpointError, UnsupportedModel

_MODULES: tuple[ModuleType, ...] = (
    qwen3_vl, qwen3_5, qwen2_5_vl, internvl, gemma3, smolvlm, text, phi3,
)  # fmt: skip
_BY_ARCHITECTURE = {name: module for module in _MODULES for name in module.ARCHITECTURES}
ARCHITECTURES = tuple(_BY_ARCHITECTURE)


def describe(root: Section, images: Section | None) -> Network:
    """What a `config.json` says, together with the image processor's settings.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture that no module here knows.
    """
    names = root.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        kind = root.values.get("model_type")
        raise CheckpointError(
            f"{root.where} names no architecture (its model_type is {shown(kind)}); it can't be planned for"
        )
    module = _BY_ARCHITECTURE.get(names[0])
    if module is None:
        raise UnsupportedModel(
            f"{root.where} is a {plain(names[0])}, whose tensors, cache and image tokens snugvl doesn't "
            f"know; it knows {', '.join(ARCHITECTURES)}"
        )
    network: Network = module.describe(root, names[0], images)
    return network
