"""Causal attention over the paged KV cache: kernels on a GPU, their plain-torch reference elsewhere.

One interface for both: new queries, the cache, and `AttentionMetadata` saying which sequence each query
belongs to and where that sequence's keys and values are.

    flat batch   [ s0 s0 s0 s0 | s1 | s2 | s3 s3 ]     query_lens   = [4, 1, 1, 2]
                   a prefill    decodes    a chunk     context_lens = [4, 9, 33, 40]

`context_lens` counts the tokens in the cache *after* this step's keys are written, so the queries of
sequence `s` stand at positions `context_lens[s] - query_lens[s] … context_lens[s] - 1`.

Source: PagedAttention, Kwon et al. 2023 (https://arxiv.org/abs/2309.06180).
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from snugvl.layers.device import upload
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.replaced import by_kernels, usable

FEW = 16  # queries of a sequence that aren't a part of a prompt
MOST_SCORES = 1 << 24  # that plain torch makes at once on a GPU, whose memory is planned


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a flat batch come from and where their keys and values go.

    Attributes:
        query_lens: new tokens of each sequence, in batch order; their sum is `tokens`.
        context_lens: tokens of each sequence in the cache once this step's are written.
        slot_mapping: `[tokens]` int64, cache slot of each new token; below 0 it is not written.
        block_tables: `[sequences, blocks]` int64 or int32, padded with 0 (masked, never read as a result).
        block_size: tokens per block.
        starts: `[sequences + 1]` int32, where each sequence begins in the batch; for kernels (`on_device`).
        lengths: `[sequences]` int32, `context_lens` on the device; for kernels. Where these are given they
            count. In a CUDA graph the tuples only say how many sequences there are at most, and the most
            tokens that one has: the last sequences may have none, and the last tokens none to belong to.
        state_slots: `[sequences]` int64, where the recurrent states are (`kv_cache.py`); None without any.
        landings: `[sequences]` int64, number of new tokens after which the state is copied to the scratch
            slot (a multiple of the delta rule's chunk, in one sequence at most), 0: it isn't; None: all 0.
        unsure: `[sequences]` int64, number of last new tokens that the state doesn't take in, because they
            may be wrong; with `landings`. 0 for a sequence with more than a chunk of the delta rule.
        apart: the same tokens, each as a sequence of its own (`token_by_token`), by which kernels attend.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    state_slots: torch.Tensor | None = None
    landings: torch.Tensor | None = None
    unsure: torch.Tensor | None = None
    apart: "AttentionMetadata | None" = None

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one new token."""
        return all(length == 1 for length in self.query_lens)

    def on_device(self) -> "AttentionMetadata":
        """A copy with `starts` and `lengths` on the device of the block tables, for every layer to read."""
        device = self.block_tables.device
        starts = upload([0, *accumulate(self.query_lens)], torch.int32, device)
        lengths = upload(self.context_lens, torch.int32, device)
        return replace(self, starts=starts, lengths=lengths)

    def on_host(self) -> "AttentionMetadata":
        """A copy with `query_lens` and `context_lens` read from `starts` and `lengths`, where set."""
        new, lengths = self.query_lens, self.context_lens
        if self.starts is not None:
            new = tuple(end - start for start, end in pairwise(self.starts.tolist()))
        if self.lengths is not None:
            lengths = tuple(self.lengths.tolist())
        return replace(self, query_lens=new, context_lens=lengths)

    def token_by_token(self, tokens: int) -> "AttentionMetadata":
        """A copy with `apart`: few tokens attend as decodes do, their contexts split over programs.

        `tokens`: number of tokens of the batch, the last of which may be padding. Needs `starts` and
        `lengths`.
        """
        starts, lengths = self.starts, self.lengths
        assert starts is not None
        assert lengths is not None
        if by_kernels(starts, "set_apart"):
            from snugvl.layers.kernels.decode_step import apart  # needs triton, which only GPUs bring

            seen, tables = apart(starts, lengths, self.block_tables, tokens)
        else:
            place = torch.arange(tokens, dtype=torch.int32, device=starts.device)
            owner = torch.searchsorted(starts[1:], place, right=True).clamp_(max=len(lengths) - 1)
            seen = lengths[owner] - starts[owner + 1] + place + 1
            seen = torch.where(place < starts[-1], seen, 0)  # padding sees nothing
            tables = self.block_tables[owner]
        ones = (1,) * tokens
        each = AttentionMetadata(ones, ones, self.slot_mapping, tables, self.block_size, lengths=seen)
        return replace(self, apart=each)

    def slots(self, sequence: int, length: int) -> torch.Tensor:
        """Slots of the first `length` tokens of a sequence, `[length]` int64."""
        blocks = -(-length // self.block_size)
        table = self.block_tables[sequence, :blocks]
        offsets = torch.arange(self.block_size, device=table.device)
        return (table[:, None] * self.block_size + offsets).flatten()[:length]


def paged_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from `query` `[tokens, heads, head_dim]` to what is before it in its own sequence.

    With a `window` each token sees so many, itself included. Keys and values before it are skipped, and keep
    their blocks all the same: other layers and the prefix cache may need them. The output is multiplied by
    the sigmoid of `gates`, of its shape, where there are some.
    The new keys and values must be in the cache already. Returns `[tokens, heads, head_dim]`.
    """
    metadata = metadata.apart or metadata
    splits, chunks = usable("attend_splits", "merge_splits"), usable("attend_chunk")
    if by_kernels(query) and (splits or chunks):
        from snugvl.layers.kernels.attention import paged as kernels  # needs triton, which only GPUs bring

        if metadata.lengths is None:
            metadata = metadata.on_device()
        lengths, starts = metadata.lengths, metadata.starts
        assert lengths is not None
        where = (*cache.layer(layer), metadata.block_tables)
        if metadata.decodes and splits:
            return kernels.decode(query, *where, lengths, metadata.block_size, scale, window, gates)
        if starts is None:
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
        if chunks:
            output = kernels.chunk(query, *where, starts, lengths, metadata.block_size, scale, window)
        else:
            output = _each(query, where, replace(metadata, starts=starts), scale, window)
    else:
        output = _plain(query, cache, layer, metadata, scale, window)
    return output if gates is None else output.mul_(gates.sigmoid())


def _each(
    query: torch.Tensor, where: tuple[torch.Tensor, ...], metadata: AttentionMetadata, scale: float,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Chunks by the kernels of decoding, a few tokens at a time: each is a sequence of its own."""
    from snugvl.layers.kernels.attention.paged import decode  # needs triton, which only GPUs bring

    each = metadata.token_by_token(len(query)).apart
    assert each is not None
    assert each.lengths is not None
    keys, values, _ = where
    parts = (torch.split(part, 4 * FEW) for part in (query, each.block_tables, each.lengths))
    return torch.cat(
        [
            decode(q, keys, values, tables, lengths, metadata.block_size, scale, window)
            for q, tables, lengths in zip(*parts, strict=True)
        ]
    )


def _plain(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Paged attention in plain torch, without gates."""
    if metadata.starts is not None or query.is_cuda:
        metadata = metadata.on_host()
    elif metadata.decodes:
        metadata = metadata.on_host()
        return _decode(query, cache, layer, metadata, scale, window)
    output = torch.empty_like(query)
    together = [] if query.is_cuda else _single(metadata)  # a GPU's memory is planned: one after the other
    if together:  # beside some that have a few queries each (drafts)
        first = [0, *accumulate(metadata.query_lens)]
        rows = torch.tensor([first[sequence] for sequence in together])
        contexts = tuple(metadata.context_lens[sequence] for sequence in together)
        part = replace(metadata, context_lens=contexts, block_tables=metadata.block_tables[together])
        output[rows] = _decode(query[rows], cache, layer, part, scale, window)
    for sequence, (start, end) in enumerate(pairwise([0, *accumulate(metadata.query_lens)])):
        if start == end or sequence in together or not metadata.context_lens[sequence]:
            continue
        slots = metadata.slots(sequence, metadata.context_lens[sequence])
        keys, values = cache.gather(layer, slots, query.dtype)
        output[start:end] = _causal(query[start:end], keys, values, scale, window)
    return output


def _single(metadata: AttentionMetadata) -> list[int]:
    """Sequences of one query that are better taken together; none beside a prompt, which has the memory."""
    if max(metadata.query_lens) > FEW:
        return []
    found = [sequence for sequence, queries in enumerate(metadata.query_lens) if queries == 1]
    return found if len(found) > 1 else []


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """One sequence `[tokens, heads, head_dim]`: its last `len(query)` positions attend causally to `key`."""
    new, context = query.shape[0], key.shape[0]
    if query.is_cuda and new > 1 and query.shape[1] * new * context > MOST_SCORES:
        half = new // 2
        seen = context - new + half
        first = _causal(query[:half], key[:seen], value[:seen], scale, window)
        return torch.cat((first, _causal(query[half:], key, value, scale, window)))
    mask = None
    if window is not None and window < context:
        mask = torch.ones(new, context, dtype=torch.bool, device=query.device).tril(context - new)
        mask = mask.triu(context - new - window + 1)
    elif (
        1 < new < context
    ):  # a chunk over a cached prefix: SDPA's is_causal aligns to the top left, we need bottom right
        mask = torch.ones(new, context, dtype=torch.bool, device=query.device).tril(context - new)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def _decode(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One query per sequence: gather all contexts into one padded batch, one SDPA for all."""
    longest = max(metadata.context_lens)
    blocks = -(-longest // metadata.block_size)
    offsets = torch.arange(metadata.block_size, device=query.device)
    slots = (metadata.block_tables[:, :blocks, None] * metadata.block_size + offsets).flatten(1)[:, :longest]
    lengths = torch.tensor(metadata.context_lens, device=query.device).clamp_(min=1)  # 0: padding
    place = torch.arange(longest, device=query.device)
    mask = place < lengths[:, None]
    if window is not None:
        mask &= place >= lengths[:, None] - window
    # Masked places read the sequence's own first slot: a stranger's could hold NaN, and 0 × NaN is NaN.
    slots = torch.where(mask, slots, slots[:, :1])
    keys, values = cache.gather(layer, slots, query.dtype)
    output = scaled_dot_product_attention(
        query[:, :, None],  # [sequences, heads, 1, head_dim]
        keys.transpose(1, 2),  # [sequences, kv_heads, longest, head_dim]
        values.transpose(1, 2),
        attn_mask=mask[:, None, None],
        scale=scale,
        enable_gqa=True,
    )
    return output[:, :, 0]
