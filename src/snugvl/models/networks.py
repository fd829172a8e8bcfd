"""Which network a configuration describes."""

from collections.abc import Callable

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.models.causal_lm import CausalLM
from snugvl.models.qwen2_5_vl import Qwen25VL
from snugvl.models.qwen3_5 import Qwen35
from snugvl.models.qwen3_vl import Qwen3VL

LoadableNetwork = Qwen3VL | CausalLM
"""A network that `models/loader.py` can fill.

Besides the engine's `Network` each has `decoder` (with `embed_tokens` and `layers`), `lm_head` unless it is
tied, `tower` or None (without one where `config.vision` is None), and for the loader:

    aliases     (prefix in older files, prefix of the parameter's name here), the first match counts
    unloaded    patterns of names (after aliases) that files store and this network doesn't have
"""

_TEXT = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_BY_ARCHITECTURE: dict[str, Callable[[ModelConfig], LoadableNetwork]] = {
    "Qwen3VLForConditionalGeneration": Qwen3VL,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    **dict.fromkeys(_TEXT, CausalLM),
}


def network_of(config: ModelConfig) -> LoadableNetwork:
    """The network of `config`, on torch's present default device."""
    return _BY_ARCHITECTURE[config.architecture](config)
