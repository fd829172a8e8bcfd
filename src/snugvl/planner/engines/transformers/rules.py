"""The planner's rules for Hugging Face transformers, and the device map of its modules.

The device map that accelerate gets is computed by the plan. Names are those of transformers' classes
(`model.language_model.layers.3`, `model.layers.3`, `model.visual`, `lm_head`), as `checkpoint/families` has
them. Every parameter is below one of them; a tied lm_head goes where the embedding is, and so does the module
of the rotary embedding, which has buffers alone.
"""

from dataclasses import replace
from typing import Final, cast

from snugvl.checkpoint.facts import TensorFact
from snugvl.core.formats import BITSANDBYTES, INTEGERS, PREQUANTIZED, WeightsName
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import MIB, format_size
from snugvl.planner.capabilities import Option, prefers_fp32, stored_format
from snugvl.planner.engines.rules import EngineRules, Ways
from snugvl.planner.engines.transformers.footprint import (
    LAYER,
    host_bytes,
    layer_bytes,
    offload_components,
    transformers_components,
    vision_bytes,
)
from snugvl.planner.footprint.total import Component, Device, Reason, up
from snugvl.planner.footprint.vision import transformers_vision_components
from snugvl.planner.footprint.weights import weight_components
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import Settings
from snugvl.planner.speed import Pace
from snugvl.planner.wishes import Wishes

MEASURED: Final = frozenset(("NVIDIA H200",))  # benchmarks/results/speeds.csv
PACKED: Final = "the package that made the {} weights (compressed-tensors, gptqmodel, …); loading names it"
BITS: Final = "bitsandbytes, which makes {} weights with transformers (pip install bitsandbytes)"


class TransformersRules(EngineRules):
    """Rules of transformers, which runs in a process of snugvl's."""

    engine = "transformers"
    title = "transformers"
    kind = "Hugging Face transformers"
    installed_by = "pip install 'snugvl[transformers]'"
    runs_remote_code = True
    rank = 0
    kv_formats = ("bf16",)
    windows = True
    bitsandbytes = True
    offloads = True
    in_process = True
    pace = Pace(0.7e-3, 1.4e-3, within=1.25, cards=MEASURED, elsewhere=2.0)

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """The formats that transformers loads; bitsandbytes makes integers of a plain checkpoint."""
        if refusal := self.unread(model):
            return refusal
        stored = stored_format(model)
        if stored in PREQUANTIZED.values():
            return [Option(model, "transformers", stored, stored, needs=PACKED.format(stored))]
        wide = Option(model, "transformers", "fp32", stored, float32=True)
        plain = Option(model, "transformers", "bf16", stored)
        if device.cpu and wishes.float32 is None and prefers_fp32(model, device):
            return [wide, plain]
        if wishes.float32:
            plain = wide
        if device.cpu or stored != "bf16" or model.mixed:  # bitsandbytes leaves experts as they are
            return [plain]
        return [
            plain,
            *(
                Option(model, "transformers", weights, weights, needs=BITS.format(weights))
                for weights in INTEGERS[::-1]
                if weights in BITSANDBYTES
            ),
        ]

    def offloading(self, option: Option, device: Device) -> Option | Reason:
        """The option with layers in host memory, where its weights aren't quantised, else why not."""
        if device.cpu:
            return super().offloading(option, device)
        if option.model.facts.quantization is not None or option.weights != "bf16":
            why = "layers of quantised checkpoints can't stay in host memory; the bf16 edition's can"
            return Reason("transformers", why)
        return replace(option, offload=True)

    def stored_as(self, option: Option) -> str:
        """Why it has no other formats, as a clause; bitsandbytes rounds neither integers nor experts."""
        if option.model.mixed and stored_format(option.model) == "bf16":
            return "bitsandbytes, which makes them, leaves a mixture's experts in bf16; use a 4-bit edition"
        return super().stored_as(option)

    def offload_ways(self, model: Inventory, base: Settings) -> list[Ways]:
        """Ways with ever less on the GPU: the tower first, copied once a picture, a layer once a token."""
        return [Ways(base._replace(vision="cpu"), "offloaded", range(model.facts.text.num_layers + 1))]

    def host_bytes(self, model: Inventory, settings: Settings) -> int:
        """Bytes of host memory of offloaded layers and tower, and of the process."""
        return host_bytes(model, settings)

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Components of weights, cache, pictures, and the workspace of whole prompts."""
        cache = self.kv_component(model, settings)
        parts = [*weight_components(model, settings), cache]
        parts += transformers_vision_components(model, settings)
        parts += offload_components(model, settings)
        return parts + transformers_components(model, settings, cache.nbytes, fused=device.fused_attention)

    def segment_bytes(self, resident: list[tuple[int, int]]) -> int:
        """Bytes of the one segment for all weights, which is reserved before they are loaded."""
        exact = sum(size * count for size, count in resident)
        return up(exact, 4 * MIB)  # measured 1.0 to 3.5 MiB beyond

    def host_text(self, choice: Choice) -> str | None:
        """The layers and the tower that are copied for every forward pass, with their size, for people."""
        if not choice.option.offload:
            return None
        settings, model = choice.settings, choice.option.model
        layers = model.facts.text.num_layers
        tower = " and the vision tower" if vision_bytes(model, settings) else ""
        held = layer_bytes(model, settings) + vision_bytes(model, settings)
        return (
            f"{settings.offloaded} of {layers} decoder layers{tower} stay in host memory "
            f"({format_size(held)}) and cross PCI Express when they are computed"
        )


HOST = "cpu"
HEAD = "lm_head"
ROTARY = "rotary_emb"


def said_of(choice: Choice, options: LoadOptions) -> LoadOptions:
    """Options, with the plan's own values, for a process that loads with transformers and doesn't plan."""
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


RULES = TransformersRules()
