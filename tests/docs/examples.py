"""Examples in the documentation that a test runs: a block below `<!-- live -->`.

    <!-- live -->        against `snugvl serve pocket`
    <!-- live keyed -->  against one that asks for an API key, which is in SNUGVL_API_KEY

Below it, a block under `<!-- prints -->` is exactly what it prints.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.generated import pages

BLOCK = re.compile(
    r"<!-- live(?P<keyed> keyed)? -->\n```(?P<language>\w+)\n(?P<code>.*?)```\n"
    r"(?:<!-- prints -->\n```\w*\n(?P<printed>.*?)```\n)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Example:
    """A block of a page. `printed`: what it must print, where the page says so."""

    name: str
    language: str
    code: str
    keyed: bool
    printed: str | None


def examples_of(path: Path) -> list[Example]:
    """The examples of a page, each named by its line."""
    page = path.read_text(encoding="utf-8")
    return [
        Example(
            f"{path.name}:{page.count(chr(10), 0, found.start()) + 1}",
            found["language"],
            found["code"],
            found["keyed"] is not None,
            found["printed"],
        )
        for found in BLOCK.finditer(page)
    ]


def all_examples() -> list[Example]:
    """Those of every page."""
    return [example for path in pages() for example in examples_of(path)]
