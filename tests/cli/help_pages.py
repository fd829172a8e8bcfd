"""Writes the reference of docs/cli.md from `--help`: `python -m tests.cli.help_pages`.

Options that several commands explain alike are explained once, in a section of their own.
"""

import io
import os
import re
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import fill
from unittest import mock

from snugvl.cli.app import app, run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MARK = "<!-- help -->\n"
COMMANDS = (
    (),
    *((command.name,) for command in (*app.registered_commands, *app.registered_groups) if command.name),
)
SHARED_BY = 3  # commands that explain an option alike, from which on it is explained once
OPTIONS = "\nOptions:\n"


def help_of(*command: str) -> str:
    """What `snugvl COMMAND --help` prints on a terminal 100 columns wide."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SNUGVL_")}
    environment |= {"COLUMNS": "100", "LANG": "C.UTF-8"}
    with mock.patch.dict(os.environ, environment, clear=True), redirect_stdout(io.StringIO()) as printed:
        assert run([*command, "--help"]) == 0
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def options_of(page: str) -> list[str]:
    """The options of a help page, each with its explanation as it is printed."""
    listed = page.partition(OPTIONS)[2].partition("\n\n")[0]
    return re.split(r"\n(?=  -)", listed) if listed else []


def plain(option: str) -> str:
    """An option without its line breaks and columns, which differ between commands."""
    return " ".join(option.split())


def name_of(option: str) -> str:
    """The long name of an option: `--model` of `-m, --model MODEL`."""
    return re.findall(r"--[a-z-]+", option)[0]


def reference() -> str:
    """The generated part of the page."""
    pages = {" ".join(("snugvl", *command)): help_of(*command) for command in COMMANDS}
    counts = Counter(plain(option) for page in pages.values() for option in options_of(page))
    often = [each for each, count in counts.most_common() if count >= SHARED_BY and name_of(each) != "--help"]
    shared = set({name_of(each): each for each in reversed(often)}.values())  # one explanation a name
    explained: dict[str, str] = {}
    sections = []
    for title, page in pages.items():
        alike = [option for option in options_of(page) if plain(option) in shared]
        if alike:
            said = f"Common options: {', '.join(map(name_of, alike))}"
            own = [option for option in options_of(page) if plain(option) not in shared]
            page = page.replace("\n".join(options_of(page)), "\n".join(own))
            page += f"\n\n{fill(said, 100, break_on_hyphens=False)}"
        explained |= {plain(option): option for option in alike}
        sections.append(f"### `{title}`\n```\n{page}\n```\n")
    common = "### Common options\n```\n" + "\n".join(explained.values()) + "\n```\n"
    return "\n".join((*sections, common))


if __name__ == "__main__":
    written, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has no {MARK.strip()}"
    PAGE.write_text(written + MARK + reference(), encoding="utf-8")
