"""`snugvl.load`: from a model's name to a running engine. "auto" is resolved here, once.

A model that sees can be loaded without its vision tower (`language_only`): its tensors are not read, the plan
doesn't count them, and pictures are refused.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from snugvl.allocation import allocate, engine_config
from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Capabilities
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.options import (
    BackendName,
    DtypeName,
    EmbeddingName,
    KVCacheName,
    LoadOptions,
    PurposeName,
    TowerName,
    WeightsName,
    flag,
)
from snugvl.engine.engine import Engine
from snugvl.errors import DoesNotFit, RequestError, UnsupportedModel
from snugvl.hardware.machine import Machine, OperatingSystem
from snugvl.hardware.sizes import format_size
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import Storage, load_model, tensor_bytes
from snugvl.models.main_memory import NoPageLockedMemory
from snugvl.models.networks import LoadableNetwork
from snugvl.place import Place, cap, device_of, dtype_of, place_on
from snugvl.planned import planned_rows, watch_on
from snugvl.planner.footprint.native import LATE_BYTES, READERS, loading_bytes
from snugvl.planner.footprint.weights import tower_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.plan import Allocation
from snugvl.planner.settings import Settings
from snugvl.timeline import mark

if TYPE_CHECKING:
    from snugvl.model import Model

Progress = Callable[[str, float], None]
"""Told what loading is doing, and how much of it is done, from 0 to 1."""

# Of all progress: nearly all the time goes into reading weights.
READING, WEIGHTS_FROM, WEIGHTS_TO = 0.03, 0.05, 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A running engine with what its memory was planned to be.

    Attributes:
        place: the device, with what was free there before.
        planned: bytes of each row of the ledger, by name.
        weights: bytes of the weights in place, by row of the ledger.
        allocation: the plan that runs.
        cap_bytes: what this process never takes more of, or None on a CPU.
        left_out_bytes: of the vision tower, where it was left out; in the format it would have had.
    """

    backend: NativeBackend
    place: Place
    planned: Mapping[str, int]
    weights: Mapping[str, int]
    allocation: Allocation
    cap_bytes: int | None
    left_out_bytes: int = 0


def load(
    model: str | Path = "pocket",
    *,
    device: str = "auto",
    dtype: DtypeName = "auto",
    weights: WeightsName = "auto",
    kv_cache: KVCacheName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
    memory: int | str | None = None,
    backend: BackendName = "native",
    language_only: bool = False,
    prefix_cache: bool = True,
    tower: TowerName = "auto",
    embedding: EmbeddingName = "auto",
    step_graphs: bool | None = None,
    trust_remote_code: bool = False,
    purpose: PurposeName = "chat",
    concurrency: int | None = None,
    progress: Progress | None = None,
) -> "Model":
    """Load a checkpoint into our own engine, or into Hugging Face transformers, in this process.

    Args:
        model: `pocket`, a checkpoint folder, or a Hub id that is in the local cache.
        device: `cpu`, `cuda`, `cuda:1`, …; auto takes the GPU if there is one.
        dtype: activations, KV cache (unless it is FP8), and weights that stay as wide; auto takes bfloat16
            (float16 before Ampere) on a GPU, and on a CPU float32 where it leaves half of the free memory.
        weights: format of the decoder's weights in memory. Auto keeps a checkpoint that is stored in 4 bits,
            and on a GPU an FP8 one, as it is; of others it takes bf16, int8 or int4, the first that fits,
            with embedding and lm_head in int8 where that makes room. On a CPU it takes `dtype`.
        kv_cache: format of keys and values: that of the activations (bf16), or fp8, half as large, of our own
            engine alone. Auto takes fp8 on a GPU, where it makes room for larger images or a longer context,
            for models that norm their keys.
        context: tokens of one conversation, image tokens included; by default as many as fit, up to 8,192.
        max_pixels: scale larger images down to this many pixels (the checkpoint's own limit at most), and
            the frames of a video until all together have as many tokens; by default what half of the
            context holds.
        memory: most that may be taken, in bytes or as a size such as "7200MiB", a GPU's CUDA context
            included; by default what is free, less a margin. On a GPU torch is held to it.
        backend: auto takes our own engine where it runs the model, else transformers.
        language_only: leave the vision tower out; pictures are refused, and its memory is free.
        prefix_cache: start a prompt from what earlier ones with the same beginning have left. The time to the
            first token then tells whether somebody asked like that before. Transformers never does it.
        tower: where the vision tower's weights are: "resident" on the GPU, or "streamed" (our own engine
            alone): in main memory, and block by block on the GPU while it encodes a picture. Auto streams
            them where nothing else fits.
        embedding: where the embedding is: on the "gpu", or "cpu" (our own engine alone): in page-locked main
            memory, where the GPU reads a row for each token. Auto has it there where that makes room, for
            models whose embedding isn't lm_head as well; under WSL2 never.
        step_graphs: on a GPU with plenty of free memory, replay steps with prompts, and small pictures, from
            CUDA graphs (our own engine alone): the first token comes sooner on a fast GPU.
        trust_remote_code: run Python files that the checkpoint brings (transformers only).
        purpose: what the memory is planned for: chat, documents, detect or batch (`snugvl plan --for`).
        concurrency: requests at the same time that are sure of their whole context.
        progress: called with what is being done and how much is done, from 0 to 1.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: the weights and one conversation need more memory than is free, with the numbers.
        RequestError: an argument is wrong.
    """
    options = LoadOptions(
        str(model), device=device, dtype=dtype, weights=weights, kv_cache=kv_cache, context=context,
        max_pixels=max_pixels, memory=memory, backend=backend, language_only=language_only,
        prefix_cache=prefix_cache, tower=tower, embedding=embedding, step_graphs=step_graphs,
        trust_remote_code=trust_remote_code, purpose=purpose, concurrency=concurrency,
    )  # fmt: skip
    return load_with(options, progress)


