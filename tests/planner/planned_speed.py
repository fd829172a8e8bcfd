"""Planned decode speeds beside every measured one, and how many lie within the plan's range.

    python -m tests.planner.planned_speed [--out benchmarks/results/planned_speed.md]
    python -m tests.planner.planned_speed --fit

The rows are those of `benchmarks/results/speeds.csv`, which says where each is from. Nothing is measured.
`--fit` finds the constants of our engine again (`Format.instructions`, `Pace.layer_s` and its like) from the
rows of code that still runs, on whole cards, and says how far rows are off that it didn't see: those held to
30 multiprocessors, whose arithmetic counts four times as much, and each model's by constants from the others.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

from snugvl.checkpoint.catalogue import catalogue_facts, gguf_edition
from snugvl.core.formats import FORMATS
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import pcie_bandwidth
from snugvl.planner import speed
from snugvl.planner.budget import gpu_budget, host_budget
from snugvl.planner.engines import rules_of
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings
from snugvl.planner.speed import BLOCK_INSTRUCTIONS, Speed, rate_text, roofline

ROWS: Final = Path(__file__).parents[2] / "benchmarks/results/speeds.csv"
ROUNDS: Final = 60  # of the search
FITTED: Final = tuple(name for name, form in FORMATS.items() if form.instructions)


@dataclass(frozen=True, slots=True)
class Row:
    """A measured speed; see the head of `benchmarks/results/speeds.csv`."""

    engine: Any
    model: str
    weights: str
    head: str
    card: str
    units: int
    read_rate: float
    tokens: int
    per_s: float
    code: str
    source: str
    slots: int | None = None
    found: int = 0
    link: str = ""
    beside: int = 0

    @property
    def place(self) -> str:
        """The card, or the processor's cores, in words, and where a mixture's experts are."""
        if self.card == "none":
            return f"{self.units} CPU cores"
        if self.slots is not None:
            return f"{self.card}, {self.slots} slots a layer, {self.found} % found, PCIe {self.link}"
        if self.beside:
            return f"{self.card}, experts of {self.beside} layers on the CPU"
        return f"{self.card}, {self.units} multiprocessors" if self.units else self.card

    @property
    def format(self) -> str:
        """Formats of the weights, or the GGUF's type."""
        if ":" in self.model:
            return self.model.rpartition(":")[2]
        return self.weights if self.head == "bf16" else f"{self.weights}, head {self.head}"


