"""The stages of a comparison: answers of an engine, passes over a network, comparisons of distributions.

Each keeps its results at once (`work.py`) and does only work that isn't done yet. Its memory is freed when it
is over: an engine and a pass are never in memory together.
"""

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from PIL import Image

from snugvl.backends.native.loading import load_engine
from snugvl.backends.place import TargetDevice, cap, device_of, place_on
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, TokenOutput, VisionItem
from snugvl.engine.sampling.grammar import GrammarState, TokenGrammar
from snugvl.errors import DoesNotFit, ImageError, RequestError, SnugvlError
from snugvl.fidelity import memory
from snugvl.fidelity.distributions import Judged, Side, judge, masks_of
from snugvl.fidelity.memory import PassPlan, plan_pass
from snugvl.fidelity.participant import Extent, Participant
from snugvl.fidelity.sweep import Sequences, Sweep
from snugvl.fidelity.variants import Question, Variant, allocation_of
from snugvl.fidelity.work import Clock, Work
from snugvl.layers.device import release
from snugvl.models.layered import LayeredNetwork
from snugvl.planner.engines.native.footprint import LATE_BYTES

IN_FLIGHT: Final = 16  # requests that the engine knows of, and whose pictures are in memory


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """An answer to make. `number`: number of the question, by which the answer is known; `prefix`: tokens
    that the answer begins with; `max_tokens` of new ones follow at most."""

    number: int
    prompt_ids: tuple[int, ...]
    vision: tuple[VisionItem, ...]
    max_tokens: int
    grammar: TokenGrammar | None = None
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """New tokens of an answer, the one that ends it included; or the error in place of an answer."""

    number: int
    tokens: tuple[int, ...]
    error: SnugvlError | None = None


def answers(engine: Engine, wanted: Iterable[Wanted], ends: frozenset[int]) -> Iterator[Answered]:
    """The likeliest tokens, request by request as they finish; `ends`: tokens that end an answer."""
    waiting = iter(wanted)
    running: dict[str, tuple[Wanted, list[int]]] = {}
    left = True
    while left or running:
        while left and len(running) < IN_FLIGHT:
            each = next(waiting, None)
            if each is None:
                left = False
                break
            try:
                engine.add(_request(each, ends))
            except SnugvlError as error:
                yield Answered(each.number, (), error)
            else:
                running[str(each.number)] = (each, [])
        for output in engine.step() if running else ():
            if (done := _taken(output, running)) is not None:
                yield done


def _request(wanted: Wanted, ends: frozenset[int]) -> EngineRequest:
    return EngineRequest(
        str(wanted.number),
        (*wanted.prompt_ids, *wanted.prefix),
        SamplingParams(max_tokens=wanted.max_tokens),
        wanted.vision,
        stop_ids=ends,
        grammar=None if wanted.grammar is None else _Begun(wanted.grammar, wanted.prefix),
    )


def _taken(output: TokenOutput, running: dict[str, tuple[Wanted, list[int]]]) -> Answered | None:
    """The answer, where an output ends it."""
    wanted, tokens = running[output.request_id]
    if output.token_id is not None:
        tokens.append(output.token_id)
    if output.finish is None:
        return None
    del running[output.request_id]
    return Answered(wanted.number, tuple(tokens), output.error)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A grammar after the tokens that an answer begins with."""

    grammar: TokenGrammar
    prefix: Sequence[int]

    def start(self) -> GrammarState:
        state = self.grammar.start()
        for token in self.prefix:
            state.accept(token)
        return state


JUDGED_ROWS: Final = 8192  # tokens whose states are in host memory at once: 64 MiB of an 8B, on each side
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A question about a picture. `size`: width and height."""

    name: str
    size: tuple[int, int]
    read: Callable[[], Image.Image]
    question: Question


@dataclass(frozen=True, slots=True, eq=False)
class Rival:
    """A variant that is compared with the reference, with its name in results and its engine's allocation."""

    variant: Variant
    side: Participant
    name: str
    engine_bytes: int


@dataclass(slots=True)
class MemoryRow:
    """Memory of a stage: planned bytes of the device, and the most that torch held there (0 on a CPU)."""

    stage: str
    planned_bytes: int
    held_bytes: int = 0


