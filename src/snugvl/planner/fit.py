"""The best that one option (a model in a format on an engine) can do within a budget."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from snugvl.core.sizes import format_size
from snugvl.planner.budget import Budget, ram_for, wsl_remedy
from snugvl.planner.capabilities import Option
from snugvl.planner.costs import kv_formats_on, tier
from snugvl.planner.engines import rules_of
from snugvl.planner.engines.native.hybrid import EACH, NATIVE_STEPS, SNAPSHOTS, keeping
from snugvl.planner.engines.rules import Spread, Ways
from snugvl.planner.footprint.kv import block_bytes, state_bytes
from snugvl.planner.footprint.total import Footprint, footprint
from snugvl.planner.footprint.vision import largest_image, scales
from snugvl.planner.goals import COMFORT, CONTEXT_GRAIN, Goal, Step, comfort, goals
from snugvl.planner.settings import BLOCK_TOKENS, KVFormat, Settings
from snugvl.planner.wishes import LEAST_ROOM_TOKENS, Wishes

ROOMY_BYTES = 2 << 30  # that stay free beside what only saves time
ENCODER_CACHE_BYTES = 64 << 20  # of encodings kept for the next question about a picture


@dataclass(frozen=True, slots=True)
class Fitted:
    """Settings that fit, with their footprint and the budget they were made for."""

    settings: Settings
    tokens: int
    footprint: Footprint
    budget: Budget

    @property
    def missing_bytes(self) -> int:
        """Bytes beyond those that may be used; negative where it fits."""
        return self.footprint.total_bytes - self.budget.usable_bytes


class Fitter:
    """Finds the best settings of one option that fit."""

    def __init__(
        self,
        option: Option,
        wishes: Wishes,
        found: Sequence[Budget],
        host: Budget | None = None,
        quality: int = 0,
    ) -> None:
        """`found`: one budget a GPU; `host`: host memory, where layers may stay; `quality`: the model's."""
        self.option = option
        self.quality = quality
        self.rules = rules_of(option.engine)
        self.wishes = wishes
        self.budgets = found
        self.host = host
        self.cpu = found[0].device.cpu
        self.goals = goals(option.model, wishes, option.context_limit, engine=option.engine, cpu=self.cpu)
        self._variants: dict[Settings, tuple[Settings, ...]] = {}

    @cached_property
    def best(self) -> Fitted | None:
        """The best that fits: comfort, then KV format, the goal, the fewest GPUs, what is left, speed."""
        if self.option.offload:
            return self._least_offloaded()
        if not self.any:  # most models are too large
            return None
        found: list[Fitted] = []
        for kv in self.kv_formats:
            if (best := self._best_in(kv)) is not None:
                found.append(best)
                if self.goal(best) is self.goals[-1]:
                    break  # no coarser cache reaches more
        return max(found, key=self._worth, default=None)  # the first of equals

    @property
    def any(self) -> bool:
        """Whether anything fits, which takes less time to know than the best: where the smallest way doesn't
        fit, nothing larger does."""
        return self.best is not None if self.option.offload else self.least.missing_bytes <= 0

    def _worth(self, fitted: Fitted) -> tuple[int, ...]:
        return *self.comfort(fitted), -self.tier(fitted), *self.goal(fitted).step

    def tier(self, fitted: Fitted) -> int:
        """See `costs.tier`."""
        return tier(self.option, fitted.settings, cpu=self.cpu)

    @cached_property
    def finest(self) -> int:
        """The lowest tier of all settings: that with the best format of the cache."""
        return tier(self.option, self.base(self.goals[0], self.kv_formats[0], Spread()), cpu=self.cpu)

    def _best_in(self, kv: KVFormat) -> Fitted | None:
        """The best settings with this KV format: those of the highest goal that fits, found by bisection, as
        goals are ordered.

        More GPUs than the goal needs are taken for requests in flight up to comfort.
        """

        def ways(goal: Goal) -> Iterator[Settings]:
            bases = (self.base(goal, kv, spread) for spread in self._spreads())
            return (base for base in bases if self.fits(self._needed(base, goal)))

        low, high = 0, len(self.goals)
        while low < high:
            middle = (low + high) // 2
            if next(ways(self.goals[middle]), None) is None:
                high = middle
            else:
                low = middle + 1
        if low == 0:
            return None
        goal = self.goals[low - 1]
        fitting = [self._refined(base, goal) for base in ways(goal)]
        return max(fitting, key=self.comfort)  # the first of equals

    @property
    def kv_formats(self) -> tuple[KVFormat, ...]:
        """Formats of the cache to try, best first."""
        return kv_formats_on(self.option, self.budgets[0].device, self.wishes.kv_cache)

    def goal(self, fitted: Fitted) -> Goal:
        """The highest goal that the settings reach."""
        within = (
            goal
            for goal in reversed(self.goals)
            if goal.tokens <= fitted.tokens
            and goal.context <= fitted.settings.context
            and goal.pool <= fitted.settings.kv_tokens
            and goal.sequences <= fitted.settings.sequences * fitted.settings.data_parallel
        )
        return next(within, self.goals[0])

    def comfort(self, fitted: Fitted, *, led: bool = False) -> Step:
        """How far towards comfort the settings come: each of the four numbers of a goal, capped at comfort.

        Args:
            led: whether the plan chose the model: few tokens a picture are then no reason to prefer it, and
                an engine that would run several requests at once if asked is no less comfortable with one.
        """
        most = COMFORT[self.wishes.good_for]
        fixed = not led and not scales(self.option.model)
        reached = comfort(self.goal(fitted), self.wishes.good_for, fixed_tokens=fixed)
        if self.wishes.max_pixels is not None:  # no larger ones are wanted, of no model
            reached = most[0], *reached[1:]
        if led and "concurrency" in self.rules.honours and self.rules.at_once(most[3], 1) == 1:
            reached = *reached[:3], most[3]
        if len(self.budgets) > 1 and reached[2] < most[2] and self._could_hold(fitted.settings, most[2]):
            return *reached[:2], most[2], reached[3]
        return reached

    def _could_hold(self, settings: Settings, tokens: int) -> bool:
        """Whether `tokens` tokens could be in flight: in a pool, or on several GPUs, whose cache with vLLM is
        all that is left."""
        if self.rules.pooled or settings.gpus == 1:
            return self.rules.pooled and settings.kv_tokens >= tokens
        at_once = -(-tokens // settings.context)
        return self.fits(self._leanest(settings._replace(concurrency=max(settings.concurrency, at_once))))

    def reaching(self, nbytes: int) -> "Fitter":
        """A copy limited to the goals that this option reaches with only `nbytes` bytes of each GPU."""
        less = [
            replace(each, margin_bytes=each.margin_bytes + max(each.usable_bytes - nbytes, 0))
            for each in self.budgets
        ]
        found, bounded = (
            Fitter(self.option, self.wishes, budgets, self.host, self.quality)
            for budgets in (less, self.budgets)
        )
        reached = self.goals.index(found.goal(found.best)) + 1 if found.best is not None else 0
        bounded.goals = self.goals[:reached]
        return bounded

    @cached_property
    def least(self) -> Fitted:
        """The smallest way to reach the lowest goal, whether it fits or not."""
        goal, kv = self.goals[0], self.kv_formats[-1]
        bases = (self.base(goal, kv, spread) for spread in self._spreads())
        tried = [self.fitted(self._leanest(base), goal.tokens) for base in bases]
        return min(tried, key=lambda fitted: fitted.missing_bytes)

    def _least_offloaded(self) -> Fitted | None:
        """The highest goal up to comfort with the fewest layers in host memory; the vision tower goes first.

        The tower is copied once a picture, a layer once a token. Beyond comfort every byte costs speed.
        """
        for goal in reversed(self.goals):
            most = COMFORT[self.wishes.good_for]
            if goal is not self.goals[0] and (goal.tokens > most[0] or goal.context > most[1]):
                continue
            settings = self._first_that_fits(self._offloads(goal))
            # Where host memory is too small, a smaller goal leaves more on the GPU.
            if settings is None or self.host is None:
                continue
            if self.rules.host_bytes(self.option.model, settings) <= self.host.usable_bytes:
                return self.fitted(settings, goal.tokens)
        return None

    def _first_that_fits(self, kinds: Iterable[Ways]) -> Settings | None:
        """The first settings that fit, kind by kind; in a kind each takes less GPU memory than the last."""
        found = (ways[bisect_left(ways, True, key=self.fits)] for ways in kinds if self.fits(ways[-1]))
        return next(found, None)

    def _offloads(self, goal: Goal) -> Iterable[Ways]:
        """Settings with less and less on the GPU, by kind (`EngineRules.offload_ways`)."""
        kv: KVFormat = next(iter(self.kv_formats), "bf16")
        return self.rules.offload_ways(self.option.model, self.base(goal, kv, Spread()))

    def why_not_offloaded(self) -> str:
        """The clause that says how much is missing even with layers in host memory."""
        ways = list(self._offloads(self.goals[0]))
        if (least := self._first_that_fits(ways)) is None:
            total = format_size(self.footprint(ways[-1][-1]).total_bytes)
            usable = format_size(self.budgets[0].usable_bytes)
            if self.budgets[0].device.unified:
                return f"wherever its layers are computed, it takes {total} of the one memory's {usable}"
            return f"with every layer in host memory it still takes {total} of the GPU's {usable}"
        moved, layers = max(least.offloaded, least.host_experts), self.option.model.facts.text.num_layers
        free = format_size(self.host.usable_bytes if self.host else 0)
        taken = self.rules.host_bytes(self.option.model, least)
        what = "the experts of " if least.host_experts and not least.offloaded else ""
        needed = f"{format_size(taken)}, of which {free} may be used"
        return f"{what}{moved} of {layers} layers would have to stay in host memory: {needed}"

    def host_remedy(self) -> str | None:
        """Host memory with which it fits, and how WSL2 is given that; None where that wouldn't do."""
        least = self._first_that_fits(self._offloads(self.goals[0]))
        if least is None or not least.host_experts or self.host is None or self.budgets[0].device.unified:
            return None
        needed = ram_for(self.rules.host_bytes(self.option.model, least), self.host.held_bytes)
        how = "" if self.host.most_bytes is None else wsl_remedy(needed, self.host.most_bytes)
        return f"it fits with {format_size(needed)} of host memory{how}"

    def base(self, goal: Goal, kv: KVFormat, spread: Spread) -> Settings:
        """Settings that reach `goal`."""
        settings = Settings(
            self.option.engine,
            self.option.weights,
            self.option.parts.head,
            kv,
            goal.context,
            goal.max_pixels,
            self.wishes.images if self.option.model.facts.vision else 0,
            self.wishes.concurrency,
            tensor_parallel=spread.tensor,
            pipeline_parallel=spread.pipeline,
            data_parallel=spread.data,
            language_only=self.wishes.language_only and self.option.model.facts.vision is not None,
            vision_weights=self.option.parts.vision_weights,
            vision=self.option.parts.vision,
            embedding=self.option.parts.embedding,
            expert_slots=0 if self.option.parts.experts == "cpu" else None,
            pool_tokens=goal.pool if self.rules.pooled else 0,
            float32=self.option.float32,
            sequences=goal.sequences,
            predictor=self.option.model.facts.predicts,
            on_gpu=not self.cpu,
        ).with_host_memory(page_locked=self.budgets[0].page_locks)
        return settings._replace(draft_graphs=settings.predictor and self._records(settings))

    def variants(self, base: Settings) -> tuple[Settings, ...]:
        """Settings that differ in speed alone, fastest first."""
        if base not in self._variants:
            self._variants[base] = tuple(self.rules.variants(self.option.model, base, cpu=self.cpu))
        return self._variants[base]

    def fastest(self, base: Settings) -> Settings | None:
        """The fastest variant that fits. Where the leanest doesn't, none does."""
        if not self.fits(self._leanest(base)):
            return None
        return next((settings for settings in self.variants(base) if self.fits(settings)), None)

    def _needed(self, base: Settings, goal: Goal) -> Settings:
        """The settings in which a goal must fit: up to comfort the slowest variant; beyond it the fastest,
        with state snapshots, as no larger goal is worth lost speed or turns computed from their beginning."""
        before = self.goals[max(self.goals.index(goal) - 1, 0)]
        most, lower, full = (
            comfort(each, self.wishes.good_for, fixed_tokens=False) for each in (goal, before, self.goals[-1])
        )
        beyond = goal.step[:3] > most[:3] and goal.step[:3] != self.goals[0].step[:3]
        kept = SNAPSHOTS if lower == full and goal is not self.goals[0] else 0
        if not beyond:
            return self._keeping(self._leanest(base), kept)
        fast = self.variants(base)[0]
        if state_bytes(self.option.model, base) and self.rules.pooled and not self.cpu:
            fast = fast._replace(sequences=base.sequences)  # one of the variants; on a CPU there is one
        return self._keeping(fast, kept)

    def _leanest(self, base: Settings) -> Settings:
        """The variant that needs the least memory, which is the slowest."""
        return self.variants(base)[-1]

    def budget(self, settings: Settings) -> Budget:
        """The budget of the smallest of the GPUs that are used."""
        return self.budgets[settings.gpus - 1]

    def fitted(self, settings: Settings, tokens: int) -> Fitted:
        """The settings with their footprint and budget."""
        return Fitted(settings, tokens, self.footprint(settings), self.budget(settings))

    def _spreads(self) -> Sequence[Spread]:
        """Ways over the GPUs, fewest first."""
        return self.rules.spreads(self.option.model, self.wishes, len(self.budgets))

    def footprint(self, settings: Settings) -> Footprint:
        """The footprint of this option's model under `settings`."""
        return footprint(self.option.model, settings, self.budget(settings).device)

    def fits(self, settings: Settings) -> bool:
        """Whether the settings fit within the budget."""
        return self.spare_bytes(settings) >= 0

    def _refined(self, base: Settings, goal: Goal) -> Fitted:
        """The settings with spare memory put to use: for states of the next turn, for a larger pool (up to
        the next goal's), then for all that saves time."""
        base = self._keeping(base, SNAPSHOTS, self.spare_bytes(self._leanest(base)))
        settings = self.fastest(base)
        assert settings is not None, "what was tried before fits"
        if self.rules.pooled:
            settings = self._keeping(settings, EACH * settings.sequences, self.spare_bytes(settings))
            settings = self._caching(settings)
            following = self.goals[min(self.goals.index(goal) + 1, len(self.goals) - 1)]
            most = following.pool
            if settings.expert_slots is not None:  # what is less than a slot reaches no goal by chance
                most = max(most - BLOCK_TOKENS, settings.kv_tokens)
            settings = self._quicker(self._filled(settings, most))
        return self.fitted(settings, goal.tokens)

    def _keeping(self, settings: Settings, most: int, spare_bytes: int | None = None) -> Settings:
        if not self.rules.pooled:
            return settings
        return keeping(self.option.model, self.wishes, settings, most, spare_bytes)

    def _caching(self, settings: Settings) -> Settings:
        """The settings with as many experts on the GPU as fit, where they are in host memory."""
        mixture, slots = self.option.model.facts.text.mixture, settings.expert_slots
        if mixture is None or slots is None or slots == mixture.count:
            return settings

        def fits(count: int) -> bool:
            return self.fits(settings._replace(expert_slots=count))

        return settings._replace(expert_slots=highest(slots, mixture.count, 1, fits))

    def _filled(self, settings: Settings, most: int) -> Settings:
        """The settings with as large a KV pool as fits, up to `most` tokens."""
        low = settings.kv_tokens
        each = block_bytes(self.option.model, settings)
        spare = self.spare_bytes(settings)
        room = min(max(most - low, 0) // BLOCK_TOKENS, spare // each if each else most)
        return settings._replace(
            pool_tokens=highest(
                low,
                low + room * BLOCK_TOKENS,
                BLOCK_TOKENS,
                lambda n: self.fits(settings._replace(pool_tokens=n)),
            )
        )

    def _quicker(self, settings: Settings) -> Settings:
        """The settings with all that only saves time, each where plenty stays free beside it: more sequences
        at once, kept encodings, CUDA graphs of prompts."""
        if self.cpu or (self.spare_bytes(settings) < ROOMY_BYTES and not settings.draft_graphs):
            return settings  # all but graphs of drafts, in whose place others come, takes memory
        more = settings._replace(
            sequences=2 * settings.sequences, state_snapshots=2 * settings.state_snapshots
        )
        if settings.sequences == NATIVE_STEPS[0][1] and self.spare_bytes(more) >= ROOMY_BYTES:
            settings = more
        kept = settings._replace(encoder_cache_bytes=ENCODER_CACHE_BYTES)
        if settings.images and self.spare_bytes(kept) >= ROOMY_BYTES:
            settings = kept
        graphs = settings._replace(step_graphs=True, draft_graphs=False)
        if self._records(graphs) and self.spare_bytes(graphs) >= ROOMY_BYTES:
            settings = graphs
        return settings

    def _records(self, settings: Settings) -> bool:
        """Whether steps with drafts, or with `step_graphs` those of prompts, may be CUDA graphs: their tower
        doesn't stream, nor do experts but those that a GPU fetches for a few tokens."""
        few = not (settings.step_graphs or settings.eager)
        recordable = settings.vision == "gpu" and (few or settings.expert_slots is None)
        return self.wishes.step_graphs and recordable and not self.cpu

    def guessing(self, settings: Settings) -> Settings | None:
        """Settings of the same model without its predictor, with the predictor and the graphs of its drafts.

        They take the place of a part of the cache, of which at least half stays, and of state snapshots, of
        which a conversation's stay. None: there is no room.
        """
        mine = settings._replace(predictor=True, draft_graphs=not settings.step_graphs)
        if not self._records(mine) or not self.option.gives(mine) or settings.sequences == 1:
            return None  # drafts take the rows of sequences that don't run
        if settings.expert_slots is not None:
            return None  # its memory would be that of slots, which every step needs
        least = mine._replace(
            pool_tokens=max(settings.kv_tokens // 2, settings.context),
            state_snapshots=min(settings.state_snapshots, SNAPSHOTS),
        )
        if not self.fits(least):
            return None
        kept = self._keeping(least, settings.state_snapshots, self.spare_bytes(least) // 2)
        return self._filled(kept, settings.kv_tokens)

    def spare_bytes(self, settings: Settings) -> int:
        """Bytes of the budget that are left; negative where it doesn't fit."""
        return self.budget(settings).usable_bytes - self.footprint(settings).total_bytes

    def longest_context_at(self, base: Settings) -> int | None:
        """Longest context that fits with these images, or None."""
        image = largest_image(self.option.model, base.max_pixels).tokens * base.images
        low = -(-(image + LEAST_ROOM_TOKENS) // CONTEXT_GRAIN) * CONTEXT_GRAIN
        limit = self.option.context_limit

        def fits(context: int) -> bool:
            return self.fastest(base._replace(context=context)) is not None

        return highest(low, limit, CONTEXT_GRAIN, fits) if low <= limit and fits(low) else None


def highest(low: int, high: int, grain: int, fits: Callable[[int], bool]) -> int:
    """The highest value, `low` plus steps of `grain`, that fits; all values below one that fits fit as well.

    It is searched from `high` down in steps that double, then by bisection: `high` is mostly nearly right.
    """
    beyond, step = max(0, (high - low) // grain) + 1, 1
    while beyond > step and not fits(low + (beyond - step) * grain):
        beyond, step = beyond - step, 2 * step
    first = max(0, beyond - step)
    above = range(first + 1, beyond)
    return low + (first + bisect_left(above, True, key=lambda n: not fits(low + n * grain))) * grain
