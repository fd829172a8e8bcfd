"""Drafted tokens: how fast answers come with speculation off, by n-grams and by its own choice.

    export PYTHONPATH=.
    python benchmarks/speculation.py [MODEL] [--device cuda] [--out FILE]
    python benchmarks/speculation.py smollm2 --dtype bfloat16
    python benchmarks/speculation.py CHECKPOINT --forced          # 2.5 tokens a step, of any weights
    python benchmarks/speculation.py CHECKPOINT --forced --method mtp --step-graphs

Kinds of answers: JSON about pictures (pocket was trained on it), free and typed by the grammar of `scene`; of
other models texts that quote a prompt (a record word for word, the same as JSON, code with a name changed),
the record as JSON, typed, and free ones. Each kind with --speculation off, ngram and auto in turn, `--rounds`
times after one that isn't counted, at several numbers of clients; medians of tokens a second, and of the
ratios within a round. Where others use the processor, too, the ratio of processor time says more. Greedy
answers must be equal, but for ties of rounding: how many differ is printed. `smollm2` is the one real
language model that a package index has (`training/releases.py`).

`--method mtp`: the checkpoint's multi-token predictor guesses instead of n-grams. Of random weights it is
never right, and takes as long. One that is right is `training/predictor.py`'s, which has a measurement of its
own.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import Any
from unittest.mock import patch

from PIL import Image
from training.releases import SMOLLM2

import machine
import snugvl
from masks import PICTURES, Answers, differ, ratio, show, timed
from snugvl.core.messages import Grammar, Picture, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine import speculation
from snugvl.engine.drafts import NgramIndex
from snugvl.engine.engine import Engine
from snugvl.engine.request import Sampled
from snugvl.engine.speculation import Speculation
from snugvl.tasks import conventions
from snugvl.tasks.prompts import SCENE

RECORD = (
    "name: {0} Miller; born: 19{1}; town: Port {0}; profession: engineer; "
    "employer: {0} & Sons Engineering Works; phone: +44 20 7946 0{1}"
)
CODE = """def average_{0}(values, start={1}):
    total = start
    for value in values:
        if value is not None:
            total = total + value
    return total / len(values)
"""
FREE = (
    "Why is the sky blue?",
    "Write three sentences about the sea.",
    "Explain to a child how a bicycle stays upright.",
    "Give me a recipe for pancakes.",
    "What causes the seasons?",
)
FIELDS = ("name", "born", "town", "profession", "employer", "phone")
SCHEMA = {
    "type": "object",
    "properties": {field: {"type": "string", "maxLength": 60} for field in FIELDS},
    "required": list(FIELDS),
    "additionalProperties": False,
}
NAMES = ("Ada", "Grace", "Alan", "Edith", "Kurt", "Emmy", "Carl", "Sofia")


def quoting(index: int) -> str:
    """A question whose answer repeats much of it."""
    name, year = NAMES[index % len(NAMES)], 40 + index
    record, code = RECORD.format(name, year), CODE.format(name.lower(), year)
    return (
        f"Repeat this record word for word, and nothing else:\n{record}",
        f"Write this record as a JSON object:\n{record}",
        f"Rename the variable total to result in this function, and show all of it:\n{code}",
    )[index % 3]


def questions(kind: str, count: int, tokens: int) -> list[Request]:
    """So many of a kind."""
    sampling = SamplingParams(max_tokens=tokens)
    if "pictures" in kind:
        form = conventions.SCENE if kind.startswith("typed") else None
        paths = sorted(PICTURES.glob("*.png"))
        seen = [user(Picture(Image.open(path).convert("RGB")), SCENE) for path in paths]
        return [Request((seen[i % len(paths)],), sampling, grammar=form) for i in range(count)]
    if kind == "typed":
        form = Grammar("json_schema", json.dumps(SCHEMA))
        records = (quoting(3 * index + 1) for index in range(count))
        return [Request((user(record),), sampling, grammar=form) for record in records]
    if kind == "quoting":
        return [Request((user(quoting(index)),), sampling) for index in range(count)]
    return [Request((user(f"{FREE[i % len(FREE)]} ({i})"),), sampling) for i in range(count)]


def guesser_of(engine: Engine, mode: Any) -> Speculation:
    """What guesses in a mode."""
    return Speculation(replace(engine.config, speculation=mode), engine._runner.drafter)


def level(
    model: Any, kind: str, method: str, clients: int, count: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens a second of so many clients in each mode, and what came of their guesses."""
    engine, asked = model.backend._engine, questions(kind, count, tokens)
    modes = ("off", method, "auto")
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    guessers = {mode: guesser_of(engine, mode) for mode in modes}
    said: dict[str, Answers] = {}
    steps, seconds = dict.fromkeys(modes, 0), dict.fromkeys(modes, 0.0)
    for round_ in range(1 + rounds):
        for mode in modes:
            engine._speculation = guessers[mode]
            before, begun = engine.steps, time.process_time()
            said[mode], speed = timed(model, asked, clients)
            if round_:
                speeds[mode].append(speed)
                steps[mode] += engine.steps - before
                seconds[mode] += time.process_time() - begun
    row: dict[str, Any] = {"kind": kind, "method": method, "clients": clients, "requests": count}
    row |= {"tokens": sum(n for _, n in said["off"])}
    row |= {f"{mode}, tokens/s": median(speeds[mode]) for mode in modes}
    for mode in modes[1:]:
        drafted, accepted = guessers[mode].drafted, guessers[mode].accepted
        row[f"{mode} / off"] = ratio(speeds[mode], speeds["off"])
        row[f"{mode}: guessed, right"] = f"{drafted}, {accepted / max(drafted, 1):.0%}"
        row[f"{mode}: processor time / off"] = seconds[mode] / seconds["off"]
        row[f"{mode}: steps / steps off"] = steps[mode] / steps["off"]
        row[f"{mode}: answers that differ"] = differ(said["off"], said[mode])
    return row