class Stages:
    """Makes answers, passes and judgements of `items`. Not thread-safe. `rows`: memory of what was made."""

    def __init__(self, items: Sequence[Item], options: LoadOptions, work: Work, clock: Clock) -> None:
        """`options`: device and memory."""
        self.items, self.work, self.clock = items, work, clock
        self.device = device_of(options.device)
        self.rows: list[MemoryRow] = []
        self._memory_bytes = options.memory_bytes

    def place(self) -> TargetDevice:
        """The device with its free memory now; memory of earlier engines and passes is released first."""
        gc.collect()
        release(self.device)
        return place_on(self.device, self._memory_bytes)

    @contextmanager
    def network(self, side: Participant) -> Iterator[LayeredNetwork]:
        """A network with one part in memory at a time."""
        network = side.network(self.device, self.clock.read)
        try:
            yield network
        finally:
            network.close()

    def extent(self, side: Participant, item: Item) -> Extent:
        """Sizes of the prompt of a question.

        Raises:
            ImageError, RequestError: it can't be asked about its picture, which the error names.
        """
        try:
            return side.extent(item.question, item.size)
        except (ImageError, RequestError) as error:
            error.args = (f"{item.name}: {error}", *error.args[1:])
            raise

    def plan(self, side: Participant, answers: int, place: TargetDevice) -> PassPlan:
        """The memory plan of a pass over `side`, with `answers` answers of greatest length to each question.

        Raises:
            DoesNotFit: it has no room.
        """
        loads = [
            memory.QuestionMemory(self.extent(side, item), answers, item.question.limit)
            for item in self.items
        ]
        with self.network(side) as network:
            return plan_pass(side, network, loads, place)

    def answer(
        self, stage: str, text: str, rival: Rival, prefixes: Mapping[int, Tokens]
    ) -> dict[int, Answered]:
        """A variant's answers behind `prefixes`, by question: new tokens, or an error."""
        found = {
            each["number"]: Answered(each["number"], tuple(each["tokens"]))
            for each in self.work.records(stage)
        }
        missing = {n: prefix for n, prefix in prefixes.items() if n not in found}
        if missing:
            place = self.place()
            allocation = allocation_of(rival.variant, place, rival.side.settings)
            self.clock.begin(stage, text, len(missing))
            with self._measured(stage, allocation.footprint.total_bytes):
                loaded = load_engine(
                    rival.variant.load, planned=allocation, progress=self._loading(rival.side)
                )
                with closing(loaded.engine) as engine:
                    if loaded.allocation.settings.weights_name != rival.side.settings.weights_name:
                        changed = loaded.allocation.changed or loaded.allocation.settings.weights_name
                        raise DoesNotFit(
                            f"{rival.name} no longer fits ({changed}); give memory back, and try again"
                        )
                    failed: dict[int, Answered] = {}
                    wanted = self._wanted(rival.side, missing, failed)
                    for count, each in enumerate(answers(engine, wanted, rival.side.ends), 1):
                        found[each.number] = each
                        if each.error is None:
                            self.work.add(stage, {"number": each.number, "tokens": list(each.tokens)})
                        self.clock.answered(f"{count} of {len(missing)}")
                found |= failed
        self.clock.end(stage)
        return {n: found[n] for n in prefixes}

    def sweep(
        self, stage: str, text: str, side: Participant, wanted: Mapping[int, tuple[Tokens, ...]]
    ) -> None:
        """Compute and keep the last hidden states of answers, by question, for `states`."""
        missing: dict[int, tuple[Tokens, ...]] = {}
        for n, given in wanted.items():
            if some := tuple(each for each in given if not self.work.has(_name(stage, n, each))):
                missing[n] = some
        if missing:
            self.clock.begin(stage, text)
            place, numbers = self.place(), list(missing)
            extents = [self.extent(side, self.items[n]) for n in numbers]
            loads = [
                memory.QuestionMemory(extent, len(missing[n]), max(map(len, missing[n])))
                for n, extent in zip(numbers, extents, strict=True)
            ]
            with self.network(side) as network:
                plan = plan_pass(side, network, loads, place)
                network.readers = plan.readers
                cap(place, LATE_BYTES)
                network.weigh_inputs()
                with self._measured(stage, plan.footprint.total_bytes):
                    for batch in plan.batches:
                        self._sweep(
                            stage, side, network, plan, {n: missing[n] for n in (numbers[i] for i in batch)}
                        )
        self.clock.end(stage)

    def states(self, stage: str, n: int, answer: Tokens) -> torch.Tensor:
        """The last hidden states of an answer that a sweep has kept, `[tokens, hidden]`."""
        return self.work.tensors(_name(stage, n, answer))["states"]

    def judge(
        self,
        reference: Participant,
        right: Mapping[int, Callable[[], torch.Tensor]],
        side: Participant | None,
        ours: Mapping[int, Callable[[], torch.Tensor]],
        whole: Mapping[int, Tokens],
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Compare states of answers' last tokens, by question: "best", and with a `side` "kl" and "same".

        Args:
            right, ours: functions that read the reference's states and the variant's.
            whole: the answers, of which the last tokens are judged.
        """
        numbers = list(right)
        for batch in memory.in_batches([len(right[n]()) for n in numbers], JUDGED_ROWS):
            some = [numbers[place] for place in batch]
            states = [right[n]() for n in some]
            masks = self._masks(reference, some, whole, list(map(len, states)))
            with self.network(reference) as network:
                first = Side(network, torch.cat(states))
                if side is None:
                    judged = judge(first, None, masks)
                else:
                    with self.network(side) as other:
                        judged = judge(first, Side(other, torch.cat([ours[n]() for n in some])), masks)
            yield from _split(some, list(map(len, states)), judged)

    def _sweep(
        self,
        stage: str,
        side: Participant,
        network: LayeredNetwork,
        plan: PassPlan,
        batch: Mapping[int, tuple[Tokens, ...]],
    ) -> None:
        items = {n: self.items[n] for n in batch}
        groups = [
            Sequences(side.prepared(item.question, item.read()).prompt, batch[n]) for n, item in items.items()
        ]
        for n, found in zip(batch, Sweep(network, groups, plan.sizes).run(), strict=True):
            for answer, states in zip(batch[n], found, strict=True):
                self.work.put(_name(stage, n, answer), {"states": states})

    def _wanted(
        self, side: Participant, prefixes: Mapping[int, Tokens], failed: dict[int, Answered]
    ) -> Iterator[Wanted]:
        """Requests for answers; errors of questions that can't be asked are put into `failed`."""
        for n, prefix in prefixes.items():
            item = self.items[n]
            try:
                prepared = side.prepared(item.question, item.read())
            except SnugvlError as error:
                failed[n] = Answered(n, (), error)
                continue
            left = item.question.limit - len(prefix)
            yield Wanted(n, prepared.prompt.ids, prepared.prompt.vision, left, prepared.grammar, prefix)

    def _masks(
        self, side: Participant, numbers: Sequence[int], whole: Mapping[int, Tokens], counts: Sequence[int]
    ) -> torch.Tensor | None:
        """Bits of tokens that grammars allow at the last `counts` tokens of answers; None without any."""
        grammars = [side.grammar(self.items[n].question, self.items[n].size) for n in numbers]
        if not any(grammars):
            return None
        vocab = side.config.text.vocab_size
        found = []
        for n, grammar, count in zip(numbers, grammars, counts, strict=True):
            if grammar is None:
                found.append(torch.full((count, -(-vocab // 32)), -1, dtype=torch.int32))
            else:
                found.append(masks_of(grammar, whole[n], vocab)[len(whole[n]) - count :])
        return torch.cat(found)

    def _loading(self, side: Participant) -> Callable[[str, float], None]:
        """Progress of loading as bytes that were read."""
        whole, last = stored_bytes(side), 0.0

        def told(_detail: str, done: float) -> None:
            nonlocal last
            self.clock.read(int(max(done - last, 0.0) * whole))
            last = max(done, last)

        return told

    @contextmanager
    def _measured(self, stage: str, planned_bytes: int) -> Iterator[None]:
        """Note the most that torch holds meanwhile."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        row = MemoryRow(stage, planned_bytes)
        self.rows.append(row)
        try:
            yield
        finally:
            row.held_bytes = torch.cuda.max_memory_reserved(self.device) if on_gpu else 0


def _name(stage: str, n: int, answer: Tokens) -> str:
    """Name of an answer's states: an answer that failed once may be there later, beside others."""
    return f"{stage}-{n}-{hashlib.blake2b(repr(answer).encode(), digest_size=8).hexdigest()}"


def stored_bytes(side: Participant) -> int:
    """Bytes of files that one reading of all of a model takes."""
    return sum(tensor.nbytes for tensor in side.facts.tensors if tensor.loaded)


def _split(
    numbers: Sequence[int], counts: Sequence[int], judged: Judged
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The judgement of all tokens, split by question."""
    start = 0
    for n, count in zip(numbers, counts, strict=True):
        rows = slice(start, start + count)
        record: dict[str, Any] = {"number": n, "best": judged.best[rows].tolist()}
        if judged.kl is not None and judged.same is not None:
            record |= {"kl": judged.kl[rows].tolist(), "same": judged.same[rows].tolist()}
        yield n, record
        start += count
