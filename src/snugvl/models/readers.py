"""Threads that read what a checkpoint stores into its place, each in the format that it stays in."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from snugvl.checkpoint.architecture import Fp8Blocks, PackedInt4
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.models import prequantized
from snugvl.models.tensor_files import LoadTarget, PackedMatrix, TensorFiles, TensorPiece, dequantise


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The files' tensors, by the network's names."""

    tensors: Mapping[str, TensorEntry]
    matrices: Mapping[str, PackedMatrix]
    form: Fp8Blocks | PackedInt4 | None

    @property
    def blocks(self) -> Fp8Blocks | None:
        return blocks_of(self.form)

    def entry(self, name: str) -> TensorEntry:
        """The tensor, or the codes of a 4-bit matrix."""
        return self.matrices[name].words if name in self.matrices else self.tensors[name]


class Readers:
    """Threads that fill a device, each with a file and a buffer of its own, which they keep until `close`."""

    def __init__(
        self, stored: StoredTensors, device: torch.device, count: int, piece_bytes: int | None = None
    ) -> None:
        """`count`: of a GPU's; a CPU has one. `piece_bytes`: see `TensorFiles`."""
        self._stored, self._device = stored, device
        self._by_name = {entry.name: entry for entry in stored.tensors.values()}
        self._pool = ThreadPoolExecutor(count if device.type == "cuda" else 1, "snugvl-load")
        self._piece_bytes = piece_bytes
        self._own = threading.local()
        self._files: list[TensorFiles] = []

    def fill(
        self, targets: Mapping[str, LoadTarget], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read tensors into their places, large ones first, so that no thread is left with one at the end."""
        entries = ((name, self._stored.entry(name)) for name in targets)
        ordered = sorted(entries, key=lambda pair: -pair[1].nbytes)
        done, total = 0, sum(entry.nbytes for _, entry in ordered)
        inference = torch.is_inference_mode_enabled()  # of the caller, who made the tensors; threads have own

        def read(pair: tuple[str, TensorEntry]) -> int:
            with torch.inference_mode(inference), torch.no_grad():
                self._read(*pair, targets[pair[0]])
            return pair[1].nbytes

        for nbytes in self._pool.map(read, ordered):
            done += nbytes
            if progress is not None:
                progress(done, total)

    def close(self) -> None:
        """Whatever has not begun is not done."""
        self._pool.shutdown(cancel_futures=True)
        for each in self._files:
            each.close()

    def _read(self, name: str, entry: TensorEntry, target: LoadTarget) -> None:
        if not hasattr(self._own, "files"):
            self._own.files = TensorFiles(self._by_name, self._stored.blocks, self._device, self._piece_bytes)
            self._files.append(self._own.files)
        if name in self._stored.matrices:
            prequantized.fill(self._stored.matrices[name], target, self._own.files)
            return
        for piece in self._own.files.pieces(entry):
            _place(piece, target, self._stored.blocks)


def _place(piece: TensorPiece, target: LoadTarget, blocks: Fp8Blocks | None) -> None:
    """Put rows of a checkpoint tensor where they go, in the format they stay in."""
    start, linear = target.start + piece.start, target.linear
    values = piece.values
    if linear is not None and linear.format == "ggml":
        linear.put_bytes(start, values)
        return
    if piece.scale is not None and blocks is not None:
        if linear is not None and linear.format == "fp8":
            linear.put_blocks(start, values, piece.scale)
            return
        values = dequantise(values, piece.scale, blocks)
    if linear is not None:
        linear.put(start, values)
        return
    destination = target.parameter[start : start + len(values)]
    destination.view(len(values), -1).copy_(values)


def blocks_of(form: Fp8Blocks | PackedInt4 | None) -> Fp8Blocks | None:
    """The blocks of FP8 weights that share a scale in a checkpoint."""
    return form if isinstance(form, Fp8Blocks) else None
