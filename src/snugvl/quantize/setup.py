"""From what somebody wants quantised to a checkpoint on the disk: planned, measured, rounded, written."""

import gc
import os
import shutil
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from snugvl.backends.place import cap, device_of, place_on
from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.safetensors import read_tensors
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size
from snugvl.engine.oom import release
from snugvl.engine.sequence import CheckedPrompt
from snugvl.errors import DoesNotFit, InputError, UnsupportedModel
from snugvl.fidelity.memory import Load, PassPlan, plan_pass
from snugvl.fidelity.participant import Extent, Participant
from snugvl.fidelity.progress import Clock, Tell
from snugvl.fidelity.sweep import Sequences
from snugvl.layers.linear import Linear
from snugvl.models.layered import LayeredNetwork
from snugvl.models.loader import OpenCheckpoint, open_checkpoint, targets_of
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.native import LATE_BYTES
from snugvl.planner.settings import Settings
from snugvl.quantize import packed, passes, writing
from snugvl.quantize.inputs import Given, Material, material_of
from snugvl.quantize.packed import Scheme
from snugvl.quantize.passes import Matrix
from snugvl.quantize.passes import Place as At
from snugvl.quantize.rounding import SLICE_ROWS, Rounded
from snugvl.quantize.widths import Choice, choice_of, group_of, stored_bits

EIGHT: Final = 8  # rows whose zero points share a word
INVERSES: Final = 4  # matrices of products that are held at once while a factor is made
WORK: Final = 8  # float32 values for each weight of a slice that is rounded
MEASURE, ROUND, COPY = "measuring what 4 bits cost", "rounding", "copying the rest"


@dataclass(frozen=True, slots=True)
class Plan:
    """What it will take.

    Attributes:
        passes: over the network, one after the other.
        disk_bytes: that are written at most.
    """

    passes: tuple[PassPlan, ...]
    disk_bytes: int

    @property
    def held_bytes(self) -> int:
        """Of the device."""
        return max(each.footprint.total_bytes for each in self.passes)

    @property
    def usable_bytes(self) -> int:
        return min(each.usable_bytes for each in self.passes)


@dataclass(slots=True)
class Made:
    """What was written.

    Attributes:
        bits: of a weight that was rounded, as our engine holds it, scales included.
        stored_bits: the same in the files.
        eights: names of the matrices in 8 bits.
        wide: matrices of the decoder that stay as they are.
        costs: nats a token of each in 4 bits.
    """

    bits: float
    stored_bits: float
    matrices: int
    wide: int
    eights: list[str]
    nbytes: int
    seconds: float
    costs: dict[str, float] = field(default_factory=dict)


