"""Failures from public threads, as `snugvl doctor --log` explains them: thread, causes, what to do.

python benchmarks/failure_logs.py
"""

import sys
from pathlib import Path

from snugvl.diagnose.explain import explain_file
from snugvl.diagnose.result import Diagnosis

LOGS = Path(__file__).resolve().parent.parent / "tests" / "diagnose" / "logs"


def what_to_do(found: Diagnosis) -> str:
    """The changed command, or the changed flags, or the first note; for an unknown failure its last word."""
    if found.command:
        return f"`{found.command}`"
    flags = [
        f"`{change.flag}{' ' if change.flag.startswith('-') else '='}{change.new}`".replace(" `", "`")
        for change in found.changes
        if change.new is not None
    ]
    said = ", ".join(flags) or next(iter(found.notes), "")
    return said or (found.causes[0].explanation if found.causes else "")


def main() -> None:
    """Print the table."""
    rows = ["| thread | cause | what to do |", "|---|---|---|"]
    for path in sorted(LOGS.glob("thread_*.log")):
        thread = path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# thread: ")
        found = explain_file(path)
        causes = "; ".join(cause.title for cause in found.causes) or "none found"
        said = what_to_do(found).replace("|", "\\|")
        rows.append(f"| {thread} | {causes} | {said} |")
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
