"""What an engine in this process allocates: the plan's own footprint against the memory that is free now.

`snugvl plan` chooses among models and engines; here model, dtype and device are given, and weight format,
context, pixels and the KV pool follow. Asked for nothing, the best that fits is taken; asked for something
that doesn't fit, it is refused with the numbers and with what would.

    weight format: as stored, bf16 or FP8 > int8 > int4
      > images and context > KV cache in bf16, then in FP8
      > embedding, lm_head and vision tower as in `planner/parts.py`
      > tokens and sequences of a step

and all of this with the vision tower on the GPU before any of it with one that streams. A context below
`LEAST_CONTEXT` comes last of each: a coarser format with more room is worth more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product

import torch

from snugvl.checkpoint.facts import ModelFacts
from snugvl.config import DEFAULT_BLOCK_SIZE, EngineConfig, KVFormat
from snugvl.errors import DoesNotFit, RequestError
from snugvl.place import Place
from snugvl.planner.capabilities import NATIVE_STEPS, Option, Refusal, kv_formats_on, native_options
from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.component import Footprint
from snugvl.planner.footprint.kv import block_bytes
from snugvl.planner.footprint.native import READERS, loading_bytes
from snugvl.planner.footprint.step_graphs import NOTHING, Recorded, recorded
from snugvl.planner.footprint.total import footprint
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.plan import subject_of
from snugvl.planner.settings import EmbeddingWish, Settings, TowerWish, WeightFormat
from snugvl.planner.shortfall import gib

CONTEXTS = (8192, 4096, 2048, 1024)  # tokens, tried in this order
LEAST_CONTEXT = 2048
PIXEL_SHARES = (1, 2, 4, 8)  # parts of half a context that one image may fill
ROOMY_BYTES = 2 << 30  # free beside everything else
ENCODER_CACHE_BYTES = 64 << 20  # of encodings kept for the next question about a picture, where there is room
POOL_SEQUENCES = {"cpu": 4, "cuda": 16}  # full-length sequences the KV pool holds where memory allows


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. None leaves it open.

    Attributes:
        context: tokens of one conversation; as many as fit, up to 8,192.
        max_pixels: limit of one image; what half of the context holds.
        weights: format of the decoder's weights; the best that fits.
        language_only: leave the vision tower out.
        tower: where its weights are; auto streams them where nothing else fits.
        kv_cache: format of keys and values; FP8 where that makes room, see `planner.capabilities`.
        step_graphs: CUDA graphs of steps with prompts and of small pictures, where plenty of memory is left.
        embedding: where the embedding is; auto has it in main memory where that makes room.
    """

    context: int | None = None
    max_pixels: int | None = None
    weights: WeightFormat | None = None
    language_only: bool = False
    tower: TowerWish = "auto"
    kv_cache: KVFormat | None = None
    step_graphs: bool = True
    embedding: EmbeddingWish = "auto"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The engine's sizes and formats, and the footprint they come from.

    Attributes:
        footprint: with the KV cache of one conversation of the full context.
        kv_bytes: of the KV pool, which takes what is left, up to `POOL_SEQUENCES` conversations.
        state_bytes: of recurrent states, for all sequences that may run.
        readers: threads that may load at once.
        subject: what measurements of it belong to.
        recorded: what CUDA graphs of steps with prompts take, beside the footprint.
    """

    engine: EngineConfig
    max_pixels: int
    settings: Settings
    footprint: Footprint
    kv_bytes: int
    state_bytes: int
    readers: int
    subject: str
    recorded: Recorded


@dataclass(frozen=True, slots=True)
class _Question:
    """What is to be placed where, and how it may be."""

    facts: ModelFacts
    model: Inventory
    options: tuple[Option, ...]
    dtype: torch.dtype
    place: Place
    language_only: bool = False
    kv_formats: tuple[KVFormat, ...] = ("bf16",)
    step_graphs: bool = True

    @property
    def sees(self) -> bool:
        """Whether there is a vision tower to place."""
        return self.facts.vision is not None and not self.language_only

    def settings(self, length: int, pixels: int, option: Option, kv: KVFormat) -> Iterator[Settings]:
        """One step in one format: as fast as it can be first."""
        wide = self.dtype == torch.float32
        weights: WeightFormat = option.weights
        if weights in ("bf16", "fp32"):
            weights = "fp32" if wide else "bf16"
        cpu = self.place.device.type == "cpu"
        base = Settings(
            "native",
            weights,
            option.parts.head,
            kv,
            context=length,
            max_pixels=pixels or None,
            images=1 if self.sees else 0,
            language_only=self.facts.vision is not None and self.language_only,
            float32=wide,
            eager=cpu,
            vision_weights=option.parts.vision_weights,
            vision=option.parts.vision,
            embedding=option.parts.embedding,
        )
        for chunk, sequences in NATIVE_STEPS[:1] if cpu else NATIVE_STEPS:
            yield replace(base, chunk=chunk, sequences=sequences)

    def every(self, steps: list[tuple[int, int]]) -> Iterator[Settings]:
        """All ways to reach one of `steps`, best first."""
        for _, alike in groupby(self.options, lambda option: option.parts.vision):
            yield from self._among(list(alike), steps)

    def _among(self, options: list[Option], steps: list[tuple[int, int]]) -> Iterator[Settings]:
        formats = list(dict.fromkeys(option.weights for option in options))
        for least, most in ((LEAST_CONTEXT, 1 << 62), (0, LEAST_CONTEXT)):
            inside = [step for step in steps if least <= step[0] < most]
            for weights in formats:
                of_format = [option for option in options if option.weights == weights]
                for (length, pixels), kv, option in product(inside, self.kv_formats, of_format):
                    yield from self.settings(length, pixels, option, kv)

    def footprint(self, settings: Settings) -> Footprint:
        """Of these settings here."""
        return footprint(self.model, settings, self.place.planned())

    def first(self, steps: list[tuple[int, int]]) -> Allocation | None:
        """The best that fits."""
        found = (self.allocated(settings) for settings in self.every(steps))
        return next((each for each in found if each is not None), None)

    def allocated(self, settings: Settings) -> Allocation | None:
        """With the KV pool and the readers that what is left allows; None where it doesn't fit."""
        needed = self.footprint(settings)
        spare = self.place.usable_bytes - needed.total_bytes
        if spare < 0:
            return None
        length, pixels = settings.context, settings.max_pixels or 0
        per_sequence = -(-length // DEFAULT_BLOCK_SIZE)
        each = block_bytes(self.model, settings)
        most = POOL_SEQUENCES[self.place.device.type] * per_sequence
        # torch reserves whole pieces, of one conversation's keys and values too.
        pool = (needed.named("KV cache") + spare) // LARGE_ROUND_BYTES * LARGE_ROUND_BYTES
        blocks = min(pool // each, most) if each else most
        left = spare + needed.named("KV cache") - up(blocks * each, LARGE_ROUND_BYTES)
        subject = subject_of(self.facts.name, settings)  # as the plan knows it, before there is more at once
        settings, needed, left = self._more_at_once(settings, needed, left)
        graphs = self._recorded(settings, left)
        config = EngineConfig(
            num_blocks=blocks,
            max_model_len=length,
            max_num_seqs=settings.sequences,
            max_batched_tokens=settings.chunk,
            kv_cache=settings.kv,
            encoder_cache_bytes=ENCODER_CACHE_BYTES if self.sees and left >= ROOMY_BYTES else 0,
            step_graph_bytes=graphs.pool_bytes,
        )
        return Allocation(
            config,
            pixels,
            settings,
            needed,
            blocks * each,
            needed.named("recurrent state"),
            self._readers(settings, needed),
            subject,
            graphs,
        )

    def _more_at_once(
        self, settings: Settings, needed: Footprint, left_bytes: int
    ) -> tuple[Settings, Footprint, int]:
        """Twice as many sequences where what they take is nothing beside what stays free."""
        if self.place.device.type == "cpu" or settings.sequences != NATIVE_STEPS[0][1]:
            return settings, needed, left_bytes
        more = replace(settings, sequences=2 * settings.sequences)
        wider = self.footprint(more)
        left = left_bytes - (wider.total_bytes - needed.total_bytes)
        return (more, wider, left) if left >= ROOMY_BYTES else (settings, needed, left_bytes)

    def _recorded(self, settings: Settings, left_bytes: int) -> Recorded:
        """Graphs that only save time, where as much as ever stays free beside them."""
        if not self.step_graphs or self.place.device.type == "cpu":
            return NOTHING
        wanted = recorded(
            self.model, settings, self.place.planned().cublas_bytes, self.place.planned().multiprocessors
        )
        return wanted if left_bytes >= ROOMY_BYTES + wanted.total_bytes else NOTHING

    def _readers(self, settings: Settings, needed: Footprint) -> int:
        """As many as there is room for before the cache and the graphs are made."""
        if self.place.device.type == "cpu":
            return 1
        later = needed.named("KV cache") + needed.named("CUDA graphs")
        room = self.place.usable_bytes - needed.always_bytes + later
        fits = (n for n in READERS if loading_bytes(self.model, settings, n) <= room)
        return next(fits, READERS[-1])


def allocate(facts: ModelFacts, dtype: torch.dtype, place: Place, wish: Wish | None = None) -> Allocation:
    """The best allocation that fits, within what was asked for.

    Raises:
        DoesNotFit: with every large component, and the largest context and pixels that would fit.
        RequestError: a context beyond the model's, or a format that the checkpoint can't have.
    """
    wish = wish or Wish()
    limit = _longest(facts)
    if wish.context is not None and not 1 <= wish.context <= limit:
        raise RequestError(
            f"context must be 1 to {limit:,} tokens for {facts.name}, not {wish.context:,}"
            f"{_beyond(facts, wish.context)}",
            field="context",
        )
    model = inventory(facts)
    options = _options(model, place, wish)
    kv_formats = kv_formats_on(options[0], place.planned(), wish.kv_cache)
    question = _Question(
        facts, model, options, dtype, place, wish.language_only, kv_formats, wish.step_graphs
    )
    steps = list(_steps(question, wish.context, wish.max_pixels))
    found = question.first(steps)
    if found is None:
        raise DoesNotFit(_refusal(question, steps))
    return found


def _longest(facts: ModelFacts) -> int:
    """Tokens of the longest context that our engine runs."""
    return facts.native_positions or facts.text.max_position_embeddings


def _beyond(facts: ModelFacts, context: int) -> str:
    """What a model could do with a context that our engine can't."""
    if facts.native_positions is None or context > facts.text.max_position_embeddings:
        return ""
    return (
        ": our own engine runs its LongRoPE within the original context; backend='transformers' "
        f"(--backend transformers) goes up to {facts.text.max_position_embeddings:,}"
    )


def _options(model: Inventory, place: Place, wish: Wish) -> tuple[Option, ...]:
    """Formats to try, best first."""
    tower = "resident" if wish.language_only else wish.tower
    made = native_options(model, place.planned(), wish.weights, tower, wish.embedding)
    if isinstance(made, Refusal):
        raise RequestError(f"{model.name}: {made.reason}", field="model")
    plain = ("bf16", "fp32")
    found = tuple(
        option
        for option in made
        if (wish.weights in (None, option.weights) or (wish.weights == "bf16" and option.weights in plain))
    )
    if not found:
        raise RequestError(
            f"weights {wish.weights!r} can't be had of {model.name}, which is stored in "
            f"{model.facts.quantization or 'bf16'}; use auto, "
            f"{', '.join(sorted({option.weights for option in made} - {'fp32'}))}"
            f"{'' if model.facts.quantization else ', or its FP8 edition'}",
            field="weights",
        )
    return found


def _steps(question: _Question, context: int | None, max_pixels: int | None) -> Iterator[tuple[int, int]]:
    """(context, pixels) to try, best first."""
    facts, limit = question.facts, _longest(question.facts)
    for length in [context] if context else sorted({min(c, limit) for c in CONTEXTS}, reverse=True):
        if facts.vision is None or not question.sees:
            yield length, 0
            continue
        rule, token = facts.vision.rule, (facts.vision.patch_size * facts.vision.merge_size) ** 2
        if max_pixels is not None:
            yield length, min(max_pixels, rule.max_pixels)
            continue
        for share in PIXEL_SHARES:
            yield length, min(rule.max_pixels, max(rule.min_pixels, length // 2 * token // share))


def _refusal(question: _Question, steps: list[tuple[int, int]]) -> str:
    """Why the least way doesn't fit, and what would."""
    facts, place = question.facts, question.place
    ways = list(question.every(steps[-1:]))
    settings = min(ways, key=lambda each: question.footprint(each).total_bytes)
    needed = question.footprint(settings)
    large = sorted(needed.counted, key=lambda part: part.nbytes, reverse=True)[:4]
    parts = ", ".join(f"{part.name} {gib(part.nbytes)}" for part in large)
    fits = question.first(list(_steps(question, None, None)))
    if fits is not None:
        pixels = f" with max_pixels={fits.max_pixels}" if question.sees else ""
        way_out = f"a context of {fits.engine.max_model_len:,} tokens{pixels} fits"
    else:
        way_out = "free some memory, or ask snugvl plan for a model that fits"
    free = f"{place.name} has {gib(place.free_bytes)} free, of which {gib(place.usable_bytes)} may be used"
    beside = {
        "its vision tower streamed": settings.vision == "streamed",
        "its embedding in main memory": settings.embedding == "cpu",
    }
    said = " and ".join(what for what, so in beside.items() if so)
    images = f" and images of {settings.max_pixels or 0:,} pixels" if question.sees else ""
    cache = ", with an FP8 KV cache," if settings.kv == "fp8" else ""
    return (
        f"{facts.name} in {settings.weights_name}{f', {said},' if said else ''} with a context of "
        f"{settings.context:,} tokens{images}{cache} needs {gib(needed.total_bytes)} ({parts}), but "
        f"{free}; {way_out}"
    )
