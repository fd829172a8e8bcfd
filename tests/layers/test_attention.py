"""Paged attention against plain softmax over each sequence alone, for any mix of chunks and block tables."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.kv_cache import KVCache
from tests.draws import draws

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5)


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """The definition, in float64: `query` are the last positions of `key`. `[tokens, heads, dim]`."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
    new, context = query.shape[0], key.shape[0]
    future = torch.arange(context)[None] > torch.arange(context - new, context)[:, None]
    if window is not None:
        future |= torch.arange(context)[None] <= torch.arange(context - new, context)[:, None] - window
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def run(
    sequences: Sequence[tuple[int, int]], seed: int, window: int | None = None, *, apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cached, new) tokens of each sequence → our output and the plain one, `[new tokens, heads, dim]`.

    `apart`: as in small CUDA graphs of steps, token by token, with tokens and sequences of nobody.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(cached + new) // BLOCK) for cached, new in sequences]
    cache = KVCache(
        num_layers=2,
        num_blocks=sum(needed) + 3,
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    # Other sequences' leftovers must never be seen; and blocks of a sequence lie anywhere.
    cache.storage.copy_(torch.full_like(cache.storage, 1e3))
    order = torch.randperm(cache.num_blocks, generator=generator)
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int64)
    queries, expected, slots, start = [], [], [], 0
    for index, ((cached, new), blocks) in enumerate(zip(sequences, needed, strict=True)):
        tables[index, :blocks] = order[start : start + blocks]
        start += blocks
        total = cached + new
        key, value = torch.randn(2, total, KV_HEADS, DIM, generator=generator)
        query = torch.randn(new, HEADS, DIM, generator=generator)
        places = tables[index][torch.arange(total) // BLOCK] * BLOCK + torch.arange(total) % BLOCK
        cache.write(1, places, key, value)
        slots.append(places[cached:])
        queries.append(query)
        expected.append(plain(query, key, value, window))
    metadata = AttentionMetadata(
        tuple(new for _, new in sequences), tuple(sum(s) for s in sequences), torch.cat(slots), tables, BLOCK
    )
    flat, tokens = torch.cat(queries), sum(new for _, new in sequences)
    if apart:
        known = metadata.on_device()
        assert known.starts is not None
        assert known.lengths is not None
        filled = replace(
            known,
            block_tables=torch.nn.functional.pad(tables, (0, 0, 0, 2)),
            starts=torch.cat([known.starts, known.starts[-1:].expand(2)]),
            lengths=torch.nn.functional.pad(known.lengths, (0, 2)),
        )
        metadata = filled.token_by_token(tokens + 3)
        flat = torch.nn.functional.pad(flat, (0, 0, 0, 0, 0, 3))
    ours = paged_attention(flat, cache, 1, metadata, DIM**-0.5, window)[:tokens]
    return ours, torch.cat(expected)


@draws(60)
@given(sequences=lengths, seed=st.integers(0, 1000))
def test_any_mix_of_prefills_chunks_and_decodes(sequences: list[tuple[int, int]], seed: int) -> None:
    ours, expected = run(sequences, seed)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


@draws(30)
@given(sequences=lengths, seed=st.integers(0, 1000), window=st.none() | st.integers(1, 12))
def test_few_tokens_one_by_one(sequences: list[tuple[int, int]], seed: int, window: int | None) -> None:
    ours, expected = run(sequences, seed, window, apart=True)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


@draws(30)
@given(cached=st.lists(st.integers(0, 30), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_batch_of_decodes(cached: list[int], seed: int) -> None:
    ours, expected = run([(count, 1) for count in cached], seed)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


@draws(60)
@given(sequences=lengths, seed=st.integers(0, 1000), window=st.integers(1, 30))
def test_a_window_over_any_mix(sequences: list[tuple[int, int]], seed: int, window: int) -> None:
    ours, expected = run(sequences, seed, window)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)
    ours, expected = run([(cached, 1) for cached, _ in sequences], seed, window)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


def test_copying_a_block_copies_it_in_every_layer() -> None:
    cache = KVCache(
        num_layers=3, num_blocks=4, block_size=2, num_kv_heads=1, head_dim=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.storage.copy_(torch.randn_like(cache.storage))
    before = cache.storage.clone()
    cache.copy_block(1, 3)
    assert torch.equal(cache.storage[:, :, 6:8], before[:, :, 2:4])
    assert torch.equal(cache.storage[:, :, :6], before[:, :, :6])
    assert cache.nbytes == 3 * 2 * 8 * 1 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(
        num_layers=1, num_blocks=8, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    key, value = torch.randn(2, 20, KV_HEADS, DIM, generator=generator).to(dtype)
    query = torch.randn(5, HEADS, DIM, generator=generator).to(dtype)
    cache.write(0, torch.arange(20), key, value)
    metadata = AttentionMetadata((5,), (20,), torch.arange(15, 20), torch.arange(8)[None], BLOCK)
    ours = paged_attention(query, cache, 0, metadata, DIM**-0.5).double()
    expected = plain(query, key, value)
    assert (ours - expected).norm() / expected.norm() < 1e-2
