"""Mixtures with experts in host memory: predicted beside published speeds, and what eight people are led to.

    python benchmarks/mixtures.py [--out benchmarks/results/mixtures.md]

Nothing is measured: machines are described, and plans are those of `snugvl plan`. "Before" is the same plan
where nobody may be led to a mixture. Published figures are those of the project's anchors, which say no more
of the machines than stands here.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.core.sizes import format_size
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import SYSTEMS, Machine
from snugvl.planner.commands import beside_gpu_bytes
from snugvl.planner.plan import Choice
from snugvl.planner.recommend import catalogue_candidates, planned
from snugvl.planner.solve import Candidate, require
from snugvl.planner.wishes import Wishes

Q4, Q3 = "ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M", "bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q3_K_M"
VL = "Qwen/Qwen3-VL-30B-A3B-Instruct-GGUF:Q4_K_M"
# Card, kind of host memory where it is known, file, published tokens a second, what was said of it.
ROWS: Final[tuple[tuple[str, str | None, str, tuple[float, ...], str], ...]] = (
    ("GTX 1060", None, Q4, (17,), "35B-A3B on 6 GB, file and memory not said"),
    ("RTX 4060 Ti 8GB", "DDR4-3200", Q4, (41,), "experts in host memory"),
    ("RTX 4060 Ti 8GB", "DDR4-3200", Q3, (55, 57), "ik_llama, IQ3"),
    ("RTX 3060 12GB", None, Q4, (42.3,), "Q4_K_M; 51.3 with an expert cache, 69.3 with MTP"),
    ("RTX 5060 Ti 16GB", None, Q3, (98,), "file not said; 144 with MTP"),
    ("RTX 2080", None, VL, (33.7,), "30B-A3B, Q4_K_M, part in host memory"),
    ("RTX 5070", None, VL, (25.7,), "30B-A3B, Q4_K_M: less than an RTX 2080 has; not reproduced"),
    ("RTX 5060", "DDR5-5600", Q4, (), "nothing published"),
    ("RTX 3090", None, Q4, (), "nothing in the anchors; it fits whole"),
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


def speeds() -> Iterator[list[str]]:
    """A row for each published one: text alone, in a context of 8,192 tokens or more."""
    for card, ddr, model, published, said in ROWS:
        facts = catalogue_facts(model)
        assert facts is not None
        choice = require(planned([Candidate(facts)], describe(card, ram="64GiB", ddr=ddr), Wishes(images=0)))
        rate, assumed = choice.speed.decode_tokens_per_s or 0.0, choice.speed.ddr
        kind = ddr or (f"{assumed[0]}, assumed" if assumed else "–")
        ends = f" ({assumed[1]:.0f} to {assumed[2]:.0f})" if assumed else ""
        of = " to ".join(f"{each:g}" for each in published) or "–"
        ratio = f"{rate * len(published) / sum(published):.2f}" if published else "–"
        experts = f"{choice.settings.host_experts} of {choice.option.model.facts.text.num_layers}"
        yield [card, kind, short(model), experts, f"{rate:.1f}{ends}", of, ratio, said]


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
        now = planned(catalogue_candidates(), machine, Wishes()).choice
        size = f"{machine.gpus[0].name.removeprefix('NVIDIA GeForce ')}, {SYSTEMS[machine.os]}, {ram}"
        same = before is not None and now is not None and before.settings == now.settings
        yield [size, told(before), "the same" if same else told(now), said]


def page() -> str:
    """Both tables."""
    head = [
        "card",
        "host memory",
        "file",
        "layers with experts there",
        "predicted",
        "published",
        "ratio",
        "said",
    ]
    lines = [
        "# Mixtures with experts in host memory",
        "",
        "Written by `benchmarks/mixtures.py`: plans of described machines, nothing measured. Tokens a second",
        "of one request; in brackets with DDR4-2133 and with DDR5-6000.",
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
