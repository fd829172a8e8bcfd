"""Small pictures through the vision tower by recordings (`recordings.py`), one for each grid of patches.

A large GPU encodes a picture of a thousand tokens faster than the host starts the tower's kernels. Larger
ones keep it busy, and must stop for others every now and then: they go launch by launch as ever.

A recording runs in one go, so it is for what takes a few slices of the encoder at most.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from snugvl.engine.graphs.recordings import Recordings
from snugvl.engine.request import VisionItem
from snugvl.models.batch import GridTHW, Network, encoded

PATCHES: Final = 4096  # of a picture, at most: a chunk of the tower (`models/vision.py`)
SLICES: Final = 3  # of the encoder that one may take


@dataclass(frozen=True, slots=True)
class _Places:
    """What recordings of pictures read and write; each size uses the beginning.

    Attributes:
        patches: `[PATCHES, patch_dim]` in the network's type.
        rows: `[tokens, (1 + levels) · hidden]`.
    """

    patches: torch.Tensor
    rows: torch.Tensor


class PictureGraphs:
    """Not for a tower whose weights are streamed, which waits for its copies."""

    def __init__(self, model: Network, recordings: Recordings) -> None:
        self._model = model
        self._recordings = recordings

    def encode(self, item: VisionItem) -> torch.Tensor | None:
        """Rows of an item, `[tokens, (1 + levels) · hidden]`; None: it is not for a recording."""
        grid, key = item.grid_thw, ("picture", item.grid_thw)
        count = math.prod(grid)
        if count > PATCHES or not self._recordings.due(key):
            return None
        places = self._recordings.held("places of pictures", self._places)
        places.patches[:count].copy_(item.reader(self._model.device, self._model.dtype)(0, count))
        self._recordings.run(key, lambda: self._encode(places, grid))
        return places.rows[: self._tokens(grid)].clone()

    def _tokens(self, grid: GridTHW) -> int:
        vision = self._model.config.vision
        assert vision is not None
        return math.prod(grid) // vision.spatial_merge_size**2

    def _places(self) -> _Places:
        config, kind, device = self._model.config, self._model.dtype, self._model.device
        vision = config.vision
        assert vision is not None
        width = (1 + len(vision.deepstack_layers)) * config.text.hidden_size
        return _Places(
            torch.zeros(PATCHES, vision.patch_dim, dtype=kind, device=device),
            torch.zeros(PATCHES // vision.spatial_merge_size**2, width, dtype=kind, device=device),
        )

    def _encode(self, places: _Places, grid: GridTHW) -> None:
        """What is recorded."""
        rows = encoded(self._model.encode_in_steps(lambda start, end: places.patches[start:end], grid))
        places.rows[: len(rows)].copy_(rows)
