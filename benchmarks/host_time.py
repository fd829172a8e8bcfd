"""The host's time of a step, by what it is spent on: the engine drives a network that computes nothing.

    python benchmarks/host_time.py [TOKENIZER] [--kinds ngram mtp …] [--steps 300] [--out FILE]

Everything runs as on a GPU but for the GPU: steps start ahead of the host, are packed into the buffers of
CUDA graphs and "replayed", on a CPU, where a replay does nothing; tokens come from a list, or at random from
those that a mask allows. So what is left is what the host does, and of that the part for which a GPU would
wait (`gap`): from reading what was started last to the next start. Steps that run ahead of the host have
none. Launches themselves are not in it: how many operations of torch a step starts is counted instead.

TOKENIZER is a folder with one: for the masks of llguidance, and the text of what is delivered. Kinds are
`ngram` and `mtp` (one client, guessed tokens of which one and two are right in turn), `ngram 8`, `free 32`,
`typed 32` (a JSON schema). Of all steps that which a quarter is below, as others use the processor, too;
microseconds of this machine. Before them: how long 32 requests that come at once wait for a grammar that is
kept, and for the masks with which their answers begin.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from itertools import count
from pathlib import Path
from statistics import quantiles
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import machine
from masks import SCHEMAS
from snugvl.backends import streams
from snugvl.backends.receiver import Receiver
from snugvl.checkpoint.architecture import ModelConfig, Rope, TextConfig
from snugvl.core.config import EngineConfig, SpeculationName
from snugvl.core.messages import Grammar
from snugvl.core.sampling import SamplingParams
from snugvl.engine import batch, in_flight, predictor, speculation
from snugvl.engine.drafts import NgramProposer, PendingDrafts
from snugvl.engine.engine import Engine, OutputProcessor
from snugvl.engine.graphs import decode
from snugvl.engine.graphs.capture import GraphPool, Work
from snugvl.engine.request import EngineRequest
from snugvl.engine.sampling import masks, sampler
from snugvl.engine.sampling.masks import allowed_bits
from snugvl.engine.sampling.sampler import PendingSample, Sampled
from snugvl.engine.scheduler import Scheduler
from snugvl.engine.speculation import Speculation
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.prompt import PreparedPrompt
from snugvl.inputs.tokenizer import Tokenizer
from speculation import decided

VOCABULARY, HIDDEN = 151_936, 64
KINDS: dict[str, tuple[int, SpeculationName, bool]] = {  # clients, what guesses, whether answers are typed
    "ngram": (1, "ngram", False),
    "mtp": (1, "mtp", False),
    "ngram 8": (8, "ngram", False),
    "free 32": (32, "off", False),
    "typed 32": (32, "off", True),
}
WARM = 20  # steps that don't count


class Idle(torch.nn.Module):
    """A network that computes nothing. `predictors`: with a head that guesses nothing in particular."""

    dtype, device, tower_is_capturable = torch.float32, torch.device("cpu"), True

    def __init__(self, predictors: int, clock: "Clock") -> None:
        super().__init__()
        self.clock = clock
        rope = Rope(1e4, 16, (2, 3, 3), True)
        text = TextConfig(
            HIDDEN, 1, 4, 1, 16, 64, VOCABULARY, 4096, 1e-6, rope, ("full",), predictors=predictors
        )
        self.config = ModelConfig(
            architecture="Idle",
            text=text,
            vision=None,
            tie_word_embeddings=True,
            vision_tokens=None,
            dtype="float32",
        )
        self.logits = torch.zeros(64, VOCABULARY)

    def forward(self, batch: Any, cache: Any) -> torch.Tensor:
        """Logits `[n, vocab]`."""
        self.clock.started()
        return self.logits[: len(batch.input_ids if batch.logit_rows is None else batch.logit_rows)]

    def predict(self, ids: torch.Tensor, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        """Hidden states `[tokens, hidden]`."""
        return hidden

    def guess(self, predicted: torch.Tensor) -> torch.Tensor:
        """Tokens `[tokens]`."""
        return torch.full((len(predicted),), 100)


class Graphs:
    """A capturer whose graphs do nothing."""

    def capture(self, work: Work) -> Work:
        """What stands in for a replay; buffers are made."""
        done = list[bool]()

        def replay() -> None:
            if not done:
                work()
                done.append(True)

        return replay

    def synchronize(self) -> None:
        """Nothing is under way."""

    def drop_pool(self) -> None:
        """There is none."""


class Run:
    """What a decode graph's replay leaves."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        self.logits, self.tokens = logits, tokens

    def results(self) -> list[Sampled]:
        """As `Replay.results`."""
        return [Sampled(token if token >= 0 else None) for token in self.tokens.tolist()]