def rows() -> tuple[Row, ...]:
    """Every measured row."""
    lines = [line for line in ROWS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple(
        Row(
            each["engine"], each["model"], each["weights"], each["head"], each["card"],
            int(each["units"] or 0), float(each["gb_per_s"] or 0) * 1e9, int(each["tokens"]),
            float(each["per_s"]), each["code"], each["source"],
            int(each["slots"]) if each["slots"] else None, int(each["found"] or 0), each["link"] or "",
            int(each["beside"] or 0),
        )
        for each in csv.DictReader(lines)
    )  # fmt: skip


@cache
def model_of(name: str) -> Inventory:
    """A model of the catalogue; "owner/name:Q4_K_M" is the GGUF that is made of it."""
    base, _, kind = name.partition(":")
    facts = catalogue_facts(base)
    assert facts is not None, base
    return inventory(gguf_edition(facts, name) if kind else facts)


def planned(row: Row) -> Speed:
    """What a plan says of a row."""
    model = model_of(row.model)
    weights: Any = row.weights or ("int8" if row.model.endswith("Q8_0") else "int4")
    settings = Settings(
        row.engine, weights=weights, head=row.head or "bf16", context=2 * row.tokens, images=0,  # type: ignore[arg-type]
        eager=False, on_gpu=row.card != "none", expert_slots=row.slots, host_experts=row.beside,
    ).with_host_memory(page_locked="pageable" not in row.link)  # fmt: skip
    if row.card == "none":
        machine = replace(describe("none", ram="64GiB"), cpu_cores=row.units)
        return roofline(model, settings, host_budget(machine))
    system = "macos" if row.card.startswith("M") else "linux"
    machine = describe(row.card, os=system, ram="64GiB")
    budget = gpu_budget((machine.gpus or machine.others)[0], machine.os)
    if row.units:
        budget = replace(budget, gpu=held(budget.gpu, row))
    if row.slots is None:
        return roofline(model, settings, budget)
    generation, lanes = map(int, row.link.split()[0].split("x"))
    budget = replace(budget, gpu=linked(budget.gpu, pcie_bandwidth(generation, lanes)))
    with patch.object(speed, "hit_rate", lambda share: row.found / 100):  # drawn, not the published one
        return roofline(model, settings, budget)


def linked(gpu: Any, bytes_per_s: float | None) -> Any:
    """The card in a PCI Express slot of that rate."""
    return replace(gpu, link_bandwidth=bytes_per_s)


def held(gpu: Any, row: Row) -> Any:
    """A card as it is to a process that has some of its 132 multiprocessors, with a name of its own."""
    share = rules_of(row.engine).pace.share
    cycles = gpu.cycles_per_s * row.units / 132
    return replace(gpu, name=row.place, bandwidth=row.read_rate / share, cycles_per_s=cycles)


def within(row: Row, found: Speed) -> bool:
    """Whether a measured speed lies in the planned range."""
    return (found.least or 0.0) <= row.per_s <= (found.most or 0.0)


def table(measured: Sequence[Row]) -> Iterator[str]:
    """A row for each measured one, in Markdown."""
    yield "| engine | model | format | where | planned | measured | ratio | in range | from |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in measured:
        found = planned(row)
        figures = found.decode_tokens_per_s, found.least, found.most
        rate, least, most = (each or 0.0 for each in figures)
        name = row.model.partition("/")[2].partition(":")[0].removesuffix("-Instruct")
        basis = "measured" if found.measured else "computed"
        said = f"{rate_text(rate)} ({rate_text(least)} to {rate_text(most)}, {basis})"
        yield (
            f"| {row.engine} | {name} | {row.format} | {row.place} | {said} | {row.per_s:g} | "
            f"{rate / row.per_s:.2f} | {'yes' if within(row, found) else 'no'} | {row.source} |"
        )


def shares(measured: Sequence[Row]) -> Iterator[str]:
    """How many rows lie within their ranges, by engine and by where the range comes from."""
    kinds: dict[str, list[Row]] = {}
    for row in measured:
        basis = "measured" if planned(row).measured else "computed"
        kinds.setdefault(f"{row.engine}, {basis}", []).append(row)
    for kind, found in {**kinds, "all": list(measured)}.items():
        ratios = sorted((planned(row).decode_tokens_per_s or 0.0) / row.per_s for row in found)
        inside = sum(within(row, planned(row)) for row in found)
        yield (
            f"- {kind}: {inside} of {len(found)} within the range; planned : measured {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}, {median(ratios):.2f} in the middle"
        )


def page() -> str:
    """All rows beside their plans, in Markdown."""
    now, before = ([row for row in rows() if (row.code == "before") == old] for old in (False, True))
    lines = [
        "# Planned speeds beside measured ones", "",
        "Written by `tests/planner/planned_speed.py`; tokens a second of one request.", "",
        *shares(now), "", *table(now), "", "By code that has been replaced since, which no plan is of:", "",
        *table(before),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# Fitting


Constants = Mapping[str, float]


def start() -> dict[str, float]:
    """The constants as they are in the code."""
    pace = rules_of("native").pace
    found = {name: FORMATS[name].instructions for name in FITTED}
    return found | {
        "blocks": BLOCK_INSTRUCTIONS, "layer": pace.layer_s * 1e6, "mixed layer": pace.mixed_layer_s * 1e6
    }  # fmt: skip


def errors(measured: Sequence[Row], constants: Constants) -> list[float]:
    """Logarithms of planned over measured, by these constants."""
    rules = rules_of("native")
    pace = replace(rules.pace, layer_s=constants["layer"] / 1e6, mixed_layer_s=constants["mixed layer"] / 1e6)
    with (
        patch.object(type(rules), "pace", pace),
        patch.object(speed, "instructions", lambda name: constants.get(name, 0.0)),
        patch.object(speed, "BLOCK_INSTRUCTIONS", constants["blocks"]),
    ):
        return [log((planned(row).decode_tokens_per_s or 0.0) / row.per_s) for row in measured]


def fitted(measured: Sequence[Row]) -> dict[str, float]:
    """The constants with the least squares of `errors`: each in turn, by smaller and smaller steps."""
    found, steps = start(), dict.fromkeys(start(), 0.2)

    def loss(constants: Constants) -> float:
        return sum(each * each for each in errors(measured, constants))

    best = loss(found)
    for _ in range(ROUNDS):
        for name in found:
            step = 1 + steps[name]
            tries = [found | {name: found[name] * factor} for factor in (step, 1 / step)]
            losses = [loss(each) for each in tries]
            if min(losses) < best:
                best, found = min(losses), tries[losses.index(min(losses))]
            else:
                steps[name] *= 0.5
        if max(steps.values()) < 1e-3:
            break
    return found


def report_fit(measured: Sequence[Row]) -> Iterator[str]:
    """The constants, and how far off rows are that they weren't fitted to."""
    ours = [row for row in measured if row.engine == "native" and row.code == "now" and row.card != "none"]
    ours = [row for row in ours if row.slots is None]  # which are of a link's rate, not of these constants
    whole, few = [row for row in ours if not row.units], [row for row in ours if row.units]
    constants = fitted(whole)
    yield "constants: " + ", ".join(f"{name} {value:.2f}" for name, value in constants.items())
    yield _spread("rows that it saw", errors(whole, constants))
    yield _spread("held to 30 multiprocessors, not seen", errors(few, constants))
    unseen: list[float] = []
    for name in sorted({row.model for row in whole}):
        rest = [row for row in whole if row.model != name]
        seen = {each for row in rest for each in (row.weights, row.head)}
        # Of a format that only this model has there is nothing to learn.
        own = [row for row in whole if row.model == name and {row.weights, row.head} <= seen]
        found = errors(own, fitted(rest)) if own else []
        unseen += found
        if found:
            yield _spread(f"{name}, not seen", found)
    yield _spread("each model by the others", unseen)
    everything = fitted(ours)
    yield "from all: " + ", ".join(f"{name} {value:.2f}" for name, value in everything.items())
    yield _spread("rows that it saw", errors(ours, everything))


def _spread(what: str, found: Sequence[float]) -> str:
    size = exp((sum(each * each for each in found) / len(found)) ** 0.5)
    return (
        f"- {what}: {len(found)} rows, planned : measured {exp(min(found)):.2f} to {exp(max(found)):.2f}, "
        f"typically a factor of {size:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="find the constants again")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = "\n".join(report_fit(rows())) + "\n" if arguments.fit else page()
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
