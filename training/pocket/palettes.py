"""The palettes that people take colours from, Material and Tailwind, and what people call their shades.

A family of one name counts with its middle shades; a family between two names ("teal": cyan or green)
counts apart, with either name. The palest and darkest shades of a family are left out: people disagree
about them.
"""

import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from training.pocket.world import Rgb

PACKAGES: Final = {"material": "material-colors@1.2.6", "tailwind": "tailwindcss@3.4.17"}
_TAILWIND: Final = (
    "slate gray zinc neutral stone red orange amber yellow lime green emerald teal cyan sky blue indigo "
    "violet purple fuchsia pink rose"
)

# family: (names that are right, the lightest and the darkest shade that count, accents that count)
FAMILIES: Final[dict[str, dict[str, tuple[tuple[str, ...], int, int, tuple[str, ...]]]]] = {
    "material": {
        "red": (("red",), 400, 900, ("a200", "a400", "a700")),
        "pink": (("pink",), 200, 500, ("a100", "a200")),
        "purple": (("purple",), 300, 900, ("a700",)),
        "deep-purple": (("purple",), 300, 700, ()),
        "indigo": (("blue",), 300, 900, ("a200", "a400", "a700")),
        "blue": (("blue",), 200, 900, ("a100", "a200", "a400", "a700")),
        "light-blue": (("blue",), 300, 900, ("a200", "a400", "a700")),
        "cyan": (("cyan", "blue"), 300, 900, ("a200", "a400", "a700")),
        "teal": (("cyan", "green"), 300, 900, ("a400", "a700")),
        "green": (("green",), 300, 900, ("a200", "a400", "a700")),
        "light-green": (("green",), 300, 900, ("a200", "a400", "a700")),
        "lime": (("green", "yellow"), 400, 900, ("a200", "a400", "a700")),
        "yellow": (("yellow",), 300, 600, ("a200", "a400", "a700")),
        "amber": (("yellow", "orange"), 300, 900, ("a200", "a400", "a700")),
        "orange": (("orange",), 300, 900, ("a200", "a400", "a700")),
        "deep-orange": (("orange", "red"), 400, 900, ("a200", "a400", "a700")),
        "brown": (("brown",), 500, 900, ()),
        "grey": (("gray",), 400, 800, ()),
        "blue-grey": (("gray", "blue"), 300, 700, ()),
    },
    "tailwind": {
        "slate": (("gray", "blue"), 400, 700, ()),
        "gray": (("gray",), 400, 600, ()),
        "zinc": (("gray",), 400, 700, ()),
        "neutral": (("gray",), 400, 700, ()),
        "stone": (("gray",), 400, 700, ()),
        "red": (("red",), 500, 800, ()),
        "orange": (("orange",), 400, 600, ()),
        "amber": (("yellow", "orange"), 300, 600, ()),
        "yellow": (("yellow",), 300, 500, ()),
        "lime": (("green",), 400, 900, ()),
        "green": (("green",), 300, 900, ()),
        "emerald": (("green", "cyan"), 400, 900, ()),
        "teal": (("cyan", "green"), 300, 800, ()),
        "cyan": (("cyan", "blue"), 300, 800, ()),
        "sky": (("blue",), 400, 900, ()),
        "blue": (("blue",), 300, 950, ()),
        "indigo": (("blue", "purple"), 400, 900, ()),
        "violet": (("purple",), 400, 800, ()),
        "purple": (("purple",), 300, 900, ()),
        "fuchsia": (("purple", "pink"), 400, 900, ()),
        "pink": (("pink",), 200, 600, ()),
        "rose": (("pink", "red"), 400, 700, ()),
    },
}


@dataclass(frozen=True, slots=True)
class Shade:
    """One shade that counts, and the names that are right for it."""

    palette: str
    name: str  # "red-500"
    rgb: Rgb
    right: tuple[str, ...]


def build(path: Path, downloads: Path) -> None:
    """Write both palettes, {palette: {family: {shade: "#rrggbb"}}}, from their npm packages."""
    if path.exists():
        return
    downloads.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES.values():
        subprocess.run(
            ["npm", "pack", "--silent", package], cwd=downloads, check=True, capture_output=True, text=True
        )
    with tarfile.open(downloads / (PACKAGES["material"].replace("@", "-") + ".tgz")) as archive:
        member = archive.extractfile("package/dist/colors.json")
        assert member is not None
        material = {f: s for f, s in json.load(member).items() if isinstance(s, dict)}
    with tarfile.open(downloads / (PACKAGES["tailwind"].replace("@", "-") + ".tgz")) as archive:
        archive.extract("package/src/public/colors.js", downloads, filter="data")
    source = (downloads / "package/src/public/colors.js").read_text()
    found = {f: _tailwind_family(source, f) for f in _TAILWIND.split()}
    path.write_text(json.dumps({"material": material, "tailwind": found}))


def _tailwind_family(source: str, family: str) -> dict[str, str]:
    """{shade: "#rrggbb"} of a family from Tailwind's colors.js."""
    body = source.split(f"  {family}: {{", 1)[1].split("}", 1)[0]
    pairs = (line.split(":") for line in body.splitlines() if "#" in line)
    return {shade.strip(): value.strip(" ',") for shade, value in pairs}


def shades(path: Path) -> list[Shade]:
    """The shades that count of the palettes in `path`."""
    out = []
    for palette, families in json.loads(path.read_text()).items():
        for family, values in families.items():
            rule = FAMILIES[palette].get(family)
            if rule is None:
                continue
            right, first, last, accents = rule
            for shade, value in values.items():
                counts = first <= int(shade) <= last if shade.isdigit() else shade in accents
                if counts and value.startswith("#"):
                    r, g, b = (int(value[i : i + 2], 16) for i in (1, 3, 5))
                    out.append(Shade(palette, f"{family}-{shade}", (r, g, b), right))
    return out
