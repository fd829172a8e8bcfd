"""Which of transformers' modules goes where: the device map that accelerate gets, computed by the plan.

Names are those of transformers' classes (`model.language_model.layers.3`, `model.layers.3`, `model.visual`,
`lm_head`), as `checkpoint/families` has them. Every parameter is below one of them; a tied lm_head goes
where the embedding is, and so does the module of the rotary embedding, which has buffers alone.
"""

from dataclasses import replace
from typing import cast

from snugvl.checkpoint.facts import TensorFact
from snugvl.core.formats import WeightsName
from snugvl.core.options import LoadOptions
from snugvl.planner.engines.transformers.offload import LAYER
from snugvl.planner.plan import Choice

HOST = "cpu"
HEAD = "lm_head"
ROTARY = "rotary_emb"


def said_of(choice: Choice, options: LoadOptions) -> LoadOptions:
    """Options of a process that loads with transformers and doesn't plan by itself: the plan's own values."""
    settings = choice.settings
    weights = cast(WeightsName, settings.weights if choice.option.made else "auto")
    said = replace(options, context=settings.context, max_pixels=settings.max_pixels, weights=weights)
    if choice.budget.device.cpu and options.dtype == "auto":
        said = replace(said, dtype="float32" if settings.float32 else "bfloat16")
    return said


def placement(choice: Choice) -> tuple[tuple[str, str], ...]:
    """(module, device) for every module of the plan; empty where all is on one device."""
    settings = choice.settings
    if not settings.offloaded and settings.vision != "cpu":
        return ()
    gpu = f"cuda:{choice.gpus[0].index if choice.gpus else 0}"
    kept = choice.option.model.facts.text.num_layers - settings.offloaded
    places: dict[str, str] = {}
    for tensor in choice.option.model.facts.tensors:
        if not tensor.loaded or tensor.name.startswith(f"{HEAD}."):
            continue
        layer = LAYER.match(tensor.name)
        if tensor.role in ("vision", "connector"):
            places[_tower(tensor)] = HOST if settings.vision == "cpu" else gpu
        elif layer:
            places[layer["module"]] = gpu if int(layer["number"]) < kept else HOST
            places[f"{layer['module'].rpartition('.layers.')[0]}.{ROTARY}"] = gpu
        else:
            places[tensor.name.rpartition(".")[0]] = gpu
    places[HEAD] = gpu
    return tuple(places.items())


def _tower(tensor: TensorFact) -> str:
    """`model.visual`, `model.vision_tower`, `model.multi_modal_projector`, …"""
    return ".".join(tensor.name.split(".")[:2])
