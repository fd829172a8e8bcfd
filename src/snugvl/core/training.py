"""Limits of what a checkpoint was trained on, as itself or a server says them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

UNLEARNED: Final = "so its answer is likely to"  # in each warning of what a model never learned


@dataclass(frozen=True, slots=True)
class Training:
    """Limits of what a checkpoint was trained on, beyond which its answers are nonsense.

    Attributes:
        drawings: whether it learned drawn pictures alone, no photographs.
        videos: whether it learned videos.
        min_images: fewest pictures with which a conversation makes sense to it.
        max_images: pictures of one conversation that it can tell apart; None: no limit but the context.
    """

    drawings: bool = False
    videos: bool = True
    min_images: int = 0
    max_images: int | None = None


def read_training(value: object) -> Training:
    """Read limits as a checkpoint or a server's `/v1/models` writes them; a malformed one counts as none."""
    said: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    least, most = said.get("min_images"), said.get("max_images")
    return Training(
        drawings=said.get("drawings") is True,
        videos=said.get("videos") is not False,
        min_images=least if type(least) is int and least >= 0 else 0,
        max_images=most if type(most) is int and most >= 1 else None,
    )
