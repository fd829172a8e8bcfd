"""Mixtures with experts in host memory: predicted beside published speeds, and what eight people are led to.

    python -m tests.planner.mixtures [--out benchmarks/results/mixtures.md]

Nothing is measured: machines are described, and plans are those of `snugvl plan`. "Before" is the same plan
where nobody may be led to a mixture. Published figures are those of the project's anchors; what is said of
their machines and commands was read where they were published: llmfit's pull requests 755 (RTX 2080) and 787
(RTX 5070), ik_llama.cpp's 1593 (RTX 5060 Ti), and guides that repeat the GTX 1060's five flags.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.core.sizes import format_size
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import SYSTEMS, Machine
from snugvl.planner.budget import ram_for
from snugvl.planner.commands import beside_gpu_bytes
from snugvl.planner.footprint.total import footprint
from snugvl.planner.plan import Choice
from snugvl.planner.recommend import catalogue_candidates, planned
from snugvl.planner.solve import Candidate, require
from snugvl.planner.speed import roofline
from snugvl.planner.wishes import Wishes

Q4, Q3 = "ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M", "bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q3_K_M"
VL = "Qwen/Qwen3-VL-30B-A3B-Instruct-GGUF:Q4_K_M"


@dataclass(frozen=True, slots=True)
class Row:
    """A published speed, and what is known of the machine and the command.

    Attributes:
        ddr: kind of host memory; None: not said.
        published: tokens a second.
        experts: layers with experts in host memory (`--n-cpu-moe`); None: as planned.
        whole: instead, whole layers there, as few as fit (`-ngl`).
    """

    card: str
    ddr: str | None
    model: str
    published: tuple[float, ...]
    said: str
    cores: int = 8
    experts: int | None = None
    whole: bool = False


HOST_5070: Final = "i9-13900HK, 31 GB of a kind not said, split by a search over `-ngl` and `--n-cpu-moe`"
ROWS: Final[tuple[Row, ...]] = (
    Row("GTX 1060", None, Q4, (17,), "i3-8100, 24 GB of DDR4, `--n-cpu-moe 35`", 4, 35),
    Row("RTX 4060 Ti 8GB", "DDR4-3200", Q4, (41,), "experts in host memory"),
    Row("RTX 4060 Ti 8GB", "DDR4-3200", Q3, (55, 57), "ik_llama, IQ3"),
    Row("RTX 3060 12GB", None, Q4, (42.3,), "Q4_K_M; 51.3 with an expert cache, 69.3 with MTP"),
    Row("RTX 5060 Ti 16GB", None, Q3, (98,), "file not said (ik_llama, IQ3_S: 98.6); 144 with MTP"),
    Row(
        "RTX 5060 Ti 16GB",
        None,
        Q4,
        (52,),
        "`--n-cpu-moe 14`, memory not said; ik_llama 62.3",
        experts=14,
    ),
    Row("RTX 2080", "4xDDR4-3200", VL, (36.7,), "i9-10900X, `--n-cpu-moe 36`; 33.7 with the prompt", 10, 36),
    Row("RTX 5070", None, VL, (25.7,), HOST_5070),
    Row("RTX 5070", "DDR4-3200", VL, (25.7,), "the same, had it DDR4-3200"),
    Row("RTX 5070", "DDR4-3200", VL, (25.7,), "the same, split by layers", whole=True),
    Row("RTX 5070", "DDR4-3200", VL, (25.7,), "the same, with all experts there", experts=48),
    Row("RTX 5060", "DDR5-5600", Q4, (), "nothing published"),
    Row("RTX 3090", None, Q4, (), "nothing in the anchors; it fits whole"),
)
PEOPLE: Final[tuple[tuple[str, str, str, dict[str, Any], str], ...]] = (
    ("gtx-1060", "linux", "16GiB", {}, "35B-A3B at 17, host memory not said"),
    ("RTX 3060 Laptop", "wsl2", "32GiB", {}, "GTX 1060 of 6 GB: 35B-A3B at 17"),
    ("rtx-5060", "wsl2", "32GiB", {"held": "951MiB"}, "RTX 4060 Ti 8 GB: 35B-A3B at 41 (Q4), 55 to 57 (IQ3)"),
    ("RTX 4060 Ti 8GB", "linux", "32GiB", {"ddr": "DDR4-3200"}, "35B-A3B at 41 (Q4), 55 to 57 (IQ3)"),
    ("rtx-3070", "linux", "16GiB", {}, "Qwen3.5-9B Q4_K_M at 55 to 58"),
    ("rtx-3060", "linux", "32GiB", {}, "35B-A3B Q4_K_M at 42.3"),
    ("RTX 5060 Ti 16GB", "wsl2", "64GiB", {}, "35B-A3B at 98"),
    ("rtx-3090", "linux", "64GiB", {}, "RTX 3090 Ti: Qwen3-8B at 133, Qwen3.5-9B at 119"),
)


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def short(model: str) -> str:
    """A model's own name, with its quantisation."""
    return model.partition("/")[2].removeprefix("Qwen_").replace("-GGUF:", " ").replace("-Instruct", "")


