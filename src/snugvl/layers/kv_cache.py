"""State of sequences in memory: keys and values, paged, and the recurrent states of linear attention.

Keys and values are one allocation for all layers, addressed by slots:

    block   0               1               2
            ├───────────────┼───────────────┼──── …
    slot    0 1 2 … 15      16 17 … 31      32 …      slot = block × block_size + offset

A sequence owns a list of blocks (its block table); its token `i` lives in
`table[i // block_size] × block_size + i % block_size`. Who owns which block is the engine's business
(`engine/sequence.py`); here are only the bytes.

In FP8 a value is a byte, float8 e4m3: a sign, 4 bits of exponent, 3 of mantissa, and no infinity. There is no
scale: e4m3 has 18 powers of two, and keys after a norm and values lie well inside of them. What is beyond 448
becomes 448. New tokens attend to what the cache gives back, their own chunk's keys included, so a token sees
the same values however a prompt was cut. The bytes are kept as uint8: torch's index operations and Triton
before Ada know no float8.

Recurrent states are also one allocation for all layers, with a slot for each sequence that runs:

    slot        0            1            …   slots − 1      slots                 slots + 1      …
                sequence a   free             sequence b     scratch: rows that    snapshot 0   …
                                                             only fill up a graph

Each running sequence has a slot, a fixed number below the most that run at once; who has which is the
engine's business (`engine/scheduler.py`). A state never grows: whatever a sequence has read is in it. So it
can't be shared or cut like keys and values: a sequence starts from zeros or from a snapshot, a copy made at
a place where others may want to start (`engine/snapshots.py`); its choices also start from a copy.

Source: FP8 formats for deep learning, Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433).
"""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_LARGEST = 448.0


class StateCache:
    """The states that linear layers keep of each sequence.

    Attributes:
        recurrent: `[layers, rows, value_heads, key_dim, value_dim]`, float32 at least: every token's
            rounding would stay in it. Its rows are the slots, the scratch and the snapshots.
        inputs: `[layers, rows, kernel - 1, channels]`, the last inputs of the convolution.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        slots: int,
        heads: tuple[int, int, int],
        inputs: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        snapshots: int = 0,
    ) -> None:
        """`heads`: value heads, width of their keys and values; `inputs`: how many are kept, channels."""
        self.slots = slots
        rows, wide = slots + 1 + snapshots, torch.promote_types(dtype, torch.float32)
        self.recurrent = torch.zeros(num_layers, rows, *heads, dtype=wide, device=device)
        self.inputs = torch.zeros(num_layers, rows, *inputs, dtype=dtype, device=device)

    def resize(self, slots: int, snapshots: int = 0) -> None:
        """Resize to `slots` empty slots; with 0 no memory is taken. The old ones are freed first."""
        rows, self.slots = (slots + 1 + snapshots if slots else 0), 0
        for name in ("recurrent", "inputs"):
            before: torch.Tensor = getattr(self, name)
            setattr(self, name, before.new_zeros(before.shape[0], 0, *before.shape[2:]))
        for name in ("recurrent", "inputs"):
            before = getattr(self, name)
            setattr(self, name, before.new_zeros(before.shape[0], rows, *before.shape[2:]))
        self.slots = slots

    @property
    def rows(self) -> int:
        """States that there is memory for."""
        return self.recurrent.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.recurrent.nbytes + self.inputs.nbytes

    @property
    def scratch(self) -> int:
        """The slot without a sequence, for padding rows, whose results aren't read."""
        return self.slots

    def copy(self, source: int, target: int) -> None:
        """Copy the state of slot `source` to slot `target`."""
        self.recurrent[:, target] = self.recurrent[:, source]
        self.inputs[:, target] = self.inputs[:, source]

    def save(self, slot: int, snapshot: int) -> None:
        """Keep a slot's state as it is now, after all steps that were started."""
        self.copy(slot, self.scratch + 1 + snapshot)

    def restore(self, slot: int, snapshot: int) -> None:
        """Set a slot's state to a snapshot."""
        self.copy(self.scratch + 1 + snapshot, slot)


class KVCache:
    """Keys and values of all layers, `[layers, 2, slots, kv_heads, head_dim]`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
    ) -> None:
        """`num_layers`: those that keep keys and values; `states`: of the others, if there are any.

        `dtype`: of what is stored; float8_e4m3fn halves it beside a 16-bit type.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.states = states
        self.fp8 = dtype == E4M3
        # Zeros, not empty: no run depends on what was in memory, and every page is touched at start-up.
        self.storage = torch.zeros(
            num_layers,
            2,
            num_blocks * block_size,
            num_kv_heads,
            head_dim,
            dtype=torch.uint8 if self.fp8 else dtype,
            device=device,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.storage.nbytes

    def resize(self, num_blocks: int) -> None:
        """Resize to `num_blocks` empty blocks, or none if memory lacks: the old ones are freed first."""
        layers, both, _, heads, dim = self.storage.shape
        self.num_blocks = 0
        self.storage = self.storage.new_zeros(layers, both, 0, heads, dim)
        self.storage = self.storage.new_zeros(layers, both, num_blocks * self.block_size, heads, dim)
        self.num_blocks = num_blocks

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[slots, kv_heads, head_dim]`, as views; bytes in FP8."""
        return self.storage[index, 0], self.storage[index, 1]

    def gather(
        self, index: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer at `slots` `[…]`, each `[…, kv_heads, head_dim]`; in FP8 as `dtype`."""
        keys, values = (stored[slots] for stored in self.layer(index))
        if self.fp8:
            keys, values = keys.view(E4M3).to(dtype), values.view(E4M3).to(dtype)
        return keys, values

    def write(self, index: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store new `key` and `value` `[tokens, kv_heads, head_dim]` of a layer at `slots` `[tokens]`.

        Those with a slot below 0 are not stored.
        """
        if not slots.is_meta and bool((slots < 0).any()):  # on the meta device slots have no values
            live = slots >= 0
            slots, key, value = slots[live], key[live], value[live]
        keys, values = self.layer(index)
        if self.fp8:
            key, value = e4m3_bytes(key), e4m3_bytes(value)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers (copy on write of a shared block)."""
        size = self.block_size
        self.storage[:, :, target * size : (target + 1) * size] = self.storage[
            :, :, source * size : (source + 1) * size
        ]


def e4m3_bytes(values: torch.Tensor) -> torch.Tensor:
    """Values as e4m3, one byte each: the nearest, ties to even; beyond ±448 that; NaN stays NaN."""
    return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(E4M3).view(torch.uint8)