class Job:
    """A checkpoint that is to be quantised."""

    def __init__(
        self, options: LoadOptions, out: Path, given: Given, *, bits: float, group: int | None, tell: Tell
    ) -> None:
        """
        Raises:
            CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
            InputError: OUT is there, the pictures or texts can't be used, so few bits can't be had.
            DoesNotFit: memory or disk is too little, with the numbers.
        """
        self.out, self.bits = out, bits
        if out.exists() or out.is_symlink():
            raise InputError(f"{out} is there already; name a folder that isn't, or remove it")
        if gguf_files(options.model) is not None:
            raise UnsupportedModel(f"{options.model} is a GGUF; quantise the safetensors it was made of")
        folder = locate(options.model)
        if isinstance(read_config(folder).quantization, PackedInt4):
            raise UnsupportedModel(f"{options.model} has 4 bits already; quantise its 16-bit or FP8 edition")
        self._place = place_on(device_of(options.device), options.memory_bytes)
        wide = options.dtype == "float32" or (options.dtype == "auto" and self._place.device.type == "cpu")
        self.side = Participant(options, Settings("native", float32=wide), self._place, options.max_pixels)
        opened = self._opened()
        self.matrices, self.wide = matrices_of(opened)
        self.choice: Choice = choice_of(self.matrices, group or (64 if bits >= 4.5 else 128))
        if not self.matrices:
            raise UnsupportedModel(f"{options.model} has no matrix whose columns divide into groups of 32")
        self.choice.check(bits)
        self.material: Material = material_of(self.side, given)
        self._entries = read_tensors(folder)
        self._replaced = {name for matrix in self.matrices.values() for name, _ in matrix.parts}
        read = sum(self._entries[name].nbytes for name in self._replaced)
        rest = writing.copied_bytes(self._entries, self._replaced)
        self._clock = Clock({MEASURE: read, ROUND: read, COPY: rest}, tell)
        self.plan = self._plan(opened, rest)

    def run(self) -> Made:
        """Measure, round, write.

        Raises:
            InputError: it can't be written.
            CheckpointError: a file has changed meanwhile.
        """
        blocks = self._opened().stored.blocks
        cap(self._place, LATE_BYTES)
        with writing.beside(self.out) as work:
            costs = self._costs() if self.bits > self.choice.mean(self.choice.fours) else {}
            schemes = self.choice.within(self.bits, costs)
            layers = {number for number, _ in schemes}
            shards = writing.Shards(work, len(layers) + 1)
            self._round(schemes, shards)
            self._clock.begin(COPY, COPY)
            shards.copy(self._entries, self._replaced, blocks, self._clock.read)
            self._clock.end(COPY)
            shards.finish()
            named = {
                name: schemes[place] for place, matrix in self.matrices.items() for name, _ in matrix.parts
            }
            writing.write_rest(self.side.folder, work, packed.configuration(named))
            nbytes = sum(path.stat().st_size for path in work.iterdir())
        return self._made(schemes, costs, nbytes)

    def close(self) -> None:
        """End what runs beside this process."""
        self.side.close()

    def _opened(self) -> OpenCheckpoint:
        return open_checkpoint(self.side.folder, dtype=self.side.dtype, storage=self.side.storage())

    def _network(self) -> LayeredNetwork:
        gc.collect()
        release(self._place.device)
        return LayeredNetwork(self._opened(), self._place.device, told=self._clock.read)

    def _costs(self) -> dict[At, float]:
        self._clock.begin(MEASURE, MEASURE)
        with closing(self._network()) as network:
            network.readers = self.plan.passes[0].readers
            found = passes.costs(
                network,
                self.material.probe,
                self.plan.passes[0].sizes,
                self.matrices,
                lambda place: self.choice.fours[place][1],
            )
        self._clock.end(MEASURE)
        return found

    def _round(self, schemes: dict[At, Scheme], shards: writing.Shards) -> None:
        def done(index: int, made: dict[str, Rounded]) -> None:
            tensors: dict[str, torch.Tensor] = {}
            for name, whole in made.items():
                start = 0
                for part, rows in self.matrices[index, name].parts:
                    tensors |= packed.tensors_of(part, whole.rows(start, start + rows))
                    start += rows
            if tensors:
                shards.add(tensors)

        self._clock.begin(ROUND, ROUND)
        with closing(self._network()) as network:
            network.readers = self.plan.passes[-1].readers
            sequences = [Sequences(prompt, ()) for prompt in self.material.prompts]
            sizes = self.plan.passes[-1].sizes
            passes.quantise(network, sequences, sizes, schemes, done, compensate=self.material.own)
        self._clock.end(ROUND)

    def _plan(self, opened: OpenCheckpoint, rest: int) -> Plan:
        with closing(LayeredNetwork(opened, self._place.device)) as network:
            probe = self.material.probe
            measured = [
                Load(Extent(len(probe.prompt), 0, 0), len(probe.answers), max(map(len, probe.answers)))
            ] * (1 + len(self.matrices))
            loads = [_load(prompt, self.side) for prompt in self.material.prompts]
            more = self._work()
            plans = tuple(
                plan_pass(self.side, network, each, self._place, more) for each in (measured, loads)
            )
        if any(len(plan.batches) > 1 for plan in plans):
            raise DoesNotFit(
                f"{self.material.tokens:,} tokens of pictures and texts have no room at once; "
                f"{format_size(self._place.usable_bytes)} can be had; give fewer, or smaller pictures "
                "(--max-pixels)"
            )
        weights = sum(matrix.weights for matrix in self.matrices.values())
        others = sum(path.stat().st_size for path in writing.other_files(self.side.folder))
        disk = int(weights * self.bits / 8) + rest + others + (4 << 20)  # headers, index, configuration
        free = _free_bytes(self.out)
        if free < disk:
            raise DoesNotFit(
                f"{self.out} takes {format_size(disk)} on the disk, and {format_size(free)} are free there"
            )
        return Plan(plans, disk)

    def _work(self) -> list[Component]:
        """What rounding a layer holds beside a pass."""
        layers: dict[int, int] = defaultdict(int)
        weights: dict[int, int] = defaultdict(int)
        for (number, _), matrix in self.matrices.items():
            layers[number] += 4 * matrix.columns**2
            weights[number] += matrix.weights
        largest = max(matrix.columns for matrix in self.matrices.values())
        slices = max(min(each.rows, SLICE_ROWS) * each.columns for each in self.matrices.values())
        work = INVERSES * 4 * largest**2 + WORK * 4 * slices + 2 * max(weights.values())
        return [
            Component("products of inputs", max(layers.values()), "prefill", why="of each pair of columns"),
            Component("rounding", work, "prefill", "predicted"),
        ]

    def _made(self, schemes: dict[At, Scheme], costs: dict[At, float], nbytes: int) -> Made:
        weights = sum(matrix.weights for matrix in self.matrices.values())
        stored = sum(stored_bits(schemes[place]) * each.weights for place, each in self.matrices.items())
        return Made(
            bits=self.choice.mean(schemes),
            stored_bits=stored / weights,
            matrices=len(schemes),
            wide=self.wide,
            eights=[_name(place) for place, (bits, _) in sorted(schemes.items()) if bits == 8],
            nbytes=nbytes,
            seconds=self._clock.seconds,
            costs={_name(place): cost for place, cost in costs.items()},
        )


def matrices_of(opened: OpenCheckpoint) -> tuple[dict[At, Matrix], int]:
    """The decoder's matrices that can be rounded, and how many can't: their sides don't divide."""
    parts: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, target in targets_of(opened.model):
        if target.linear is not None:
            parts[id(target.linear)].append((opened.stored.entry(name).name, target.rows))
    found, wide = {}, 0
    for number, layer in enumerate(opened.model.decoder.layers):
        for name, linear in layer.named_modules():
            if not isinstance(linear, Linear) or not linear.quantises:
                continue
            mine = tuple(parts[id(linear)])
            if group_of(linear.columns, 4) is None or any(rows % EIGHT for _, rows in mine):
                wide += 1
            else:
                found[number, name] = Matrix(linear.rows, linear.columns, mine)
    return found, wide


def _load(prompt: CheckedPrompt, side: Participant) -> Load:
    merge = 1 if side.config.vision is None else side.config.vision.spatial_merge_size
    tokens = len(prompt.placeholders)
    return Load(Extent(len(prompt), tokens, tokens * merge**2), 0, 0)


def _free_bytes(out: Path) -> int:
    """Where `out` will be.

    Raises:
        InputError: nothing can be written there.
    """
    place = out.absolute().parent
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} can't be written: {place} is no folder that may be written to")
    return shutil.disk_usage(place).free


def _name(place: At) -> str:
    return f"layers.{place[0]}.{place[1]}"
