"""Sliding windows, and heads of sizes that are no power of two, in the kernels: against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.kernels.attention import paged
from snugvl.layers.linear import RMSNorm
from snugvl.models.rope import rotate
from tests.draws import draws
from tests.layers.kernels.test_attention import BLOCK, cache, poison, tables, tolerance

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (heads, KV heads, dim), window
CASES = [
    ((4, 2, 64), 70), ((2, 1, 80), 1), ((2, 1, 96), None), ((2, 2, 96), 70), ((2, 1, 128), 33),
    ((2, 1, 256), None), ((1, 1, 256), 50), ((6, 2, 16), 1),
]  # fmt: skip


def decode(shape: tuple[int, int, int], lengths: list[int], window: int | None) -> None:
    """One new token a sequence, kernel against reference."""
    heads, kv_heads, dim = shape
    store, table = cache(DEVICE, kv_heads, dim), tables(lengths, DEVICE)
    poison(store, table, lengths)
    query = torch.randn(len(lengths), heads, dim, device=DEVICE)
    metadata = AttentionMetadata(
        (1,) * len(lengths), tuple(lengths), torch.zeros(1, dtype=torch.int64), table, BLOCK
    )
    expected = paged_attention(query, store, 0, metadata, dim**-0.5, window)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    ours = paged.decode(query, *store.layer(0), table.int(), counts, BLOCK, dim**-0.5, window)
    torch.testing.assert_close(ours, expected, **tolerance(DEVICE))


def chunk(shape: tuple[int, int, int], new: list[int], cached: list[int], window: int | None) -> None:
    """Chunks over what is cached, kernel against reference."""
    heads, kv_heads, dim = shape
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    store, table = cache(DEVICE, kv_heads, dim), tables(lengths, DEVICE)
    poison(store, table, lengths)
    query = torch.randn(sum(new), heads, dim, device=DEVICE)
    metadata = AttentionMetadata(tuple(new), tuple(lengths), torch.zeros(1, dtype=torch.int64), table, BLOCK)
    expected = paged_attention(query, store, 0, metadata, dim**-0.5, window)
    placed = metadata.on_device()
    assert placed.starts is not None
    assert placed.lengths is not None
    where = (*store.layer(0), table.int(), placed.starts, placed.lengths)
    ours = paged.chunk(query, *where, BLOCK, dim**-0.5, window)
    torch.testing.assert_close(ours, expected, **tolerance(DEVICE))


@pytest.mark.parametrize(("shape", "window"), CASES)
def test_decode(shape: tuple[int, int, int], window: int | None) -> None:
    decode(shape, [1, 150], window)


@pytest.mark.parametrize(("shape", "window"), CASES)
def test_chunks(shape: tuple[int, int, int], window: int | None) -> None:
    chunk(shape, [1, 70], [40, 60], window)


@draws(6)
@given(st.lists(st.integers(1, 110), min_size=1, max_size=2), st.integers(1, 130))
def test_decode_with_any_window(lengths: list[int], window: int) -> None:
    decode((2, 1, 16), lengths, window)


@draws(5)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(0, 40)), min_size=1, max_size=2), st.integers(1, 130)
)
def test_chunks_with_any_window(sequences: list[tuple[int, int]], window: int) -> None:
    chunk((1, 1, 16), [new for new, _ in sequences], [cached for _, cached in sequences], window)


def test_nothing_before_a_window_is_read() -> None:
    """NaN where no query looks: what was read there would show."""
    lengths, window = [100], 20
    store, table = cache(DEVICE, 1, 32), tables(lengths, DEVICE)
    query = torch.randn(1, 2, 32, device=DEVICE)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    place = torch.arange(80, device=DEVICE)
    store.storage[:, :, table[0, place // BLOCK] * BLOCK + place % BLOCK] = torch.nan
    ours = paged.decode(query, *store.layer(0), table.int(), counts, BLOCK, 1.0, window)
    assert ours.isfinite().all()


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(("dim", "rotated"), [(80, 80), (96, 96), (128, 96), (256, 64), (64, 64)])
@pytest.mark.parametrize("normed", [True, False])
def test_rotation_and_cache_write(dim: int, rotated: int, normed: bool) -> None:
    heads, kv_heads, tokens = 2, 1, 3
    store = cache(DEVICE, kv_heads, dim, blocks=1)
    before = store.storage.clone()
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE)
    norms = [RMSNorm(dim, 1e-6).to(DEVICE) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    angles = torch.rand(tokens, rotated // 2, device=DEVICE) * 6
    full = (torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    slots = torch.tensor([5, -1, 9], device=DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    expected = rotate(k, full)
    weights = (norms[0].weight.detach(), norms[1].weight.detach()) if normed else None
    ours = paged.write(qkv, weights, 1e-6, full, slots, *store.layer(0), heads)
    torch.testing.assert_close(ours, rotate(q, full), atol=1e-5, rtol=1e-4)
    keys, values = store.layer(0)
    torch.testing.assert_close(keys[[5, 9]], expected[[0, 2]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(values[[5, 9]], v[[0, 2]])
    untouched = [slot for slot in range(BLOCK) if slot not in (5, 9)]
    torch.testing.assert_close(store.storage[:, :, untouched], before[:, :, untouched])
