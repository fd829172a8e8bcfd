"""Weights from safetensors files straight into their place in a network.

The network is built without memory, then given it once in its final dtype and device. Each tensor is
read in pieces of at most `CHUNK_BYTES` into one buffer and copied, converted and, where it is FP8,
multiplied with its block scales on the way. So the host never holds more than the network itself and a
few buffers (`benchmarks/load_memory.py` measures it). Files are read, not mapped: mapped pages would
count as ours.

Strict both ways: a tensor that is missing, has another shape, or belongs to another architecture is
named with its file.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from snugvl.checkpoint.architecture import Fp8Blocks, ModelConfig, read_config
from snugvl.checkpoint.safetensors import TensorEntry, read_tensors
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.models.decoder import packed_modules
from snugvl.models.qwen3_vl import Qwen3VL

CHUNK_BYTES = 8 << 20
SCALE_SUFFIX = "_scale_inv"
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: rows `start … start + rows` of a parameter."""

    parameter: torch.Tensor
    start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape the checkpoint tensor must have (patch embeddings come with more dimensions)."""
        return (self.rows, *self.parameter.shape[1:])


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Qwen3VL:
    """Build the network that `folder` describes and fill it.

    Args:
        progress: called after every tensor with the bytes of weights read, and those of all.

    Raises:
        CheckpointError: names the file and tensor to blame.
        UnsupportedModel: an architecture, dtype or quantisation that this engine doesn't run.
    """
    config = read_config(folder)
    tensors = read_tensors(folder)
    model = _without_memory(config)
    model.requires_grad_(False).eval()
    model.to(dtype)  # still without memory
    check_names(model, config, tensors, folder)
    model.to_empty(device=device)
    targets = dict(_targets(model))
    entries = [tensors[name] for name in targets]
    done, total = 0, sum(entry.nbytes for entry in entries)
    with closing(_Reader(tensors, config.quantization)) as reader:
        for entry in sorted(entries, key=lambda entry: (entry.file, entry.offset)):
            reader.fill(entry, targets[entry.name])
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
    return model


def network_elements(config: ModelConfig) -> int:
    """Elements of the network that `config` describes (a tied head counts once), without taking memory."""
    return sum(parameter.numel() for parameter in _without_memory(config).parameters())


class _NoInitialValues(TorchFunctionMode):
    """Makes `torch.nn.init` do nothing.

    The values come from the files; and drawing them for a tensor without memory imports all of
    `torch._dynamo`, which takes longer than loading a small model.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":  # a C method has no module
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def _without_memory(config: ModelConfig) -> Qwen3VL:
    with torch.device("meta"), _NoInitialValues():
        return Qwen3VL(config)


def check_names(
    model: Qwen3VL, config: ModelConfig, tensors: Mapping[str, TensorEntry], folder: Path
) -> None:
    """Compare names, shapes and dtypes of the checkpoint with the network's, before any memory is taken."""
    targets = dict(_targets(model))
    for name, target in targets.items():
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks tensor {name!r}; the checkpoint is incomplete or foreign")
        entry = tensors[name]
        if math.prod(target.shape) != entry.numel or target.shape[0] != (entry.shape or (1,))[0]:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, "
                f"config.json asks for {list(target.shape)}"
            )
        _check_dtype(entry, tensors, config.quantization)
    for name, entry in tensors.items():
        scale_of = name.removesuffix(SCALE_SUFFIX)
        tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if name not in targets and not tied_head and (scale_of == name or scale_of not in targets):
            raise CheckpointError(f"{entry.file}: tensor {name!r} does not belong to a {config.architecture}")


def _check_dtype(entry: TensorEntry, tensors: Mapping[str, TensorEntry], blocks: Fp8Blocks | None) -> None:
    if entry.dtype not in DTYPES:
        raise UnsupportedModel(
            f"{entry.file}: tensor {entry.name!r} is {entry.dtype}; weights may be {', '.join(DTYPES)}"
        )
    if entry.dtype != "F8_E4M3":
        return
    if blocks is None:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} is FP8 but config.json names no fp8 quantization"
        )
    scale = tensors.get(entry.name + SCALE_SUFFIX)
    if scale is None:
        raise CheckpointError(f"{entry.file}: FP8 tensor {entry.name!r} has no {SCALE_SUFFIX[1:]} beside it")
    expected = (-(-entry.shape[0] // blocks.rows), -(-entry.shape[1] // blocks.columns))
    if scale.shape != expected or scale.dtype not in ("BF16", "F32", "F16"):
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name!r} is {scale.dtype} {list(scale.shape)}, "
            f"expected {list(expected)} scales for blocks of {blocks.rows}x{blocks.columns}"
        )


