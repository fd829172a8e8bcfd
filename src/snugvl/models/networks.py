"""Which network a configuration describes: each family's is Qwen3-VL's frame or a text model's."""

from collections.abc import Callable

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import qwen2_5_vl, text
from snugvl.models.causal_lm import CausalLM
from snugvl.models.qwen2_5_vision import Qwen25Tower
from snugvl.models.qwen3_vl import Qwen3VL


class Qwen25VL(Qwen3VL):
    """The network of every Qwen2.5-VL checkpoint: another tower, and Qwen2's decoder.

    Its names are those of transformers ≥ 4.52.
    """

    tower_type = Qwen25Tower
    aliases = qwen2_5_vl.ALIASES  # the Hub's files are older


class Qwen35(Qwen3VL):
    """The network of every dense Qwen3.5 checkpoint: a decoder of linear and gated full attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # The files carry a multi-token predictor for speculative decoding; transformers ignores it, too.
        self.unloaded = (*self.unloaded, "mtp.*")


LoadableNetwork = Qwen3VL | CausalLM
"""A network that `models/loader.py` can fill.

Besides the engine's `Network` each has `decoder` (with `embed_tokens` and `layers`), `lm_head` unless it is
tied, `tower` or None (without one where `config.vision` is None), and for the loader:

    aliases     (prefix in older files, prefix of the parameter's name here), the first match counts
    unloaded    patterns of names (after aliases) that files store and this network doesn't have
"""

_BY_ARCHITECTURE: dict[str, Callable[[ModelConfig], LoadableNetwork]] = {
    "Qwen3VLForConditionalGeneration": Qwen3VL,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    **dict.fromkeys(text.ARCHITECTURES, CausalLM),
}


def network_of(config: ModelConfig) -> LoadableNetwork:
    """The network of `config`, on torch's present default device."""
    return _BY_ARCHITECTURE[config.architecture](config)
