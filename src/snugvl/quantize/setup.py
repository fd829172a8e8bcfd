"""The job of `snugvl quantize`: a checkpoint is planned, measured, rounded and written to disk.

It also decides how many bits each matrix gets: more where they save most, within a mean of all. Bits are
those that our engine holds: of codes with 4 to 6 bits a scale and a zero point of 16 bits for a group of
columns, of 8-bit codes a scale. Calibration data are the user's pictures and texts, or tokens drawn at
random.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Final

import torch
from PIL import Image

from snugvl.backends.place import cap, device_of, place_on
from snugvl.checkpoint.architecture import Fp8Blocks, ModelConfig, PackedInt4
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.safetensors import read_tensors
from snugvl.core.formats import FEW_BITS, FORMATS, GROUPS
from snugvl.core.memory_kinds import Kind
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size
from snugvl.engine.admission import check_prompt
from snugvl.engine.request import CheckedPrompt, EngineRequest
from snugvl.errors import DoesNotFit, InputError, UnsupportedModel
from snugvl.fidelity.memory import PassPlan, QuestionMemory, plan_pass
from snugvl.fidelity.participant import Extent, Participant
from snugvl.fidelity.sweep import Sequences
from snugvl.fidelity.variants import Question
from snugvl.fidelity.work import Clock, Tell
from snugvl.layers.device import release
from snugvl.layers.linear import Linear
from snugvl.models.decoder import Layer
from snugvl.models.layered import LayeredNetwork
from snugvl.models.loader import OpenCheckpoint, open_checkpoint, targets_of
from snugvl.planner.engines.native.footprint import LATE_BYTES
from snugvl.planner.footprint.total import Component, predicted
from snugvl.planner.settings import Settings
from snugvl.quantize import passes, writing
from snugvl.quantize.gguf_output import GgufOutput, GgufWriter
from snugvl.quantize.grids import Grid
from snugvl.quantize.passes import Matrix, Parts, Place, Rounds
from snugvl.quantize.rounding import SLICE_ROWS

PIECE: Final = 512  # tokens of a text that are read together
MOST: Final = 32_768  # tokens in all
LEAST: Final = 16  # of a piece
RANDOM: Final = 4  # pieces of random tokens
PROBES: Final = 4  # pieces that costs are measured on
PROBE: Final = 32  # tokens of each
USUAL_GROUP: Final = 64


@dataclass(frozen=True, slots=True)
class Given:
    """The user's files: (name, function that opens it) of each picture, (name, text) of each text."""

    pictures: Sequence[tuple[str, Callable[[], Image.Image]]] = ()
    texts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationData:
    """The prompts that pass through the network.

    Attributes:
        prompts: sequences for which matrices are rounded.
        probe: sequences on which the costs of matrices are measured.
        own: whether the prompts are the user's, not random.
        left_out: number of tokens beyond `MOST`, which aren't used.
    """

    prompts: tuple[CheckedPrompt, ...]
    probe: Sequences
    own: bool
    left_out: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def material_of(side: Participant, given: Given) -> CalibrationData:
    """Calibration data of the user's files; random tokens where none are given.

    Raises:
        InputError: pictures for a model that reads none, or texts that are all too short.
        ImageError: a picture can't be read.
    """
    config = side.config
    if given.pictures and config.vision is None:
        raise InputError(f"{side.capabilities.model} reads no pictures; give texts (.txt, .md)")
    pieces = [piece for _, text in given.texts for piece in _pieces(side, text)]
    seen = [side.prepared(Question("caption"), read()).prompt for _, read in given.pictures]
    if not pieces and not seen:
        if given.texts:
            raise InputError(f"the texts have fewer than {LEAST} tokens each; give longer ones, or pictures")
        drawn = _random(config)
        return CalibrationData(
            tuple(_checked(piece, config) for piece in drawn), _probe(drawn, config), own=False
        )
    prompts = [*seen, *(_checked(piece, config) for piece in pieces)]
    kept = _evenly(prompts)
    left_out = sum(map(len, prompts)) - sum(map(len, kept))
    return CalibrationData(kept, _probe(pieces or _random(config), config), own=True, left_out=left_out)


