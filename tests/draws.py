"""How many examples hypothesis draws: a test says how many make it sure of itself, the suite draws a share.

Every run draws others, so that all of them come in time; with SNUGVL_DRAWS=1 they all come at once.
"""

import os
from typing import Any

from hypothesis import settings

SHARE = float(os.environ.get("SNUGVL_DRAWS", "0.2"))


def draws(examples: int, **more: Any) -> settings:
    """Settings with that share of so many examples, and no clock; `more`: others of hypothesis."""
    return settings(max_examples=max(1, round(SHARE * examples)), deadline=None, **more)


def draw_fewer() -> None:
    """Make it so where a test says nothing, too."""
    settings.register_profile("share", draws(100))
    settings.load_profile("share")
