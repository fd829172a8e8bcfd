"""Typed answers against free ones: how fast, alone and in company, and whether they are the same.

    python benchmarks/masks.py [MODEL] [--device cuda] [--out FILE]
    python benchmarks/masks.py CHECKPOINT --concurrency 32

Answers that follow a JSON schema are given three times: with the tokens that the schema forces computed one
by one, with those appended at once (`EngineConfig.skip_forced`), and as many free tokens to each request. All
three in turn, `--rounds` times, after a round that isn't counted; medians of tokens a second, and of the
ratios within a round. Greedy answers must be equal: one by one and at once, alone and in company.

`--served` measures as `snugvl serve` works: the engine has a process to itself, and clients don't take turns
with it in one interpreter. Then forced tokens are always appended at once.

`--schema limited` has a `maxLength` for each string, near which a mask takes longest; `plain` has none.
Then tasks: objects and boxes of the pictures in `examples/images`, tokens a second and seconds an answer,
with forced tokens one by one and at once. `--step-graphs` captures CUDA graphs of these steps.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import machine
import snugvl
from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine
from snugvl.core.messages import Grammar, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import SnugvlError
from snugvl.model import Model

PICTURES = Path(__file__).parent.parent / "examples" / "images"


def schema(*, limited: bool) -> dict[str, Any]:
    """A small one; `limited`: with a `maxLength` for each string, near which masks take longest."""
    title, tag = ({"maxLength": 60}, {"maxLength": 20}) if limited else ({}, {})
    tags = {"type": "array", "items": {"type": "string", **tag}, "minItems": 3, "maxItems": 6}
    year = {"type": "integer", "minimum": 1900, "maximum": 2100}
    properties = {"title": {"type": "string", **title}, "year": year, "tags": tags}
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS = {"limited": schema(limited=True), "plain": schema(limited=False)}
KINDS = ("one by one", "at once", "free")
Answers = list[tuple[str, int]]
"""Texts, and their tokens."""


@contextmanager
def forced(model: Any, *, at_once: bool) -> Iterator[None]:
    """Whether forced tokens are appended at once, meanwhile."""
    engine = model.backend._engine
    kept = engine.config
    engine.config = replace(kept, skip_forced=at_once)
    try:
        yield
    finally:
        engine.config = kept


def question(index: int, *, tokens: int, typed: str | None) -> Request:
    """One of many. `typed`: its schema's name."""
    grammar = None if typed is None else Grammar("json_schema", json.dumps(SCHEMAS[typed]))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=typed is None)
    return Request((user(f"Describe thing number {index}."),), sampling, grammar=grammar)


def answered(model: Any, asked: Request) -> tuple[str, int]:
    """The text of an answer, and its tokens."""
    text, tokens = "", 0
    for delta in model.backend.submit(asked):
        text += delta.text
        tokens = tokens if delta.usage is None else delta.usage.completion_tokens
    return text, tokens


def timed(model: Any, requests: list[Request], clients: int) -> tuple[Answers, float]:
    """The answers, and tokens a second of all clients."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda each: answered(model, each), requests))
    return answers, sum(tokens for _, tokens in answers) / (time.perf_counter() - start)


def ratio(speeds: list[float], others: list[float]) -> float:
    """Median of the ratios within a round."""
    return median(mine / other for mine, other in zip(speeds, others, strict=True))


def differ(answers: Answers, others: Answers) -> int:
    """How many answers differ."""
    return sum(mine != other for mine, other in zip(answers, others, strict=True))


def level(
    model: Any, form: str, clients: int, count: int, tokens: int, rounds: int
) -> tuple[dict[str, Any], Answers]:
    """Tokens a second of so many clients, and the typed answers, which must always be the same."""
    typed = [question(index, tokens=tokens, typed=form) for index in range(count)]
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found: list[Answers] = []
    for round_ in range(1 + rounds):
        measured = {}
        for kind in KINDS[:2]:
            with forced(model, at_once=kind == "at once"):
                answers, measured[kind] = timed(model, typed, clients)
            found.append(answers)
        lengths = [tokens for _, tokens in found[-1]]
        free = [question(i, tokens=length, typed=None) for i, length in enumerate(lengths)]
        _, measured["free"] = timed(model, free, clients)
        for kind in KINDS if round_ else ():
            speeds[kind].append(measured[kind])
    row: dict[str, Any] = {"clients": clients, "requests": count}
    row |= {f"{kind}, tokens/s": median(speeds[kind]) for kind in KINDS}
    for kind in KINDS[:2]:
        row[f"{kind} / free"] = ratio(speeds[kind], speeds["free"])
    row["answers that differ"] = sum(differ(found[0], other) for other in found[1:])
    return row, found[0]


async def served(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second of each level, typed and free, of an engine in a process of its own."""
    choice = EngineChoice(
        options.model, device=options.device, concurrency=options.concurrency, step_graphs=options.step_graphs
    )
    service = SupervisedEngine(choice)
    await service.start()
    while service.health.state != "ready":
        if service.failure is not None:
            raise service.failure
        await asyncio.sleep(0.1)
    try:
        return [
            await served_level(service, options, *map(int, pair.split(":")))
            for pair in options.levels.split(",")
        ]
    finally:
        await service.close()


