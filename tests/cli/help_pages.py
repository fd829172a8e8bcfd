"""Writes the reference of docs/cli.md from `--help`: `python -m tests.cli.help_pages`."""

import os
import subprocess
import sys
from pathlib import Path

from snugvl.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MARK = "<!-- help -->\n"
COMMANDS = (
    (),
    *((command.name,) for command in (*app.registered_commands, *app.registered_groups) if command.name),
)


def help_of(*command: str) -> str:
    """What `snugvl COMMAND --help` prints on a terminal 100 columns wide."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SNUGVL_")}
    environment |= {"COLUMNS": "100", "LANG": "C.UTF-8"}
    line = [sys.executable, "-m", "snugvl.cli", *command, "--help"]
    run = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in run.stdout.strip().splitlines())


def reference() -> str:
    """The generated part of the page."""
    sections = []
    for command in COMMANDS:
        title = " ".join(("snugvl", *command))
        sections.append(f"### `{title}`\n```\n{help_of(*command)}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    written, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has no {MARK.strip()}"
    PAGE.write_text(written + MARK + reference(), encoding="utf-8")
