"""Paged attention kernels against the plain-torch reference."""

import pytest
import torch

from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.kernels.attention import paged
from snugvl.layers.kernels.rows import normed
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import RMSNorm
from snugvl.models.rope import rotate

BLOCK = 16
NAN_BYTE = 0x7F  # of e4m3


def cache(
    device: torch.device, kv_heads: int, dim: int, blocks: int = 24, dtype: torch.dtype = torch.float32
) -> KVCache:
    made = KVCache(
        num_layers=1,
        num_blocks=blocks,
        block_size=BLOCK,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    slots = torch.arange(blocks * BLOCK, device=device)
    made.write(0, slots, *torch.randn(2, len(slots), kv_heads, dim, device=device))
    return made


def tolerance(device: torch.device) -> dict[str, float]:
    """Float32 products are exact to float32 on a GPU, too, where tf32 would be 5e-3 off."""
    return {"atol": 2e-5, "rtol": 2e-4} if device.type == "cpu" else {"atol": 1e-4, "rtol": 1e-3}


def tables(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Blocks of each sequence, in a shuffled order, none shared."""
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1)) + 1
    width = max(-(-length // BLOCK) for length in lengths)
    table = torch.zeros(len(lengths), width, dtype=torch.int64)
    used = 0
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK)
        table[row, :count] = order[used : used + count]
        used += count
    return table.to(device)


def poison(store: KVCache, table: torch.Tensor, lengths: list[int]) -> None:
    """NaN wherever no sequence has a token."""
    live = torch.zeros(store.num_blocks * BLOCK, dtype=torch.bool, device=store.storage.device)
    for row, length in enumerate(lengths):
        place = torch.arange(length, device=live.device)
        live[table[row, place // BLOCK] * BLOCK + place % BLOCK] = True
    store.storage[:, :, ~live] = NAN_BYTE if store.fp8 else torch.nan


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (8, 1)])
@pytest.mark.parametrize("lengths", [[1], [16, 1, 33], [70, 129, 5]])
def test_decode(heads: int, kv_heads: int, lengths: list[int], device: torch.device) -> None:
    store, table = cache(device, kv_heads, 32), tables(lengths, device)
    poison(store, table, lengths)
    query = torch.randn(len(lengths), heads, 32, device=device)
    metadata = AttentionMetadata(
        (1,) * len(lengths), tuple(lengths), torch.zeros(1, dtype=torch.int64), table, BLOCK
    )
    expected = paged_attention(query, store, 0, metadata, 32**-0.5)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    ours = paged.decode(query, *store.layer(0), table.int(), counts, BLOCK, 32**-0.5)
    torch.testing.assert_close(ours, expected, **tolerance(device))


def test_a_padding_row_of_a_batch_reads_nothing(device: torch.device) -> None:
    store = cache(device, 2, 32)
    store.storage.fill_(torch.nan)
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    query = torch.randn(2, 4, 32, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    ours = paged.decode(query, *store.layer(0), table, counts, BLOCK, 1.0)
    assert not ours.any()


@pytest.mark.parametrize(
    ("new", "lengths"), [([5], [5]), ([1, 20, 3], [40, 20, 65]), ([70, 130], [90, 131]), ([64], [64])]
)
def test_chunks_over_a_cached_prefix(new: list[int], lengths: list[int], device: torch.device) -> None:
    store, table = cache(device, 2, 32), tables(lengths, device)
    poison(store, table, lengths)
    query = torch.randn(sum(new), 4, 32, device=device)
    metadata = AttentionMetadata(tuple(new), tuple(lengths), torch.zeros(1, dtype=torch.int64), table, BLOCK)
    expected = paged_attention(query, store, 0, metadata, 32**-0.5)
    placed = metadata.on_device()
    assert placed.starts is not None
    assert placed.lengths is not None
    where = (*store.layer(0), table.int(), placed.starts, placed.lengths)
    ours = paged.chunk(query, *where, BLOCK, 32**-0.5)
    torch.testing.assert_close(ours, expected, **tolerance(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 8])
def test_tokens_and_sequences_that_fill_up_a_step(
    dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    """A recorded step is larger than what is in it: tokens of nobody, sequences of no tokens, NaN in both."""
    new, lengths = [20, 1, 3], [20, 65, 40]
    store, table = cache(device, 2, 32, dtype=dtype), tables(lengths, device)
    poison(store, table, lengths)
    query = torch.randn(64, 4, 32, device=device)
    query[24:] = torch.nan
    starts = torch.tensor([0, 20, 21, 24, 24, 24], dtype=torch.int32, device=device)
    counts = torch.tensor([*lengths, 0, 0], dtype=torch.int32, device=device)
    wide = torch.zeros(5, table.shape[1], dtype=torch.int64, device=device)
    wide[:3] = table
    nowhere = torch.zeros(1, dtype=torch.int64)
    exact = AttentionMetadata(tuple(new), tuple(lengths), nowhere, table, BLOCK)
    right = paged_attention(query[:24], store, 0, exact, 32**-0.5, window)
    where = (*store.layer(0), wide, starts, counts)
    ours = paged.chunk(query, *where, BLOCK, 32**-0.5, window)
    torch.testing.assert_close(ours[:24], right, **tolerance(device))
    filled = AttentionMetadata((64, 1, 1, 1, 1), (64,) * 5, nowhere, wide, BLOCK, starts, counts)
    again = paged_attention(query, store, 0, filled, 32**-0.5, window)
    torch.testing.assert_close(again[:24], right, **tolerance(device))


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rotation_and_cache_write(normed: bool, device: torch.device) -> None:
    heads, kv_heads, dim, tokens = 4, 2, 32, 5
    store = cache(device, kv_heads, dim, blocks=2)
    before = store.storage.clone()
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device)
    norms = [RMSNorm(dim, 1e-6).to(device) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    angles = torch.rand(tokens, dim // 2, device=device) * 6
    slots = torch.tensor([3, 0, 31, 17, -1], device=device)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    full = (torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    expected_q, expected_k = rotate(q, full), rotate(k, full)
    weights = (norms[0].weight.detach(), norms[1].weight.detach()) if normed else None
    ours = paged.write(qkv, weights, 1e-6, full, slots, *store.layer(0), heads)
    torch.testing.assert_close(ours, expected_q, atol=1e-5, rtol=1e-4)
    keys, values = store.layer(0)
    torch.testing.assert_close(keys[slots[:4]], expected_k[:4], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(values[slots[:4]], v[:4])
    untouched = [slot for slot in range(32) if slot not in (3, 0, 31, 17)]
    torch.testing.assert_close(store.storage[:, :, untouched], before[:, :, untouched])


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("rotated", [8, 32])
def test_gates_and_zero_centred_norms(rotated: int, device: torch.device) -> None:
    """Qwen3.5: each query is followed by its gate, the norms' weights are distances from 1."""
    heads, kv_heads, dim, tokens = 4, 2, 32, 3
    store = cache(device, kv_heads, dim, blocks=1)
    qkv = torch.randn(tokens, 2 * heads + 2 * kv_heads, dim, device=device)
    norms = [RMSNorm(dim, 1e-6, 1.0).to(device) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    angles = torch.rand(tokens, rotated // 2, device=device) * 6
    full = (torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    slots = torch.tensor([3, 0, 7], device=device)
    q, k, v = qkv.split((2 * heads, kv_heads, kv_heads), dim=1)
    weights = (norms[0].weight.detach(), norms[1].weight.detach())
    where = (slots, *store.layer(0))
    ours = paged.write(qkv, weights, 1e-6, full, *where, heads, offset=1.0, gated=True)
    torch.testing.assert_close(ours, rotate(norms[0](q[:, ::2]), full), atol=1e-5, rtol=1e-4)
    keys, values = store.layer(0)
    torch.testing.assert_close(keys[slots], rotate(norms[1](k), full), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(values[slots], v)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float, device: torch.device) -> None:
    x = torch.randn(3, 48, device=device)
    weight = torch.randn(48, device=device)
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + weight)
    torch.testing.assert_close(normed(x, weight, 1e-6, offset), right, atol=1e-5, rtol=1e-5)
