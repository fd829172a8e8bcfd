"""The recurrent states of linear attention: one allocation for all layers, addressed by seats.

    seat        0            1            …   seats − 1      seats
                sequence a   free             sequence b     scratch: rows that only fill up a CUDA graph

Each running sequence has a seat, a fixed number below the most that run at once; who has which is the
engine's business (`engine/scheduler.py`). A state never grows: whatever a sequence has read is in it. So it
can't be shared or cut like keys and values: a sequence starts from zeros, and its choices from a copy.
"""

import torch


class StateCache:
    """What the linear layers remember of each sequence.

    Attributes:
        recurrent: `[layers, seats + 1, value_heads, key_dim, value_dim]`, float32 at least: every token's
            rounding would stay in it.
        inputs: `[layers, seats + 1, kernel - 1, channels]`, the last inputs of the convolution.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        seats: int,
        heads: tuple[int, int, int],
        inputs: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`heads`: value heads, width of their keys and values; `inputs`: how many are kept, channels."""
        self.seats = seats
        wide = torch.promote_types(dtype, torch.float32)
        self.recurrent = torch.zeros(num_layers, seats + 1, *heads, dtype=wide, device=device)
        self.inputs = torch.zeros(num_layers, seats + 1, *inputs, dtype=dtype, device=device)

    def resize(self, seats: int) -> None:
        """Have so many seats, all empty; none takes no memory. The old ones go first."""
        rows, self.seats = (seats + 1 if seats else 0), 0
        for name in ("recurrent", "inputs"):
            before: torch.Tensor = getattr(self, name)
            setattr(self, name, before.new_zeros(before.shape[0], 0, *before.shape[2:]))
        for name in ("recurrent", "inputs"):
            before = getattr(self, name)
            setattr(self, name, before.new_zeros(before.shape[0], rows, *before.shape[2:]))
        self.seats = seats

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.recurrent.nbytes + self.inputs.nbytes

    @property
    def scratch(self) -> int:
        """The seat that is nobody's, for rows whose results nobody reads."""
        return self.seats

    def clear(self, seat: int) -> None:
        """Let a seat's state be that before the first token, whatever was in it (NaN, too)."""
        self.recurrent[:, seat].zero_()
        self.inputs[:, seat].zero_()

    def copy(self, source: int, target: int) -> None:
        """Let one seat's state be another's."""
        self.recurrent[:, target] = self.recurrent[:, source]
        self.inputs[:, target] = self.inputs[:, source]
