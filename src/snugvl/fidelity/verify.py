"""The reference's own greedy answer, found by checking drafts of it, each pass with one reading of its files.

A reference that is read layer by layer from the disk would need a reading for every token. But a variant's
answer is nearly its answer: given all of a draft at once, the reference says after each token which one it
would have taken, and every token up to the first difference is its own, and the one there is known:

    draft        A  dog  on  a    lawn .  ⏹
    reference    A  dog  on  the                    accepted: A dog on the
    next draft   A  dog  on  the  grass .  ⏹        the variant goes on behind what is accepted

So each pass brings an answer at least one token further, and mostly to its end. What is accepted is exactly
what greedy decoding would give (with the same arithmetic), whoever drafts. Answers with a grammar are checked
under the same grammar.

Source: speculative decoding with greedy verification, Leviathan et al. 2023
(https://arxiv.org/abs/2211.17192).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verified:
    """The beginning of the reference's answer, as far as it is known; `done`: that is all of it."""

    tokens: tuple[int, ...] = ()
    done: bool = False


def verified(
    accepted: tuple[int, ...], draft: Sequence[int], best: Sequence[int], ends: frozenset[int], limit: int
) -> Verified:
    """What a draft behind `accepted` has brought.

    Args:
        best: for each token of the draft, which one the reference takes there.
        ends: tokens that end an answer.
        limit: tokens of an answer, at most.
    """
    tokens = list(accepted)
    for offered, taken in zip(draft, best, strict=True):
        tokens.append(taken)
        if taken in ends or taken != offered:
            break
    tokens = tokens[:limit]
    return Verified(tuple(tokens), bool(tokens) and (tokens[-1] in ends or len(tokens) >= limit))


def furthest(found: Sequence[Verified]) -> Verified:
    """Longest of several beginnings of one answer."""
    return max(found, key=lambda each: (len(each.tokens), each.done), default=Verified())