class Clock:
    """Time of the engine's thread by part: each is charged with what no other part inside of it takes."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._stack: list[str] = ["other"]
        self._since = perf_counter_ns()
        self._begun = self._done = 0  # numbers of what was started last, and of what is known to be over
        self._read = 0  # since when
        self.quiet = False  # whether what starts is part of a step that has been counted

    def enter(self, part: str) -> None:
        """A part begins."""
        self._charge()
        self._stack.append(part)

    def leave(self) -> None:
        """It ends."""
        self._charge()
        self._stack.pop()

    def read(self, number: int) -> None:
        """Results are read, of what was started as the `number`th, or before."""
        if number > self._done:
            self._done, self._read = number, perf_counter_ns()

    def started(self) -> None:
        """A step, or drafts."""
        if self.quiet:
            return
        if self._done == self._begun:
            self._spent["gap"] += (perf_counter_ns() - self._read) / 1000
        self._begun += 1

    def watched(self, kind: type, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Constructor and reader of what waits for the device."""
        make, ask = kind.__init__, self.timed("read back", getattr(kind, name))  # type: ignore[misc]

        def init(each: Any, *arguments: Any) -> None:
            make(each, *arguments)
            each.number = self._begun

        def read(each: Any, *arguments: Any) -> Any:
            found = ask(each, *arguments)
            self.read(each.number)
            return found

        return init, read

    def tick(self) -> None:
        """A call of `step`, and what was delivered of it, is over."""
        self._charge()
        self.steps.append(dict(self._spent))
        self._spent.clear()

    def _charge(self) -> None:
        now = perf_counter_ns()
        if self._stack[-1] == "gpu":
            self._read += now - self._since
        self._spent[self._stack[-1]] += (now - self._since) / 1000
        self._since = now

    def once(self, function: Callable[..., Any], *, counts: bool) -> Callable[..., Any]:
        """`function`, in which a network may run: for a step, or to capture one."""

        def call(*arguments: Any) -> Any:
            if counts:
                self.started()
            before, self.quiet = self.quiet, True
            try:
                return function(*arguments)
            finally:
                self.quiet = before

        return call

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is a part's."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self.leave()

        return call


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch starts: on a GPU nearly all of it is a launch or a copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        if "view" not in func.name() and "slice" not in func.name() and "select" not in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))


class Blind:
    """Guesses three tokens: whether they are right is decided elsewhere."""

    def __init__(self, prompt: Any, generated: list[int]) -> None:
        self._ngrams = NgramProposer(prompt, generated)

    def propose(self, most: int) -> list[int]:
        """After a look-up, as n-grams."""
        self._ngrams.propose(most)
        return [100, 101, 102][:most]


def likeliest(
    logits: torch.Tensor, bits: torch.Tensor | None, dice: random.Random, clock: Clock
) -> torch.Tensor:
    """Tokens that masks allow, at random: the GPU's part."""
    if bits is None:
        return torch.tensor([dice.randrange(1000, 50_000) for _ in range(len(logits))])
    clock.enter("gpu")
    tokens = []
    for row in bits.numpy().view(np.uint32):
        words = row.nonzero()[0]
        at = int(words[dice.randrange(len(words))])
        places = [bit for bit in range(32) if int(row[at]) >> bit & 1]
        tokens.append(min(32 * at + dice.choice(places), VOCABULARY - 1))
    clock.leave()
    return torch.tensor(tokens)


def begin(logits: torch.Tensor, choices: Any) -> PendingSample:
    """As a GPU begins where all are greedy."""
    masks = [choice.grammar for choice in choices]
    return sampler.begin_likeliest(logits, allowed_bits(masks, VOCABULARY) if any(masks) else None)