def as_published(row: Row, choice: Choice) -> Choice:
    """The choice with the split of the published command, and the speed that follows."""
    model, settings = choice.option.model, choice.settings
    if row.experts is not None:
        settings = settings._replace(host_experts=row.experts)
    if row.whole:
        ways = (
            settings._replace(host_experts=0, offloaded=n) for n in range(model.facts.text.num_layers + 1)
        )
        settings = next(
            each
            for each in ways
            if footprint(model, each, choice.budget.device).total_bytes <= choice.budget.usable_bytes
        )
    return replace(choice, settings=settings, speed=roofline(model, settings, choice.budget))


def predicted(row: Row) -> Choice:
    """The plan of a row's machine for text alone, in a context of 8,192 tokens or more, split as it was."""
    facts = catalogue_facts(row.model)
    assert facts is not None
    machine = replace(describe(row.card, ram="64GiB", ddr=row.ddr), cpu_cores=row.cores)
    return as_published(row, require(planned([Candidate(facts)], machine, Wishes(images=0))))


def speeds() -> Iterator[list[str]]:
    """A row for each published one."""
    for row in ROWS:
        choice = predicted(row)
        rate, assumed = choice.speed.decode_tokens_per_s or 0.0, choice.speed.ddr
        kind = row.ddr or (f"{assumed[0]}, assumed" if assumed else "–")
        ends = f" ({assumed[1]:.0f} to {assumed[2]:.0f})" if assumed else ""
        of = " to ".join(f"{each:g}" for each in row.published) or "–"
        ratio = f"{rate * len(row.published) / sum(row.published):.2f}" if row.published else "–"
        settings, layers = choice.settings, choice.option.model.facts.text.num_layers
        there = f"{settings.offloaded} of {layers} layers whole" if row.whole else ""
        there = there or f"experts of {settings.host_experts} of {layers} layers"
        yield [row.card, kind, short(row.model), there, f"{rate:.1f}{ends}", of, ratio, row.said]


def told(choice: Choice | None) -> str:
    """A plan in a few words."""
    if choice is None:
        return "nothing"
    settings, rate = choice.settings, choice.speed.decode_tokens_per_s or 0.0
    beside = f", {format_size(beside_gpu_bytes(choice))} in host memory" if beside_gpu_bytes(choice) else ""
    weights = "" if choice.option.model.facts.gguf else f" {settings.weights}"
    got = f"{settings.context:,} tokens, images of {choice.tokens:,}"
    return f"{short(choice.option.model.name)}{weights}, about {rate:.0f} tokens/s, {got}{beside}"


def people() -> Iterator[list[str]]:
    """A row for each person: what they are led to, before and now."""
    for card, system, ram, more, said in PEOPLE:
        machine: Machine = describe(card, os=system, ram=ram, **more)
        before = planned(catalogue_candidates(), replace(machine, ram_assumed=True), Wishes()).choice
        plan = planned(catalogue_candidates(), machine, Wishes())
        now, roomier = plan.choice, plan.roomier
        size = f"{machine.gpus[0].name.removeprefix('NVIDIA GeForce ')}, {SYSTEMS[machine.os]}, {ram}"
        same = before is not None and now is not None and before.settings == now.settings
        led = "the same" if same else told(now)
        if roomier is not None:
            led += f"; with {format_size(ram_for(beside_gpu_bytes(roomier)))} for WSL2 {told(roomier)}"
        yield [size, told(before), led, said]


def page() -> str:
    """Both tables."""
    head = [
        "card",
        "its kind",
        "file",
        "in host memory",
        "predicted",
        "published",
        "ratio",
        "said",
    ]
    lines = [
        "# Mixtures with experts in host memory",
        "",
        "Written by `tests/planner/mixtures.py`: plans of described machines, nothing measured. Tokens a",
        "second of one request; in brackets with DDR4-2133 and with DDR5-6000. Rows that llama.cpp itself",
        "gave are predicted up to a quarter too high, where their memory is said. Of the RTX 5070 too little",
        "is known: with DDR4-3200 a split by layers, or all experts there, gives what was published, and the",
        "plan's own split more.",
        "",
        *table(head, speeds()),
        "",
        "What eight people are led to, by a plan without a model:",
        "",
        *table(["machine", "before", "now", "people with such cards publish (tokens/s)"], people()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write them there")
    given = parser.parse_args()
    if given.out is None:
        print(page(), end="")
    else:
        given.out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
