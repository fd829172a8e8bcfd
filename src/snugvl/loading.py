"""`snugvl.load`: from a model's name to a running engine. "auto" is resolved here, once."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import torch

from snugvl.allocation import Place, allocate
from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Capabilities
from snugvl.checkpoint.architecture import ModelConfig, read_config
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.engine.engine import Engine
from snugvl.errors import RequestError
from snugvl.inputs.prompt import Processor
from snugvl.model import Model
from snugvl.models.loader import load_model, network_elements

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model: str | Path = "pocket",
    *,
    device: str = "auto",
    dtype: DtypeName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
) -> Model:
    """Load a checkpoint into our own engine, in this process.

    Args:
        model: `pocket`, a checkpoint folder, or a Hub id that is in the local cache.
        device: `cpu`, `cuda`, `cuda:1`, …; auto takes the GPU if there is one.
        dtype: weights and KV cache; auto takes bfloat16 (float16 before Ampere) on a GPU, and on a CPU
            float32 where it leaves half of the free memory.
        context: tokens of one conversation, image tokens included; by default as many as fit, up to 8,192.
        max_pixels: scale larger images down to this many pixels (the checkpoint's own limit at most); by
            default what half of the context holds.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: the weights and one conversation need more memory than is free, with the numbers.
        RequestError: an argument is wrong.
    """
    folder = locate(str(model))
    config = read_config(folder)
    target = _device(device)
    place = _place(target)
    kind = _dtype(dtype, config, place)
    processor = Processor.from_folder(folder, config, max_pixels=max_pixels)
    facts = replace(facts_of(str(folder), offline=True), name=str(model))
    allocation = allocate(facts, kind, place, context=context, max_pixels=max_pixels)
    processor.images = processor.images.limited(allocation.max_pixels)
    network = load_model(folder, dtype=kind, device=target)
    engine = Engine(network, allocation.engine)
    capabilities = Capabilities(
        model=str(model),
        context_tokens=allocation.engine.max_model_len,
        images=True,
        video=processor.videos is not None,
        max_pixels=processor.images.settings.max_pixels,
        min_pixels=processor.images.settings.min_pixels,
    )
    return Model(NativeBackend(engine, processor, capabilities))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device {name!r} is unknown; use auto, cpu or cuda", field="device") from None
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"device {name!r} is not supported; use auto, cpu or cuda", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA GPUs; use cpu",
            field="device",
        )
    return device


def _place(device: torch.device) -> Place:
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return Place(device, name, torch.cuda.mem_get_info(device)[0], capability)
    return Place(device, "main memory", psutil.virtual_memory().available)


def _dtype(name: str, config: ModelConfig, place: Place) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise RequestError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}", field="dtype")
    if place.compute_capability is not None:
        return torch.bfloat16 if place.compute_capability >= (8, 0) else torch.float16
    wide = network_elements(config) * 4
    return torch.float32 if wide <= place.free_bytes // 2 else torch.bfloat16
