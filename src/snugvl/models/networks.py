"""Which network a configuration describes."""

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.models.qwen3_vl import Qwen3VL

LoadableNetwork = Qwen3VL
"""A network that `models/loader.py` can fill."""

_BY_ARCHITECTURE = {"Qwen3VLForConditionalGeneration": Qwen3VL}


def network_of(config: ModelConfig) -> LoadableNetwork:
    """The network of `config`, on torch's present default device."""
    return _BY_ARCHITECTURE[config.architecture](config)
