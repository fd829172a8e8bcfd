"""The model behind a command. A server will stand here too, behind the same methods."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from snugvl.cli.options import DEFAULT_MODEL, ModelChoice
from snugvl.cli.stderr import say

if TYPE_CHECKING:
    from snugvl.model import Model

POCKET_NOTE = (
    "pocket, the built-in model, knows drawn shapes, pictograms and words, not photographs; "
    "for those: --model FOLDER_OR_ID, such as Qwen/Qwen3-VL-2B-Instruct"
)


def load_model(choice: ModelChoice) -> Model:
    """Load the chosen model."""
    import snugvl

    return snugvl.load(
        choice.model,
        device=choice.device,
        dtype=choice.dtype,
        context=choice.context,
        max_pixels=choice.max_pixels,
    )


def note_about(choice: ModelChoice, *, quiet: bool) -> None:
    """Tell a person at a terminal what the default model is for."""
    if choice.model == DEFAULT_MODEL and not quiet and sys.stderr.isatty():
        say(POCKET_NOTE)
