"""Reading tensors of safetensors files piece by piece through one buffer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from snugvl.checkpoint.architecture import Fp8Blocks, PackedInt4
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.errors import CheckpointError, UnsupportedModel
from snugvl.layers.ggml import LAYOUTS, ggml_type
from snugvl.layers.linear import Linear

CHUNK_BYTES = 8 << 20
SCALE_SUFFIX = "_scale_inv"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
_ALL = DTYPES | {
    "I32": torch.int32,
    "I64": torch.int64,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}  # what pre-quantized weights of few bits are packed in besides
_ALL |= dict.fromkeys(LAYOUTS, torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class TensorPiece:
    """Rows `start …` of a tensor, flattened to `[rows, columns]`, on the device they go to.

    `scale` `[block rows, block columns]` float32 belongs to FP8 `values`.
    """

    start: int
    values: torch.Tensor
    scale: torch.Tensor | None = None


class TensorFiles:
    """One reader: its buffer, and the file it has open. Not thread-safe; each thread has its own."""

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        blocks: Fp8Blocks | None,
        device: torch.device,
        piece_bytes: int | None = None,
    ) -> None:
        """`piece_bytes`: that are read at a time, `CHUNK_BYTES` by default."""
        self._tensors = tensors
        self._blocks = blocks
        self._device = device
        self._piece_bytes = piece_bytes or CHUNK_BYTES
        self._buffer = self._allocate(self._piece_bytes)
        self._file: FileIO | None = None
        self._path: Path | None = None

    def whole(self, entry: TensorEntry) -> torch.Tensor:
        """A small tensor, on the device and the caller's own."""
        shape = entry.shape[::-1] if entry.turned else entry.shape
        values = self._read(entry, 0, entry.nbytes).view(_ALL[entry.dtype]).view(shape)
        values = values.to(self._device, copy=True)  # out of the buffer, which the next read reuses
        return values.T.contiguous() if entry.turned else values

    def rows(self, entry: TensorEntry, first: int, last: int) -> torch.Tensor:
        """Rows `first … last - 1` of a tensor that isn't FP8, `[rows, columns]`, on the device, for good."""
        row_bytes = entry.nbytes // entry.shape[0]
        raw = self._read(entry, first * row_bytes, (last - first) * row_bytes)
        return raw.view(_ALL[entry.dtype]).view(last - first, -1).to(self._device, copy=True)

    def some_rows(self, entry: TensorEntry, wanted: list[int]) -> torch.Tensor:
        """Some rows of a plain tensor `[rows, columns]`, on the device."""
        nbytes = entry.nbytes // entry.shape[0]
        read = (self._read(entry, row * nbytes, nbytes).view(_ALL[entry.dtype]).clone() for row in wanted)
        return torch.stack(list(read)).to(self._device)

    def pieces(self, entry: TensorEntry, multiple: int = 1) -> Iterator[TensorPiece]:
        """A tensor in pieces of whole rows (and whole FP8 blocks), each gone when the next is asked for.

        A GGUF's blocks come as bytes `[rows, bytes]`. `multiple`: rows that belong together, of all.
        """
        if entry.frames:
            yield from self._joined(entry)
            return
        if entry.turned:  # of one expert: some megabytes
            yield TensorPiece(0, self.whole(entry), self._scale(entry))
            return
        if entry.heads:
            multiple = entry.shape[0] // entry.heads
        rows = entry.shape[0]
        row_bytes = entry.nbytes // rows
        scale = self._scale(entry)
        step = max(multiple, self._piece_bytes // row_bytes // multiple * multiple)
        if scale is not None and self._blocks is not None:
            step = max(self._blocks.rows, step - step % self._blocks.rows)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            raw = self._read(entry, first * row_bytes, (last - first) * row_bytes)
            # Waits for the copy: the buffer is read into again.
            values = raw.view(_ALL[entry.dtype]).view(last - first, -1).to(self._device)
            if entry.heads:
                values = _undone(values, multiple)
            if entry.meant:
                values = values.float() - 1 if entry.meant == "plus one" else values.float().neg().log()
            block = None
            if scale is not None and self._blocks is not None:
                block = scale[first // self._blocks.rows : -(-last // self._blocks.rows)]
            yield TensorPiece(first, values, block)

    def _joined(self, entry: TensorEntry) -> Iterator[TensorPiece]:
        """Frames, each a tensor `[rows, channels, …]`, as `[rows, channels · frames · …]`."""
        rows, channels = entry.shape[:2]
        frames = [self.whole(frame).view(rows, channels, 1, -1) for frame in entry.frames]
        yield TensorPiece(0, torch.cat(frames, 2).flatten(1))

    def close(self) -> None:
        """Close the open file, if any."""
        if self._file is not None:
            self._file.close()
            self._file = self._path = None

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Pinned for a GPU, where that is possible: twice the speed, and WSL2 has little of it."""
        if self._device.type == "cuda":
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:
                pass
        return torch.empty(nbytes, dtype=torch.uint8)

    def _scale(self, entry: TensorEntry) -> torch.Tensor | None:
        if entry.dtype != "F8_E4M3":
            return None
        scale = self._tensors[entry.name + SCALE_SUFFIX]
        return self.whole(scale).float()

    def _read(self, entry: TensorEntry, start: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of a tensor, in the buffer (grown if one row is larger than it)."""
        if nbytes > self._buffer.numel():
            self._buffer = self._allocate(nbytes)
        if self._path != entry.file:
            self.close()
            self._file, self._path = FileIO(entry.file), entry.file
        assert self._file is not None
        self._file.seek(entry.offset + start)
        view = memoryview(self._buffer.numpy().data)[:nbytes]
        done = 0
        while done < nbytes:
            count = self._file.readinto(view[done:])
            if not count:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} ends early; the file changed or is truncated"
                )
            done += count
        return self._buffer[:nbytes]


