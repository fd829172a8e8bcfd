"""Weights from safetensors files straight into their place in a network.

The network is built without memory, then given it once in its final formats and device. Each tensor is
read in pieces (`models/tensor_files.py`) and copied, converted, quantised or, where it is FP8 and doesn't
stay so, multiplied with its block scales on the way. So the host never holds more than the network itself
and a few buffers. Files are read, not mapped: mapped pages would
count as ours. A GPU is filled by several threads: one can't read as fast as it takes.

Strict both ways: a tensor that is missing, has another shape, or belongs to another architecture is
named with its file. What a network says for itself (`LoadableNetwork`): which parameters hold several tensors
of the checkpoint (`packed`, of any module), what older files call them (`aliases`), and what files store that
no network has (`unloaded`). Pre-quantized 4-bit matrices are `models/prequantized.py`'s.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Literal

import torch
from torch import nn

from snugvl.checkpoint.architecture import Fp8Blocks, ModelConfig, PackedInt4
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_folder import read_weights
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.core.formats import FEW_BITS, FORMATS
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.device import give_back_free_blocks, in_thread_that_ends
from snugvl.layers.experts import Experts
from snugvl.layers.linear import Linear
from snugvl.layers.weights import GROUP, FormatName, to_few_bits
from snugvl.models import prequantized, sensitivity
from snugvl.models.expert_cache import (
    ExpertCache,
    InPlace,
    cache_bytes,
    copies_to,
    experts_of,
    experts_to_host,
)
from snugvl.models.host_memory import CopyStream, WeightStream, room_bytes, to_host, to_host_memory
from snugvl.models.linear_attention import join_projections
from snugvl.models.networks import LoadableNetwork, give_memory, without_memory
from snugvl.models.readers import Readers, StoredTensors, blocks_of
from snugvl.models.tensor_files import (
    DTYPES,
    SCALE_SUFFIX,
    LoadTarget,
    PackedMatrix,
    TensorFiles,
    check_dtype,
)

GPU_READERS = 4
WIDE = ("BF16", "F16", "F32")  # dtypes of what isn't quantised


@dataclass(frozen=True, slots=True)
class Storage:
    """In which format the weights stay in memory.

    Attributes:
        layers: the decoder layers' linears; "fp8" keeps an FP8 checkpoint's own blocks. Those that have few
            bits in the checkpoint stay so, whatever else there is stays as wide: what the narrowest of
            them are says that of all.
        head: embedding and head ("bf16" or "int8").
        group: columns that share a scale in few bits; None: as many as is usual.
        tower: the vision tower's matrices ("bf16" or "int8"), but for the patches' own.
        streamed: the tower's blocks and mergers stay in host memory (`models/host_memory.py`), "pinned"
            where that is possible or "plain"; None keeps them on the device.
        embedding: "cpu": it stays in host memory, where a GPU reads it (`models/host_memory.py`).
        expert_slots: experts of each layer that have a place on the device, all being in host memory
            (`models/expert_cache.py`), page-locked with `experts_pinned` if possible; None: all are on
            the device.
    """

    layers: FormatName = "bf16"
    head: FormatName = "bf16"
    group: int | None = None
    tower: FormatName = "bf16"
    streamed: Literal["pinned", "plain"] | None = None
    embedding: Literal["gpu", "cpu"] = "gpu"
    expert_slots: int | None = None
    experts_pinned: bool = True

    @property
    def columns(self) -> int:
        """That share a scale in a matrix of a layer."""
        asked = self.group if self.layers in FEW_BITS else None
        return asked or FORMATS[self.layers].group


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheckpoint:
    """A network without memory, what its files hold, and how it is to be stored."""

    model: LoadableNetwork
    stored: StoredTensors
    storage: Storage

    @property
    def rounds(self) -> torch.dtype | None:
        """Type of the values that are rounded to few bits; None: none are."""
        few = sensitivity.rounded_matrices(self.model.decoder.layers).values()
        ready = isinstance(self.stored.form, PackedInt4) or any(each.parts for each in few)
        if ready or not few:  # what has few bits in the files stays as it is
            return None
        ids = set(map(id, few))
        name = next(name for name, target in targets_of(self.model) if id(target.linear) in ids)
        stored = self.stored.entry(name).dtype
        return torch.float32 if stored == "F8_E4M3" else DTYPES[stored]  # as `dequantise` makes them

    def begin_rounding(self, device: torch.device) -> Thread:
        """Have what rounds to few bits compiled for a GPU, in each format, while inputs are weighed.

        What goes wrong comes up again where weights are rounded.
        """
        matrices = sensitivity.rounded_matrices(self.model.decoder.layers).values()
        stored = None if device.type == "cpu" else self.rounds
        few = {(each.format, each.group) for each in matrices} if stored is not None else ()

        def round_some() -> None:
            for kind, group in few:
                with suppress(Exception):
                    to_few_bits(torch.zeros(8, group, dtype=stored, device=device), kind, group)

        thread = Thread(target=round_some, name="snugvl-rounding", daemon=True)
        thread.start()
        return thread

    def weigh_inputs(
        self,
        device: torch.device,
        readers: int = GPU_READERS,
        piece_bytes: int | None = None,
        kept: Path | None = None,
    ) -> None:
        """Let the decoder's matrices know what to be rounded for, where that is to few bits.

        Its layers are read once more for this, one after the other, unless what came out is found.

        Args:
            kept: folder where it is.
        """
        if self.rounds is None:
            return
        file = None
        if kept is not None:
            file = sensitivity.squares_file(kept, self.model, self.stored.tensors.values())
        if file is None or not sensitivity.recall(self.model, file, device):
            # It multiplies, and the engine's thread needs the library's handle afterwards.
            in_thread_that_ends(partial(_weigh_inputs, self.model, self.stored, device, readers, piece_bytes))
            if file is not None:
                sensitivity.remember(self.model, file)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    storage: Storage | None = None,
    readers: int = GPU_READERS,
    piece_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    language_only: bool = False,
    predictor: bool = False,
    outlined: Callable[[LoadableNetwork], None] | None = None,
    kept: Path | None = None,
) -> LoadableNetwork:
    """Build the network that `folder` describes and fill it.

    Args:
        dtype: of activations, and of all weights that `storage` leaves wide ("bf16").
        readers: threads that fill a GPU, each with a piece of its own there.
        piece_bytes: that each of them reads at a time, 8 MiB by default. A piece costs the interpreter as
            much whatever its size.
        progress: called after every tensor with the bytes of weights read, and those of all.
        language_only: leave the vision tower out.
        predictor: whether to load the multi-token predictor as well.
        outlined: called with the network in its final formats, before it has memory.
        kept: folder where what matrices are rounded for is kept for later starts.

    Raises:
        RequestError: there is no predictor.
        CheckpointError: names the file and tensor to blame.
        UnsupportedModel: an architecture, dtype or quantisation that this engine doesn't run.
        NoPageLockedMemory: there is none for the embedding; nothing was taken of the device yet.
    """
    opened = open_checkpoint(folder, dtype, storage, language_only=language_only, predictor=predictor)
    model, storage = opened.model, opened.storage
    join_projections(model.decoder.layers)
    apart = [] if storage.expert_slots is None else experts_of(model.decoder)
    by_gpu = storage.experts_pinned and device.type == "cuda"
    for experts in apart:
        experts.places = InPlace(experts, storage.expert_slots or 0 if by_gpu else 0)
    if outlined is not None:
        outlined(model)
    rounding = opened.begin_rounding(device)
    try:
        opened.weigh_inputs(device, readers, piece_bytes, kept)
    except BaseException:
        rounding.join()  # it holds memory of the device, which another try may need
        raise
    if storage.embedding == "cpu":
        to_host_memory(model.decoder.embed_tokens, device)
    units = [] if model.tower is None or storage.streamed is None else model.tower.units
    host = to_host(units, pinned=storage.streamed == "pinned")
    pinned = experts_to_host(apart, device, pinned=storage.experts_pinned)
    sizes = [room_bytes(units, [len(each) for each in host]), cache_bytes(apart, storage.expert_slots or 0)]
    give_memory(model, device, sizes[:1])
    # The last is a piece of its own: other programs may need it.
    room, slots = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    rounding.join()
    with closing(Readers(opened.stored, device, readers, piece_bytes)) as reading:
        reading.fill(dict(targets_of(model)), progress)
    if model.tower is not None and units:
        model.tower.weights = WeightStream(units, host, room, CopyStream(device))
    if apart:
        count, copies = storage.expert_slots or 0, copies_to(device)
        model.expert_cache = ExpertCache(apart, count, slots, copies, pinned=pinned)
    sensitivity.forget(model)
    return model


def _weigh_inputs(
    model: LoadableNetwork, stored: StoredTensors, device: torch.device, readers: int, piece_bytes: int | None
) -> None:
    wide = without_memory(replace(model.config, vision=None))
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            setattr(wide.get_submodule(name), "packed", module.packed)  # noqa: B010 (a module's, to mypy)
    wide.requires_grad_(False).eval().to(model.dtype)
    names = {id(module): f"{name}." for name, module in wide.named_modules()}
    embedding = next(name for name, each in targets_of(wide) if each.linear is wide.decoder.embed_tokens)
    with closing(Readers(stored, device, readers, piece_bytes)) as reading:

        def layer_ready(layer: nn.Module) -> None:
            give_memory(layer, device)
            reading.fill(dict(targets_of(layer, names[id(layer)])))

        with closing(TensorFiles({}, None, device)) as files:
            ids = sensitivity.some_ids(model.config.text.vocab_size)
            embedded = files.some_rows(stored.entry(embedding), ids).to(model.dtype)
        sensitivity.weigh_inputs(model, wide, embedded, layer_ready)
    if device.type == "cuda":
        give_back_free_blocks()  # the network is one piece of memory, in which nothing else may lie


def open_checkpoint(
    folder: Path,
    dtype: torch.dtype,
    storage: Storage | None = None,
    *,
    language_only: bool = False,
    predictor: bool = False,
) -> OpenCheckpoint:
    """The network that `folder` describes, without memory and in its final formats; see `load_model`."""
    config = read_config(folder)
    if language_only:
        config = replace(config, vision=None)
    if predictor:
        config = config.with_predictor()
    model = without_memory(config)
    tensors = stacked(model, _renamed(read_weights(folder), model.aliases))
    model.requires_grad_(False).eval()
    model.to(dtype)  # still without memory
    form = config.quantization
    matrices: dict[str, PackedMatrix] = {}
    if isinstance(form, PackedInt4):
        known = {name: each.parameter.shape[-1] for name, each in targets_of(model)}
        tensors, matrices = prequantized.collect(tensors, form, folder, known)
    check_names(model, config, tensors, folder, matrices)
    if isinstance(form, PackedInt4):
        inside = {id(module) for module in model.decoder.layers.modules()}
        prequantized.store(dict(targets_of(model)), matrices, inside)
        storage = storage or Storage(form.weights)
    storage = storage or Storage()
    prequantized.store_blocks(dict(targets_of(model)), tensors)
    choose_formats(model, storage, form, {name for name, each in tensors.items() if each.dtype in WIDE})
    return OpenCheckpoint(model, StoredTensors(tensors, matrices, form), storage)


def choose_formats(
    model: LoadableNetwork, storage: Storage, form: Fp8Blocks | PackedInt4 | None, wide: Collection[str] = ()
) -> None:
    """Choose the formats, before there is memory. What a format can't hold stays as it is, such as a matrix
    joined of parts that begin within a block of FP8, and so does all that a GGUF has beside its blocks.

    `wide`: tensors that an FP8 checkpoint stores wide, which don't become FP8.
    """
    blocks, config = blocks_of(form), model.config
    head = model.decoder.embed_tokens
    heads = [head] if config.tie_word_embeddings else [head, model.lm_head]
    for linear in heads:
        if linear.columns % GROUP == 0 and linear.format == "bf16":
            linear.store_as(storage.head)
    if storage.layers == "fp8" and blocks is None:
        raise UnsupportedModel(
            "the weights can't stay FP8: this checkpoint isn't; use bf16, int8 or int4, or its FP8 edition"
        )
    if isinstance(form, PackedInt4) and storage.layers != form.weights:
        raise UnsupportedModel(
            f"pre-quantized weights stay {form.weights}, not {storage.layers}; use {form.weights} or auto"
        )
    stay = {
        id(target.linear)
        for name, target in targets_of(model)
        if storage.layers == "fp8" and (name in wide or target.start % GROUP)
    }
    layers = chain(model.decoder.layers.modules(), model.mtp.modules() if config.text.predictors else ())
    gguf = any(isinstance(each, Linear) and each.parts for each in model.decoder.layers.modules())
    for module in () if gguf or isinstance(form, PackedInt4) else layers:
        if not isinstance(module, Linear) or not module.quantises or id(module) in stay:
            continue
        if _fits(module, storage, blocks):
            module.store_as(storage.layers, storage.columns)
    for module in () if model.tower is None else model.tower.modules():
        if isinstance(module, Linear) and module.format == "bf16":  # odd widths have a scale for a row
            module.store_as(storage.tower, module.columns if module.columns % GROUP else GROUP)


def _fits(linear: Linear, storage: Storage, blocks: Fp8Blocks | None) -> bool:
    if storage.layers == "fp8":
        # Experts begin at whole blocks, and the blocks are the kernels' own.
        square = blocks is not None and (blocks.rows, blocks.columns) == (GROUP, GROUP)
        return square and linear.columns % GROUP == 0 and (linear.unit or linear.rows) % GROUP == 0
    return linear.columns % storage.columns == 0


def device_bytes(model: nn.Module) -> int:
    """Bytes of a network's weights where it computes: with slots for experts in place of all of them."""
    cache = model.expert_cache if isinstance(model, LoadableNetwork) else None
    return tensor_bytes(model) + (0 if cache is None else cache.nbytes - cache.host_nbytes)


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of the distinct tensors of a module; tied ones count once."""
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _renamed(
    tensors: Mapping[str, TensorEntry], aliases: tuple[tuple[str, str], ...]
) -> dict[str, TensorEntry]:
    """Entries by the network's names of tensors; entries keep the file's. The first matching alias counts."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        ours = next((new + name.removeprefix(old) for old, new in aliases if name.startswith(old)), name)
        if ours in found:
            raise CheckpointError(
                f"{entry.file}: tensors {name!r} and {found[ours].name!r} are the same one in this network"
            )
        found[ours] = entry
    return found


