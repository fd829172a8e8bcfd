"""Where `detect --draw` puts its pictures: decided, and checked, before any work."""

from collections.abc import Sequence
from pathlib import Path

from snugvl.cli.sources import STDIN
from snugvl.errors import InputError


def targets(where: Path, images: Sequence[str]) -> dict[str, Path]:
    """Image → picture. `where` is a file for one image; a folder for several, or without a picture's suffix.

    In a folder a picture keeps the image's name, with .png where its own format isn't written.

    Raises:
        InputError: a picture would replace an input, or another picture.
    """
    from snugvl.tasks.draw import SUFFIXES, check_suffix

    folder = where.is_dir() or not where.suffix
    if not folder and len(images) > 1:
        raise InputError(f"--draw {where} is one picture, but there are {len(images)} images; name a folder")
    if not folder:
        check_suffix(where)
    chosen: dict[str, Path] = {}
    for image in images:
        name = Path("stdin.png" if image == STDIN else image)
        suffix = name.suffix if name.suffix.lower() in SUFFIXES else ".png"
        chosen[image] = where / f"{name.stem}{suffix}" if folder else where
    _check(chosen)
    return chosen


def _check(chosen: dict[str, Path]) -> None:
    inputs = {Path(image).resolve() for image in chosen if image != STDIN}
    owners: dict[Path, str] = {}
    for image, target in chosen.items():
        path = target.resolve()
        if path in inputs:
            raise InputError(f"--draw would replace the input {target}; choose another place")
        if path in owners:
            raise InputError(f"--draw would give {owners[path]} and {image} the same picture {target}")
        owners[path] = image
