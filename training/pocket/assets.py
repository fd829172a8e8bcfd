"""Build the asset pack `.pocket/`: pictogram sprites, training fonts, the tokenizer.

    apt-get install fontconfig fonts-noto-color-emoji fonts-noto-core fonts-noto-extra fonts-dejavu \
        fonts-liberation fonts-freefont-ttf fonts-roboto fonts-open-sans fonts-lato fonts-cantarell fonts-hack
    python -m training.pocket.assets
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from training.pocket import lettering, tokens, world
from training.pocket.scenes import Cast

EMOJI_FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
SIDE = 96  # longer side of a pictogram sprite
PACK = Path(__file__).parents[2] / ".pocket"
SHIPPED = Path(__file__).parents[2] / "src/snugvl/pocket/tokenizer.json"


def pictogram(code: str) -> Image.Image:
    """One pictogram, cropped to its ink, at the font's own size (about 128 pixels), RGBA."""
    font = ImageFont.truetype(EMOJI_FONT, 109)  # the only size this bitmap font has
    image = Image.new("RGBA", (180, 180))
    ImageDraw.Draw(image).text((16, 16), chr(int(code, 16)), font=font, embedded_color=True)
    alpha = image.getchannel("A").point([0] * 24 + [255] * 232)
    return image.crop(alpha.getbbox())


@dataclass(frozen=True)
class Pack:
    """What the folder holds."""

    cast: Cast
    sprites: dict[str, np.ndarray]  # name → [height, width, 4] uint8
    fonts: tuple[str, ...]
    tokenizer: Path


def build(folder: Path, new_tokenizer: bool = False) -> None:
    """Write the pack, with the shipped tokenizer, so that the shipped weights can be trained on."""
    (folder / "fonts").mkdir(parents=True, exist_ok=True)
    arrays, facts = {}, {}
    for name, code in world.PICTOGRAMS.items():
        image = pictogram(code)
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        pixels = np.asarray(image)
        weight = pixels[..., 3:].astype(float)
        mean = (pixels[..., :3] * weight).sum((0, 1)) / weight.sum()
        arrays[name] = pixels
        facts[name] = {"aspect": image.width / image.height, "mean": [round(v) for v in mean]}
    np.savez_compressed(folder / "pictograms.npz", **arrays)
    (folder / "pictograms.json").write_text(json.dumps(facts))
    for path in lettering.font_files(held_out=False):
        shutil.copy(path, folder / "fonts" / Path(path).name)
    cast = Cast({n: f["aspect"] for n, f in facts.items()}, {n: tuple(f["mean"]) for n, f in facts.items()})
    if new_tokenizer or not SHIPPED.exists():
        tokens.build(tokens.world_pieces(cast)).save(str(folder / "tokenizer.json"))
    else:
        shutil.copyfile(SHIPPED, folder / "tokenizer.json")


def load(folder: Path = PACK) -> Pack:
    """Read the pack."""
    facts = json.loads((folder / "pictograms.json").read_text())
    cast = Cast({n: f["aspect"] for n, f in facts.items()}, {n: tuple(f["mean"]) for n, f in facts.items()})
    with np.load(folder / "pictograms.npz") as data:
        sprites = {name: data[name] for name in facts}
    fonts = tuple(sorted(str(p) for p in (folder / "fonts").iterdir()))
    return Pack(cast, sprites, fonts, folder / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PACK)
    parser.add_argument("--new-tokenizer", action="store_true", help="collect the vocabulary again")
    args = parser.parse_args()
    folder = args.out
    build(folder, args.new_tokenizer)
    pack = load(folder)
    vocabulary = tokens.Encoder(pack.tokenizer).size
    print(f"{folder}: {len(pack.sprites)} pictograms, {len(pack.fonts)} fonts, {vocabulary} tokens")


if __name__ == "__main__":
    main()