def load_with(options: LoadOptions, progress: Progress | None = None) -> "Model":
    """The same, of options that are one value."""
    from snugvl.model import Model

    if backend_for(options) == "native":
        return Model(load_engine(options, progress=progress).backend)
    refuse_ours(options)
    from snugvl.backends.transformers.loading import load_planned

    return Model(load_planned(options, progress=progress).backend)


def refuse_ours(options: LoadOptions) -> None:
    """Refuse what our own engine alone has, for another.

    Raises:
        RequestError: names the option and the way out.
    """
    ours = {
        "tower": options.tower == "streamed",
        "embedding": options.embedding == "cpu",
        "kv_cache": options.kv_cache == "fp8",
        "step_graphs": options.step_graphs is not None,
    }
    for name, said in ours.items():
        if said:
            value = getattr(options, name)
            raise RequestError(
                f"{name} {value!r} is for our own engine alone; leave it out, or use backend='native' "
                f"({flag(name, value)}, --backend native)",
                field=name,
            )


def backend_for(options: LoadOptions) -> Literal["native", "transformers"]:
    """The backend that runs a model in this process.

    Raises:
        RequestError: there is no such backend in this process.
        CheckpointNotFound, CheckpointError: about the checkpoint, where it decides.
    """
    if options.backend == "vllm":
        raise RequestError(
            "backend 'vllm' runs behind `snugvl serve` alone; use auto, native or transformers",
            field="backend",
        )
    if options.backend != "auto":
        return options.backend
    try:
        read_config(locate(options.model))
    except UnsupportedModel:
        return "transformers"
    return "native"


