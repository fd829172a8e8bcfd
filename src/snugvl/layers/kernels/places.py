"""Whose tokens a program takes, in a flat batch whose lengths only the device knows.

    tokens       [ s0 … s0 | s1 | s2 … ]     starts = [0, 40, 41, …]
    programs     take EACH tokens of one sequence; the places of sequence s are from starts[s] / EACH + s on,
                 as many as its tokens need

So `tokens // EACH + sequences` programs are enough for any lengths, and few find nothing to do: a batch of
many short sequences and a CUDA graph start hardly more than they need.
"""

import triton
import triton.language as tl

MAX_SEQUENCES = 256  # that kernels are compiled for; more are another variant


def most_sequences(sequences: int) -> int:
    """A power of two that holds so many."""
    return max(MAX_SEQUENCES, int(triton.next_power_of_2(sequences)))


@triton.jit
def owner(starts, place, sequences, EACH: tl.constexpr, MAX: tl.constexpr):
    """Whose block of EACH tokens a place is: sequence, its first token, its tokens, number of the block."""
    line = tl.arange(0, MAX)
    there = line < sequences
    before = tl.load(starts + line, mask=there, other=0) // EACH + line
    sequence = tl.sum((there & (before <= place)).to(tl.int32), 0) - 1
    begin = tl.load(starts + sequence)
    return sequence, begin, tl.load(starts + sequence + 1) - begin, place - (begin // EACH + sequence)
