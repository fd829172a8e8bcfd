"""`snugvl.load`: from a model's name to a running engine. "auto" is resolved here, once.

A model that sees can be loaded without its vision tower (`language_only`): its tensors are not read, the plan
doesn't count them, and pictures are refused.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from snugvl.allocation import Allocation, Wish, allocate
from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Backend, Capabilities
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.engine.engine import Engine
from snugvl.errors import DoesNotFit, RequestError, UnsupportedModel
from snugvl.hardware.machine import Machine, OperatingSystem
from snugvl.hardware.sizes import format_size, parse_size
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import Storage, load_model, tensor_bytes
from snugvl.models.main_memory import NoPageLockedMemory
from snugvl.place import Place, cap, device_of, place_on
from snugvl.planned import planned_rows, watch_on
from snugvl.planner.capabilities import prefers_fp32
from snugvl.planner.footprint.native import LATE_BYTES
from snugvl.planner.footprint.step_graphs import Recorded
from snugvl.planner.footprint.weights import tower_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import EmbeddingWish, KVFormat, Settings, TowerWish, WeightFormat
from snugvl.timeline import mark

if TYPE_CHECKING:
    from snugvl.model import Model

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightsName = Literal["auto", "bf16", "fp8", "int8", "int4"]
TowerName = TowerWish
EmbeddingName = EmbeddingWish
KVCacheName = Literal["auto", "bf16", "fp8"]
BackendName = Literal["auto", "native", "transformers"]
Progress = Callable[[str, float], None]
"""Told what loading is doing, and how much of it is done, from 0 to 1."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = ("auto", "bf16", "fp8", "int8", "int4")
KV_CACHES = ("auto", "bf16", "fp8")
BACKENDS = ("auto", "native", "transformers")
TOWERS = ("auto", "resident", "streamed")
EMBEDDINGS = ("auto", "gpu", "cpu")
# Of all progress: nearly all the time goes into reading weights.
READING, WEIGHTS_FROM, WEIGHTS_TO = 0.03, 0.05, 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A running engine with what its memory was planned to be.

    Attributes:
        place: the device, with what was free there before.
        planned: bytes of each row of the ledger, by name.
        weights: bytes of the weights in place, by row of the ledger.
        subject: what measurements of it belong to.
        cap_bytes: what this process never takes more of, or None on a CPU.
        recorded: what CUDA graphs of steps with prompts take.
        left_out_bytes: of the vision tower, where it was left out; in the format it would have had.
    """

    backend: NativeBackend
    place: Place
    planned: Mapping[str, int]
    weights: Mapping[str, int]
    subject: str
    cap_bytes: int | None
    recorded: Recorded
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
    step_graphs: bool = True,
    trust_remote_code: bool = False,
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
        progress: called with what is being done and how much is done, from 0 to 1.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: the weights and one conversation need more memory than is free, with the numbers.
        RequestError: an argument is wrong.
    """
    from snugvl.model import Model

    wanted: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "weights": weights,
        "context": context,
        "max_pixels": max_pixels,
        "memory": memory,
        "language_only": language_only,
        "progress": progress,
    }
    made: Backend
    if tower not in TOWERS:
        raise RequestError(f"tower {tower!r} is unknown; use {', '.join(TOWERS)}", field="tower")
    if embedding not in EMBEDDINGS:
        raise RequestError(
            f"embedding {embedding!r} is unknown; use {', '.join(EMBEDDINGS)}", field="embedding"
        )
    if backend_for(model, backend) == "native":
        wanted |= {"tower": tower, "embedding": embedding, "step_graphs": step_graphs}
        made = load_engine(model, prefix_cache=prefix_cache, kv_cache=kv_cache, **wanted).backend
    elif tower == "streamed":
        raise RequestError(
            "only our own engine streams the vision tower; use tower='auto', or backend='native'",
            field="tower",
        )
    elif embedding == "cpu":
        raise RequestError(
            "only our own engine reads the embedding from main memory; use embedding='auto', or "
            "backend='native'",
            field="embedding",
        )
    else:
        if _kv_format(kv_cache) == "fp8":
            raise RequestError(
                "kv_cache 'fp8' is for our own engine; transformers keeps keys and values in dtype",
                field="kv_cache",
            )
        from snugvl.backends.transformers.loading import load_engine as load_transformers

        made = load_transformers(model, trust_remote_code=trust_remote_code, **wanted).backend
    return Model(made)


def backend_for(model: str | Path, backend: str) -> str:
    """The backend that runs a model in this process: "native" or "transformers".

    Raises:
        RequestError: there is no such backend in this process.
        CheckpointNotFound, CheckpointError: about the checkpoint, where it decides.
    """
    if backend not in BACKENDS:
        raise RequestError(f"backend {backend!r} is unknown; use {', '.join(BACKENDS)}", field="backend")
    if backend != "auto":
        return backend
    try:
        read_config(locate(str(model)))
    except UnsupportedModel:
        return "transformers"
    return "native"