def _undone(rows: torch.Tensor, head: int) -> torch.Tensor:
    """Rows `[n, …]` of heads of `head` rows, whose two halves alternate, one half after the other."""
    return rows.view(-1, head // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def dequantise(values: torch.Tensor, scale: torch.Tensor, blocks: Fp8Blocks) -> torch.Tensor:
    """FP8 `values` `[rows, columns]` times their block `scale`, in float32.

    `scale[i, j]` multiplies rows `i·128 …` and columns `j·128 …` (the last blocks may be cut).
    """
    rows, columns = values.shape
    wide = scale.repeat_interleave(blocks.rows, 0)[:rows]
    if blocks.columns < columns:
        wide = wide.repeat_interleave(blocks.columns, 1)[:, :columns]
    return values.float() * wide


def check_dtype(entry: TensorEntry, scale: TensorEntry | None, blocks: Fp8Blocks | None) -> None:
    """Refuse a tensor that can't be read as weights; `scale`: what stands beside it.

    Raises:
        UnsupportedModel: of a type that no weights have here.
        CheckpointError: FP8 whose scales are missing, or of another shape than its blocks.
    """
    if ggml_type(entry.dtype):
        return
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
    if scale is None:
        raise CheckpointError(f"{entry.file}: FP8 tensor {entry.name!r} has no {SCALE_SUFFIX[1:]} beside it")
    expected = (-(-entry.shape[0] // blocks.rows), -(-entry.shape[1] // blocks.columns))
    if scale.shape != expected or scale.dtype not in ("BF16", "F32", "F16"):
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name!r} is {scale.dtype} {list(scale.shape)}, "
            f"expected {list(expected)} scales for blocks of {blocks.rows}x"
            f"{min(blocks.columns, entry.shape[1])}"
        )


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where a checkpoint tensor goes: rows `start … start + rows` of a parameter, maybe a `Linear`'s."""

    parameter: torch.Tensor
    start: int
    rows: int
    linear: Linear | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape the checkpoint tensor must have (patch embeddings come with more dimensions)."""
        return (self.rows, *self.parameter.shape[1:])


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The stored tensors of one matrix.

    Attributes:
        form: how it is stored.
        shape: what compressed-tensors says of it.
        order: the group of each column, where the file has it.
        bias: one of zeros that GPTQ's files have where the network has none.
        upper: the bits above the fourth (our own format, of 5 and 6 bits).
    """

    form: PackedInt4
    words: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    shape: TensorEntry | None = None
    order: TensorEntry | None = None
    bias: TensorEntry | None = None
    upper: TensorEntry | None = None
