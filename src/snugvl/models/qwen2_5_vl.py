"""Qwen2.5-VL: Qwen3-VL's frame around another tower and Qwen2's decoder."""

from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.qwen3_vl import Qwen3VL


class Qwen25VL(Qwen3VL):
    """The network of every Qwen2.5-VL checkpoint. Its names are those of transformers ≥ 4.52."""

    tower_type = Qwen25Tower
    # The Hub's files are older.
    aliases = (
        ("visual.", "model.visual."),
        ("model.visual.", "model.visual."),
        ("model.language_model.", "model.language_model."),
        ("model.", "model.language_model."),
    )