def check_names(
    model: LoadableNetwork,
    config: ModelConfig,
    tensors: dict[str, TensorEntry],
    folder: Path,
    matrices: Mapping[str, PackedMatrix],
) -> None:
    """Compare names, shapes and dtypes of the checkpoint with the network's, before any memory is taken."""
    targets = dict(targets_of(model))
    for name, target in targets.items():
        if name in matrices:
            prequantized.check_matrix(matrices[name], target)
            continue
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks tensor {name!r}; the checkpoint is incomplete or foreign")
        entry = tensors[name]
        if math.prod(target.shape) != entry.numel or target.shape[0] != (entry.shape or (1,))[0]:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} has shape {list(entry.shape)}, "
                f"config.json asks for {list(target.shape)}"
            )
        check_dtype(entry, tensors.get(name + SCALE_SUFFIX), blocks_of(config.quantization))
    for name, entry in (tensors | {name: matrix.words for name, matrix in matrices.items()}).items():
        known = name in targets or name.removesuffix(SCALE_SUFFIX) in targets
        tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if not known and not tied_head and not any(fnmatchcase(name, each) for each in model.unloaded):
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} does not belong to a {config.architecture}"
            )


def targets_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, LoadTarget]]:
    """Checkpoint tensor names and the rows of parameters they fill; `prefix`: of a part's names."""
    packed = {
        f"{name}.{part}": parts
        for name, module in model.named_modules()
        for part, parts in getattr(module, "packed", {}).items()
    }
    linears = {id(module.weight): module for module in model.modules() if isinstance(module, Linear)}
    for name, parameter in model.named_parameters():
        linear = linears.get(id(parameter))
        owner, suffix = name.rsplit(".", 1)
        whole = parameter.shape[0] if linear is None else linear.rows  # a GGUF's blocks are bytes
        if owner not in packed:
            yield prefix + name, LoadTarget(parameter, 0, whole, linear)
            continue
        start = 0
        for part, rows in packed[owner]:
            place = f"{prefix}{owner.rsplit('.', 1)[0]}.{part}.{suffix}"
            yield place, LoadTarget(parameter, start, rows, linear)
            start += rows
        assert start == whole, f"the parts of {name} are not the whole"


