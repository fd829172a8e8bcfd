"""Goals of a plan: for each purpose a chain of (image tokens, context, KV pool, sequences), each step at
least the one before in all of them.

| `--for` | comfort | beyond it, as far as memory goes |
|---|---|---|
| chat | full-HD images whole, 8,192 tokens | several conversations at once, then longer ones |
| documents | 8 megapixels, 16,384 tokens | the largest images, 32,768 tokens, then several at once |
| detect | full-HD images, never below 1,024 tokens each (boxes suffer), 4,096 tokens | larger images |
| batch | a megapixel, 2,048 tokens, sixteen thousand tokens in flight | more in flight |

The solver takes the highest step that fits. As a chain is ordered, more memory never gives smaller images, a
shorter context or fewer tokens in flight in the same format on the same engine; and up to comfort no finer
format either. On a processor pictures end at full HD, which takes half a minute to read, unless more is asked
for.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from snugvl.core.options import PurposeName
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.total import up
from snugvl.planner.footprint.vision import largest_image, pixels_for, scales
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Engine
from snugvl.planner.wishes import ANY_TOKENS, LEAST_ROOM_TOKENS, ROOM_TOKENS, Wishes

Step = tuple[int, int, int, int]
CONTEXT_GRAIN: Final = 512

# Tokens of the largest image, of a context, of the KV pool, and sequences that may run at once.
STEPS: Final[dict[PurposeName, tuple[Step, ...]]] = {
    "chat": (
        (256, 1024, 1024, 1), (256, 2048, 2048, 1), (512, 2048, 2048, 1), (1024, 2048, 2048, 1),
        (1024, 4096, 4096, 1), (2048, 4096, 4096, 1), (2048, 5120, 5120, 2), (2048, 6144, 6144, 2),
        (2048, 7168, 7168, 4), (2048, 8192, 8192, 4), (2048, 8192, 12288, 4), (2048, 8192, 16384, 8),
        (3072, 8192, 16384, 8), (4096, 8192, 16384, 8), (4096, 8192, 24576, 8), (4096, 8192, 32768, 16),
        (4096, 12288, 49152, 16), (4096, 16384, 65536, 16), (6144, 16384, 65536, 16),
        (8192, 24576, 98304, 16), (8192, 32768, 131072, 16), (16384, 32768, 131072, 16),
    ),
    "documents": (
        (256, 1024, 1024, 1), (512, 2048, 2048, 1), (1024, 2048, 2048, 1), (2048, 4096, 4096, 1),
        (2048, 6144, 6144, 1), (3072, 6144, 6144, 1), (4096, 8192, 8192, 1), (6144, 12288, 12288, 1),
        (8192, 12288, 12288, 1), (8192, 16384, 16384, 1), (8192, 20480, 20480, 2), (12288, 24576, 24576, 4),
        (16384, 24576, 24576, 4), (16384, 32768, 32768, 4), (16384, 32768, 49152, 4),
        (16384, 32768, 65536, 8), (16384, 49152, 98304, 16), (16384, 65536, 131072, 16),
    ),
    "detect": (
        (1024, 2048, 2048, 1), (1024, 4096, 4096, 1), (1536, 4096, 4096, 2), (2048, 4096, 4096, 4),
        (2048, 4096, 8192, 4), (3072, 4096, 8192, 4), (4096, 6144, 12288, 4), (4096, 6144, 24576, 8),
        (6144, 8192, 32768, 16), (8192, 12288, 49152, 16), (12288, 16384, 65536, 16),
        (16384, 32768, 131072, 16),
    ),
    "batch": (
        (256, 1024, 1024, 1), (256, 1024, 4096, 4), (256, 2048, 4096, 4), (512, 2048, 8192, 8),
        (768, 2048, 12288, 8), (1024, 2048, 16384, 16), (1024, 3072, 24576, 16), (1024, 4096, 32768, 16),
        (2048, 4096, 49152, 16), (2048, 4096, 65536, 16), (3072, 6144, 98304, 16), (4096, 8192, 131072, 16),
    ),
}  # fmt: skip
COMFORT: Final[dict[PurposeName, Step]] = {
    "chat": (2048, 8192, 8192, 4), "documents": (8192, 16384, 16384, 1), "detect": (2048, 4096, 4096, 4),
    "batch": (1024, 2048, 16384, 16),
}  # fmt: skip
HOST_TOKENS: Final = 2048  # of a picture on a processor, unasked: a larger one takes minutes
HOST_CONVERSATIONS: Final = 4  # of a pool in host memory: a CPU is short of time, not of room


@dataclass(frozen=True, slots=True)
class Goal:
    """One step of a chain; `max_pixels` is the pixel budget that gives `tokens` tokens an image.

    `counted`: the part of it that counts towards comfort, where that is less than all.
    """

    tokens: int
    context: int
    pool: int
    sequences: int
    max_pixels: int | None
    counted: Step | None = None

    @property
    def step(self) -> Step:
        """(image tokens, context, pool, sequences), by which goals are ordered."""
        return self.tokens, self.context, self.pool, self.sequences


@lru_cache(maxsize=256)
def goals(
    model: Inventory, wishes: Wishes, limit: int, *, engine: Engine = "native", cpu: bool = False
) -> tuple[Goal, ...]:
    """The steps that make sense for a model under the wishes, ascending; empty where none does.

    Args:
        limit: tokens of the longest context.
        engine: ours has a KV pool with a size of its own; others' pools follow from the contexts, and among
            them only vLLM lets more requests share it.
        cpu: whether only the pool grows beyond comfort, as on a processor.
    """
    found: list[Goal] = []
    most, counted = 0, None  # tokens of the largest image that leaves room for text
    for step in STEPS[wishes.good_for]:
        goal = _goal(model, wishes, limit, step, engine=engine, cpu=cpu)
        if goal is not None:
            most, counted = step[0], goal.step
        elif counted is not None:  # images end here; what is in flight may grow
            goal = _goal(model, wishes, limit, (most, *step[1:]), engine=engine, cpu=cpu)
            goal = goal and replace(goal, counted=counted)
        if goal is not None and (not found or goal.step != found[-1].step):
            found.append(goal)
    return tuple(found)


def _goal(
    model: Inventory, wishes: Wishes, limit: int, step: Step, *, engine: Engine, cpu: bool
) -> Goal | None:
    """One step with the wishes put in its place, or None where the image leaves no room for text."""
    tokens, context, pool, sequences = step
    if cpu:
        most = COMFORT[wishes.good_for]
        tokens, context = min(tokens, most[0], HOST_TOKENS), min(context, most[1])
        pool = min(pool, HOST_CONVERSATIONS * min(wishes.context or context, limit))
    if wishes.min_image_tokens == ANY_TOKENS and wishes.context is not None:
        tokens = min(tokens, max(wishes.context // 2 // max(wishes.images, 1), 1))
    tokens, max_pixels = _image(model, wishes, tokens)
    if wishes.images and model.facts.vision is not None and tokens < (wishes.min_image_tokens or 0):
        return None  # the model's largest image has fewer
    needed = wishes.images * tokens
    room = min(ROOM_TOKENS, limit // 2)
    length = wishes.context or min(limit, max(context, up(needed + room, CONTEXT_GRAIN)))
    crowded = needed + min(LEAST_ROOM_TOKENS, length // 2) > length
    if (crowded and wishes.min_image_tokens != ANY_TOKENS) or length > limit:
        return None
    whole = length * wishes.concurrency
    sequences = max(sequences, wishes.concurrency)
    rules = rules_of(engine)
    pool = max(pool, whole) if rules.pooled else whole
    return Goal(tokens, length, pool, rules.at_once(sequences, wishes.concurrency), max_pixels)


def _image(model: Inventory, wishes: Wishes, tokens: int) -> tuple[int, int | None]:
    """Tokens of the largest image at this step, and its pixel budget."""
    if model.facts.vision is None or not wishes.images:
        return 0, None
    if not scales(model):
        return largest_image(model, wishes.max_pixels).tokens, wishes.max_pixels
    if wishes.max_pixels is not None:
        pixels = min(wishes.max_pixels, model.facts.vision.rule.max_pixels)
        return largest_image(model, pixels).tokens, pixels
    pixels = pixels_for(model, max(tokens, wishes.least_image_tokens))
    return largest_image(model, pixels).tokens, pixels


def comfort(goal: Goal, purpose: PurposeName, *, fixed_tokens: bool) -> Step:
    """How far towards comfort a goal is: its step, each number capped at comfort's.

    `fixed_tokens`: whether every picture of the model has the same tokens. They count as enough, but not for
    documents, whose print needs many.
    """
    most = COMFORT[purpose]
    step = goal.counted or goal.step
    reached = (most[0], *step[1:]) if fixed_tokens and purpose != "documents" else step
    tokens, context, pool, sequences = map(min, reached, most)
    return tokens, context, pool, sequences
