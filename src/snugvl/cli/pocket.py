"""What pocket, the built-in model, is for: a note whenever it answers, and a refusal of photographs.

Pocket learned drawn scenes alone. Of a photograph it would say what the patches resemble ("two large gray
rectangles"), so a picture that looks like one is refused before it is asked about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from snugvl.errors import ImageError, SnugvlError

if TYPE_CHECKING:
    from PIL.Image import Image

NOTE: Final = (
    "pocket answers, the built-in model: it knows drawn shapes, pictograms and words, not photographs; "
    "for those: --model FOLDER_OR_ID, such as Qwen/Qwen3-VL-2B-Instruct-FP8"
)
# Measured on 400 drawn scenes of training/pocket: as PNG they have at most 4.0 bits and 16 levels; as JPEG of
# quality 60, 99.5 % have at most 5.6 bits, and none has more than 18 levels. Of ten colour photographs of
# scikit-image and scikit-learn eight have more than 5.9. What is missed (a rocket in the night, an eye, a
# grey texture) gets the note alone.
COLOURS_BITS: Final = 5.7
GREY_LEVELS: Final = 20
SIDE: Final = 256  # pixels: noise of a sensor, and of JPEG, is averaged out first


def looks_like_a_photograph(image: Image) -> bool:
    """Whether the pixels of `image` have as many colours, or shades, as photographs have and drawings don't.

    The colours (16 steps a channel) of a small copy without its edges have an entropy, in bits: that of a
    drawing is small, as large areas of it have few colours. A grey photograph has many shades instead.

    Args:
        image: RGB.
    """
    import numpy as np
    from PIL import ImageFilter
    from PIL.Image import Resampling

    small = image.copy()
    small.thumbnail((SIDE, SIDE), Resampling.BOX)
    small = small.filter(ImageFilter.MedianFilter(3))
    steps = np.asarray(small).astype(np.int32) >> 4
    counts = np.bincount((steps[..., 0] << 8 | steps[..., 1] << 4 | steps[..., 2]).ravel())
    shares = counts[counts > 0] / counts.sum()
    bits = float(-(shares * np.log2(shares)).sum())
    shades = np.bincount(np.asarray(small.convert("L")).ravel() >> 3)
    return bits > COLOURS_BITS or int((shades >= 0.01 * shades.sum()).sum()) >= GREY_LEVELS


def refuse_photograph(image: Image, name: str) -> None:
    """Raise where pocket would talk nonsense.

    Raises:
        ImageError: `name` looks like a photograph; says which model to download.
    """
    if looks_like_a_photograph(image):
        raise ImageError(
            f"{name} looks like a photograph. Pocket, the built-in model, can't describe photographs; "
            f"{_way_out()}"
        )


def _way_out() -> str:
    """The best model of the catalogue that fits this machine, and how to get it."""
    from snugvl.checkpoint.locate import POCKET
    from snugvl.cli.machine_options import MachineChoice, machine_from
    from snugvl.planner.recommend import catalogue_candidates
    from snugvl.planner.solve import require, solve
    from snugvl.planner.wishes import Wishes

    try:
        best = require(solve(catalogue_candidates(), machine_from(MachineChoice()), Wishes()))
        name = best.option.model.name
    except SnugvlError:
        name = POCKET
    if name == POCKET:
        return "no model that can fits this machine: `snugvl plan` says what is missing"
    return f"download one that can: snugvl pull {name}"
