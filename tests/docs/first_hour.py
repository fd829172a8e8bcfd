"""The transcripts of docs/first_hour.md: `python -m tests.docs.first_hour` types every command again.

A transcript is a block of `console` whose lines after "$ " are typed, in a folder with the examples and the
recordings of machines where a clone has them, with an empty cache. What follows is what they print,
standard error included; times are masked. Each command is a process of its own, forked by one that has
imported what they all import and read the catalogue: that is most of the time of starting them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first_hour.md"
BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
SECONDS = re.compile(r"(?<!at least )\b\d+\.\d s\b")
RECORDINGS = ROOT / "tests" / "hardware" / "recordings"
# Reads lists of words, and writes what each prints as a command; none has run before the first is forked.
FORKS = """
import json, os, sys, tempfile
import snugvl.backends.native.loading, snugvl.cli.plan, snugvl.model
from snugvl.cli.entry import main
from snugvl.planner.inventory import inventory
from snugvl.planner.recommend import catalogue_candidates
for candidate in catalogue_candidates():
    inventory(candidate.facts)
for line in sys.stdin:
    with tempfile.TemporaryFile() as file:
        if not (child := os.fork()):
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            sys.argv = json.loads(line)
            main()
            os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        print(json.dumps(file.read().decode()), flush=True)
"""


def typed(block: str) -> list[str]:
    """The commands of a transcript."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


def transcript(block: str) -> str:
    """The same commands with what they print now."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        (Path(folder) / RECORDINGS.relative_to(ROOT)).parent.mkdir(parents=True)
        (Path(folder) / RECORDINGS.relative_to(ROOT)).symlink_to(RECORDINGS)
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SNUGVL_", "XDG_"))}
        environment = {
            **kept, "PATH": path, "COLUMNS": "100", "HOME": folder, "HF_HOME": f"{folder}/hub",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        commands = typed(block)
        done = subprocess.run(
            [sys.executable, "-c", FORKS], cwd=folder, env=environment, text=True, check=True,
            input="".join(f"{json.dumps(shlex.split(command))}\n" for command in commands),
            stdout=subprocess.PIPE, timeout=2 * PATIENCE_S,
        )  # fmt: skip
        lines = []
        for command, told in zip(commands, done.stdout.splitlines(), strict=True):
            printed = SECONDS.sub("… s", json.loads(told)).rstrip("\n")
            lines.append(f"$ {command}\n{printed}\n" if printed else f"$ {command}\n")
    return "".join(lines)


def main() -> None:
    """Write the page again."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(BLOCK.sub(lambda found: transcript(found[0]), page), "utf-8")


if __name__ == "__main__":
    main()
