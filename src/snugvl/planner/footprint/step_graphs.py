"""The memory of CUDA graphs of steps with prompts and of small pictures (`engine/step_graphs.py`).

It is no part of a footprint: it makes nothing possible, only quicker, and is taken where plenty is left. All
graphs share one pool: what the largest of them has alive at a time, and what they read and write.

    numbers of a step      48 · tokens + seats · (4 · blocks + 32)
    rows of pictures       tokens · (1 + levels) · h · s          beside a bool a token
    logits                 4 · seats · vocabulary
    patches, encoding      P · patch_dim · s + P / merge² · (1 + levels) · h · s, P = 4096
    work                   the larger of a step's and of a picture of P patches', as without graphs

and, once a stream and for good, what cuBLAS works in.
"""

from dataclasses import replace
from typing import Final

from snugvl.planner.footprint import hybrid
from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.images import ImageSize
from snugvl.planner.footprint.native import SMALL_ROWS, TOKEN_BYTES, prefill_bytes, split_workspace
from snugvl.planner.footprint.vision import encoder_bytes_per_token, native_workspace
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings

TOKENS: Final = 128  # the largest sizes of steps are multiples of
PATCHES: Final = 4096  # of the largest picture
SEAT_BYTES: Final = 32  # seat, row of logits, start and length
TABLE: Final = 16  # a block table's width is a multiple of
SMALL_BYTES: Final = 8 << 20  # of the pool, for small tensors


def step_graph_bytes(model: Inventory, settings: Settings, multiprocessors: int) -> int:
    """The pool, for `settings` as they run: `chunk` and `sequences` are the most of a step.

    0 where such steps are not recorded: a model with recurrent states, or a tower that streams.
    """
    if hybrid.has_states(model) or settings.vision != "gpu":
        return 0
    steps = replace(settings, chunk=up(settings.chunk, TOKENS), images=0)
    work = max(prefill_bytes(model, steps), split_workspace(model, settings, SMALL_ROWS, multiprocessors))
    if _pictures(model, settings):
        picture = ImageSize(PATCHES // _merge(model), PATCHES)
        work = max(work, native_workspace(model, picture, settings.itemsize, settings.vision_weights))
    return up(work + held_bytes(model, settings), LARGE_ROUND_BYTES) + SMALL_BYTES


def held_bytes(model: Inventory, settings: Settings) -> int:
    """What graphs read and write, from the first of them on."""
    tokens, seats = up(settings.chunk, TOKENS), settings.sequences
    blocks = up(-(-settings.context // BLOCK_TOKENS), TABLE)
    held = TOKEN_BYTES * tokens + seats * (4 * blocks + SEAT_BYTES)
    held += 4 * seats * model.facts.text.vocab_size
    if _pictures(model, settings):
        vision, row = model.facts.vision, encoder_bytes_per_token(model, settings.itemsize)
        assert vision is not None
        held += tokens * (row + 1)
        held += PATCHES * vision.patch_dim * settings.itemsize + PATCHES // _merge(model) * row
    return held


def _pictures(model: Inventory, settings: Settings) -> bool:
    return model.facts.vision is not None and settings.images > 0


def _merge(model: Inventory) -> int:
    assert model.facts.vision is not None
    return int(model.facts.vision.merge_size**2)