def load_engine(
    model: str | Path,
    *,
    device: str,
    dtype: DtypeName,
    weights: WeightsName = "auto",
    kv_cache: KVCacheName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
    memory: int | str | None = None,
    max_waiting: int | None = None,
    language_only: bool = False,
    prefix_cache: bool = True,
    tower: TowerName = "auto",
    embedding: EmbeddingName = "auto",
    step_graphs: bool = True,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> Loaded:
    """`load` of our own engine without the tasks, for a process that only runs the engine.

    `max_waiting`: requests that may queue before `QueueFull`; None for the engine's own limit. `machine`: as
    it was before this process took anything of it, where somebody has looked.
    """
    report = progress or (lambda _detail, _done: None)
    report("reading headers", READING)
    folder = locate(str(model))
    config = read_config(folder)
    if language_only:
        config = replace(config, vision=None)
    target = device_of(device)
    limit = parse_size(memory, "memory") if isinstance(memory, str) else memory
    place = place_on(target, limit, machine)
    mark("the device is there")
    facts = replace(facts_of(str(folder), offline=True), name=str(model))
    counted = inventory(facts)
    kind = _dtype(dtype, counted, place)
    # In a thread of its own: a tokenizer needs Python for about as long as the weights need the GPU.
    reader = ThreadPoolExecutor(1, "processor")
    reading = reader.submit(Processor.from_folder, folder, config, max_pixels=max_pixels)
    reader.shutdown(wait=False)
    kv_format = _kv_format(kv_cache)
    wish = Wish(
        context, max_pixels, _weights(weights), language_only, tower, kv_format, step_graphs, embedding
    )
    allocation = allocate(facts, kind, place, wish)
    cap_bytes = cap(place, LATE_BYTES)
    mark("memory is planned and capped")
    left_out = tower_bytes(counted, allocation.settings) if allocation.settings.language_only else 0
    if left_out:
        report(f"leaving the vision tower out, which frees {format_size(left_out)}", WEIGHTS_FROM)
    try:
        network = load_model(
            folder,
            dtype=kind,
            device=target,
            storage=_storage(allocation.settings, place.system),
            readers=allocation.readers,
            progress=_of_weights(report),
            language_only=language_only,
        )
    except NoPageLockedMemory as error:
        raise DoesNotFit(
            f"the system gives no {format_size(error.nbytes)} of page-locked main memory, where the "
            "embedding was to be; keep it on the GPU: embedding='gpu' (--embedding gpu)"
        ) from None
    mark("weights are loaded")
    processor = reading.result()
    mark("the tokenizer is read")
    if processor.pictures is not None:
        processor.pictures.limit(allocation.max_pixels)
    report("allocating the KV cache", WEIGHTS_TO)
    if target.type == "cuda":
        torch.cuda.empty_cache()  # what loading took for a moment, in pieces that fit nothing else
    planned = planned_rows(allocation, place)
    sizes = replace(allocation.engine, prefix_cache=prefix_cache)
    sizes = sizes if max_waiting is None else replace(sizes, max_waiting=max_waiting)
    engine = Engine(network, sizes, watch_on(place, planned, cap_bytes))
    mark("the engine is made")
    vision = 0 if network.tower is None else tensor_bytes(network.tower)
    beside = tensor_bytes(network.decoder.embed_tokens) if allocation.settings.embedding == "cpu" else 0
    held = {"text weights": tensor_bytes(network) - vision - beside, "vision weights": vision}
    capabilities = replace(
        _capabilities(config, processor, allocation, kind, parameters=counted.parameters),
        model=str(model),
        device="CPU" if target.type == "cpu" else place.name,
        language_only=left_out > 0,
    )
    backend = NativeBackend(engine, processor, capabilities)
    return Loaded(backend, place, planned, held, allocation.subject, cap_bytes, allocation.recorded, left_out)


def _capabilities(
    config: ModelConfig, processor: Processor, allocation: Allocation, kind: torch.dtype, *, parameters: int
) -> Capabilities:
    """What the model can do, but for its name and place."""
    pictures = processor.pictures
    return Capabilities(
        model="",
        context_tokens=allocation.engine.max_model_len,
        images=pictures is not None,
        video=pictures is not None and pictures.videos is not None,
        max_pixels=0 if pictures is None else pictures.images.settings.max_pixels,
        min_pixels=0 if pictures is None else pictures.images.settings.min_pixels,
        dtype=str(kind).removeprefix("torch."),
        weights=allocation.settings.weights_name,
        kv_cache=allocation.settings.kv_name,
        architecture=config.architecture,
        parameters=parameters,
        tools=processor.template.shows_tools,
        tool_form=processor.template.tool_form,
        most_characters=processor.tokenizer.most_characters(allocation.engine.max_model_len),
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


def _weights(name: WeightsName) -> WeightFormat | None:
    if name not in WEIGHTS:
        raise RequestError(f"weights {name!r} are unknown; use {', '.join(WEIGHTS)}", field="weights")
    return None if name == "auto" else name


def _kv_format(name: KVCacheName) -> KVFormat | None:
    if name not in KV_CACHES:
        raise RequestError(f"kv_cache {name!r} is unknown; use {', '.join(KV_CACHES)}", field="kv_cache")
    return None if name == "auto" else name


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


def _dtype(name: str, counted: Inventory, place: Place) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise RequestError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}", field="dtype")
    if place.compute_capability is not None:
        return torch.bfloat16 if place.compute_capability >= (8, 0) else torch.float16
    return torch.float32 if prefers_fp32(counted, place.planned()) else torch.bfloat16
