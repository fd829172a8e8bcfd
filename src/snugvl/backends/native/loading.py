"""From options and a plan to our own engine, running: headers, allocation, weights, KV cache.

A model that sees can be loaded without its vision tower (`language_only`): its tensors are not read, the plan
doesn't count them, and pictures are refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Thread
from typing import Literal

import torch

from snugvl.backends.native.ahead import KernelsAhead
from snugvl.backends.native.allocation import allocate, as_planned, engine_config
from snugvl.backends.native.backend import NativeBackend
from snugvl.backends.native.checking import settle
from snugvl.backends.native.planned import planned_rows, watch_on
from snugvl.backends.place import TargetDevice, cap, device_of, dtype_of, place_on, with_driver
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.catalogue import thinks_about_pictures
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.gguf_folder import folder_of, read_weights
from snugvl.checkpoint.gguf_network import ours
from snugvl.checkpoint.locate import locate, training_of
from snugvl.checkpoint.read import facts_of
from snugvl.core.folders import cache_folder
from snugvl.core.kernel_checks import KernelVerdict, told
from snugvl.core.ledger import LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Capabilities
from snugvl.core.options import LoadOptions, Progress
from snugvl.core.service import mark
from snugvl.core.sizes import format_size
from snugvl.engine.claims import DeviceClaim, loading_onto
from snugvl.engine.engine import Engine
from snugvl.errors import DoesNotFit, SnugvlError
from snugvl.hardware import host
from snugvl.hardware.machine import Machine
from snugvl.inputs.prompt import Processor
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.layers.device import release
from snugvl.models.host_memory import NoPageLockedMemory
from snugvl.models.loader import Storage, device_bytes, load_model, tensor_bytes
from snugvl.models.networks import LoadableNetwork
from snugvl.models.tensor_files import CHUNK_BYTES
from snugvl.planner.engines.native.footprint import LATE_BYTES, LOADING, PIECE_BYTES, loading_bytes
from snugvl.planner.footprint.weights import expert_host_bytes, part_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.plan import Allocation
from snugvl.planner.settings import Settings

Settle = Callable[..., tuple[KernelVerdict, ...]]  # see `settle`
# Of all progress: nearly all the time goes into reading weights.
READING, WEIGHTS_FROM, WEIGHTS_TO = 0.03, 0.05, 0.9
AHEAD_S = 1.0  # of waiting for kernels, after which files are read ahead
KEPT_BYTES = 6 << 30  # of host memory that stay free then, for the processes that are waited for


@dataclass(frozen=True, eq=False)
class LoadedEngine:
    """An engine, the processor that makes its prompts, and the plan of its memory.

    Reading `backend` has the engine run in a thread of its own from then on; else the caller makes its steps.

    Attributes:
        place: the device, with its free memory before loading.
        planned: bytes of each row of the ledger, by name.
        weights: bytes of the weights in place, by row of the ledger.
        allocation: the plan that runs.
        cap_bytes: most bytes that this process ever takes, or None on a CPU.
        left_out_bytes: bytes of the vision tower, where it was left out, in the format it would have had.
        kernels: the compiler of kernels ahead of their use, or None.
        beside: rows of the ledger of what stays in host memory beside a GPU.
    """

    engine: Engine
    processor: Processor
    capabilities: Capabilities
    thinking: ThinkingDefault
    place: TargetDevice
    planned: Mapping[str, int]
    weights: Mapping[str, int]
    allocation: Allocation
    cap_bytes: int | None
    left_out_bytes: int = 0
    kernels: KernelsAhead | None = None
    beside: tuple[LedgerRow, ...] = ()

    @cached_property
    def backend(self) -> NativeBackend:
        """The engine, running."""
        return NativeBackend(self.engine, self.processor, self.capabilities, self.thinking, self.kernels)


def load_engine(
    options: LoadOptions,
    *,
    planned: Allocation | None = None,
    machine: Machine | None = None,
    progress: Progress | None = None,
    kernels: KernelsAhead | None = None,
    settled: Settle = settle,
) -> LoadedEngine:
    """Our own engine without the tasks, for a process that only runs the engine.

    Args:
        planned: a plan's allocation, which runs as it is where it still fits.
        machine: as it was before this process took anything of it, where it was probed then.
        kernels: begins to compile them while weights are loaded.
        settled: sees, before there is memory, that no kernel runs that is wrong on this GPU.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: it needs more memory than is free, with the numbers.
        RequestError: an option that no plan can meet.
    """
    report = progress or (lambda _detail, _done: None)
    report("reading headers", READING)
    with loading_onto(device_of(options.device)) as claim:
        return _loaded(options, planned, machine, report, partial(settled, kernels=kernels), kernels, claim)


def _loaded(
    options: LoadOptions, planned: Allocation | None, machine: Machine | None, report: Progress,
    settled: Settle, kernels: KernelsAhead | None, claim: DeviceClaim,
) -> LoadedEngine:  # fmt: skip
    """See `load_engine`. Where it raises, its variables are cleared, and those of whatever it has called."""
    files = gguf_files(options.model)
    folder = locate(options.model) if files is None else folder_of(files)
    config = read_config(folder)
    if options.language_only:
        config = replace(config, vision=None)
    target = claim.device
    place = with_driver(place_on(target, options.memory_bytes, machine))
    mark("the device is there")
    facts = facts_of(str(folder) if files is None else options.model, offline=True)
    facts = replace(facts if files is None else ours(facts), name=options.model)
    counted = inventory(facts)
    # In a thread of its own: a tokenizer needs Python for about as long as the weights need the GPU.
    reader = ThreadPoolExecutor(1, "processor")
    reading = reader.submit(Processor.from_folder, folder, config, max_pixels=options.max_pixels)
    reader.shutdown(wait=False)
    allocation = allocate(facts, options, place, planned)
    settings = allocation.settings
    if settings.predictor:
        counted = inventory(facts.with_predictor())
    cap_bytes = cap(as_planned(place, allocation), LATE_BYTES)
    mark("memory is planned and capped")
    if allocation.changed:
        report(allocation.changed, WEIGHTS_FROM)
    left_out = part_bytes(counted, settings, "vision") if settings.language_only else 0
    if left_out:
        report(f"leaving the vision tower out, which frees {format_size(left_out)}", WEIGHTS_FROM)
    kind = dtype_of(options.dtype, place, wide=settings.itemsize == 4)
    sizes = engine_config(allocation, options)

    replaced: list[KernelVerdict] = []

    def outlined(network: LoadableNetwork) -> None:
        room = place.usable_bytes - 2 * place.context_bytes  # this process's, and that of who checks
        with _read_ahead(folder):
            replaced.extend(settled(network, sizes, place, limit_bytes=room, report=report))

    network = _network(folder, kind, place, allocation, counted, report, outlined)
    mark("weights are loaded")
    processor = reading.result()
    mark("the tokenizer is read")
    if processor.pictures is not None and settings.max_pixels is not None:
        processor.pictures.limit(settings.max_pixels)
    report("allocating the KV cache", WEIGHTS_TO)
    release(target)  # what loading took for a moment, in pieces that fit nothing else
    planned_bytes = planned_rows(allocation, counted)
    engine = Engine(network, sizes, watch_on(place, planned_bytes, cap_bytes), claim)
    mark("the engine is made")
    capabilities = replace(
        capabilities_of(config, processor, settings, kind, parameters=counted.parameters),
        model=options.model,
        device="CPU" if target.type == "cpu" else place.name,
        language_only=left_out > 0,
        most_images=options.images,
        training=training_of(options.model),
        plan=allocation.running,
        replaced=told(replaced),
    )
    if facts.gguf is not None and counted.has("blocks", "decoder"):
        capabilities = replace(capabilities, weights=facts.gguf.file_type)
    thinking = ThinkingDefault(options.thinking, thinks_about_pictures(facts.family))
    made = engine, processor, capabilities, thinking
    held, beside = _held(network, settings), _beside(network, expert_host_bytes(counted, settings))
    return LoadedEngine(*made, place, planned_bytes, held, allocation, cap_bytes, left_out, kernels, beside)


def _network(
    folder: Path, kind: torch.dtype, place: TargetDevice, allocation: Allocation, model: Inventory,
    report: Progress, outlined: Callable[[LoadableNetwork], None],
) -> LoadableNetwork:  # fmt: skip
    """The network with its weights in the plan's formats and places.

    Raises:
        DoesNotFit: the system gives no page-locked memory for the embedding.
    """
    settings = allocation.settings
    readers, piece_bytes = _readers(model, allocation, place)
    try:
        return load_model(
            folder,
            dtype=kind,
            device=place.device,
            storage=storage_of(settings),
            readers=readers,
            piece_bytes=piece_bytes,
            progress=_of_weights(report),
            language_only=settings.language_only,
            predictor=settings.predictor,
            outlined=outlined,
            kept=_kept(),
        )
    except NoPageLockedMemory as error:
        raise DoesNotFit(
            f"the system gives no {format_size(error.nbytes)} of page-locked host memory, where the "
            "embedding was to be; keep it on the GPU: --embedding gpu"
        ) from None


@contextmanager
def _read_ahead(folder: Path) -> Iterator[None]:
    """Have the system's cache of files hold a checkpoint's, where what is done meanwhile takes long."""
    done = Event()

    def read() -> None:
        if not done.wait(AHEAD_S):
            with suppress(OSError, SnugvlError):  # it comes up again where weights are read
                files = dict.fromkeys(entry.file for entry in read_weights(folder).values())
                _cache_files(files, host.memory().free_bytes - KEPT_BYTES, done)

    Thread(target=read, name="snugvl-read-ahead", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _cache_files(files: Iterable[Path], most: int, done: Event) -> int:
    """Read at most about `most` bytes of files, until `done`; returns how many."""
    buffer, total = bytearray(CHUNK_BYTES), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while total < most and not done.is_set() and (count := file.readinto(buffer)):
                total += count
    return total


def _kept() -> Path | None:
    """The folder in which sensitivities for rounding are kept; None without a home folder."""
    try:
        return cache_folder() / "inputs"
    except RuntimeError:
        return None


def _held(network: LoadableNetwork, settings: Settings) -> dict[str, int]:
    """Bytes of the weights on the device, by row of the ledger."""
    vision = 0 if network.tower is None else tensor_bytes(network.tower)
    beside = tensor_bytes(network.decoder.embed_tokens) if settings.embedding == "cpu" else 0
    return {Kind.TEXT: device_bytes(network) - vision - beside, Kind.VISION: vision}


def _beside(network: LoadableNetwork, planned: int) -> tuple[LedgerRow, ...]:
    """The ledger's row of experts in host memory, where they are there."""
    cache = network.expert_cache
    if cache is None:
        return ()
    return (LedgerRow(Kind.HOST.value, planned, cache.host_nbytes, kind=Kind.HOST),)


