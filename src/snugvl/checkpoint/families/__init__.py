"""The known families of models, one module each, with all that is known of it (`traits.Family`).

A `config.json` is recognised by the name of transformers' class, and has two views: `describe` for the plan
of any engine, `parse_config` for our own engine, which refuses by name what it doesn't run. Nothing is
guessed: an unknown architecture is refused, a field that is missing or contradicts another one is named
together with the file, and the few defaults are those of Hugging Face's own configuration classes.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families.traits import Family, Network, Prompting, Traits
from snugvl.checkpoint.section import Section, plain, read_json, shown
from snugvl.errors import UnsupportedModel

_MODULES = ("qwen3_vl", "qwen3_5", "qwen2_5_vl", "internvl", "gemma3", "gemma4", "smolvlm", "text")
# Families that our engine doesn't run and whose `config.json` the plan doesn't read: other engines run them;
# llama.cpp's GGUF files give the plan their shapes.
_GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
_PALIGEMMA = "PaliGemmaForConditionalGeneration"
_FULL_EVERY: Mapping[str, int] = {"gemma2": 2, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4}

_ELSEWHERE = Family(
    traits={
        **{name: Traits(full_every=layers) for name, layers in _FULL_EVERY.items()},
        "qwen3next": Traits(recurrent=True),
    },
    prompting={
        # Google's "Image understanding", and Hugging Face's "Welcome Gemma 4".
        **dict.fromkeys(_GEMMA4, Prompting("Gemma 4", "y first")),
        # Google's "PaliGemma prompt and system instructions", and big_vision's README.
        _PALIGEMMA: Prompting("PaliGemma", "locations"),
    },
)
FAMILIES: tuple[Family, ...] = (
    *(import_module(f"{__name__}.{name}").FAMILY for name in _MODULES),
    _ELSEWHERE,
)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_TRAITS = {name: traits for family in FAMILIES for name, traits in family.traits.items()}
_OF_GGUF = {architecture: name for name, traits in _TRAITS.items() for architecture in traits.gguf}
ARCHITECTURES = tuple(_BY_ARCHITECTURE)
SUPPORTED = tuple(name for family in FAMILIES for name in family.native)
PROMPTING = {name: prompting for family in FAMILIES for name, prompting in family.prompting.items()}
GGUF = {name: network for family in FAMILIES for name, network in family.gguf.items()}
PROJECTORS = {name: tokens for family in FAMILIES for name, tokens in family.projectors.items()}


def traits_of(family: str) -> Traits:
    """Traits of a family; the defaults for one whose module says nothing."""
    return _TRAITS.get(family, Traits())


def family_of_gguf(architecture: str) -> str:
    """The family of an architecture as GGUF files name it; its own name where no family claims it."""
    return _OF_GGUF.get(architecture, architecture)


def is_of(family: str, architectures: object) -> bool:
    """Whether a `config.json` with these architectures is of a family, as facts name it."""
    known = architectures if isinstance(architectures, list) else []
    return any(name in _BY_ARCHITECTURE and family in _BY_ARCHITECTURE[name].traits for name in known)


def describe(root: Section, images: Section | None) -> Network:
    """The planner's view of a `config.json`, together with the image processor's settings.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture that no module here knows.
    """
    name = _architecture(root)
    family = _BY_ARCHITECTURE.get(name)
    if family is None or family.describe is None:
        raise UnsupportedModel(
            f"{root.where} is a {plain(name)}, whose tensors, cache and image tokens snugvl doesn't "
            f"know; it knows {', '.join(ARCHITECTURES)}"
        )
    return family.describe(root, name, images)


def network_class(architecture: str) -> str:
    """The class of the network of a supported architecture, as "module:class"."""
    return _BY_ARCHITECTURE[architecture].network


def read_config(folder: Path) -> ModelConfig:
    """Parse and check `config.json` of a checkpoint folder for our own engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture or a quantisation this engine doesn't run.
    """
    path = folder / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """A model's configuration from an object that is read already; `where` names it in errors."""
    root = Section(values, where)
    name = _architecture(root)
    family = _BY_ARCHITECTURE.get(name)
    if family is None or family.parse is None or name not in family.native:
        raise UnsupportedModel(f"{where} is a {plain(name)}; our own engine runs {', '.join(SUPPORTED)}")
    return family.parse(root, name)


def _architecture(root: Section) -> str:
    names = root.values.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = shown(root.values.get("model_type"))
    raise UnsupportedModel(
        f"{root.where} names no architecture (model_type {kind}); without one its network is unknown"
    )
