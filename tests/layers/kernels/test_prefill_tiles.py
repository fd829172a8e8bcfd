"""Attention of chunks: its tiles fit the hardware, and give the same whatever they are."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.kernels import places
from snugvl.layers.kernels.attention import paged
from snugvl.layers.kernels.attention.paged import PrefillTiles, prefill_tiles
from snugvl.layers.kernels.device import Hardware
from tests.layers.kernels.test_attention import BLOCK, cache, poison, tables, tolerance

KIB = 1024
LIMITS = {  # shared memory of a program at most
    (7, 5): 64 * KIB, (8, 0): 163 * KIB, (8, 6): 99 * KIB, (8, 9): 99 * KIB, (9, 0): 227 * KIB,
    (10, 0): 227 * KIB, (12, 0): 99 * KIB,
}  # fmt: skip


def test_tiles_fit_in_shared_memory() -> None:
    for capability, dim, shared, exact in product(LIMITS, (64, 128, 256), (1, 4), (False, True)):
        tiles = prefill_tiles(Hardware(capability, 100), dim, shared, exact)
        buffers = tiles.stages if capability >= (9, 0) else tiles.stages - 1
        few = max(tiles.few_stages - 1, 1) * tiles.few_step
        wide = 128 if dim <= 128 else dim
        taken = (4 if exact else 2) * wide * max(tiles.rows + 2 * buffers * tiles.step, 16 + 2 * few)
        assert taken <= LIMITS[capability], (capability, dim, shared, exact)


def compare(
    shape: tuple[int, int], new: list[int], cached: list[int], device: torch.device, window: int | None = None
) -> None:
    """Chunks of heads of 16 values over what is cached, kernel against reference; NaN where nothing is."""
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    store, table = cache(device, shape[1], 16), tables(lengths, device)
    poison(store, table, lengths)
    query = torch.randn(sum(new), shape[0], 16, device=device)
    metadata = AttentionMetadata(tuple(new), tuple(lengths), torch.zeros(1, dtype=torch.int64), table, BLOCK)
    expected = paged_attention(query, store, 0, metadata, 0.25, window)
    placed = metadata.on_device()
    assert placed.starts is not None
    assert placed.lengths is not None
    where = (*store.layer(0), table.int(), placed.starts, placed.lengths)
    ours = paged.chunk(query, *where, BLOCK, 0.25, window)
    torch.testing.assert_close(ours, expected, **tolerance(device))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("change", [{}, {"rows": 16, "step": 16}, {"rows": 128, "few_step": 16}])
def test_tiles_change_nothing(
    change: dict[str, int], window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = replace(PrefillTiles(step=32), **change)
    monkeypatch.setattr(paged, "prefill_tiles", lambda *_: tiles)
    compare((4, 2), [70, 1, 33, 1], [64, 80, 0, 0], device, window)


@pytest.mark.parametrize("shape", [(3, 1), (12, 2), (20, 1)])
def test_heads_that_share_keys_in_any_number(shape: tuple[int, int], device: torch.device) -> None:
    """Three fill no power of two of rows, twenty more than the tile of decodes usually has."""
    compare(shape, [25, 1, 7], [40, 70, 0], device)


def test_more_sequences_than_are_usual(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find theirs among them all: short ones, and a long one between."""
    monkeypatch.setattr(places, "MAX_SEQUENCES", 64)
    new = [2] * 66
    new[50] = 40
    store = cache(device, 1, 16)
    query = torch.randn(sum(new), 1, 16, device=device)
    table = torch.arange(66, device=device)[:, None] % 8 * 3 + torch.arange(3, device=device)
    metadata = AttentionMetadata(tuple(new), tuple(new), torch.zeros(1, dtype=torch.int64), table, BLOCK)
    expected = paged_attention(query, store, 0, metadata, 0.25)
    placed = metadata.on_device()
    assert placed.starts is not None
    assert placed.lengths is not None
    where = (*store.layer(0), table, placed.starts, placed.lengths)
    torch.testing.assert_close(paged.chunk(query, *where, BLOCK, 0.25), expected, **tolerance(device))


class Grids:
    """Notes how many programs are started, in place of starting them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.seen.append(grid)
        return lambda *values, **constants: None


def test_a_recorded_step_starts_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as 640 tokens need, and one a sequence; not the most that each of 32 could need."""
    monkeypatch.setattr(paged, "attend_chunk", grids := Grids())
    numbers = torch.zeros(33, dtype=torch.int32)
    query, keys = torch.zeros(640, 4, 16), torch.zeros(16, 2, 16)
    paged.chunk(query, keys, keys, numbers[:32, None], numbers, numbers[:32], BLOCK, 0.25)
    assert grids.seen == [(2, 640 // (PrefillTiles().rows // 2) + 32)]
