"""Copies a checkpoint with its matrices as `--weights` rounds them while loading, rounded once and for all.

The network is loaded as `serve` loads it, but for the vision tower, which stays as it is in the files; then
the decoder's matrices are written as they are in memory. So the copy answers like the original under
`--weights`, token for token.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from snugvl.backends.place import cap, device_of, dtype_of, place_on
from snugvl.checkpoint.quantized import own_settings
from snugvl.checkpoint.read import facts_of
from snugvl.checkpoint.safetensors import read_tensors
from snugvl.core.formats import FORMATS, FewBits
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size
from snugvl.errors import DoesNotFit, UnsupportedModel
from snugvl.fidelity.work import Clock, Tell
from snugvl.layers.linear import Linear
from snugvl.models import own_format
from snugvl.models.loader import Storage, load_model, open_checkpoint
from snugvl.models.networks import LoadableNetwork
from snugvl.planner.capabilities import prefers_fp32
from snugvl.planner.engines.native.footprint import KERNEL_BYTES, LATE_BYTES, loading_bytes
from snugvl.planner.footprint.weights import part_bytes, weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from snugvl.quantize import writing
from snugvl.quantize.passes import Matrix, Place
from snugvl.quantize.setup import COPY, ROUND, WrittenCheckpoint, label, matrices_of, source_of

READERS: Final = 1


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Bytes that a copy holds on the device, that may be used there, and that it writes to disk at most."""

    held_bytes: int
    usable_bytes: int
    disk_bytes: int


class CopyJob:
    """The copying of a checkpoint in few bits."""

    def __init__(
        self, options: LoadOptions, out: Path, weights: FewBits, *, group: int | None, tell: Tell
    ) -> None:
        """
        Args:
            group: columns that share a scale; None: as many as while loading.

        Raises:
            CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
            InputError: OUT is there, or nothing can be written there.
            DoesNotFit: memory or disk is too little, with the numbers.
        """
        self.out, self.weights = out, weights
        self._folder = source_of(options.model, out)
        self._place = place_on(device_of(options.device), options.memory_bytes)
        model = inventory(facts_of(str(self._folder), offline=True))
        cpu = self._place.device.type == "cpu"
        plenty = options.dtype == "auto" and prefers_fp32(model, self._place.planned())
        wide = cpu and (options.dtype == "float32" or plenty)  # as `serve` decides
        self._dtype = dtype_of(options.dtype, self._place, wide=wide)
        self._storage = Storage(weights, group=group)
        opened = open_checkpoint(self._folder, self._dtype, self._storage, language_only=True)
        self._blocks = opened.stored.blocks
        self.matrices, self.wide = matrices_of(opened, lambda linear, _: linear.format == weights)
        if not self.matrices:
            raise UnsupportedModel(
                f"{options.model} has no matrix whose columns divide into groups of {self._storage.columns}; "
                "give a smaller --group, or take the model as it is"
            )
        self._entries = read_tensors(self._folder)
        self._replaced = {name for matrix in self.matrices.values() for name, _ in matrix.parts}
        rest = writing.copied_bytes(self._entries, self._replaced)
        read = sum(self._entries[name].nbytes for name in self._replaced)
        self._clock = Clock({ROUND: read, COPY: rest}, tell)
        settings = Settings("native", weights, float32=wide)
        held = weight_bytes(model, settings) - part_bytes(model, settings, "vision")
        held += loading_bytes(model, settings, READERS)
        held += 0 if cpu else self._place.context_bytes + KERNEL_BYTES + LATE_BYTES
        if held > self._place.usable_bytes:
            raise DoesNotFit(
                f"{options.model} in {weights} needs {format_size(held)}, and "
                f"{format_size(self._place.usable_bytes)} is available; free some, or use --device cpu"
            )
        columns = self._storage.columns
        held_bits = FORMATS[weights].held_bits(columns)
        weights_bytes = sum(each.weights * held_bits / 8 for each in self.matrices.values())
        disk = writing.check_room(out, self._folder, int(weights_bytes) + rest)
        self.plan = CopyPlan(held, self._place.usable_bytes, disk)

    @property
    def aim(self) -> str:
        """The text of the format that matrices are rounded to."""
        return f"{self.weights}, as while loading"

    def run(self) -> WrittenCheckpoint:
        """Load the network and write the copy.

        Raises:
            OSError: it can't be written.
            CheckpointError: a file has changed meanwhile.
        """
        with writing.beside(self.out) as work:
            network = self._loaded()
            shards = writing.Shards(work, len({number for number, _ in self.matrices}) + 1)
            held = 0
            for tensors in self._layers(network):
                held += sum(each.nbytes for each in tensors.values())
                shards.add(tensors)
            self._clock.begin(COPY, COPY)
            shards.copy(self._entries, self._replaced, self._blocks, self._clock.read)
            self._clock.end(COPY)
            shards.finish()
            writing.write_rest(self._folder, work, own_settings(self.weights))
            nbytes = sum(path.stat().st_size for path in work.iterdir())
        bits = 8 * held / sum(each.weights for each in self.matrices.values())
        widths = {label(place): FORMATS[self.weights].bits for place in sorted(self.matrices)}
        return WrittenCheckpoint(bits, len(self.matrices), self.wide, widths, nbytes, self._clock.seconds)

    def close(self) -> None:
        """Do nothing: no other process runs."""

    def _loaded(self) -> LoadableNetwork:
        cap(self._place, LATE_BYTES)
        self._clock.begin(ROUND, ROUND)
        before = 0

        def progress(done: int, _: int) -> None:
            nonlocal before
            self._clock.read(done - before)
            before = done

        network = load_model(
            self._folder,
            dtype=self._dtype,
            device=self._place.device,
            storage=self._storage,
            readers=READERS,
            progress=progress,
            language_only=True,
        )
        self._clock.end(ROUND)
        return network

    def _layers(self, network: LoadableNetwork) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors to write of each layer, by name."""
        by_layer: dict[int, list[tuple[Place, Matrix]]] = defaultdict(list)
        for place, matrix in self.matrices.items():
            by_layer[place[0]].append((place, matrix))
        for number, found in by_layer.items():
            tensors: dict[str, torch.Tensor] = {}
            for (_, name), matrix in found:
                linear = network.decoder.layers[number].get_submodule(name)
                assert isinstance(linear, Linear)
                tensors |= own_format.tensors_of(matrix.parts, linear.weights)
            yield tensors
