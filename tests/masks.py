"""Masks of grammars in tests, made here and now."""

import torch

from snugvl.engine.sampling.grammar import GrammarState, Mask, MaskPace, MaskThreads, fill_allowed


def mask_of(state: GrammarState, vocab: int) -> Mask:
    """As the engine makes it."""
    return Mask(state, MaskThreads(1, vocab), MaskPace())


def allowed_by(state: GrammarState, vocab: int) -> torch.Tensor:
    """Which tokens may come next, `[vocab]` bool."""
    return fill_allowed([mask_of(state, vocab)], vocab, torch.device("cpu"))[0]
