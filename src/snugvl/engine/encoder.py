"""Encoding of images and videos: when, how much at once, and which encodings are held.

    sequences │ decode │ decode │ decode │ decode + first chunk of the prompt
    encoder   │ slice  │ slice  │ slice  │

Beside sequences that decode an item is encoded in slices, one after each step, so that no stream waits for
a whole image; when no sequence decodes, in one go. The size of a slice changes no value: the tower stops
where its chunks end anyway.

An encoding is held while a running sequence is before its last row; sequences of a step share it. Afterwards
it stays within `cache_bytes`, least recently used first to go, for the next question about the same image.
Items are encoded one at a time: the workspace is that of the largest one. Where there is memory for it, small
pictures of a size that comes again are one CUDA graph each (`graphs/prefill.py`), done in one go.

Not thread-safe.
"""

import math
from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch

from snugvl.engine.graphs.prefill import PictureGraphs
from snugvl.engine.request import VisionItem
from snugvl.engine.scheduler import Chunk
from snugvl.engine.sequence import Sequence
from snugvl.models.batch import GridTHW, Network

# Floating point operations of a slice: about 6 ms of any GPU, as much time as a decode step of a few billion
# weights takes, and half of a 1024 × 1024 image on a large one; some tenths of a second of a CPU, likewise.
SLICE_OF_MULTIPROCESSOR = 18e9
SLICE_OF_CPU = 20e9
SLICES = 3  # that a picture may take whose graph runs in one go

Key = tuple[bytes, GridTHW]
_GRIDS = 256  # whose work is remembered


@dataclass(slots=True)
class Encoding:
    """An item's rows `[tokens, (1 + levels) · hidden]`; `used` once a sequence has begun with them."""

    rows: torch.Tensor
    used: bool = False


class Encoder:
    """Encodes what sequences need, and holds it as long as it pays.

    Attributes:
        items_encoded: items that went through the tower.
        queries: items that a sequence began to read.
        hits: those of them that were encoded for another one.
        slice: floating point operations of a slice.
        cache_bytes: bytes that may be held for the next question, from the next `keep` on.
    """

    def __init__(self, model: Network, cache_bytes: int = 0) -> None:
        self.items_encoded = self.queries = self.hits = 0
        self._model = model
        self.cache_bytes = cache_bytes
        self.slice = SLICE_OF_CPU
        if model.device.type == "cuda":
            units = torch.cuda.get_device_properties(model.device).multi_processor_count
            self.slice = SLICE_OF_MULTIPROCESSOR * units
        self._encodings: OrderedDict[Key, Encoding] = OrderedDict()  # least recently used first
        self._begun: tuple[Key, Generator[int, None, torch.Tensor]] | None = None
        self._graphs: PictureGraphs | None = None  # where there is memory for them
        self._work: OrderedDict[GridTHW, int] = OrderedDict()  # of those encoded last
        self._spent = 0  # of the one in the making

    def use_graphs(self, graphs: PictureGraphs) -> None:
        """Encode small pictures by CUDA graphs from now on."""
        self._graphs = graphs

    @property
    def nbytes(self) -> int:
        """Bytes of the encodings held, the one in the making not among them."""
        return sum(encoding.rows.nbytes for encoding in self._encodings.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is in the making and no more is held than the cache may."""
        return self._begun is None and self.nbytes <= self.cache_bytes

    def ready(self, chunk: Chunk) -> bool:
        """Whether all encodings that a chunk needs are there."""
        return not self._missing(chunk)

    def advance(self, chunk: Chunk) -> None:
        """Work a slice at the first item that a chunk lacks."""
        missing = self._missing(chunk)
        if missing:
            self._encode(missing[0], self.slice)

    def rows(self, chunk: Chunk) -> list[torch.Tensor]:
        """The encoder rows that a chunk needs, encoding what isn't there yet."""
        parts = []
        for part in chunk.sequence.prompt.vision_in(chunk.start, chunk.end):
            key = _key(part.item)
            while key not in self._encodings:
                self._encode(part.item, float("inf"))
            encoding = self._encodings[key]
            self._encodings.move_to_end(key)
            if part.start == 0:
                self.queries += 1
                self.hits += encoding.used
                encoding.used = True
            parts.append(encoding.rows[part.start : part.end])
        return parts

    def keep(self, sequences: Iterable[Sequence], window: int) -> None:
        """Drop encodings beyond `cache_bytes` that the next `window` tokens of these sequences don't need."""
        if self._begun is None and not self._encodings:
            return
        needed = {
            _key(part.item)
            for sequence in sequences
            for part in sequence.prompt.vision_in(sequence.computed, sequence.computed + window)
        }
        if self._begun is not None and self._begun[0] not in needed:
            self._begun = None
        spare = sum(e.rows.nbytes for key, e in self._encodings.items() if key not in needed)
        for key in list(self._encodings):
            if spare <= self.cache_bytes:
                break
            if key not in needed:
                spare -= self._encodings.pop(key).rows.nbytes

    def clear(self) -> None:
        """Drop all encodings, the one in the making included."""
        self._begun = None
        self._encodings.clear()

    def _missing(self, chunk: Chunk) -> list[VisionItem]:
        items = [part.item for part in chunk.sequence.prompt.vision_in(chunk.start, chunk.end)]
        return [item for item in items if _key(item) not in self._encodings]

    def _encode(self, item: VisionItem, budget: float) -> None:
        """Go on with an item, or begin it, until it is done or `budget` operations are."""
        key = _key(item)
        if self._begun is None or self._begun[0] != key:
            self._begun = None  # before the next one takes memory
            work = self._work.get(item.grid_thw, math.inf)
            if self._graphs is not None and work <= SLICES * self.slice:
                rows = self._graphs.encode(item)
                if rows is not None:  # a CUDA graph is there for its size
                    self._store(key, rows)
                    return
            model = self._model
            self._begun = key, model.encode_in_steps(item.reader(model.device, model.dtype), item.grid_thw)
            self._spent = 0
        steps, before = self._begun[1], self._spent
        try:
            while self._spent - before < budget:
                self._spent += next(steps)
        except StopIteration as end:
            self._store(key, end.value)
            self._begun = None
            self._work[item.grid_thw] = self._spent
            if len(self._work) > _GRIDS:
                self._work.popitem(last=False)
        except BaseException:
            self._begun = None  # a generator that has raised returns nothing ever after
            raise

    def _store(self, key: Key, rows: torch.Tensor) -> None:
        self._encodings[key] = Encoding(rows)
        self.items_encoded += 1


def _key(item: VisionItem) -> Key:
    return item.digest, item.grid_thw
