"""How ambitious a plan may be: a chain of (image tokens, context), each step at least the one before in both.

The solver takes the highest step that fits. As the chain is ordered, more memory never gives smaller images
or a shorter context in the same format on the same engine.
"""

from dataclasses import dataclass
from typing import Final

from snugvl.planner.footprint.allocator import up
from snugvl.planner.footprint.images import largest_image, pixels_for, scales
from snugvl.planner.inventory import Inventory
from snugvl.planner.wishes import LEAST_ROOM_TOKENS, ROOM_TOKENS, Wishes

STEPS: Final = (
    (256, 2048), (512, 2048), (1024, 2048), (1024, 4096), (2048, 4096), (2048, 8192), (4096, 8192),
    (4096, 16384), (8192, 16384), (8192, 32768), (16384, 32768),
)  # fmt: skip
COMFORT: Final = (2048, 8192)  # a full-HD image whole, and a long conversation: beyond it the engine decides
CONTEXT_GRAIN: Final = 512
TOKEN_GRAIN: Final = 64


@dataclass(frozen=True, slots=True)
class Goal:
    """Image tokens and context to reach; `max_pixels` is the budget that belongs to the tokens."""

    tokens: int
    context: int
    max_pixels: int | None


def goals(model: Inventory, wishes: Wishes, limit: int) -> list[Goal]:
    """The steps that make sense for a model under the wishes, ascending; empty where none does.

    `limit`: tokens of the longest context.
    """
    found: list[Goal] = []
    for tokens, context in STEPS:
        goal = goal_of(model, wishes, limit, tokens, context)
        if goal is not None and goal not in found:
            found.append(goal)
    return found


def goal_of(model: Inventory, wishes: Wishes, limit: int, tokens: int, context: int) -> Goal | None:
    """One step with the wishes put in its place, or None where the image leaves no room for text."""
    tokens, max_pixels = _image(model, wishes, tokens)
    needed = wishes.images * tokens
    room = min(ROOM_TOKENS, limit // 2)
    length = wishes.context or min(limit, max(context, up(needed + room, CONTEXT_GRAIN)))
    if needed + min(LEAST_ROOM_TOKENS, length // 2) > length or length > limit:
        return None
    return Goal(tokens, length, max_pixels)


def _image(model: Inventory, wishes: Wishes, tokens: int) -> tuple[int, int | None]:
    """Tokens of the largest image at this step, and its pixel budget."""
    if model.facts.vision is None or not wishes.images:
        return 0, None
    if not scales(model):
        return largest_image(model, None).tokens, None
    if wishes.max_pixels is not None:
        pixels = min(
            max(wishes.max_pixels, model.facts.vision.rule.min_pixels), model.facts.vision.rule.max_pixels
        )
        return largest_image(model, pixels).tokens, pixels
    pixels = pixels_for(model, max(tokens, wishes.least_image_tokens))
    return largest_image(model, pixels).tokens, pixels


def comfort(goal_tokens: int, context: int, fixed_tokens: bool) -> tuple[int, int]:
    """How far towards comfort a plan is; more than comfort counts no more than comfort."""
    tokens = COMFORT[0] if fixed_tokens else min(goal_tokens, COMFORT[0])
    return tokens, min(context, COMFORT[1])
