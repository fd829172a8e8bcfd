"""The gated delta rule: attention whose memory is one matrix a head, decayed and corrected by every token.

    S ← exp(decay) · S                         forget
    S ← S + k · (beta · (v − Sᵀ k))ᵀ           correct what S answers to k, by a share beta
    output = Sᵀ q                              S `[key_dim, value_dim]`, q and k of length 1, q / √key_dim

`recur` does that for one token of many sequences. `scan` reads many tokens of one sequence: within a chunk
of them the corrections depend on one another like a triangular system, which is solved at once; between
chunks only S goes on.

    S ──► chunk ──► S ──► chunk ──► S          64 tokens a chunk; matrix products inside
           └► outputs      └► outputs

Both compute in float32 at least. They are equal up to rounding, as is a scan cut anywhere
(`tests/layers/test_delta_rule.py`).

Sources: Gated Delta Networks (https://arxiv.org/abs/2412.06464); the chunkwise form of DeltaNet
(https://arxiv.org/abs/2406.06484), as Hugging Face transformers has it in `models/qwen3_5`.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import pad

CHUNK: Final = 64
EPS: Final = 1e-6  # under the root of a key's length; that of the kernels the models were trained with


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The tokens' queries, keys, values and decays.

    Attributes:
        query, key: `[tokens, key_heads, key_dim]`, of any length; each serves as many value heads in a row.
        value: `[tokens, value_heads, value_dim]`.
        decay: `[tokens, value_heads]`, logarithms: 0 keeps all, below forgets.
        beta: `[tokens, value_heads]`, 0 … 1.
        tiled: value head `i` has key head `i mod key_heads` instead.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    tiled: bool = False

    def wide(self) -> tuple[torch.Tensor, ...]:
        """All five in float32 at least, query and key of their proper length and one for each value head."""
        dtype = torch.promote_types(self.value.dtype, torch.float32)
        shared = self.value.shape[1] // self.key.shape[1]
        query, key = (_unit(x.to(dtype)) for x in (self.query, self.key))
        query = query * query.shape[-1] ** -0.5
        if shared > 1:
            pairs = (query, key)
            if self.tiled:
                query, key = (x.repeat(1, shared, 1) for x in pairs)
            else:
                query, key = (x.repeat_interleave(shared, dim=1) for x in pairs)
        return query, key, self.value.to(dtype), self.decay.to(dtype), self.beta.to(dtype)


def recur(rule: Rule, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several sequences. `state`: `[sequences, value_heads, key_dim, value_dim]` before
    the tokens; not changed.

    Returns:
        Outputs `[sequences, value_heads, value_dim]` and the states after the tokens, as wide as `state`.
    """
    query, key, value, decay, beta = rule.wide()
    state = state * decay.exp()[..., None, None]
    answer = (state * key[..., None]).sum(-2)
    change = (value - answer) * beta[..., None]
    state = state + key[..., None] * change[..., None, :]
    return (state * query[..., None]).sum(-2), state


def scan(rule: Rule, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of one sequence, in their order. `state`: `[value_heads, key_dim, value_dim]` before the
    first; not changed.

    Returns:
        Outputs `[tokens, value_heads, value_dim]` and the state after the last, as wide as `state`.
    """
    tokens = rule.value.shape[0]
    query, key, since, left, new, old = _solved(rule, min(CHUNK, tokens))
    within = query @ key.transpose(-1, -2) * left
    query = query * since.exp()[..., None]
    key = key * (since[..., -1:] - since).exp()[..., None]
    kept = since[..., -1].exp()[..., None, None]
    before, changes = [], []  # of each chunk; only this loop goes in order, so little is done in it
    for chunk in range(new.shape[1]):
        change = torch.baddbmm(new[:, chunk], old[:, chunk], state, alpha=-1)
        before.append(state)
        changes.append(change)
        state = torch.baddbmm(state * kept[:, chunk], key[:, chunk].transpose(-1, -2), change)
    del key, new, old, left  # before the outputs, which take as much
    outputs = query @ torch.stack(before, 1)
    outputs += within @ torch.stack(changes, 1)
    return outputs.flatten(1, 2)[:, :tokens].transpose(0, 1), state


def _solved(rule: Rule, size: int) -> tuple[torch.Tensor, ...]:
    """The parts of the chunks' computation that don't depend on the state, each `[heads, chunks, size, …]`.

    Queries and keys; the logarithm of what is left of the state before the chunk; what is left of token j at
    token i; what the tokens would add to an empty state, and what they take from each row of a full one.
    """
    # Filled up with tokens that neither forget nor correct.
    query, key, value, decay, beta = (_cut(x, size) for x in rule.wide())
    since = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    left = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    corrected = key * beta[..., None]
    # Row i: what correction i undoes of the earlier ones. Its diagonal is not read: it counts as 1.
    system = corrected @ key.transpose(-1, -2) * left
    wanted = torch.cat((value * beta[..., None], corrected * since.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, old = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    return query, key, since, left, new, old


def recur_at(rule: Rule, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`recur` on the states at `slots` `[sequences]` of `[slots, value_heads, key_dim, value_dim]`, in place.

    Returns `[sequences, value_heads, value_dim]`.
    """
    output, after = recur(rule, states.index_select(0, slots))
    states.index_copy_(0, slots, after)
    return output


def scan_at(rule: Rule, states: torch.Tensor, slots: torch.Tensor, keeps: bool = True) -> torch.Tensor:
    """`scan` on the state at the one of `slots` `[1]`, in place where it `keeps` what comes of it.

    Returns `[tokens, value_heads, value_dim]`.
    """
    output, after = scan(rule, states.index_select(0, slots)[0])
    if keeps:
        states.index_copy_(0, slots, after[None])
    return output


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[tokens, heads, …]` → `[heads, chunks, size, …]`, filled up with zeros."""
    missing = -x.shape[0] % size
    x = pad(x.transpose(0, 1), (*[0, 0] * (x.dim() - 2), 0, missing))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])
