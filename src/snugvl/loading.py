"""`snugvl.load`: from a model's name to a running engine. "auto" is resolved here, once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
import torch

from snugvl.allocation import Allocation, Place, allocate
from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Capabilities
from snugvl.checkpoint.architecture import ModelConfig, read_config
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.engine.engine import Engine
from snugvl.errors import RequestError
from snugvl.hardware.sizes import format_size
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import load_model, network_elements

if TYPE_CHECKING:
    from snugvl.model import Model

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Progress = Callable[[str, float], None]
"""Told what loading is doing, and how much of it is done, from 0 to 1."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS_FROM, WEIGHTS_TO = 0.05, 0.9  # of all progress: nearly all the time goes into reading weights


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A running engine with what its memory was planned to be.

    Attributes:
        device: as torch knows it.
        planned: bytes of each row of the ledger, by name.
        weights: bytes of the weights in place, by row of the ledger.
    """

    backend: NativeBackend
    device: torch.device
    planned: Mapping[str, int]
    weights: Mapping[str, int]


def load(
    model: str | Path = "pocket",
    *,
    device: str = "auto",
    dtype: DtypeName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
    progress: Progress | None = None,
) -> "Model":
    """Load a checkpoint into our own engine, in this process.

    Args:
        model: `pocket`, a checkpoint folder, or a Hub id that is in the local cache.
        device: `cpu`, `cuda`, `cuda:1`, …; auto takes the GPU if there is one.
        dtype: weights and KV cache; auto takes bfloat16 (float16 before Ampere) on a GPU, and on a CPU
            float32 where it leaves half of the free memory.
        context: tokens of one conversation, image tokens included; by default as many as fit, up to 8,192.
        max_pixels: scale larger images down to this many pixels (the checkpoint's own limit at most); by
            default what half of the context holds.
        progress: called with what is being done and how much is done, from 0 to 1.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: the weights and one conversation need more memory than is free, with the numbers.
        RequestError: an argument is wrong.
    """
    from snugvl.model import Model

    loaded = load_engine(
        model, device=device, dtype=dtype, context=context, max_pixels=max_pixels, progress=progress
    )
    return Model(loaded.backend)


def load_engine(
    model: str | Path,
    *,
    device: str,
    dtype: DtypeName,
    context: int | None,
    max_pixels: int | None,
    progress: Progress | None = None,
) -> Loaded:
    """`load` without the tasks, for a process that only runs the engine."""
    report = progress or (lambda _detail, _done: None)
    report("reading headers", 0.0)
    folder = locate(str(model))
    config = read_config(folder)
    target = _device(device)
    place = _place(target)
    kind = _dtype(dtype, config, place)
    processor = Processor.from_folder(folder, config, max_pixels=max_pixels)
    facts = replace(facts_of(str(folder), offline=True), name=str(model))
    allocation = allocate(facts, kind, place, context=context, max_pixels=max_pixels)
    processor.images = processor.images.limited(allocation.max_pixels)
    network = load_model(folder, dtype=kind, device=target, progress=_of_weights(report))
    report("allocating the KV cache", WEIGHTS_TO)
    engine = Engine(network, allocation.engine)
    capabilities = Capabilities(
        model=str(model),
        context_tokens=allocation.engine.max_model_len,
        images=True,
        video=processor.videos is not None,
        max_pixels=processor.images.settings.max_pixels,
        min_pixels=processor.images.settings.min_pixels,
        device="CPU" if target.type == "cpu" else place.name,
        dtype=str(kind).removeprefix("torch."),
    )
    weights = {
        "text weights": _tensor_bytes(network) - _tensor_bytes(network.model["visual"]),
        "vision weights": _tensor_bytes(network.model["visual"]),
    }
    return Loaded(NativeBackend(engine, processor, capabilities), target, planned_rows(allocation), weights)


def planned_rows(allocation: Allocation) -> dict[str, int]:
    """The plan as rows of the ledger. Workspaces of different phases share theirs: it is the largest one."""
    plan = allocation.footprint
    vision = plan.named("weights: vision tower")
    encodings = sum(part.nbytes for part in plan.counted if part.name.startswith("encoder outputs"))
    rows = {
        "text weights": plan.named("weights: ") - vision,
        "vision weights": vision,
        "KV cache": allocation.kv_bytes,
        "encoder outputs": encodings,
    }
    rows["workspace"] = plan.total_bytes - sum(rows.values()) + allocation.kv_bytes - plan.named("KV cache")
    return rows


def _of_weights(report: Progress) -> Callable[[int, int], None]:
    """Bytes of weights as progress of all, told at every whole percent."""
    last = -1

    def tell(done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // total
        if percent != last:
            last = percent
            text = f"loading weights ({format_size(done)} of {format_size(total)})"
            report(text, WEIGHTS_FROM + (WEIGHTS_TO - WEIGHTS_FROM) * done / total)

    return tell


def _tensor_bytes(module: torch.nn.Module) -> int:
    """Bytes of the distinct tensors of a module; tied ones count once."""
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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