async def served_level(
    service: SupervisedEngine, options: argparse.Namespace, clients: int, count: int
) -> dict[str, Any]:
    """One of them."""

    async def answered(asked: Request) -> tuple[str, int]:
        text, tokens = "", 0
        async with places:
            async for delta in await service.submit(asked):
                text += delta.text
                tokens = tokens if delta.usage is None else delta.usage.completion_tokens
        return text, tokens

    async def timed(requests: list[Request]) -> tuple[Answers, float]:
        start = time.perf_counter()
        answers = await asyncio.gather(*map(answered, requests))
        return answers, sum(tokens for _, tokens in answers) / (time.perf_counter() - start)

    places, found = asyncio.Semaphore(clients), list[Answers]()
    typed = [question(index, tokens=options.tokens, typed=options.schema) for index in range(count)]
    speeds: dict[str, list[float]] = {"typed": [], "free": []}
    for round_ in range(2 + options.rounds):  # graphs of sizes that come again are recorded in the second
        answers, measured = await timed(typed)
        found.append(answers)
        free = [question(i, tokens=length, typed=None) for i, (_, length) in enumerate(answers)]
        _, other = await timed(free)
        if round_ > 1:
            speeds["typed"].append(measured)
            speeds["free"].append(other)
    row: dict[str, Any] = {"clients": clients, "requests": count}
    row |= {f"{kind}, tokens/s": median(values) for kind, values in speeds.items()}
    row["typed / free"] = ratio(speeds["typed"], speeds["free"])
    row["answers that differ"] = sum(differ(found[0], other) for other in found[1:])
    row["complete JSON"] = f"{sum(_is_json(text) for text, _ in found[0])} of {count}"
    show(row)
    return row


def task(model: Any, name: str, ask: Callable[[Path], object], rounds: int) -> dict[str, Any]:
    """A task on all pictures, with forced tokens one by one and at once."""
    engine, pictures = model.backend._engine, sorted(PICTURES.glob("*.png"))
    row: dict[str, Any] = {"task": name, "answers": len(pictures)}
    results = []
    for kind in KINDS[:2]:
        seconds, rates = [], []
        with forced(model, at_once=kind == "at once"):
            for round_ in range(1 + rounds):
                before, skipped = engine.stats.generated_tokens, engine.stats.forced_tokens
                start = time.perf_counter()
                said = [ask(picture) for picture in pictures]
                took, tokens = time.perf_counter() - start, engine.stats.generated_tokens - before
                skipped = engine.stats.forced_tokens - skipped
                if round_:
                    seconds.append(took / len(pictures))
                    rates.append(tokens / took)
        results.append(said)
        row |= {f"{kind}, tokens/s": median(rates), f"{kind}, seconds an answer": median(seconds)}
        row |= {"tokens": tokens, "of them at once": skipped}
    row["the same answers"] = results[0] == results[1]
    return row


def show(row: dict[str, Any]) -> None:
    """A line a figure."""
    for name, figure in row.items():
        print(f"  {name:32} {figure if not isinstance(figure, float) else round(figure, 3)}")
    print(flush=True)


def main() -> None:
    """Measure, print, save."""
    parser = machine.parser(__doc__)
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--levels", default="1:12,8:48,32:96", help="clients and their requests")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, help="sequences to plan for")
    parser.add_argument("--step-graphs", action="store_true", default=None)
    parser.add_argument(
        "--schema", choices=SCHEMAS, default="limited", help="strings with a limit, or without"
    )
    parser.add_argument("--served", action="store_true", help="by an engine in a process of its own")
    options = parser.parse_args()
    figures: dict[str, Any]
    if options.served:
        figures = {"model": options.model, "schema": options.schema, "served": asyncio.run(served(options))}
        machine.save("masks", figures, options.out)
        return
    model: Model = snugvl.load(
        options.model, device=options.device, concurrency=options.concurrency, step_graphs=options.step_graphs
    )
    figures = {"model": options.model, "schema": options.schema, "levels": [], "tasks": []}
    alone: Answers = []
    for pair in options.levels.split(","):
        clients, count = map(int, pair.split(":"))
        row, answers = level(model, options.schema, clients, count, options.tokens, options.rounds)
        alone = alone or answers
        pairs = list(zip(alone, answers, strict=False))
        row |= {"the same as in the first level": f"{sum(a == b for a, b in pairs)} of {len(pairs)}"}
        row |= {"complete JSON": f"{sum(_is_json(text) for text, _ in answers)} of {count}"}
        figures["levels"].append(row)
        show(row)
    for name, ask in (("detect", model.detect), ("scene", model.scene)):
        try:
            row = task(model, name, ask, options.rounds)
        except SnugvlError as error:  # random weights say nothing that can be read as boxes
            row = {"task": name, "error": str(error)[:200]}
        figures["tasks"].append(row)
        show(row)
    machine.save("masks", figures, options.out)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
