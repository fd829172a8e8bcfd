"""Gated DeltaNet: attention with a state of constant size instead of keys and values.

    x ─ norm ┬─ in_proj_qkvz ┬─ convolution ─ q, k, v ─ delta rule ─ norm · silu(gate) ─ out_proj ─ + x
             │               └─ gate ──────────────────────────────────────┘
             └─ in_proj_ba ──── how much to correct (beta), how much to forget (decay)

Of each sequence the convolution needs its last inputs and the delta rule its matrices; both are read from the
sequence's slot and written back. Kernels take a whole batch at once (`layers/kernels/delta_rule.py`). Plain
torch works on it in runs: sequences side by side that have one new token each are one, and of a longer chunk
`PIECE` tokens at a time, so that the float32 workspace has a ceiling:

    flat batch   [ s0 | s1 | s2 s2 s2 … s2 s2 ]        runs: rows 0 … 1 of s0 and s1,
                                                        256 rows of s2, the rest of s2

Drafts find what stands before them and leave nothing: the state is written behind the last
one that is sure (`engine/speculation.py`).

Source: Hugging Face transformers, `models/qwen3_5/modeling_qwen3_5.py` (Apache-2.0); Gated Delta Networks,
https://arxiv.org/abs/2412.06464.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from snugvl.checkpoint.architecture import TextConfig
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.delta_rule import EPS, Rule, recur_at, scan_at
from snugvl.layers.kv_cache import KVCache, StateCache
from snugvl.layers.linear import Linear, RMSNorm
from snugvl.layers.replaced import by_kernels

PIECE: Final = 256  # tokens of a chunk that are in float32 at a time


class TokenRun(NamedTuple):
    """Rows of the batch that are worked on together, and whose they are."""

    rows: slice
    sequences: slice
    single: bool  # one token of each sequence; else tokens of one sequence
    lands: bool = False  # its sequence's state is kept then
    sure: bool = True  # its sequence's state takes them in


def runs(
    query_lens: Sequence[int], landings: Sequence[int] = (), unsure: Sequence[int] = ()
) -> Iterator[TokenRun]:
    """Cut a batch into runs of tokens: `query_lens` has the number of new tokens of each sequence.

    A sequence is cut behind `landings` tokens, where that isn't 0, and before its last `unsure` ones.
    """
    row = first = 0
    for index, count in enumerate(query_lens):
        if count == 1 and index + 1 < len(query_lens) and query_lens[index + 1] == 1:
            continue  # the run goes on
        if count == 1:
            end = row + index + 1 - first
            yield TokenRun(slice(row, end), slice(first, index + 1), single=True)
            row = end
        else:
            end, landing = row + count, row + (landings[index] if landings else 0)
            sure = end - (unsure[index] if unsure else 0)
            for start, stop in pairwise(sorted({*range(row, end, PIECE), landing, sure, end})):
                lands, mine = row < stop == landing, slice(index, index + 1)
                yield TokenRun(slice(start, stop), mine, single=False, lands=lands, sure=stop <= sure)
            row = end
        first = index + 1


def empty_beginners(states: StateCache, layer: int, metadata: AttentionMetadata) -> None:
    """Let sequences whose first tokens these are begin from zeros, whatever was in their slots (even NaN)."""
    assert metadata.state_slots is not None
    lengths = zip(metadata.query_lens, metadata.context_lens, strict=True)
    fresh = [row for row, (new, length) in enumerate(lengths) if new == length > 0]
    for values in (states.inputs[layer], states.recurrent[layer]) if fresh else ():
        values.index_fill_(0, metadata.state_slots[fresh], 0)


def runs_of(metadata: AttentionMetadata) -> Iterator[TokenRun]:
    """`runs` of a batch that is on the host."""
    cuts = (metadata.landings, metadata.unsure)
    return runs(metadata.query_lens, *([] if cut is None else list(map(int, cut.tolist())) for cut in cuts))


def keep(states: StateCache, layer: int, state_slots: torch.Tensor) -> None:
    """Copy the state at the one of `state_slots` to the scratch slot."""
    for values in (states.inputs[layer], states.recurrent[layer]):
        values[states.scratch] = values[state_slots[0]]


def join_projections(layers: nn.Module) -> None:
    """Join the projections of all layers (`GatedDeltaNet.join`): after formats, before memory is given."""
    for module in layers.modules():
        if isinstance(module, GatedDeltaNet):
            module.join()


# Of a layer; a decode step takes two of them.
KERNELS: Final = ("convolve", "slide", "correct", "solve", "scan", "gate")


class GatedDeltaNet(nn.Module):
    """One layer's linear attention."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        sizes = config.linear
        assert sizes is not None
        self.layer, self.sizes = config.place_of(layer), sizes
        self.in_proj_qkvz = Linear(config.hidden_size, sizes.channels + sizes.values)
        # A few rows that decide how much is forgotten.
        self.in_proj_ba = Linear(config.hidden_size, 2 * sizes.value_heads, quantises=False)
        self.in_proj: Linear | None = None  # both: `join`
        self.packed: dict[str, tuple[tuple[str, int], ...]] = {
            "in_proj_qkvz": (("in_proj_qkv", sizes.channels), ("in_proj_z", sizes.values)),
            "in_proj_ba": (("in_proj_b", sizes.value_heads), ("in_proj_a", sizes.value_heads)),
        }
        self.conv1d = nn.Conv1d(
            sizes.channels, sizes.channels, sizes.kernel, groups=sizes.channels, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads))
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(sizes.values, config.hidden_size)

    def join(self) -> None:
        """Make one matrix of both projections where both are in the network's type: a product less."""
        parts = self.in_proj_qkvz, self.in_proj_ba
        if any(part.format != "bf16" for part in parts):
            return
        kind, device = parts[0].weight.dtype, parts[0].weight.device
        with device:
            self.in_proj = Linear(parts[0].columns, sum(part.rows for part in parts)).to(kind)
        self.packed = {"in_proj": self.packed["in_proj_qkvz"] + self.packed["in_proj_ba"]}
        del self.in_proj_qkvz, self.in_proj_ba

    def forward(
        self, x: torch.Tensor, norm: RMSNorm, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """`x` `[tokens, hidden]` plus attention over its `norm`; the states take the new tokens in."""
        assert cache.states is not None, "the cache has no states for linear layers"
        projected, rates = self._projected(x, norm)
        attended = self._attend(projected, rates, cache.states, metadata)
        result: torch.Tensor = self.out_proj(attended, residual=x)
        return result

    def _attend(
        self, projected: torch.Tensor, rates: torch.Tensor, states: StateCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        attend = self._by_kernels if by_kernels(projected, *KERNELS) else self._plain
        return attend(projected, rates, states, metadata)

    def _projected(self, x: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys, values and gates `[tokens, channels + values]`; what makes betas, then decays."""
        alone = norm if len(x) == 1 else None  # a product of one row makes its norm itself
        normed = x if alone is not None else norm(x)
        if self.in_proj is None:
            return self.in_proj_qkvz.with_tail(normed, self.in_proj_ba, norm=alone)
        both: torch.Tensor = self.in_proj(normed, norm=alone)
        sizes = self.sizes
        return both[:, : sizes.channels + sizes.values], both[:, sizes.channels + sizes.values :]

    def _by_kernels(
        self, projected: torch.Tensor, rates: torch.Tensor, states: StateCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        from snugvl.layers.kernels import convolution, delta_rule  # they need triton, which only GPUs bring

        if metadata.lengths is None:
            metadata = metadata.on_device()
        assert metadata.lengths is not None
        assert metadata.state_slots is not None, "the batch has no state slots for linear layers"
        sizes = self.sizes
        layer = convolution.DeltaNet(
            *(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self.norm.eps),
            *(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, EPS),
            tiled=sizes.tiled,
        )
        where = (states.inputs[self.layer], states.recurrent[self.layer], metadata.state_slots)
        ends = (None if metadata.decodes else metadata.starts, metadata.lengths)
        landing = None
        if metadata.landings is not None and metadata.unsure is not None:
            landing = metadata.landings, metadata.unsure, states.scratch
        return delta_rule.attend(projected, rates, layer, *where, *ends, landing)

    def _plain(
        self, projected: torch.Tensor, rates: torch.Tensor, states: StateCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        metadata, sizes = metadata.on_host(), self.sizes
        assert metadata.state_slots is not None, "the batch has no state slots for linear layers"
        empty_beginners(states, self.layer, metadata)
        mixed, gate = torch.split(projected, [sizes.channels, sizes.values], dim=-1)
        b, a = rates.chunk(2, dim=-1)
        beta = b.sigmoid()
        decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias)
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for run in runs_of(metadata):
            rows, mine = run.rows, metadata.state_slots[run.sequences]
            if run.single:
                rule = self._rule(self._step(mixed[rows], states, mine), decay[rows], beta[rows])
                answer = recur_at(rule, states.recurrent[self.layer], mine)
            else:
                slid = self._slide(mixed[rows], states, mine, run.sure)
                rule = self._rule(slid, decay[rows], beta[rows])
                answer = scan_at(rule, states.recurrent[self.layer], mine, run.sure)
            answer = answer.to(projected.dtype)
            opened = silu(gate[rows].float()).view(answer.shape)
            output[rows] = (self.norm(answer).float() * opened).to(projected.dtype).flatten(1)
            if run.lands:
                keep(states, self.layer, mine)
        return output

    def _rule(self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> Rule:
        """Queries, keys and values lie side by side in `mixed` `[tokens, channels]`."""
        sizes = self.sizes
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = torch.split(mixed, [keys, keys, sizes.values], dim=-1)
        shape = (len(mixed), -1, sizes.key_dim)
        value = value.view(len(mixed), -1, sizes.value_dim)
        return Rule(query.view(shape), key.view(shape), value, decay, beta, sizes.tiled)

    def _step(self, mixed: torch.Tensor, states: StateCache, state_slots: torch.Tensor) -> torch.Tensor:
        """The convolution at one token `[sequences, channels]` of each of the sequences at `state_slots`."""
        inputs = states.inputs[self.layer]
        window = torch.cat((inputs.index_select(0, state_slots), mixed[:, None]), dim=1)
        inputs.index_copy_(0, state_slots, window[:, 1:])
        return self._convolved(window.unbind(1))

    def _slide(
        self, mixed: torch.Tensor, states: StateCache, state_slots: torch.Tensor, sure: bool
    ) -> torch.Tensor:
        """The convolution over tokens `[tokens, channels]` of the one sequence at `state_slots`.

        `sure`: whether it remembers them.
        """
        inputs, count = states.inputs[self.layer], len(mixed)
        window = torch.cat((inputs.index_select(0, state_slots)[0], mixed))
        if sure:
            inputs.index_copy_(0, state_slots, window[None, count:])
        return self._convolved(window[tap : tap + count] for tap in range(self.sizes.kernel))

    def _convolved(self, taps: Iterable[torch.Tensor]) -> torch.Tensor:
        """`[rows, channels]` for each tap, the oldest first; summed in float32, like a kernel would."""
        total: torch.Tensor | None = None
        kind = self.conv1d.weight.dtype
        for tap, weight in zip(taps, self.conv1d.weight[:, 0].float().T, strict=True):
            total = tap * weight if total is None else torch.addcmul(total, tap, weight)
        assert total is not None
        return silu(total.to(kind))
