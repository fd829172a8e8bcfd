"""The prefix cache: a prompt starts from KV blocks that earlier sequences have left.

Keys and values of a token depend on everything before it, so a full block is known by a chain of hashes:

    block   [ 5 8 ▒ ▒ ]    [ ▒ ▒ ▒ ▒ ]    [ 9 4 … partly filled
    key     h(root, ids,   h(that key,    none: only full blocks are shared, as they are never written again
              image 0…1)     ids, image 2…5)

    h takes   the key of the block before │ token ids │ digest, grid and first row of each picture in it

Placeholders look alike, so the pictures themselves must be in the key. M-RoPE positions need not: they
follow from the ids and grids up to the token. Generated tokens are tokens like any other, so the next turn
of a conversation finds the answers of the turns before; and so does a sequence that was preempted.

A block can be found once a finished step has written all of it, which is when `publish` is called, and until
`blocks.py` gives it to another sequence. The last known token is never taken from the cache: its logits
choose the next one. A hit may end inside a picture; the vision tower then runs again for the rest of its
rows.

Linear attention keeps no keys and values that a block could hold, only a state that has moved on; a model
with such layers starts where a copy of it was kept, from the blocks up to there (`snapshots.py`).

Timing reveals whether a prompt with the same beginning came before: the first token comes sooner. One team
behind one server can live with that; where users must not learn of each other's prompts, turn it off
(`snugvl serve --no-prefix-cache`, `load(prefix_cache=False)`).

Source: automatic prefix caching of vLLM (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
"""

import struct
from array import array
from collections.abc import Sequence as Items
from hashlib import blake2b

from snugvl.engine.blocks import BlockPool, Key
from snugvl.engine.request import VisionSlice
from snugvl.engine.sequence import Sequence

ROOT = bytes(32)  # where a key of its own length would stand, so that all hashes have one form


def find(sequence: Sequence, pool: BlockPool) -> list[int]:
    """Blocks that hold the longest cached beginning of a sequence, its last token excepted."""
    extend_keys(sequence, pool.block_size)
    blocks: list[int] = []
    for key in sequence.keys[: (sequence.length - 1) // pool.block_size]:
        block = pool.find(key)
        if block is None:
            break
        blocks.append(block)
    return blocks


def publish(sequence: Sequence, pool: BlockPool) -> None:
    """Let the blocks be found that are full of known tokens, all of them written by finished steps.

    A step that runs ahead may have written one token more; it isn't known yet, so it doesn't count.
    """
    full = min(sequence.computed, sequence.length) // pool.block_size
    if full <= sequence.published:
        return
    extend_keys(sequence, pool.block_size)
    for index in range(sequence.published, full):
        pool.publish(sequence.table[index], sequence.keys[index])
    sequence.published = full


def check(sequence: Sequence, pool: BlockPool) -> None:
    """Assert that a running sequence's blocks are found by what is in them, and only if they are full."""
    size = pool.block_size
    full = min(sequence.computed, sequence.length) // size
    assert sequence.published <= full <= len(sequence.table), "blocks are published that are not full"
    parent = ROOT
    for index, block in enumerate(sequence.table):
        if index >= full:
            assert pool.key(block) is None, f"block {block} can be found but is not full"
            continue
        start, end = index * size, (index + 1) * size
        parent = block_key(parent, sequence.ids(start, end), sequence.prompt.vision_in(start, end))
        assert pool.key(block) in (None, parent), f"block {block} is found by what is not in it"
        assert sequence.keys[index : index + 1] in ([], [parent]), "a key differs from its tokens"


def block_key(parent: Key, ids: Items[int], vision: Items[VisionSlice]) -> Key:
    """Key of a full block: what comes before it, its tokens, and the rows of pictures among them."""
    state = blake2b(parent, digest_size=len(ROOT))
    state.update(array("q", ids))
    for part in vision:
        state.update(struct.pack("<5q", *part.item.grid_thw, part.start, len(part.item.digest)))
        state.update(part.item.digest)
    return state.digest()


def extend_keys(sequence: Sequence, block_size: int) -> None:
    """Compute the keys of full blocks of known tokens that have none yet."""
    keys = sequence.keys
    for end in range((len(keys) + 1) * block_size, sequence.length + 1, block_size):
        start = end - block_size
        vision = sequence.prompt.vision_in(start, end)
        keys.append(block_key(keys[-1] if keys else ROOT, sequence.ids(start, end), vision))
