"""Writes the reference of docs/cli.md from `--help`: `python -m tests.cli.help_pages`."""

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from snugvl.cli.app import app, run

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
    with mock.patch.dict(os.environ, environment, clear=True), redirect_stdout(io.StringIO()) as printed:
        assert run([*command, "--help"]) == 0
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


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
