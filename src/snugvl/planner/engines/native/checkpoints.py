"""Recurrent states make sequences dear, and the next turn as well: it starts from one that was kept.

A state of Qwen3.5-4B takes the memory of 1,500 tokens of keys and values, whatever a sequence's length. Our
engine has one for each sequence that may run, and keeps others where prompts start (`engine/checkpoints.py`):

    up to comfort    as many as are left room for, before larger steps
    beyond it        a few must fit: a longer context is worth less than turns that start where the last ended
    then             two a sequence, before a larger pool
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from snugvl.planner.footprint.kv import state_bytes
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings
from snugvl.planner.wishes import Wishes

# (EngineConfig.max_batched_tokens, max_num_seqs) that allocation tries, fastest first
NATIVE_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
CHECKPOINTS: Final = 4  # for the end of a picture, of the turns before and after it, and of an answer
EACH: Final = 2  # a sequence
TOKENS: Final = 1024  # of the pool for each: without its blocks it is of no use


def keeping(
    model: Inventory, wishes: Wishes, settings: Settings, most: int, spare_bytes: int | None = None
) -> Settings:
    """Settings with checkpoints, up to `most` in all and into so many bytes; never with fewer than before."""
    each = state_bytes(model, settings)
    if not each or not wishes.prefix_cache:
        return settings
    now, most = settings.state_checkpoints, min(most, settings.kv_tokens // TOKENS)
    more = most - now if spare_bytes is None else min(most - now, spare_bytes // each)
    return replace(settings, state_checkpoints=now + max(more, 0))


def steps(model: Inventory, base: Settings) -> Sequence[tuple[int, int]]:
    """Chunks and sequences of our engine, fastest first: with states, sequences become fewer first."""
    if not state_bytes(model, base):
        return NATIVE_STEPS
    chunks, sequences = (sorted(set(each), reverse=True) for each in zip(*NATIVE_STEPS, strict=True))
    counts = sorted({*sequences, base.sequences}, reverse=True)
    return [(chunk, count) for chunk in chunks for count in counts]