def stacked(model: nn.Module, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors by the names that `model` has for them once its experts know how they are stored.

    `layers/experts.py` has all experts below one another; checkpoints store them in one of these ways:

    | a file has | of |
    |---|---|
    | `experts.7.gate_proj.weight`, `.up_proj`, `.down_proj` | each expert, as most quantised checkpoints |
    | `experts.gate_up_proj` `[experts, 2 · width, hidden]`, `.down_proj` `[experts, hidden, width]` | all |
    | the same with the last two dimensions exchanged | all, as Qwen3-VL's |
    | `experts.gate_proj.weight` `[experts, width, hidden]`, `.up_proj`, `.down_proj` | all, of a GGUF |

    FP8 has `…_scale_inv` beside each, of the same form.
    Source: transformers, `conversion_mapping.py` (Apache-2.0).
    """
    made = dict(tensors)
    for name, experts in model.named_modules():
        if not isinstance(experts, Experts):
            continue
        if f"{name}.gate_up_proj" in made:
            _whole(name, experts, made)
        for part in ("gate_proj", "up_proj", "down_proj"):
            entry = made.get(f"{name}.{part}.weight")
            if entry is None or len(entry.shape) != 3 or entry.shape[0] != experts.count:
                continue
            if not experts.packed:  # beside gate and up that are one tensor
                made[f"{name}.{part}.weight"] = _flat(entry)
            else:
                del made[f"{name}.{part}.weight"]
                made |= {f"{name}.{n}.{part}.weight": each for n, each in enumerate(_each(entry))}
    return made


def _whole(name: str, experts: Experts, made: dict[str, TensorEntry]) -> None:
    """All experts' matrices in one tensor: as it is, or where it is turned expert by expert."""
    width, hidden, count = experts.width, experts.hidden, experts.count
    shapes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    parts = [part for part in shapes if f"{name}.{part}" in made]
    if all(made[f"{name}.{part}"].shape == (count, *shapes[part]) for part in parts):
        experts.packed = {}
        for part in parts:
            for suffix in ("", SCALE_SUFFIX):
                if (entry := made.pop(f"{name}.{part}{suffix}", None)) is not None:
                    made[f"{name}.{part}.weight{suffix}"] = _flat(entry)
        return
    if any(made[f"{name}.{part}"].shape != (count, *shapes[part][::-1]) for part in parts):
        return  # of another size than config.json says: `check_names` tells it
    experts.store_apart(halves=False)
    for part in parts:
        for suffix in ("", SCALE_SUFFIX):
            if (entry := made.pop(f"{name}.{part}{suffix}", None)) is not None:
                for number, each in enumerate(_each(entry, suffix)):
                    turned = replace(each, shape=(each.shape[1], each.shape[0]), turned=True)
                    made[f"{name}.{number}.{part}.weight{suffix}"] = turned


def _flat(entry: TensorEntry) -> TensorEntry:
    return replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))


def _each(entry: TensorEntry, suffix: str = "") -> Iterator[TensorEntry]:
    """One entry an expert, named by the tensor and its number in it; `suffix` ends its name all the same."""
    size = entry.nbytes // entry.shape[0]
    stem = entry.name.removesuffix(suffix)
    for number in range(entry.shape[0]):
        yield replace(
            entry,
            name=f"{stem}[{number}]{suffix}",
            shape=entry.shape[1:],
            offset=entry.offset + number * size,
            nbytes=size,
        )
