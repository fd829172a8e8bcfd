"""What a checkpoint says that it was trained on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Training:
    """Limits of what a checkpoint was trained on, beyond which its answers are nonsense.

    Attributes:
        drawings: whether it learned drawn pictures alone, no photographs.
        videos: whether it learned videos.
        min_images: pictures without which a conversation makes no sense to it.
        max_images: pictures of one conversation that it can tell apart; None: no limit but the context.
    """

    drawings: bool = False
    videos: bool = True
    min_images: int = 0
    max_images: int | None = None