def _targets(model: Qwen3VL) -> Iterator[tuple[str, Target]]:
    """Checkpoint tensor names and the rows of parameters they fill."""
    text = model.config.text
    rows = {
        "q_proj": text.num_heads * text.head_dim,
        "k_proj": text.num_kv_heads * text.head_dim,
        "v_proj": text.num_kv_heads * text.head_dim,
        "gate_proj": text.intermediate_size,
        "up_proj": text.intermediate_size,
    }
    for name, parameter in model.named_parameters():
        prefix, module, suffix = ("." + name).rsplit(".", 2)
        start = 0
        for part in packed_modules.get(module, (module,)):
            count = rows[part] if module in packed_modules else parameter.shape[0]
            yield f"{prefix}.{part}.{suffix}"[1:], Target(parameter, start, count)
            start += count


class _Reader:
    """Reads tensors piecewise through one buffer; keeps the last file open."""

    def __init__(self, tensors: Mapping[str, TensorEntry], blocks: Fp8Blocks | None) -> None:
        self.tensors = tensors
        self.blocks = blocks
        self.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self.file: FileIO | None = None
        self.path: Path | None = None

    def fill(self, entry: TensorEntry, target: Target) -> None:
        """Copy a tensor into its place, row block by row block."""
        rows = entry.shape[0]
        row_bytes = entry.nbytes // rows
        scale = self._scale(entry)
        step = max(1, CHUNK_BYTES // row_bytes)
        if scale is not None and self.blocks is not None:
            step = max(self.blocks.rows, step - step % self.blocks.rows)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            piece = self._read(entry, first * row_bytes, (last - first) * row_bytes)
            values = piece.view(DTYPES[entry.dtype]).view(last - first, -1).to(target.parameter.device)
            destination = target.parameter[target.start + first : target.start + last].view(last - first, -1)
            if scale is None or self.blocks is None:
                destination.copy_(values)
            else:
                block = scale[first // self.blocks.rows : -(-last // self.blocks.rows)]
                destination.copy_(dequantise(values, block.to(values.device), self.blocks))

    def _scale(self, entry: TensorEntry) -> torch.Tensor | None:
        if entry.dtype != "F8_E4M3":
            return None
        scale = self.tensors[entry.name + SCALE_SUFFIX]
        raw = self._read(scale, 0, scale.nbytes)
        values = raw.view(DTYPES[scale.dtype]).view(scale.shape)
        return values.to(torch.float32, copy=True)  # out of the buffer, which the weights reuse

    def _read(self, entry: TensorEntry, start: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of a tensor, in the shared buffer (grown if one row is larger than it)."""
        if nbytes > self.buffer.numel():
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self.path != entry.file:
            self.close()
            self.file, self.path = FileIO(entry.file), entry.file
        assert self.file is not None
        self.file.seek(entry.offset + start)
        view = memoryview(self.buffer.numpy().data)[:nbytes]
        done = 0
        while done < nbytes:
            count = self.file.readinto(view[done:])
            if not count:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} ends early; the file changed or is truncated"
                )
            done += count
        return self.buffer[:nbytes]

    def close(self) -> None:
        """Close the open file, if any."""
        if self.file is not None:
            self.file.close()
            self.file = self.path = None


def dequantise(values: torch.Tensor, scale: torch.Tensor, blocks: Fp8Blocks) -> torch.Tensor:
    """FP8 `values` `[rows, columns]` times their block `scale`, in float32.

    `scale[i, j]` multiplies rows `i·128 …` and columns `j·128 …` (the last blocks may be cut).
    """
    rows, columns = values.shape
    wide = scale.repeat_interleave(blocks.rows, 0)[:rows].repeat_interleave(blocks.columns, 1)[:, :columns]
    return values.float() * wide