def replayed(graph: Any, rows: int, clock: Clock) -> Run:
    """A decode graph's replay."""
    if not hasattr(graph, "_given"):
        graph._given = torch.zeros(len(graph._ids), VOCABULARY)
    clock.started()
    graph._results.reverse()
    result = graph._results[0]
    result.copy_(graph._ids % 40 + 1000)
    return Run(graph._given[:rows], result[:rows])


def chosen(graph: Any, allowed: torch.Tensor, rows: int, *_: Any, dice: random.Random, clock: Clock) -> Run:
    """What the graph does that chooses among allowed tokens."""
    tokens = likeliest(graph._logits, allowed[:rows], dice, clock)
    graph._ids[:rows].copy_(tokens)
    return Run(graph._logits, tokens)


@contextmanager
def instruments(clock: Clock) -> Iterator[None]:
    """What stands in for a GPU, and the parts."""
    dice = random.Random(1)
    parts: tuple[tuple[str, Any, str], ...] = (
        ("schedule", Scheduler, "schedule"),
        ("draft", Speculation, "extend"),
        ("draft", Speculation, "ask_ahead"),
        ("draft", Speculation, "waits"),
        ("pack", batch.Staging, "copy"),
        ("pack", batch, "shape_of"),
        ("launch", decode.DecodeGraphs, "start"),
        ("launch", decode.DecodeGraphs, "advance"),
        ("launch", decode.DecodeGraphs, "choose"),
        ("masks", OutputProcessor, "skip_forced"),
        ("masks", masks, "make"),
        ("masks", in_flight, "allowed_bits"),
        ("accept", OutputProcessor, "give"),
        ("draft", predictor.Drafter, "ask"),
    )
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        put(
            decode._DecodeGraph, "_pinned", staticmethod(lambda count, dtype: torch.zeros(count, dtype=dtype))
        )
        put(decode._DecodeGraph, "capture", lambda graph, pool, stream: object())
        put(decode._DecodeGraph, "_replay", lambda graph, rows: replayed(graph, rows, clock))
        put(decode._DecodeGraph, "choose", partialmethod(chosen, dice=dice, clock=clock))
        put(decode.DecodeGraphs, "stream", lambda graphs: None)
        put(sampler, "likeliest", partial(likeliest, dice=dice, clock=clock))
        put(sampler, "_begin", begin)
        put(speculation, "NgramProposer", Blind)
        put(OutputProcessor, "take", clock.timed("accept", decided(OutputProcessor.take)))
        for part, owner, name in parts:
            put(owner, name, clock.timed(part, getattr(owner, name)))
        for kind, name in ((PendingSample, "results"), (Run, "results"), (PendingDrafts, "of")):
            init, read = clock.watched(kind, name)
            put(kind, "__init__", init)
            put(kind, name, read)
        put(GraphPool, "run", clock.once(GraphPool.run, counts=True))
        put(decode.DecodeGraphs, "_graph", clock.once(decode.DecodeGraphs._graph, counts=False))
        yield


def engine_of(kind: str, clock: Clock) -> Engine:
    """An engine as on a GPU with room for all graphs."""
    clients, guesses, _ = KINDS[kind]
    config = EngineConfig(
        num_blocks=4096,
        max_model_len=2048,
        max_num_seqs=max(clients, 32),
        step_graph_bytes=1 << 30,
        speculation=guesses,
    )
    network: Any = Idle(int(guesses == "mtp"), clock)
    engine = Engine(network, config)
    engine._runner.has_graphs = True
    engine._runner.use_graph_pool(GraphPool(Graphs(), network, 1 << 20))
    return engine


def typical(values: Iterable[float]) -> float:
    """The lowest quarter's end: of a step that nobody disturbed."""
    return quantiles(values, n=4)[0]


