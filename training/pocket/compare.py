"""Measure a newly trained folder beside the shipped weights, and say whether it may take their place.

    python -m training.pocket.compare --model .pocket/run/model --out .pocket/run/measured

The same pictures and questions as in the shipped figures, the quickest measure first: strips, the edges of
the world, OpenMoji, then the first scenes of the final split. A measurement whose file lies in `--out` is not
made again. The exit status is 1 where a measure that met its target misses it now.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.pocket import edges, evaluate

SHIPPED = Path(__file__).parents[2] / "benchmarks/results/pocket"
FINAL, STRIPS, UNSEEN = 1000, 200, 150  # scenes
TARGETS: Final = {
    "questions": 0.95, "caption facts": 0.95, "F1@0.5": 0.95, "mean IoU": 0.85, "words": 0.9,
}  # fmt: skip
UNSEEN_TARGET = 0.85  # of questions about a set of pictograms that training never saw
EDGE_TARGET = 0.95  # of shades, and of questions beyond its world


@dataclass(frozen=True)
class Row:
    """One measure before and after; a share, or NaN where it was not measured."""

    name: str
    target: float
    before: float
    after: float

    @property
    def verdict(self) -> str:
        """met, gained, missed, or lost."""
        was, now = self.before >= self.target, self.after >= self.target
        if math.isnan(self.before):
            return "met" if now else "missed"
        return ("met" if was else "gained") if now else ("lost" if was else "missed")


def jobs(folder: Path, processes: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """The measurements by the name of their file, quickest first."""

    def scenes(count: int, split: str = "final", **options: Any) -> Callable[[], dict[str, Any]]:
        threads = 32 // processes
        return lambda: evaluate.evaluate(folder, split, 0, count, threads, processes, **options)

    return {
        "strips": scenes(STRIPS, strips=True),
        "edges": lambda: edges.measure(folder, 16),
        "openmoji": scenes(UNSEEN, "dev", pictogram_set="openmoji"),
        "evaluation": scenes(FINAL),
    }


def rows(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Row]:
    """What a measurement says: the tiers of scenes, or the edges."""
    if name == "edges":
        yield Row("palettes", EDGE_TARGET, before["palettes"]["all"], after["palettes"]["all"])
        was, now = (part["honesty"]["right"] for part in (before, after))
        yield Row("honesty", EDGE_TARGET, was["all"], now["all"])
        return
    known = before.get("tiers", {})
    if name == "openmoji":
        yield Row("openmoji", UNSEEN_TARGET, known["all"]["questions"], after["tiers"]["all"]["questions"])
        return
    for tier, found in after["tiers"].items():
        for measure, target in TARGETS.items():
            if measure in found:
                was = known.get(tier, {}).get(measure, math.nan)
                yield Row(f"{name}, {tier}: {measure}", target, was, found[measure])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--shipped", type=Path, default=SHIPPED, help="folder of the figures before")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="some of: strips, edges, openmoji, evaluation")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lost = False
    for name, work in jobs(args.model, args.processes).items():
        if args.only and name not in args.only:
            continue
        path, known = args.out / f"{name}.json", args.shipped / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(work(), indent=1) + "\n")
        before = json.loads(known.read_text()) if known.exists() else {}
        for row in rows(name, before, json.loads(path.read_text())):
            lost |= row.verdict == "lost"
            print(f"{row.verdict:7}{row.before:8.4f} →{row.after:8.4f}  target {row.target:.2f}  {row.name}",
                  flush=True)  # fmt: skip
    raise SystemExit(int(lost))


if __name__ == "__main__":
    main()
