"""Qwen3.5: Qwen3-VL's tower without deepstack levels, before a decoder of linear and gated full attention."""

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.models.qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    """The network of every dense Qwen3.5 checkpoint, with or without its tower."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # The files carry a multi-token predictor for speculative decoding; transformers ignores it, too.
        self.unloaded = (*self.unloaded, "mtp.*")