def measure(kind: str, folder: Path, steps: int) -> dict[str, Any]:
    """Medians over steps of one kind."""
    clock = Clock()
    clients, _, typed = KINDS[kind]
    tokenizer = Tokenizer.from_folder(folder)
    compiler = GrammarCompiler(tokenizer, VOCABULARY)
    source = json.dumps(SCHEMAS["plain"])
    with instruments(clock), torch.inference_mode():
        engine, receivers, ids = engine_of(kind, clock), dict[str, Receiver](), count()
        deliver = clock.timed("deliver", partial(streams.deliver, engine.abort, receivers))
        stops = frozenset(tokenizer.eos_ids)
        sampling = SamplingParams(max_tokens=400, ignore_eos=not typed)

        def add() -> None:
            name = str(next(ids))
            prompt = tuple(range(1000, 1040))
            form = compiler.compile(Grammar("json_schema", source)) if typed else None
            engine.add(EngineRequest(name, prompt, sampling, stop_ids=stops, grammar=form))
            receivers[name] = Receiver(
                tokenizer, PreparedPrompt(prompt, (), 0), sampling, stops, grammar=typed
            )

        def step() -> None:
            while len(engine._requests) < clients:
                add()
            clock.tick()
            for output in engine.step():
                deliver(output)
            clock.tick()

        for _ in range(WARM):
            step()
        clock.steps.clear()
        before = engine.stats
        for _ in range(steps):
            step()
        kept = clock.steps[1::2]
        after = engine.stats
        assert not after.faults, "a step failed"
        with Operations() as counted:  # type: ignore[no-untyped-call]
            for _ in range(50):
                step()
    names = sorted({name for each in kept for name in each} - {"gap", "gpu"})
    row: dict[str, Any] = {
        "kind": kind,
        "tokens a step": (after.generated_tokens - before.generated_tokens) / steps,
    }
    row["host"] = typical(
        sum(spent for name, spent in each.items() if name not in ("gap", "gpu")) for each in kept
    )
    row["gap"] = typical(each.get("gap", 0.0) for each in kept)
    row |= {name: typical(each.get(name, 0.0) for each in kept) for name in names}
    row["steps with a gap"] = sum("gap" in each for each in kept) / len(kept)
    return row | {"torch operations": counted.count / 50}


def arrivals(folder: Path, *, known: bool, requests: int = 32) -> dict[str, float]:
    """Milliseconds until so many requests at once have states of a grammar that is kept, then their masks.

    Of ten waves; `known`: whether how their answers begin is kept, too.
    """
    tokenizer = Tokenizer.from_folder(folder)
    compiler, threads = GrammarCompiler(tokenizer, VOCABULARY), masks.MaskThreads(2, VOCABULARY)
    asked, ends = Grammar("json_schema", json.dumps(SCHEMAS["plain"])), frozenset(tokenizer.eos_ids)
    compiler.compile(asked)
    waves: dict[str, list[float]] = {"grammar": [], "first masks": []}
    for _ in range(10):
        begun = perf_counter_ns()
        states = [compiler.compile(asked).start() for _ in range(requests)]
        started = perf_counter_ns()
        kind: Any = type(states[0])
        with nullcontext() if known else patch.object(kind, "openings", None):
            made = [masks.Mask(state, threads, masks.MaskPace(), ends) for state in states]
        while not all(mask.ready for mask in made):
            threads.wait(1e-4)
        waves["grammar"].append((started - begun) / 1e6)
        waves["first masks"].append((perf_counter_ns() - started) / 1e6)
        del states, made  # their matchers are the next wave's
    return {name: typical(values) for name, values in waves.items()}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, nargs="?", default=Path("src/snugvl/pocket"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    waits = {how: arrivals(options.tokenizer, known=how == "known") for how in ("unknown", "known")}
    for how, waited in waits.items():
        told = ", ".join(f"{value:.1f} ms for their {name}" for name, value in waited.items())
        print(f"32 requests that come at once, whose answers begin in a way that is {how}, wait {told}")
    rows = [measure(kind, options.tokenizer, options.steps) for kind in options.kinds]
    for row in rows:
        print(
            "  ".join(
                f"{name} {value if isinstance(value, str) else round(value, 1)}"
                for name, value in row.items()
            )
        )
    if options.out is not None:
        figures = {"tokenizer": options.tokenizer.name, "arrivals": waits, "kinds": rows}
        machine.save("host_time", figures, options.out)


if __name__ == "__main__":
    main()