def _pieces(side: Participant, text: str) -> list[tuple[int, ...]]:
    ids = side.processor.tokenizer.encode(text)
    pieces = [tuple(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]
    return [piece for piece in pieces if len(piece) >= LEAST]


def _random(config: ModelConfig) -> list[tuple[int, ...]]:
    """Pieces of random tokens, without those that stand for pictures."""
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randint(config.text.vocab_size, (RANDOM, PIECE), generator=chance).tolist()
    return [tuple(token for token in piece if token not in config.placeholders) for piece in drawn]


def _checked(ids: tuple[int, ...], config: ModelConfig) -> CheckedPrompt:
    return check_prompt(EngineRequest("", ids), config)


def _evenly(prompts: Sequence[CheckedPrompt]) -> tuple[CheckedPrompt, ...]:
    """At most about `MOST` tokens of prompts, taken evenly from all of them; one prompt at least."""
    total = sum(map(len, prompts))
    if total <= MOST:
        return tuple(prompts)
    count = max(1, len(prompts) * MOST // total)
    return tuple(prompts[number * len(prompts) // count] for number in range(count))


def _probe(pieces: Sequence[tuple[int, ...]], config: ModelConfig) -> Sequences:
    """Middles of some pieces, each behind the first one's first token: chats all begin alike."""
    chosen = [pieces[number * len(pieces) // PROBES] for number in range(min(PROBES, len(pieces)))]
    starts = [max(1, (len(piece) - PROBE) // 2) for piece in chosen]
    middles = [piece[start : start + PROBE] for piece, start in zip(chosen, starts, strict=True)]
    first = next(chain.from_iterable(pieces))
    return Sequences(_checked((first,), config), tuple(dict.fromkeys(middles)))


def group_of(columns: int, bits: int, asked: int | None = None) -> int | None:
    """Columns that share a scale; None where they don't divide.

    `asked`: the wish for fewer bits than 8; narrower groups are taken where these don't divide. 8 bits have
    the widest groups.
    """
    most = max(GROUPS) if bits == 8 else asked or USUAL_GROUP
    return next(
        (group for group in sorted(GROUPS, reverse=True) if group <= most and not columns % group), None
    )


@dataclass(frozen=True, slots=True)
class WidthOptions:
    """The grids that each matrix may have, the first of which is measured, and the mean bits they allow."""

    grids: Mapping[Place, Sequence[Grid]]
    matrices: Mapping[Place, Matrix]

    @property
    def least(self) -> dict[Place, Grid]:
        """Each matrix's grid of the fewest bits."""
        return {place: min(grids, key=attrgetter("held_bits")) for place, grids in self.grids.items()}

    @property
    def most(self) -> dict[Place, Grid]:
        """Each matrix's grid of the most bits."""
        return {place: max(grids, key=attrgetter("held_bits")) for place, grids in self.grids.items()}

    def mean(self, chosen: Mapping[Place, Grid]) -> float:
        """Mean bits a weight under `chosen`."""
        weights = sum(each.weights for each in self.matrices.values())
        held = sum(chosen[place].held_bits * each.weights for place, each in self.matrices.items())
        return held / weights

    def check(self, bits: float) -> None:
        """
        Raises:
            InputError: `bits` is out of reach.
        """
        least, most = self.mean(self.least), self.mean(self.most)
        if not least <= bits <= most:
            raise InputError(
                f"{bits:g} bits a weight can't be reached: with scales these matrices take {least:.2f} (all "
                f"in {min(grid.bits for grid in self.least.values())} bits) to {most:.2f} (all in 8)"
            )

    def within(self, bits: float, costs: Mapping[Place, Mapping[Grid, float]]) -> dict[Place, Grid]:
        """Each matrix's grid: more bits where they save most nats a bit, up to a mean of `bits`."""
        chosen = self.least
        weights = sum(each.weights for each in self.matrices.values())
        left = (bits - self.mean(chosen) + 1e-6) * weights
        while True:
            steps = (
                (nats / more, more, place, grid)
                for place, of in costs.items()
                for grid in self.grids[place]
                if 0 < (more := self._more(place, chosen[place], grid)) <= left
                and (nats := of[chosen[place]] - of[grid]) > 0
            )
            best = max(steps, default=None)
            if best is None:
                return chosen
            _, more, place, grid = best
            chosen[place] = grid
            left -= more

    def _more(self, place: Place, now: Grid, then: Grid) -> float:
        """Number of bits that a matrix takes more under `then` than under `now`."""
        return (then.held_bits - now.held_bits) * self.matrices[place].weights


def own_grids(columns: int, group: int | None) -> list[Grid]:
    """Grids (bits and group) of our own format for a matrix with `columns` columns, in the order to measure.

    `group`: columns that share a scale in 4 bits; None: the usual number.
    """
    narrowest, *finer = (FORMATS[kind].bits for kind in reversed(FEW_BITS) if FORMATS[kind].offered)
    kinds: list[tuple[int, int | None]] = [(narrowest, group)]
    if group is None:
        kinds.append((narrowest, max(GROUPS)))
    kinds += [(each, most) for each in finer for most in (None, max(GROUPS))]
    kinds.append((8, None))
    found = ((each, group_of(columns, each, width)) for each, width in kinds)
    return list(dict.fromkeys(Grid(each, width) for each, width in found if width is not None))


EIGHT: Final = 8  # rows whose zero points share a word
INVERSES: Final = 4  # matrices of products that are held at once while a factor is made
COMPARED: Final = 3  # float32 values for each input and output of a token whose exact ones stand beside
WORK: Final = 8  # float32 values for each weight of a slice that is rounded
MEASURE, ROUND, COPY = "measuring what few bits cost", "rounding", "copying the rest"


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Memory and disk that the job will take.

    Attributes:
        passes: memory of each pass over the network; they run one after the other.
        disk_bytes: bytes that are written at most.
    """

    passes: tuple[PassPlan, ...]
    disk_bytes: int

    @property
    def held_bytes(self) -> int:
        """Most bytes of the device's memory that a pass holds."""
        return max(each.footprint.total_bytes for each in self.passes)

    @property
    def usable_bytes(self) -> int:
        return min(each.usable_bytes for each in self.passes)


@dataclass(slots=True)
class WrittenCheckpoint:
    """The checkpoint that was written.

    Attributes:
        bits: mean bits of a rounded weight, in files and in memory, scales included.
        widths: bits of each matrix' codes, by label.
        wide: number of the decoder's matrices that stay as they are.
        costs: nats a token that each matrix costs in its fewest bits, by label.
    """

    bits: float
    matrices: int
    wide: int
    widths: dict[str, int]
    nbytes: int
    seconds: float
    costs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnOutput:
    """Our own format, in which a checkpoint can be written, as in `GgufOutput`.

    Attributes:
        source: the folder that is read.
        group: columns that share a scale in 4 bits; None: as is usual.
    """

    source: Path
    blocks: Fp8Blocks | None
    group: int | None

    def fits(self, linear: Linear, parts: Parts) -> bool:
        """Whether groups of columns divide, and rows whose zero points share a word."""
        return group_of(linear.columns, 4) is not None and not any(rows % EIGHT for _, rows in parts)

    def grids(self, columns: int) -> list[Grid]:
        """See `own_grids`."""
        return own_grids(columns, self.group)

    def order(self, parts: Parts) -> None:
        """Do nothing: columns keep their order."""

    def rest(self, replaced: set[str]) -> int:
        """Bytes of the tensors that are copied."""
        return writing.copied_bytes(read_tensors(self.source), replaced)

    def open(self, work: Path, rounds: Rounds) -> writing.OwnWriter:
        """Begin to write shards."""
        return writing.OwnWriter(self.source, work, read_tensors(self.source), self.blocks, rounds)


class QuantizeJob:
    """The quantisation of a checkpoint."""

    def __init__(
        self,
        options: LoadOptions,
        out: Path,
        given: Given,
        *,
        bits: float,
        group: int | None,
        tell: Tell,
        as_gguf: bool = False,
    ) -> None:
        """
        Args:
            bits: wished mean of bits a weight, scales included.
            group: columns that share a scale in 4 bits, of our own format.
            as_gguf: write a GGUF, with an mmproj where the model sees; else our own format.

        Raises:
            CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
            InputError: OUT is there, the pictures or texts can't be used, the bits are out of reach.
            DoesNotFit: memory or disk is too little, with the numbers.
        """
        self.out, self.bits = out, bits
        folder = source_of(options.model, out)
        if read_config(folder).text.mixture is not None:
            raise UnsupportedModel(
                f"{options.model} is a mixture of experts, which can't be calibrated yet; --weights int4 (or "
                "int8) rounds it while it is loaded"
            )
        self._place = place_on(device_of(options.device), options.memory_bytes)
        wide = options.dtype == "float32" or (options.dtype == "auto" and self._place.device.type == "cpu")
        self.side = Participant(options, Settings("native", float32=wide), self._place, options.max_pixels)
        opened = self._opened()
        output = (
            GgufOutput(self.side, out.name, bits)
            if as_gguf
            else OwnOutput(folder, opened.stored.blocks, group)
        )
        self._output = output
        self.matrices, self.wide = matrices_of(opened, output.fits, output.order)
        grids = {place: output.grids(each.columns) for place, each in self.matrices.items()}
        self.choice: WidthOptions = WidthOptions(grids, self.matrices)
        if not self.matrices:
            raise UnsupportedModel(
                f"{options.model} has no matrix whose columns divide into groups of 32; "
                "use the model as it is"
            )
        self.choice.check(bits)
        self.material: CalibrationData = material_of(self.side, given)
        entries = read_tensors(folder)
        replaced = {name for matrix in self.matrices.values() for name, _ in matrix.parts}
        read = sum(entries[name].nbytes for name in replaced)
        rest = output.rest(replaced)
        # They are written with the matrices; on the disk they count with the rest.
        self._norms = norms_of(opened, self.matrices)
        self._clock = Clock({MEASURE: read, ROUND: read, COPY: rest}, tell)
        self.plan = self._plan(opened, rest)

    @property
    def aim(self) -> str:
        """The text of the formats that matrices are rounded to, and of the data they are rounded for."""
        own = (
            f"{self.material.tokens:,} tokens of yours"
            if self.material.own
            else "random tokens (--with takes yours)"
        )
        more = f", {self.material.left_out:,} more left out" if self.material.left_out else ""
        return f"{self.bits:g} bits a weight for {own}{more}"

    def run(self) -> WrittenCheckpoint:
        """Measure, round, and write the checkpoint.

        Raises:
            OSError: it can't be written.
            CheckpointError: a file has changed meanwhile.
        """
        cap(self._place, LATE_BYTES)
        with writing.beside(self.out) as work:
            costs = self._costs() if self.bits > self.choice.mean(self.choice.least) else {}
            rounds = Rounds(self.choice.within(self.bits, costs), self.matrices, self._norms)
            with closing(self._output.open(work, rounds)) as writer:
                self._round(rounds, writer)
                self._clock.begin(COPY, COPY)
                writer.finish(self._clock.read)
                self._clock.end(COPY)
            nbytes = sum(path.stat().st_size for path in work.iterdir())
        return self._made(rounds.grids, costs, nbytes)

    def close(self) -> None:
        """End the processes that were started."""
        self.side.close()

    def _opened(self) -> OpenCheckpoint:
        return open_checkpoint(self.side.folder, dtype=self.side.dtype, storage=self.side.storage())

    def _network(self) -> LayeredNetwork:
        gc.collect()
        release(self._place.device)
        return LayeredNetwork(self._opened(), self._place.device, told=self._clock.read)

    def _costs(self) -> dict[Place, dict[Grid, float]]:
        self._clock.begin(MEASURE, MEASURE)
        with closing(self._network()) as network:
            network.readers = self.plan.passes[0].readers
            sizes = self.plan.passes[0].sizes
            found = passes.costs(network, self.material.probe, sizes, self.choice.grids, self.matrices)
        self._clock.end(MEASURE)
        return found

    def _round(self, rounds: Rounds, writer: writing.OwnWriter | GgufWriter) -> None:
        self._clock.begin(ROUND, ROUND)
        with closing(self._network()) as network:
            network.readers = self.plan.passes[-1].readers
            sequences = [Sequences(prompt, ()) for prompt in self.material.prompts]
            sizes = self.plan.passes[-1].sizes
            passes.quantise(network, sequences, sizes, rounds, writer.layer, compensate=self.material.own)
        self._clock.end(ROUND)

    def _plan(self, opened: OpenCheckpoint, rest: int) -> QuantizePlan:
        with closing(LayeredNetwork(opened, self._place.device)) as network:
            probe = self.material.probe
            measured = [
                QuestionMemory(
                    Extent(len(probe.prompt), 0, 0), len(probe.answers), max(map(len, probe.answers))
                )
            ] * (1 + len(self.matrices))
            loads = [_load(prompt, self.side) for prompt in self.material.prompts]
            if self.material.own:
                loads *= 2  # behind rounded layers, and behind exact ones
            more = self._work()
            plans = tuple(
                plan_pass(self.side, network, each, self._place, more) for each in (measured, loads)
            )
        if any(len(plan.batches) > 1 for plan in plans):
            raise DoesNotFit(
                f"{self.material.tokens:,} tokens of pictures and texts have no room at once; "
                f"{format_size(self._place.usable_bytes)} is available; give fewer, or smaller pictures "
                "(--max-pixels)"
            )
        weights = sum(matrix.weights for matrix in self.matrices.values())
        disk = writing.check_room(self.out, self.side.folder, int(weights * self.bits / 8) + rest)
        return QuantizePlan(plans, disk)

    def _work(self) -> list[Component]:
        """Components of memory that rounding a layer takes beside a pass."""
        layers: dict[int, list[Matrix]] = defaultdict(list)
        for (number, _), matrix in self.matrices.items():
            layers[number].append(matrix)
        own = self.material.own
        # With the user's tokens one matrix' moments are held at a time, else those of a whole layer.
        parts = [[matrix] for matrix in self.matrices.values()] if own else list(layers.values())
        products = max(sum(map(self._moments, each)) for each in parts)
        beside = max(self._exact(matrix) for matrix in self.matrices.values()) if own else 0
        work = max(beside, max(map(self._rounding, parts)) - products)
        kept = 2 + own * self.side.settings.itemsize  # codes with what is beside them; what they were
        work += kept * max(sum(matrix.weights for matrix in layer) for layer in layers.values())
        return [
            Component(
                "products of inputs",
                Kind.OTHER,
                products,
                "prefill",
                why="of each pair of columns, and what lacks",
            ),
            predicted("rounding", Kind.OTHER, work, "prefill"),
        ]

    def _moments(self, matrix: Matrix) -> int:
        """Bytes of the products of a matrix' inputs and, with the user's data, of its outputs' error with
        them; of both orders of its columns."""
        return 4 * (matrix.columns**2 + self.material.own * matrix.weights) * (1 + (matrix.order is not None))

    def _rounding(self, matrices: list[Matrix]) -> int:
        """Most bytes held while matrices are rounded in order; each one's products are freed after it."""
        left = [self._moments(matrix) for matrix in matrices]
        return max(
            sum(left[number:])
            + INVERSES * 4 * matrix.columns**2
            + WORK * 4 * min(matrix.rows, SLICE_ROWS) * matrix.columns
            for number, matrix in enumerate(matrices)
        )

    def _exact(self, matrix: Matrix) -> int:
        """Bytes of a matrix' exact inputs for the longest sequence, and of the comparison with them."""
        hidden = self.side.config.text.hidden_size  # what a product may be added to
        kept = self.side.settings.itemsize * (matrix.columns + hidden)
        made = COMPARED * 4 * (matrix.rows + matrix.columns)
        return max(map(len, self.material.prompts)) * (kept + made)

    def _made(
        self, grids: Mapping[Place, Grid], costs: dict[Place, dict[Grid, float]], nbytes: int
    ) -> WrittenCheckpoint:
        return WrittenCheckpoint(
            bits=self.choice.mean(grids),
            matrices=len(grids),
            wide=self.wide,
            widths={label(place): grid.bits for place, grid in sorted(grids.items())},
            nbytes=nbytes,
            seconds=self._clock.seconds,
            costs={label(place): next(iter(each.values())) for place, each in costs.items()},
        )


def source_of(model: str, out: Path) -> Path:
    """The folder of a checkpoint that can be quantised to `out`.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        InputError: there is something at `out`.
    """
    writing.check_new(out)
    if gguf_files(model) is not None:
        raise UnsupportedModel(f"{model} is a GGUF; quantise the safetensors it was made of")
    folder = locate(model)
    if isinstance(form := read_config(folder).quantization, PackedInt4):
        raise UnsupportedModel(f"{model} has {form.bits} bits already; quantise its 16-bit or FP8 edition")
    return folder


def matrices_of(
    opened: OpenCheckpoint,
    fits: Callable[[Linear, Parts], bool],
    order: Callable[[Parts], torch.Tensor | None] = lambda _: None,
) -> tuple[dict[Place, Matrix], int]:
    """(the decoder's matrices that can be rounded, the number of those that can't); `order`: of a matrix'
    columns."""
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
            if fits(linear, mine):
                found[number, name] = Matrix(linear.rows, linear.columns, mine, order(mine))
            else:
                wide += 1
    return found, wide


def norms_of(opened: OpenCheckpoint, matrices: Mapping[Place, Matrix]) -> dict[Place, str]:
    """The checkpoint's name of the norm that each of these matrices alone reads."""
    targets = targets_of(opened.model)
    names = {id(target.parameter): opened.stored.entry(name).name for name, target in targets}
    return {
        (number, name): names[id(norm.weight)]
        for number, layer in enumerate(opened.model.decoder.layers)
        if isinstance(layer, Layer)
        for name, norm in passes.fed(layer).items()
        if (number, name) in matrices
    }


def _load(prompt: CheckedPrompt, side: Participant) -> QuestionMemory:
    merge = 1 if side.config.vision is None else side.config.vision.spatial_merge_size
    tokens = len(prompt.placeholders)
    return QuestionMemory(Extent(len(prompt), tokens, tokens * merge**2), 0, 0)


def label(place: Place) -> str:
    """The name of a matrix in results."""
    return f"layers.{place[0]}.{place[1]}"
