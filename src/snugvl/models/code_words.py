"""Eight codes of 4 bits in a word: taken out, and moved from AWQ's order to ours."""

import torch

PLAIN = (0, 1, 2, 3, 4, 5, 6, 7)  # where in a word the code of each of eight neighbours is
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def codes_of(words: torch.Tensor, nibbles: tuple[int, ...]) -> torch.Tensor:
    """`[n, m / 8]` int32 as `[n, m]` codes."""
    shifts = torch.tensor([4 * nibble for nibble in nibbles], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1)


def move_awq(words: torch.Tensor, out: torch.Tensor) -> None:
    """`[n, rows / 8]` int32 in AWQ's order to `out` `[rows, n / 8]` in ours.

    A code of each word at a time: the codes of a whole piece are eight times as large.
    """
    out.zero_()
    eights = out.view(-1, 8, out.shape[1])
    for column in range(8):
        some = words[column::8]
        for row, nibble in enumerate(AWQ):
            codes = (some >> 4 * nibble) & 15
            eights[:, row].bitwise_or_((codes << 4 * column).T)
