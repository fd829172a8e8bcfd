"""The best that one option (a model in a format on an engine) can do within a budget."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from snugvl.planner.budget import Budget
from snugvl.planner.capabilities import NATIVE_STEPS, VLLM_CHUNKS, Option, kv_formats_on
from snugvl.planner.footprint.component import Footprint
from snugvl.planner.footprint.images import largest_image, pixels_for
from snugvl.planner.footprint.total import footprint
from snugvl.planner.goals import CONTEXT_GRAIN, TOKEN_GRAIN, Goal, goals
from snugvl.planner.settings import KVFormat, Settings
from snugvl.planner.wishes import LEAST_ROOM_TOKENS, Wishes

PARALLEL = (2, 4, 8)  # GPUs that vLLM shares a layer among


@dataclass(frozen=True, slots=True)
class Fitted:
    """Settings that fit, with their footprint and the budget they were made for."""

    settings: Settings
    tokens: int
    footprint: Footprint
    budget: Budget


class Fitter:
    """Tries settings of one option. Footprints are pure, so nothing is remembered."""

    def __init__(self, option: Option, wishes: Wishes, found: Sequence[Budget]) -> None:
        self.option = option
        self.wishes = wishes
        self.budgets = found
        self.goals = goals(option.model, wishes)

    def best(self) -> Fitted | None:
        """The best that fits: KV format first, then the goal, the fewest GPUs, what is left, speed."""
        for kv in kv_formats_on(self.option, self.budgets[0].device):
            for goal in reversed(self.goals):
                for tensor, pipeline in self._parallel():
                    base = self.base(goal, kv, tensor, pipeline)
                    if self.fastest(base) is not None:
                        return self._refined(base, goal)
        return None

    def least(self, goal: Goal | None = None) -> Fitted:
        """The smallest way to reach a goal (the lowest one by default), whether it fits or not."""
        goal = goal or self.goals[0]
        kv = kv_formats_on(self.option, self.budgets[0].device)[-1]
        tried = [
            self.fitted(settings, goal.tokens)
            for tensor, pipeline in self._parallel()
            for settings in self.variants(self.base(goal, kv, tensor, pipeline))
        ]
        return min(tried, key=lambda fitted: fitted.footprint.total_bytes - fitted.budget.usable_bytes)

    def base(self, goal: Goal, kv: KVFormat, tensor: int, pipeline: int) -> Settings:
        """Settings that reach `goal`."""
        return Settings(
            self.option.engine,
            self.option.weights,
            self.option.head,
            kv,
            goal.context,
            goal.max_pixels,
            self.wishes.images if self.option.model.facts.vision else 0,
            self.wishes.concurrency,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )

    def variants(self, base: Settings) -> Iterator[Settings]:
        """What changes speed alone, fastest first: CUDA graphs, then large chunks."""
        if self.option.engine == "transformers" or self.budgets[0].device.cpu:
            yield base
        elif self.option.engine == "native":
            for chunk, sequences in NATIVE_STEPS:
                if sequences >= base.concurrency or (chunk, sequences) == NATIVE_STEPS[0]:
                    most = max(sequences, base.concurrency)
                    yield replace(base, eager=False, chunk=chunk, sequences=most)
        else:
            for eager in (False, True):
                for chunk in VLLM_CHUNKS:
                    yield replace(base, eager=eager, chunk=chunk)

    def fastest(self, base: Settings) -> Settings | None:
        """The fastest variant that fits."""
        return next((settings for settings in self.variants(base) if self.fits(settings)), None)

    def budget(self, settings: Settings) -> Budget:
        """That of the smallest of the GPUs that are used."""
        return self.budgets[settings.gpus - 1]

    def fitted(self, settings: Settings, tokens: int) -> Fitted:
        """With footprint and budget."""
        return Fitted(settings, tokens, self.footprint(settings), self.budget(settings))

    def _parallel(self) -> list[tuple[int, int]]:
        """(tensor, pipeline) sizes. Heads must divide; otherwise groups of layers are spread."""
        sizes, count = [(1, 1)], len(self.budgets)
        if self.option.engine != "vllm":
            return sizes
        heads = self.option.model.facts.text.num_heads
        vision = self.option.model.facts.vision
        for gpus in PARALLEL:
            if gpus > count:
                break
            divides = heads % gpus == 0 and (vision is None or vision.num_heads % gpus == 0)
            sizes.append((gpus, 1) if divides else (1, gpus))
        if count > 1 and count not in PARALLEL:
            sizes.append((1, count))
        return sizes

    def footprint(self, settings: Settings) -> Footprint:
        """Of this option's model."""
        return footprint(self.option.model, settings, self.budget(settings).device)

    def fits(self, settings: Settings) -> bool:
        """Within the budget."""
        return self.footprint(settings).total_bytes <= self.budget(settings).usable_bytes

    def _refined(self, base: Settings, goal: Goal) -> Fitted:
        """Use what is left up to the next goal: for larger images, then a longer context, then speed."""
        index = self.goals.index(goal)
        following = self.goals[index + 1] if index + 1 < len(self.goals) else goal
        tokens = goal.tokens
        if following.tokens > tokens:
            tokens = self.most_tokens(base, tokens, following.tokens)
            base = self.with_tokens(base, tokens)
        if following.context > goal.context:
            base = replace(base, context=self.most_context(base, goal.context, following.context))
        settings = self.fastest(base)
        assert settings is not None, "what was refined fits"
        return self.fitted(settings, tokens)

    def with_tokens(self, settings: Settings, tokens: int) -> Settings:
        """The same with another pixel budget."""
        return replace(settings, max_pixels=pixels_for(self.option.model, tokens))

    def most_tokens(self, base: Settings, low: int, high: int) -> int:
        """Most image tokens from `low` (which fits) to `high` at this context."""
        room = (base.context - LEAST_ROOM_TOKENS) // max(base.images, 1)
        return _highest(
            low, min(high, room), TOKEN_GRAIN, lambda n: self.fastest(self.with_tokens(base, n)) is not None
        )

    def most_context(self, base: Settings, low: int, high: int) -> int:
        """Longest context from `low` (which fits) to `high` with these images."""
        return _highest(
            low, high, CONTEXT_GRAIN, lambda n: self.fastest(replace(base, context=n)) is not None
        )

    def longest_context_at(self, base: Settings) -> int | None:
        """Longest context that fits with these images, or None."""
        image = largest_image(self.option.model, base.max_pixels).tokens * base.images
        low = -(-(image + LEAST_ROOM_TOKENS) // CONTEXT_GRAIN) * CONTEXT_GRAIN
        limit = self.option.model.facts.text.max_position_embeddings
        if low > limit or self.fastest(replace(base, context=low)) is None:
            return None
        return self.most_context(base, low, limit)


def _highest(low: int, high: int, grain: int, fits: Callable[[int], bool]) -> int:
    """The highest value in steps of `grain` above `low` that fits; what fits is below what doesn't."""
    first, last = 0, max(0, (high - low) // grain)
    while first < last:
        middle = (first + last + 1) // 2
        if fits(low + middle * grain):
            first = middle
        else:
            last = middle - 1
    return low + first * grain
