"""Build the asset pack `.pocket/`: pictogram sprites of all sets, fonts, photographs, palettes, the
tokenizer.

    apt-get install npm fontconfig fonts-noto-color-emoji fonts-noto-core fonts-noto-extra fonts-dejavu \
        fonts-liberation fonts-freefont-ttf fonts-roboto fonts-open-sans fonts-lato fonts-cantarell \
        fonts-hack mate-backgrounds plasma-workspace-wallpapers
    pip install resvg-py fonttools scikit-image scikit-learn matplotlib
    python -m training.pocket.assets

The pack is less than 16 MiB and all that training needs: it travels to machines that can download nothing.
"""

import argparse
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from training.pocket import lettering, looks, palettes, photos, pictograms, tokens

PACK = Path(__file__).parents[2] / ".pocket"
SHIPPED = Path(__file__).parents[2] / "src/snugvl/pocket/tokenizer.json"
LATIN = "U+0020-007E"  # what a font of the pack keeps


@dataclass(frozen=True)
class Pack:
    """What the folder holds."""

    sets: dict[str, dict[str, np.ndarray]]  # training's pictograms: set → name → [height, width, 4] uint8
    fonts: tuple[str, ...]
    tokenizer: Path
    photos: Path  # folder of photographs by split


def build_pictograms(folder: Path, downloads: Path) -> None:
    """One file of sprites a set. Raises FileNotFoundError without npm."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in pictograms.SETS:
        if not (folder / f"{name}.npz").exists():
            drawn = pictograms.draw_set(name, downloads)
            np.savez_compressed(
                folder / f"{name}.npz", **{n: np.asarray(image) for n, image in drawn.items()}
            )


def build_fonts(folder: Path) -> None:
    """Training's fonts with nothing but ASCII in them."""
    from fontTools import subset  # needed here only

    folder.mkdir(parents=True, exist_ok=True)
    for path in lettering.font_files(held_out=False):
        kept = folder / Path(path).name
        if not kept.exists():
            try:
                subset.main(
                    [
                        path,
                        f"--unicodes={LATIN}",
                        f"--output-file={kept}",
                        "--no-hinting",
                        "--layout-features=",
                    ]
                )
            except Exception:
                shutil.copy(path, kept)


def build(folder: Path, photographs: list[Path], new_tokenizer: bool = False) -> None:
    """Write what the pack lacks, with the shipped tokenizer: the shipped weights can be trained on."""
    downloads = folder.parent / f"{folder.name}-downloads"
    build_pictograms(folder / "pictograms", downloads)
    build_fonts(folder / "fonts")
    photos.build(photographs, folder / "photos")
    palettes.build(folder / "palettes.json", downloads)
    if new_tokenizer or not SHIPPED.exists():
        _, cast = looks.audition(sprites(folder), 0, 0, 1)
        tokens.build(tokens.world_pieces(cast)).save(str(folder / "tokenizer.json"))
    else:
        shutil.copyfile(SHIPPED, folder / "tokenizer.json")


def drawings(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The sprites of one set."""
    with np.load(folder / "pictograms" / f"{name}.npz") as data:
        return {pictogram: data[pictogram] for pictogram in data.files}


def sprites(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The sprites of every set that training may see."""
    names = [n for n, source in pictograms.SETS.items() if not source.held_out]
    return {n: drawings(folder, n) for n in names if (folder / "pictograms" / f"{n}.npz").exists()}


def load(folder: Path = PACK) -> Pack:
    """Read the pack."""
    fonts = tuple(sorted(str(p) for p in (folder / "fonts").iterdir()))
    return Pack(sprites(folder), fonts, folder / "tokenizer.json", folder / "photos")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PACK)
    parser.add_argument("--new-tokenizer", action="store_true", help="collect the vocabulary again")
    parser.add_argument(
        "--photographs", type=Path, nargs="*", default=[Path("/"), Path(sysconfig.get_paths()["purelib"])],
        help="folders that hold unpacked packages with photographs",
    )  # fmt: skip
    args = parser.parse_args()
    try:
        build(args.out, args.photographs, args.new_tokenizer)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", None) or error
        raise SystemExit(f"error: the pack could not be made: {message}") from error
    pack = load(args.out)
    vocabulary = tokens.Encoder(pack.tokenizer).size
    drawn = ", ".join(f"{len(d)} of {n}" for n, d in pack.sets.items())
    shots = {s: len(photos.load(pack.photos, s)) for s in ("training", "held-out")}
    print(
        f"{args.out}: pictograms: {drawn}; {len(pack.fonts)} fonts, {vocabulary} tokens; photographs: {shots}"
    )


if __name__ == "__main__":
    main()