def _readers(model: Inventory, allocation: Allocation, place: TargetDevice) -> tuple[int, int]:
    """(threads that load at once, bytes of their pieces), as many as fit before cache and graphs are made.
    Where page-locked memory is scarce pieces are small, as torch keeps it.
    """
    if place.device.type == "cpu":
        return LOADING[-1]
    needed = allocation.footprint
    later = needed.of(Kind.CACHE, Kind.GRAPHS)
    room = place.usable_bytes - needed.always_bytes + later
    ways = [each for each in LOADING if place.pinned_bytes is None or each[1] == PIECE_BYTES]
    fits = (each for each in ways if loading_bytes(model, allocation.settings, *each) <= room)
    return next(fits, LOADING[-1])


def capabilities_of(
    config: ModelConfig, processor: Processor, settings: Settings, kind: torch.dtype, *, parameters: int
) -> Capabilities:
    """Capabilities of the model, without its name and place."""
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
        thinks=processor.template.thinks,
        most_characters=processor.tokenizer.most_characters(settings.context),
    )


def storage_of(settings: Settings) -> Storage:
    """The formats and places of a plan's weights."""
    layers = "bf16" if settings.weights == "fp32" else settings.weights
    memory: Literal["plain", "pinned"] = "pinned" if settings.page_locked else "plain"
    streamed = memory if settings.vision == "streamed" else None
    embedding: Literal["gpu", "cpu"] = "cpu" if settings.embedding == "cpu" else "gpu"
    return Storage(
        layers, settings.head, tower=settings.vision_weights, streamed=streamed, embedding=embedding,
        expert_slots=settings.expert_slots, experts_pinned=settings.page_locked,
    )  # fmt: skip


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
