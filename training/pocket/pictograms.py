"""Pictogram sets: where each comes from, its licence, and its drawings of the 100 names as sprites.

The sets are npm packages of SVG drawings (`npm pack`, nothing is installed) and Debian's Noto font. Weights
are trained on drawings of all but the held-out set; no drawing is shipped. A set may lack some of the names.
"""

import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw, ImageFont
from training.pocket import world

EMOJI_FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
SIDE = 96  # longer side of a pictogram sprite, in pixels


@dataclass(frozen=True, slots=True)
class Source:
    """One set of pictograms."""

    package: str  # of npm; empty for Debian's font
    licence: str
    held_out: bool = False


SETS: Final[dict[str, Source]] = {
    "noto": Source("", "SIL OFL 1.1"),
    "noto-v1": Source("@iconify-json/noto-v1@1.2.5", "Apache 2.0"),
    "fluent": Source("@iconify-json/fluent-emoji@1.2.7", "MIT"),
    "fluent-flat": Source("@iconify-json/fluent-emoji-flat@1.2.6", "MIT"),
    "twemoji": Source("@iconify-json/twemoji@1.2.5", "CC BY 4.0"),
    "emojione": Source("@iconify-json/emojione@1.2.3", "CC BY 4.0"),
    "streamline": Source("@iconify-json/streamline-emojis@1.2.4", "CC BY 4.0"),
    "firefox": Source("@iconify-json/fxemoji@1.2.2", "Apache 2.0"),
    "openmoji": Source("@iconify-json/openmoji@1.2.29", "CC BY-SA 4.0", held_out=True),
}
# Drawings that show something else than the name says: a tennis ball without a racket.
WRONG: Final = frozenset({("streamline", "tennis racket"), ("openmoji", "tennis racket")})
NAMING: Final = ("twemoji", "fluent-flat", "openmoji")  # sets that list their icons' code points


def from_font(code: str) -> Image.Image:
    """Noto's drawing of a code point, cropped to its ink, at the font's own size (about 128 pixels), RGBA."""
    font = ImageFont.truetype(EMOJI_FONT, 109)  # the only size this bitmap font has
    image = Image.new("RGBA", (180, 180))
    ImageDraw.Draw(image).text((16, 16), chr(int(code, 16)), font=font, embedded_color=True)
    return cropped(image)


def cropped(image: Image.Image) -> Image.Image:
    """`image` cropped to what can be seen of it."""
    return image.crop(image.getchannel("A").point([0] * 24 + [255] * 232).getbbox())


def fetch(package: str, folder: Path) -> dict[str, Any]:
    """The JSON files of an npm package of icons (`icons`, `chars` where it has one), kept in `folder`.

    Raises CalledProcessError with npm's message where the package can't be had.
    """
    kept = folder / (package.replace("@", "").replace("/", "-") + ".tgz")
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        (folder / made).rename(kept)
    out: dict[str, Any] = {}
    with tarfile.open(kept) as archive:
        for name in ("icons", "chars"):
            if f"package/{name}.json" in archive.getnames():
                member = archive.extractfile(f"package/{name}.json")
                assert member is not None
                out[name] = json.load(member)
    return out


def spellings(name: str, charts: list[dict[str, str]]) -> list[str]:
    """Names under which a set may have the pictogram: those of its code point elsewhere, numbered too."""
    code = world.PICTOGRAMS[name].lower()
    found = [chart[c] for chart in charts for c in (code, f"{code}-fe0f") if c in chart]
    found = list(dict.fromkeys([*found, name.replace(" ", "-")]))
    return [f"{n}{end}" for n in found for end in ("", "-face", "-1", "-2", "-3")]


def svg(icons: dict[str, Any], name: str) -> str | None:
    """The drawing called `name` as an SVG document, or None where the set has none."""
    aliases = icons.get("aliases", {})
    while name in aliases:
        name = aliases[name]["parent"]
    icon = icons["icons"].get(name)
    if icon is None:
        return None
    left, top, width, height = (
        icon.get(k, icons.get(k, d)) for k, d in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}">{icon["body"]}</svg>'
    )


def rasterise(document: str, side: int) -> Image.Image:
    """An SVG document as a picture whose longer side has `side` pixels at least, cropped to its ink."""
    import resvg_py  # needed here only: pip install resvg-py

    picture = bytes(resvg_py.svg_to_bytes(svg_string=document, width=side * 2))
    return cropped(Image.open(io.BytesIO(picture)).convert("RGBA"))


def draw_set(name: str, folder: Path, side: int = SIDE) -> dict[str, Image.Image]:
    """The set's drawings by name, the longer side at most `side` pixels; downloads go to `folder`."""
    source = SETS[name]
    if not source.package:
        drawn = {n: from_font(code) for n, code in world.PICTOGRAMS.items()}
    else:
        charts = [fetch(SETS[n].package, folder)["chars"] for n in NAMING]
        icons = fetch(source.package, folder)["icons"]
        drawn = {}
        for pictogram in world.PICTOGRAMS:
            found = [d for n in spellings(pictogram, charts) if (d := svg(icons, n))]
            if found and (name, pictogram) not in WRONG:
                drawn[pictogram] = rasterise(found[0], side)
    for image in drawn.values():
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return drawn
