"""Writes docs/ladder.md: what fits on cards from 8 to 80 GB, by the planner itself.

    python -m tests.docs.ladder            # write it
    python -m tests.docs.ladder --check    # exit 1 when it is stale

A test of the extended group runs the check, and one of every suite compares some of its rows, so the page
can't say anything that the planner doesn't.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from snugvl.core.sizes import format_size, megapixels
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import SYSTEMS, Machine
from snugvl.planner.commands import next_command
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.vision import scales
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.recommend import catalogue_candidates
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.speed import rate_text
from snugvl.planner.wishes import Wishes

PAGE = Path(__file__).parents[2] / "docs" / "ladder.md"
CARDS = (
    (8, "rtx-5060"), (12, "rtx-3060"), (16, "rtx-5060-ti"), (24, "rtx-4090"), (32, "rtx-5090"), (48, "l40s"),
    (80, "h100"),
)  # fmt: skip
SYSTEM_HELD = (("wsl2", "1GiB"), ("linux", "512MiB"))
HEADER = """\
# The ladder: what fits where

The planner's answers for described cards, written by `tests/docs/ladder.py`. **Nothing here was measured on
these cards**; [plan.md](plan.md) has the formulas, and what they were checked against. Each row is
`snugvl plan --gpu NAME --os SYSTEM --held SIZE --offline`: the best model of the catalogue, with one image a
request and room for one whole context. The desktop is taken to hold 1 GiB under WSL2, and 512 MiB on Linux.
Speeds are likely ones of one request, with their computed range ([how](plan.md#speed)).
"""


def page() -> str:
    """The whole page."""
    candidates = catalogue_candidates()
    plans = [(size, machine, solve(candidates, machine, Wishes())) for size, machine in machines()]
    parts = [HEADER, "## The best that fits\n", *best_table(plans), "", "## The commands\n", *commands(plans)]
    parts += [
        "",
        "## Each model\n",
        "The best way to run each: engine, tokens of context and of an image.\n",
    ]
    parts += model_table(candidates)
    return "\n".join(parts) + "\n"


def machines() -> list[tuple[int, Machine]]:
    """Every card under both systems."""
    return [
        (size, describe(name, os=system, held=held, vram=f"{size}GB" if name == "rtx-5060-ti" else None))
        for size, name in CARDS
        for system, held in SYSTEM_HELD
    ]


def best_table(plans: Sequence[tuple[int, Machine, Plan]]) -> list[str]:
    """One row a card and system."""
    lines = ["| card | system | model | weights | engine | context | image | memory | tokens/s |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for size, machine, plan in plans:
        where = f"{size} GB ({short(machine.gpus[0].name)}) | {SYSTEMS[machine.os]}"
        lines.append(
            f"| {where} | {cells(plan.choice)} |"
            if plan.choice
            else f"| {where} | nothing fits | | | | | | |"
        )
    return lines


def cells(choice: Choice) -> str:
    """The columns of one choice."""
    settings, speed = choice.settings, choice.speed
    image = f"{choice.tokens:,} tokens"
    if scales(choice.option.model) and settings.max_pixels:
        image += f" ({megapixels(settings.max_pixels)})"
    memory = f"{format_size(choice.footprint.total_bytes)} of {format_size(choice.budget.usable_bytes)}"
    return " | ".join(
        [
            short(choice.option.model.name),
            settings.weights_name,
            rules_of(settings.engine).title,
            f"{settings.context:,}",
            image,
            memory,
            f"{rate_text(speed.decode_tokens_per_s)} ({rate_text(speed.least)} to {rate_text(speed.most)})"
            if speed.decode_tokens_per_s and speed.least and speed.most
            else "–",
        ]
    )


def commands(plans: Sequence[tuple[int, Machine, Plan]]) -> list[str]:
    """Every command once, with the cards that it is for."""
    cards: dict[str, list[str]] = {}
    for size, machine, plan in plans:
        if plan.choice:
            command = next_command(plan.choice, plan.wishes)
            cards.setdefault(command, []).append(f"{size} GB {SYSTEMS[machine.os]}")
    return [f"    {command}   # {', '.join(found)}" for command, found in cards.items()]


def model_table(candidates: Sequence[Candidate]) -> list[str]:
    """One row a published form of a model, one column a card under WSL2."""
    cards = [(size, machine) for size, machine in machines() if machine.os == "wsl2"]
    lines = ["| model | " + " | ".join(f"{size} GB" for size, _ in cards) + " |"]
    lines.append("|---|" + "---|" * len(cards))
    for name, fits in rows(candidates, [machine for _, machine in cards]):
        lines.append("| " + " | ".join((name, *fits)) + " |")
    note = (
        "All under WSL2, which leaves the least memory. –: nothing fits. *: slow, with layers in host memory."
    )
    return [*lines, "", note]


def rows(candidates: Sequence[Candidate], cards: Sequence[Machine]) -> Iterator[tuple[str, list[str]]]:
    """Of each model its name, and its cells."""
    for candidate in sorted(candidates, key=lambda each: each.quality):
        choices = [solve([candidate], machine, Wishes()).choice for machine in cards]
        yield short(candidate.facts.name), [cell(choice) if choice else "–" for choice in choices]


def cell(choice: Choice) -> str:
    """Engine, context and tokens of an image."""
    engine = choice.settings.engine + ("*" if choice.option.offload else "")
    return f"{engine}, {choice.settings.context:,}, {choice.tokens:,}"


def short(name: str) -> str:
    """Without the vendor."""
    return name.split("/")[-1].removeprefix("NVIDIA ").removeprefix("GeForce ")


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    arguments = parser.parse_args()
    text = page()
    if not arguments.check:
        PAGE.write_text(text, encoding="utf-8")
        print(PAGE)
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is stale; run: python -m tests.docs.ladder")


if __name__ == "__main__":
    main()