class Blind:
    """Guesses what it likes: whether that is right is decided elsewhere."""

    def __init__(self, prompt: NgramIndex, generated: list[int]) -> None:
        """As n-grams."""

    def propose(self, most: int) -> list[int]:
        """Three at most, as a head that predicts some tokens would."""
        return [100, 101, 102][:most]


def decided(take: Callable[..., Any]) -> Callable[..., Any]:
    """`Speculation.take`, for whom one guess and two are right in turn, whatever the network chose."""
    right = cycle((1, 2))

    def decides(
        own: Any, sequence: Any, drafts: tuple[int, ...], results: Iterable[Sampled], *rest: Any, **named: Any
    ) -> Any:
        chosen = list(results)
        if drafts and sequence.grammar is None:
            count = min(next(right), len(drafts))
            chosen[:count] = map(Sampled, drafts[:count])
            if count < len(drafts) and chosen[count].token_id == drafts[count]:
                chosen[count] = Sampled(drafts[count] + 1)
        return take(own, sequence, drafts, chosen, *rest, **named)

    return decides


def forced(
    model: Any, kind: str, method: Any, clients: int, count: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """What two and a half tokens a step bring, whoever guessed them: off, forced and by auto in turn."""
    engine, asked = model.backend._engine, questions("free", count, tokens)
    asked = [replace(each, sampling=replace(each.sampling, ignore_eos=True)) for each in asked]
    modes = {"off": "off", "forced": method, "auto": "auto"}
    guessers = {name: guesser_of(engine, mode) for name, mode in modes.items()}
    speeds: dict[str, list[float]] = {name: [] for name in guessers}
    steps = dict.fromkeys(speeds, 0)
    for round_ in range(1 + rounds):
        for name in speeds:
            engine._speculation = guessers[name]
            before = engine.steps
            with (
                patch.object(speculation, "NgramProposer", Blind),
                patch.object(Speculation, "take", decided(Speculation.take)),
            ):
                _, speed = timed(model, asked, clients)
            if round_:
                speeds[name].append(speed)
                steps[name] += engine.steps - before
    row: dict[str, Any] = {"kind": kind, "method": method, "clients": clients, "requests": count}
    row |= {f"{name}, tokens/s": median(values) for name, values in speeds.items()}
    row |= {f"{name} / off": ratio(speeds[name], speeds["off"]) for name in ("forced", "auto")}
    row |= {f"{name}: steps / steps off": steps[name] / steps["off"] for name in ("forced", "auto")}
    return row


def main() -> None:
    """Measure, print, save."""
    parser = machine.parser(__doc__)
    parser.add_argument("model", nargs="?", default="pocket")
    for name in ("device", "dtype", "weights", "experts", "memory"):
        parser.add_argument(f"--{name}", default=None if name == "memory" else "auto", help="as of `serve`")
    parser.add_argument("--levels", default="1:6,8:16,32:32", help="clients and their requests")
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram")
    parser.add_argument("--forced", action="store_true", help="2.5 tokens a step, whoever guessed them")
    parser.add_argument("--kinds", nargs="+", help="of answers: quoting typed free")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=32, help="sequences to plan for")
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--step-graphs", action="store_true", default=None)
    options = parser.parse_args()
    folder = SMOLLM2.folder() if options.model == "smollm2" else options.model
    names = ("device", "dtype", "weights", "memory", "experts", "concurrency", "context", "step_graphs")
    model: Any = snugvl.load(folder, speculation=options.method, **{n: getattr(options, n) for n in names})
    figures: dict[str, Any] = {"model": options.model, "dtype": model.backend.capabilities.dtype}
    figures |= {"sequences": model.backend._engine.config.max_num_seqs, "levels": []}
    pictures = ["JSON of pictures", "typed, of pictures"]
    kinds = options.kinds or (pictures if options.model == "pocket" else ["quoting", "typed", "free"])
    for kind in ["forced"] if options.forced else kinds:
        for pair in options.levels.split(","):
            clients, count = map(int, pair.split(":"))
            measure = forced if options.forced else level
            row = measure(model, kind, options.method, clients, count, options.tokens, options.rounds)
            figures["levels"].append(row)
            show(row)
    machine.save("speculation", figures, options.out)


if __name__ == "__main__":
    main()
