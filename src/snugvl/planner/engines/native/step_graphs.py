"""The memory of CUDA graphs of steps with prompts and of small pictures (`engine/graphs/prefill.py`).

Such graphs only save time, and are made where plenty of memory is left; those of drafts and of the small
steps that check them wherever a predictor is, as without them drafts would lose. All share one pool: what the
largest of them has alive at a time, and what they read and write.

    numbers of a step      48 (with a predictor 64) · tokens + slots · (4 · blocks + 40)
    rows of pictures       tokens · (1 + levels) · h · s          beside a bool a token
    logits                 4 · slots · vocabulary
    patches, encoding      P · patch_dim · s + P / merge² · (1 + levels) · h · s, P = 4096
    work                   the larger of a step's and of a picture of P patches', as without graphs
    holes                  the largest tensor of a step, as what is free in a pool need not be in one piece

Beside it the driver keeps every graph's kernels and their arguments, and cuBLAS a workspace a stream, for
good: the same as for the graphs of decode steps, where those need it.
"""

from typing import Final

from snugvl.core.config import EXPERT_ROUNDS
from snugvl.core.formats import LOW_BIT
from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines.native import hybrid
from snugvl.planner.engines.native.footprint import (
    SMALL_ROWS,
    TOKEN_BYTES,
    largest_bytes,
    library_bytes,
    own_widths,
    prefill_bytes,
    slices,
    split_workspace,
)
from snugvl.planner.footprint.total import LARGE_ROUND_BYTES, Component, measured, predicted, up
from snugvl.planner.footprint.vision import ImageSize, encoder_bytes_per_token, native_workspace
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings

TOKENS: Final = 128  # the largest sizes of steps are multiples of
DRAFT_TOKENS: Final = 16  # of the largest step where drafts alone have graphs: two sequences with theirs
PATCHES: Final = 4096  # of the largest picture
SLOT_BYTES: Final = 48  # slot, row of logits, landing, unsure tokens, start and length
PREDICTOR_BYTES: Final = 16  # of a token: where its hidden state goes, and the token after it
TABLE: Final = 16  # a block table's width is a multiple of
SMALL_BYTES: Final = 8 << 20  # of the pool, for small tensors
MOST: Final = 24  # recordings at a time
MOST_OF_DRAFTS: Final = 6  # of those steps: two numbers of tokens, three of sequences
MOST_OF_EXPERTS: Final = 8  # of those steps with experts in host memory: 2 to 8 tokens, and 16
# The driver's part of each kernel of a recording. On an H200: 1.7 MiB for about 500 (prompts on 2B-FP8), 3.1
# for 830 (4B-FP8), 1.0 to 1.3 for 290 (pictures).
NODE_BYTES: Final = 4 << 10
TOWER_LAYER_KERNELS: Final = 12
ROUTED: Final = 6  # scores, choice, order, two products, sum (`layers/kernels/products/grouped.py`)
FETCHED: Final = 4  # of each round of experts: their slots, their copies, two products
POOL: Final = "CUDA graphs of other steps"  # than of decodes
LIBRARY: Final = "cuBLAS workspace of these"
DRIVER: Final = "driver's part of these"


def step_graph_components(
    model: Inventory, settings: Settings, cublas_bytes: int, multiprocessors: int
) -> list[Component]:
    """Components of such graphs, for steps of at most `chunk` tokens and `sequences`, or for those of drafts
    alone; empty without graphs.

    Steps are not recorded with a tower that streams.
    """
    if not (settings.step_graphs or settings.draft_graphs) or settings.vision != "gpu":
        return []
    pool = pool_bytes(model, settings, multiprocessors)
    library = cublas_bytes - library_bytes(model, settings, cublas_bytes)
    vision = model.facts.vision
    tower_kernels = 0 if vision is None else vision.depth * TOWER_LAYER_KERNELS
    most = recordings(settings)
    driver = most * NODE_BYTES * max(_step_kernels(model, settings), tower_kernels)
    why = f"up to {most} recordings, on an H200"
    return [
        predicted(POOL, Kind.GRAPHS, pool + library, why="one pool for all of them"),
        measured(DRIVER, Kind.OTHER, driver, why=why),
    ]


def recordings(settings: Settings) -> int:
    """Number of such graphs that there may be at a time."""
    if settings.step_graphs:
        return MOST
    return MOST_OF_DRAFTS if settings.expert_slots is None else MOST_OF_EXPERTS


def _step_kernels(model: Inventory, settings: Settings) -> int:
    """Number of kernels that a long step launches."""
    w, products = own_widths(model), 5  # gate and up make two: the product, and the product of both halves
    if settings.weights in LOW_BIT:
        qkv, output, down = (w.q + 2 * w.k, w.h), (w.h, w.q), (w.h, w.i)
        products = 2 * sum(slices(*shape, settings.itemsize) for shape in (qkv, output, down))
        products += 3 * slices(w.i, 2 * w.h, settings.itemsize)
    if model.facts.text.mixture:
        products += ROUTED + (0 if settings.expert_slots is None else EXPERT_ROUNDS * FETCHED)
    # Two norms, rotation and cache, attention, two residuals; a linear layer has six in place of two of them.
    others = 10 if hybrid.has_states(model) else 6
    return model.facts.text.num_layers * (others + products)


def pool_bytes(model: Inventory, settings: Settings, multiprocessors: int) -> int:
    """Bytes of torch's memory that the graphs take, in one piece."""
    steps = settings._replace(chunk=_tokens(settings), images=0)
    work = max(
        prefill_bytes(model, steps) + largest_bytes(model, steps),
        split_workspace(model, settings, SMALL_ROWS, multiprocessors),
    )
    if _pictures(model, settings):
        picture = ImageSize(PATCHES // _merge(model), PATCHES)
        work = max(work, native_workspace(model, picture, settings.itemsize, settings.vision_weights))
    return up(work + held_bytes(model, settings), LARGE_ROUND_BYTES) + SMALL_BYTES


def held_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes that the graphs read and write, held from the first graph on."""
    tokens, slots = _tokens(settings), settings.sequences
    blocks = up(-(-settings.context // BLOCK_TOKENS), TABLE)
    held = (TOKEN_BYTES + PREDICTOR_BYTES * model.facts.predicts) * tokens + slots * (4 * blocks + SLOT_BYTES)
    held += 4 * slots * model.facts.text.vocab_size
    if _pictures(model, settings):
        vision, row = model.facts.vision, encoder_bytes_per_token(model, settings.itemsize)
        assert vision is not None
        held += tokens * (row + 1)
        held += PATCHES * vision.patch_dim * settings.itemsize + PATCHES // _merge(model) * row
    return held


def _tokens(settings: Settings) -> int:
    return up(settings.chunk, TOKENS) if settings.step_graphs else DRAFT_TOKENS


def _pictures(model: Inventory, settings: Settings) -> bool:
    return settings.step_graphs and model.facts.vision is not None and settings.images > 0


def _merge(model: Inventory) -> int:
    assert model.facts.vision is not None
    return int(model.facts.vision.merge_size**2)
