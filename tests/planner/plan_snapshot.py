"""Plans of many described machines × wishes, kept before the planner is moved about, and compared afterwards.

    python -m tests.planner.plan_snapshot --out BEFORE.jsonl.gz [--cases 10000] [--seed 0]
    python -m tests.planner.plan_snapshot --against BEFORE.jsonl.gz [--show 5]

The cases are those of `random_plans.py`: a command line each, run through the real parser. What is kept of a
case is the whole JSON document of `snugvl plan --json`, or the error's text. Compared, it prints how many
documents are equal, and for every field that differs how often, with the first command lines and both
values. Exit code 1 where one differs.
"""

import argparse
import gzip
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snugvl.planner.report.document import document
from tests.planner.random_plans import Case, built, ggufs, planned, random_case


def kept(case: Case) -> Any:
    """The document of a case's plan, or the error's text, as JSON would give it back."""
    outcome = planned(case)
    if outcome.plan is None or outcome.machine is None:
        return {"code": outcome.code, "error": outcome.said}
    return json.loads(json.dumps(document(outcome.plan, outcome.machine)))


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field that differs: its path (places in lists as `[]`), and both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from differences(one, other, f"{path}[]")
    elif before != after:
        yield path, before, after


def write(path: Path, cases: int, seed: int, folder: Path) -> None:
    """One line a case, in the order in which they are drawn."""
    pick = random.Random(seed)
    files = ggufs(folder)
    with gzip.open(path, "wt", encoding="utf-8") as out:
        for number in range(cases):
            case = random_case(pick, files)
            words = [word.replace(str(folder), "GGUFS") for word in case.words]
            plan = json.loads(json.dumps(kept(case)).replace(str(folder), "GGUFS"))
            out.write(json.dumps({"words": words, "plan": plan}, sort_keys=True) + "\n")
            if sys.stderr.isatty() and number % 100 == 0:
                print(f"\r{number} of {cases}", end="", file=sys.stderr)


def compare(before: Path, after: Path, show: int) -> int:
    """Print what differs between two snapshots; the number of cases that do."""
    rows: dict[str, list[str]] = defaultdict(list)
    differ = whole = 0
    with gzip.open(before, "rt", encoding="utf-8") as old, gzip.open(after, "rt", encoding="utf-8") as new:
        for one, other in zip(map(json.loads, old), map(json.loads, new), strict=True):
            whole += 1
            found = list(differences(one, other))
            differ += bool(found)
            for path, was, now in found:
                rows[path].append(f"{' '.join(one['words'])}\n      {was!s:.200}\n   →  {now!s:.200}")
    print(f"{whole - differ:,} of {whole:,} documents are equal")
    for path, examples in sorted(rows.items(), key=lambda row: -len(row[1])):
        print(f"{len(examples):6,} {path}")
        for example in examples[:show]:
            print(f"   {example}")
    return differ


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the snapshot there")
    parser.add_argument("--against", type=Path, help="compare with a snapshot")
    parser.add_argument("--cases", type=int, help="of the snapshot; default: 10000, or as many as it has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=3, help="examples of each field that differs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, built():
        folder = Path(name)
        cases = given.cases
        if cases is None and given.against is not None:
            with gzip.open(given.against, "rt", encoding="utf-8") as old:
                cases = sum(1 for _ in old)
        out = given.out or folder / "now.jsonl.gz"
        write(out, cases or 10_000, given.seed, folder)
        return min(1, compare(given.against, out, given.show)) if given.against else 0


if __name__ == "__main__":
    sys.exit(main())
