"""Traits of families that our engine doesn't run and whose `config.json` the plan doesn't read.

Other engines run them; llama.cpp's GGUF files give the plan their shapes.
"""

from collections.abc import Mapping

from snugvl.checkpoint.families.traits import Family, Prompting, Traits

_GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
_PALIGEMMA = "PaliGemmaForConditionalGeneration"
_FULL_EVERY: Mapping[str, int] = {"gemma2": 2, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4}

FAMILY = Family(
    traits={
        **{name: Traits(full_every=layers) for name, layers in _FULL_EVERY.items()},
        "qwen3next": Traits(recurrent=True),
    },
    prompting={
        # Google's "Image understanding", and Hugging Face's "Welcome Gemma 4".
        **dict.fromkeys(_GEMMA4, Prompting("Gemma 4", "y first")),
        # Google's "PaliGemma prompt and system instructions", and big_vision's README.
        _PALIGEMMA: Prompting("PaliGemma", "locations"),
    },
)
