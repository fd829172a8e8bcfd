"""The files of `snugvl quantize --format gguf`: OUT/NAME.gguf, and OUT/mmproj-NAME.gguf where the model sees.

The decoder's rounded matrices are blocks that meet the wished bits; the embedding, the head and what else is
multiplied with are Q8_0, the vision tower is in 16 bits, norms are in 32. Nothing else has to be there: our
engine, llama.cpp and what stands on it read these files as any other GGUF.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from snugvl.checkpoint.gguf_facts import cut_named
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.checkpoint.section import read_json
from snugvl.errors import UnsupportedModel
from snugvl.fidelity.participant import Participant
from snugvl.layers.ggml import LAYOUTS, SUPER
from snugvl.layers.linear import Linear
from snugvl.models.loader import open_checkpoint, targets_of
from snugvl.models.tensor_files import TensorFiles, dequantise
from snugvl.quantize.gguf_file import (
    INSTEAD,
    GgufFile,
    Naming,
    Tensor,
    add_vocabulary,
    converted,
    nbytes_of,
    plain_kind,
)
from snugvl.quantize.grids import BLOCKS, Grid
from snugvl.quantize.passes import Factors, Parts, Rounds
from snugvl.quantize.rounding import Rounded

COLUMNS: Final = 32  # of the smallest block
VISUAL: Final = "model.visual."
MIXED: Final = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # what files of mostly these are called


def block_grids(columns: int, bits: float) -> list[Grid]:
    """Grids for a matrix of `columns` columns and a wished mean of `bits`, in the order of measuring."""
    narrow = columns % SUPER != 0
    kinds = [kind for kind in BLOCKS if (LAYOUTS[kind].block < SUPER) == narrow or kind == "Q8_0"]
    grids = [Grid(LAYOUTS[kind].low + LAYOUTS[kind].high, LAYOUTS[kind].group, kind) for kind in kinds]
    grids.sort(key=lambda grid: grid.held_bits)
    # Three bits cost so much that none are taken where four fit.
    four = next(index for index, grid in enumerate(grids) if grid.bits == 4)
    return grids[four:] if bits >= grids[four].held_bits else grids


class GgufOutput:
    """A GGUF and its mmproj, in which a checkpoint can be written, as in `setup.OwnOutput`."""

    def __init__(self, side: Participant, name: str, bits: float) -> None:
        """
        Args:
            name: that of the files, without endings.
            bits: wished mean of bits a weight, scales included.

        Raises:
            UnsupportedModel: no GGUF can hold this model, or our engine couldn't read it.
        """
        self._side, self._name, self._bits = side, name, bits
        self.naming = Naming(side.config, predicts=side.config.predictor)
        self._document = read_json(side.folder / "tokenizer.json")
        cut = cut_named(self._document)
        if cut is None:
            raise UnsupportedModel(
                f"{side.capabilities.model} cuts text in a way that no GGUF can name; {INSTEAD}"
            )
        self._cut = cut
        opened = open_checkpoint(side.folder, side.dtype, side.storage(), predictor=side.config.predictor)
        self.blocks = opened.stored.blocks
        self.entries = opened.stored.tensors
        self.names = {opened.stored.entry(name).name: name for name, _ in targets_of(opened.model)}

    def fits(self, linear: Linear, parts: Parts) -> bool:
        """Whether blocks divide a matrix' columns."""
        return linear.columns % COLUMNS == 0

    def grids(self, columns: int) -> list[Grid]:
        """See `block_grids`."""
        return block_grids(columns, self._bits)

    def order(self, parts: Parts) -> torch.Tensor | None:
        """A matrix' columns in llama.cpp's order; None: as they are."""
        return self.naming.columns(self.names[parts[0][0]])

    def rest(self, replaced: set[str]) -> int:
        """Bytes of all tensors but the replaced ones."""
        return sum(
            nbytes_of(each.shape, kind) for each, kind, source in self.plain() if source not in replaced
        )

    def plain(self) -> Iterator[tuple[Tensor, Kind, str]]:
        """(tensor, type while nothing is rounded, the checkpoint's name) of both files."""
        for factors in self.naming.factors():
            yield factors, Kind.F32, ""
        for source, name in self.names.items():
            entry = self.entries[name]
            tensor = Tensor(name, entry.shape, partial(self.read, entry))
            visual = name.startswith(VISUAL)
            for part in self.naming.tower(tensor) if visual else self.naming.decoder(tensor):
                yield part, plain_kind(part, Kind.F16 if visual else Kind.Q8_0), source

    def read(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Values of a tensor in pieces of its rows."""
        files = TensorFiles(
            {each.name: each for each in self.entries.values()}, self.blocks, torch.device("cpu")
        )
        try:
            for piece in files.pieces(entry):
                if piece.scale is None or self.blocks is None:
                    yield piece.values
                else:
                    yield dequantise(piece.values, piece.scale, self.blocks)
        finally:
            files.close()

    def open(self, work: Path, rounds: Rounds) -> "GgufWriter":
        """Write the headers."""
        return GgufWriter(self, work, rounds)

    def headers(self, work: Path, rounds: Rounds) -> tuple[GgufFile, GgufFile | None]:
        """The files of the decoder and of the tower, with holes for their tensors."""
        blocks = {
            name: Kind[grid.block]
            for place, grid in rounds.grids.items()
            if grid.block is not None
            for name, _ in rounds.matrices[place].parts
        }
        listed = [(each, blocks.get(source, kind)) for each, kind, source in self.plain()]
        text = [pair for pair in listed if not _of_tower(pair[0])]
        tower = [pair for pair in listed if _of_tower(pair[0])]
        writer = self.naming.metadata()
        weights = Counter[str]()
        for place, grid in rounds.grids.items():
            weights[str(grid.block)] += rounds.matrices[place].weights
        (commonest, _), *_ = weights.most_common(1)
        called = MIXED.get(commonest, commonest)
        writer.add_name(self._name)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{called}"])
        writer.add_quantization_version(2)
        self._add_vocabulary(writer)
        file = GgufFile(work / f"{self._name}.gguf", writer, text)
        if self._side.config.vision is None:
            return file, None
        writer = self.naming.tower_metadata()
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        return file, GgufFile(work / f"mmproj-{self._name}.gguf", writer, tower)

    def _add_vocabulary(self, writer: gguf.GGUFWriter) -> None:
        processor = self._side.processor
        tokenizer = processor.tokenizer
        end = tokenizer.variables.get("eos_token")
        ends = sorted(
            tokenizer.eos_ids,
            key=lambda number: (tokenizer.decode([number], skip_special=False) != end, number),
        )
        framed = tokenizer.encode("", framed=True)
        add_vocabulary(
            writer,
            self._document,
            self._side.config.text.vocab_size,
            self._cut,
            ends,
            processor.template.source,
            framed[0] if framed else None,
        )


class GgufWriter:
    """The two files, as layers are rounded."""

    def __init__(self, output: GgufOutput, work: Path, rounds: Rounds) -> None:
        self._output, self._rounds = output, rounds
        self._file, self._tower = output.headers(work, rounds)

    def layer(self, index: int, made: Mapping[str, Rounded], factors: Factors) -> None:
        """Write a layer's rounded matrices, and the norms that their factors change."""
        output, naming = self._output, self._output.naming
        for name, whole in made.items():
            start, blocks = 0, whole.blocks().cpu()
            for source, rows in self._rounds.matrices[index, name].parts:
                mine, called = blocks[start : start + rows], output.names[source]
                order = naming.rows(called)
                self._file.put(naming.name(called), [(mine if order is None else mine[order]).numpy()])
                start += rows
        for name, each in factors.items():
            called = output.names[self._rounds.norms[index, name]]
            weight = torch.cat([*output.read(output.entries[called])]).flatten().float() / each.cpu()
            self._file.put(naming.name(called), [weight.numpy()])

    def finish(self, told: Callable[[int], None]) -> None:
        """Convert all other tensors; `told` is called with the bytes of each."""
        written = self._rounds.replaced | {*self._rounds.norms.values()}
        for tensor, kind, source in self._output.plain():
            if source in written:
                continue
            file = self._tower if _of_tower(tensor) else self._file
            assert file is not None
            file.put(tensor.name, converted(tensor, kind))
            told(nbytes_of(tensor.shape, kind))

    def close(self) -> None:
        """Close both files."""
        for file in (self._file, self._tower):
            if file is not None:
                file.close()


def _of_tower(tensor: Tensor) -> bool:
    return tensor.name.startswith(("v.", "mm."))
