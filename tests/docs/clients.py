"""Tables of docs/clients.md: of each client what its script says of itself, at its version.

A script's heading is its docstring, or the comments that a script for Node begins with: a sentence, then
`Packages:` with what it imports, then `Ran:` with what it does. Versions are those of the pins.
"""

import json
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tests.clients import test_clients
from tests.clients.conftest import (
    EXTENDED_REQUIREMENTS,
    FRAMEWORK_REQUIREMENTS,
    REQUIREMENTS,
    SCRIPTS,
)
from tests.clients.shapes import SHAPES

HEADING = re.compile(r"(.+?)\n\nPackages: (.+?)\nRan: (.+)", re.DOTALL)


@dataclass(frozen=True)
class Script:
    """A script's heading.

    Attributes:
        sentence: what it is about.
        packages: names, as a package index has them.
        ran: what it does.
    """

    sentence: str
    packages: tuple[str, ...]
    ran: str


def heading(path: Path) -> Script:
    """What a script says of itself."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        text = text.split('"""', 2)[1]
    else:
        lines = takewhile(lambda line: line.startswith("//"), text.splitlines())
        text = "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines)
    found = HEADING.match(text.strip())
    if found is None:
        raise ValueError(f"{path.name} begins with no heading: a sentence, `Packages:` and `Ran:`")
    sentence, packages, ran = (" ".join(part.split()) for part in found.groups())
    return Script(sentence.rstrip("."), tuple(packages.split()), ran)


def versions(requirements: Path) -> dict[str, str]:
    """Versions by package, of pinned Python requirements or of a package.json."""
    text = requirements.read_text("utf-8")
    if requirements.suffix == ".json":
        pins: dict[str, str] = json.loads(text)["dependencies"]
        return pins
    lines = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    return {name.lower(): version.split()[0] for name, _, version in (line.partition("==") for line in lines)}


def scripts() -> list[tuple[Path, Path, bool]]:
    """Of each script that the tests run: its path, its pins, and whether only `-m extended` runs it."""
    node = SCRIPTS / "package.json"
    rows = [(f"{name}.py", REQUIREMENTS, False) for name in test_clients.PYTHON]
    rows.append(("openai_sdk.mjs", node, False))
    rows += [(f"{name}.py", FRAMEWORK_REQUIREMENTS, True) for name in test_clients.FRAMEWORKS]
    for name in test_clients.EXTENDED:
        ours = name in test_clients.WITH_FRAMEWORKS
        rows.append((f"{name}.py", FRAMEWORK_REQUIREMENTS if ours else EXTENDED_REQUIREMENTS, True))
    rows += [(f"{name}.mjs", node, True) for name in test_clients.EXTENDED_NODE]
    return [(SCRIPTS / name, pins, extended) for name, pins, extended in rows]


def script_table() -> str:
    """Clients that are run."""
    lines = ["| client | version | what is run | when |", "|---|---|---|---|"]
    for path, pins, extended in scripts():
        script, pinned = heading(path), versions(pins)
        named = ", ".join(f"`{name}` {pinned[name]}" for name in script.packages)
        when = "`-m extended`" if extended else "CI"
        lines.append(f"| {script.sentence} | {named} | {script.ran} | {when} |")
    return "\n".join(lines) + "\n"


def shape_table() -> str:
    """Clients whose requests are sent without them."""
    lines = ["| client | source | route |", "|---|---|---|"]
    lines += [f"| {shape.client} | `{shape.source}` | `{shape.route}` |" for shape in SHAPES]
    return "\n".join(lines) + "\n"
