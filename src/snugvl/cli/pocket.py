"""What pocket, the built-in model, is for: a note whenever it answers; photographs and videos are refused.

Pocket learned drawn scenes alone. Of a photograph it would say what the patches resemble ("two large gray
rectangles"), so a picture that looks like one is refused before it is asked about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from snugvl.errors import ImageError, SnugvlError

if TYPE_CHECKING:
    from PIL.Image import Image

KNOWS: Final = (
    "the built-in model: it knows drawn shapes, pictograms and words, not photographs; "
    "for those: --model FOLDER_OR_ID, such as Qwen/Qwen3-VL-2B-Instruct-FP8"
)
NOTE: Final = f"pocket answers, {KNOWS}"


def refuse_photograph(image: Image, name: str) -> None:
    """Raise where pocket would talk nonsense.

    Raises:
        ImageError: `name` looks like a photograph; says which model to download.
    """
    from snugvl.tasks.training import looks_like_a_photograph

    if looks_like_a_photograph(image):
        raise ImageError(
            f"{name} looks like a photograph. Pocket, the built-in model, can't describe photographs; "
            f"{_way_out()}"
        )


def refuse_video(name: str) -> NoReturn:
    """Say that pocket never learned videos.

    Raises:
        ImageError: always; says which model to download.
    """
    raise ImageError(
        f"{name} is a video. Pocket, the built-in model, learned single pictures and can't describe videos; "
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