def load_engine(
    options: LoadOptions,
    *,
    planned: Allocation | None = None,
    machine: Machine | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Our own engine without the tasks, for a process that only runs the engine.

    Args:
        planned: what a plan has decided; it runs as it is where it still fits.
        machine: as it was before this process took anything of it, where somebody has looked.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: it needs more memory than is free, with the numbers.
        RequestError: an option that no plan can meet.
    """
    report = progress or (lambda _detail, _done: None)
    report("reading headers", READING)
    folder = locate(options.model)
    config = read_config(folder)
    if options.language_only:
        config = replace(config, vision=None)
    target = device_of(options.device)
    place = place_on(target, options.memory_bytes, machine)
    mark("the device is there")
    facts = replace(facts_of(str(folder), offline=True), name=options.model)
    counted = inventory(facts)
    # In a thread of its own: a tokenizer needs Python for about as long as the weights need the GPU.
    reader = ThreadPoolExecutor(1, "processor")
    reading = reader.submit(Processor.from_folder, folder, config, max_pixels=options.max_pixels)
    reader.shutdown(wait=False)
    allocation = allocate(facts, options, place, planned)
    settings = allocation.settings
    cap_bytes = cap(place, LATE_BYTES)
    mark("memory is planned and capped")
    if allocation.changed:
        report(allocation.changed, WEIGHTS_FROM)
    left_out = tower_bytes(counted, settings) if settings.language_only else 0
    if left_out:
        report(f"leaving the vision tower out, which frees {format_size(left_out)}", WEIGHTS_FROM)
    kind = dtype_of(options.dtype, place, wide=settings.itemsize == 4)
    network = _network(folder, kind, place, allocation, counted, report)
    mark("weights are loaded")
    processor = reading.result()
    mark("the tokenizer is read")
    if processor.pictures is not None and settings.max_pixels is not None:
        processor.pictures.limit(settings.max_pixels)
    report("allocating the KV cache", WEIGHTS_TO)
    if target.type == "cuda":
        torch.cuda.empty_cache()  # what loading took for a moment, in pieces that fit nothing else
    planned_bytes = planned_rows(allocation, counted)
    engine = Engine(network, engine_config(allocation, options), watch_on(place, planned_bytes, cap_bytes))
    mark("the engine is made")
    capabilities = replace(
        _capabilities(config, processor, settings, kind, parameters=counted.parameters),
        model=options.model,
        device="CPU" if target.type == "cpu" else place.name,
        language_only=left_out > 0,
        plan=allocation,
    )
    backend = NativeBackend(engine, processor, capabilities)
    held = _held(network, settings)
    return Loaded(backend, place, planned_bytes, held, allocation, cap_bytes, left_out)


def _network(
    folder: Path, kind: torch.dtype, place: Place, allocation: Allocation, model: Inventory, report: Progress
) -> LoadableNetwork:
    """The weights in place, as the plan has them.

    Raises:
        DoesNotFit: the system gives no page-locked memory for the embedding.
    """
    settings = allocation.settings
    try:
        return load_model(
            folder,
            dtype=kind,
            device=place.device,
            storage=_storage(settings, place.system),
            readers=_readers(model, allocation, place),
            progress=_of_weights(report),
            language_only=settings.language_only,
        )
    except NoPageLockedMemory as error:
        raise DoesNotFit(
            f"the system gives no {format_size(error.nbytes)} of page-locked main memory, where the "
            "embedding was to be; keep it on the GPU: embedding='gpu' (--embedding gpu)"
        ) from None


def _held(network: LoadableNetwork, settings: Settings) -> dict[str, int]:
    """Bytes of the weights on the device, by row of the ledger."""
    vision = 0 if network.tower is None else tensor_bytes(network.tower)
    beside = tensor_bytes(network.decoder.embed_tokens) if settings.embedding == "cpu" else 0
    return {"text weights": tensor_bytes(network) - vision - beside, "vision weights": vision}


def _readers(model: Inventory, allocation: Allocation, place: Place) -> int:
    """Threads that load at once: as many as there is room for before the cache and the graphs are made."""
    if place.device.type == "cpu":
        return 1
    needed = allocation.footprint
    later = needed.named("KV cache") + needed.named("CUDA graphs")
    room = place.usable_bytes - needed.always_bytes + later
    fits = (n for n in READERS if loading_bytes(model, allocation.settings, n) <= room)
    return next(fits, READERS[-1])


def _capabilities(
    config: ModelConfig, processor: Processor, settings: Settings, kind: torch.dtype, *, parameters: int
) -> Capabilities:
    """What the model can do, but for its name and place."""
    pictures = processor.pictures
    return Capabilities(
        model="",
        context_tokens=settings.context,
        images=pictures is not None,
        video=pictures is not None and pictures.videos is not None,
        max_pixels=0 if pictures is None else pictures.images.settings.max_pixels,
        min_pixels=0 if pictures is None else pictures.images.settings.min_pixels,
        dtype=str(kind).removeprefix("torch."),
        weights=settings.weights_name,
        kv_cache=settings.kv_name,
        architecture=config.architecture,
        parameters=parameters,
        tools=processor.template.shows_tools,
        tool_form=processor.template.tool_form,
        most_characters=processor.tokenizer.most_characters(settings.context),
    )


def _storage(settings: Settings, system: OperatingSystem) -> Storage:
    """Under WSL2 there is little pinned memory, and others need it too."""
    layers = "bf16" if settings.weights == "fp32" else settings.weights
    memory: Literal["plain", "pinned"] = "plain" if system == "wsl2" else "pinned"
    streamed = memory if settings.vision == "streamed" else None
    embedding: Literal["gpu", "cpu"] = "cpu" if settings.embedding == "cpu" else "gpu"
    return Storage(
        layers, settings.head, tower=settings.vision_weights, streamed=streamed, embedding=embedding
    )


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
