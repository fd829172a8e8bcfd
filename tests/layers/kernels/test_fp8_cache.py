"""Kernels over a cache of e4m3 bytes: the reference's results, and its rounding to the bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.kernels.attention import paged
from snugvl.layers.kv_cache import E4M3, KVCache, e4m3_bytes
from tests.draws import draws
from tests.layers.kernels.test_attention import BLOCK, cache, poison, tables, tolerance

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Shape = tuple[int, int, int]  # heads, KV heads, dim


def poisoned(shape: Shape, lengths: list[int]) -> tuple[KVCache, torch.Tensor]:
    """A cache in FP8 that is NaN where no sequence has a token, and the block tables."""
    store, table = cache(DEVICE, shape[1], shape[2], dtype=E4M3), tables(lengths, DEVICE)
    poison(store, table, lengths)
    return store, table


def decode(
    shape: Shape, lengths: list[int], window: int | None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """One new token a sequence: the kernel's outputs and the reference's."""
    store, table = poisoned(shape, lengths)
    query = torch.randn(len(lengths), shape[0], shape[2], device=DEVICE).to(dtype)
    none = torch.zeros(1, dtype=torch.int64)
    metadata = AttentionMetadata((1,) * len(lengths), tuple(lengths), none, table, BLOCK)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    scale = shape[2] ** -0.5
    ours = paged.decode(query, *store.layer(0), table.int(), counts, BLOCK, scale, window)
    return ours, on_cpu(query, store, metadata, scale, window)


def chunk(
    shape: Shape, new: list[int], cached: list[int], window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks over what is cached: the kernel's outputs and the reference's."""
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    store, table = poisoned(shape, lengths)
    query = torch.randn(sum(new), shape[0], shape[2], device=DEVICE)
    metadata = AttentionMetadata(tuple(new), tuple(lengths), torch.zeros(1, dtype=torch.int64), table, BLOCK)
    placed, scale = metadata.on_device(), shape[2] ** -0.5
    assert placed.starts is not None
    assert placed.lengths is not None
    where = (*store.layer(0), table.int(), placed.starts, placed.lengths)
    ours = paged.chunk(query, *where, BLOCK, scale, window)
    return ours, on_cpu(query, store, metadata, scale, window)


def on_cpu(
    query: torch.Tensor, store: KVCache, metadata: AttentionMetadata, scale: float, window: int | None
) -> torch.Tensor:
    """The plain-torch reference over the same bytes, wherever they are."""
    plain = cache(torch.device("cpu"), store.storage.shape[3], store.storage.shape[4], dtype=E4M3)
    plain.storage.copy_(store.storage)
    placed = AttentionMetadata(
        metadata.query_lens, metadata.context_lens, metadata.slot_mapping, metadata.block_tables.cpu(), BLOCK
    )
    return paged_attention(query.cpu(), plain, 0, placed, scale, window).to(query.device)


@draws(5)
@given(
    st.sampled_from([(2, 1, 16), (4, 2, 32), (2, 2, 80)]),
    st.lists(st.integers(1, 110), min_size=1, max_size=2),
    st.none() | st.integers(1, 130),
)
def test_decode(shape: Shape, lengths: list[int], window: int | None) -> None:
    torch.testing.assert_close(*decode(shape, lengths, window), **tolerance(DEVICE))


@draws(5)
@given(
    st.sampled_from([(2, 1, 16), (4, 2, 32), (2, 2, 80)]),
    st.lists(st.tuples(st.integers(1, 80), st.integers(0, 40)), min_size=1, max_size=2),
    st.none() | st.integers(1, 130),
)
def test_chunks(shape: Shape, sequences: list[tuple[int, int]], window: int | None) -> None:
    new, cached = ([pair[place] for pair in sequences] for place in (0, 1))
    torch.testing.assert_close(*chunk(shape, new, cached, window), **tolerance(DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries(dtype: torch.dtype) -> None:
    """Their products run in float16, whose rounding is finer than that of the result."""
    ours, expected = decode((4, 2, 32), [1, 70], None, dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


def test_what_is_written_is_what_the_reference_writes() -> None:
    """Every e4m3, what lies halfway between two and beside that, what is too large, NaN, infinity."""
    exact = torch.arange(127, dtype=torch.uint8).view(E4M3).float()  # 0 … 448
    between = (exact[1:] + exact[:-1]) / 2
    up = torch.tensor(math.inf)
    beside = torch.cat([between.nextafter(up), between.nextafter(-up), exact.nextafter(up)])
    large = torch.tensor([448.1, 463.9, 464.0, 465.0, 1e4, 3e38, math.inf, math.nan, 1e-10, 1e-45])
    sizes = torch.cat([exact, between, beside, large])
    every = torch.cat([sizes, -sizes, torch.randn(2048) * 10])
    tokens = -(-every.numel() // 256)
    value = torch.nn.functional.pad(every, (0, tokens * 256 - every.numel())).view(tokens, 1, 256).to(DEVICE)
    store = cache(DEVICE, 1, 256, blocks=-(-tokens // BLOCK), dtype=E4M3)
    qkv = torch.cat([torch.zeros_like(value), torch.zeros_like(value), value], 1)
    whole = torch.zeros(tokens, 256, device=DEVICE)
    paged.write(qkv, None, 0.0, (whole, whole), torch.arange(tokens, device=DEVICE), *store.layer(0), 1)
    expected = e4m3_bytes(value).view(E4M3).float()
    stored = store.gather(0, torch.arange(tokens, device=DEVICE), torch.float32)[1]
    assert torch.equal(stored.nan_to_num(-1e9), expected.nan_to_num(-1e9))
    assert stored.isnan().sum() == 2, "NaN stays NaN, so that its request is seen to fail; nothing else does"


def test_norm_rotation_and_write_round_once_more_than_the_wide_cache() -> None:
    """Keys, too: what a wide cache would hold, in e4m3. Slots of no token stay."""
    heads, kv_heads, dim, slots = 2, 1, 32, torch.tensor([5, -1, 9], device=DEVICE)
    wide, narrow = cache(DEVICE, kv_heads, dim, blocks=1), cache(DEVICE, kv_heads, dim, 1, E4M3)
    before = narrow.storage.clone()
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, device=DEVICE)
    norms = (torch.randn(dim, device=DEVICE), torch.randn(dim, device=DEVICE))
    angles = torch.rand(3, dim // 2, device=DEVICE).repeat(1, 2)
    where = (qkv, norms, 1e-6, (angles.cos(), angles.sin()), slots)
    queries = [paged.write(*where, *store.layer(0), heads) for store in (wide, narrow)]
    assert torch.equal(*queries)
    for one, other in zip(wide.layer(0), narrow.layer(0), strict=True):
        assert torch.equal(other[[5, 9]], e4m3_bytes(one[[5, 9]]))
    untouched = [slot for slot in range(BLOCK) if slot not in (5, 9)]
    assert torch.equal(narrow.storage[:, :, untouched], before[:, :, untouched])
