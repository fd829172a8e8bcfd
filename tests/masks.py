"""Masks of grammars in tests, made here and now."""

import time

import numpy as np
import torch

from snugvl.engine.sampling.grammar import GrammarState
from snugvl.engine.sampling.masks import Foreseen, Mask, MaskPace, MaskThreads, unpacked


def mask_of(state: GrammarState, vocab: int) -> Mask:
    """As the engine makes it."""
    return Mask(state, MaskThreads(1, vocab), MaskPace())


def allowed_by(state: GrammarState, vocab: int) -> torch.Tensor:
    """Which tokens may come next, `[vocab]` bool."""
    bits = torch.zeros((vocab + 31) // 32, dtype=torch.int32)
    state.fill(bits)
    return unpacked(bits[None], vocab)[0]


def tokens_of(mask: Mask | Foreseen) -> list[int]:
    """The tokens that a mask allows next, in order."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask.allowed, np.uint8), bitorder="little")).tolist()


def spend(seconds: float) -> None:
    """So much of this thread's processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
