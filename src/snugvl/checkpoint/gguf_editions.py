"""Facts of a model's GGUF before its file is read: in llama.cpp's Q4_K_M, in which nearly every model is
published.

Its types follow from names and shapes alone: four bits, but six for the values and second products of every
third layer and those at both ends, and for the head; norms in 32 bits, the vision tower in 16. The bytes are
those of a file with these tensors (`tests/checkpoint/test_gguf_editions.py`).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Final

from snugvl.checkpoint.facts import GgufFacts, ModelFacts, TensorFact
from snugvl.checkpoint.image_rules import SmartResize
from snugvl.core.formats import READY_MADE

FILE_TYPE: Final = "Q4_K_M"
MOST_TOKENS: Final = 4096  # of a picture of Qwen's families in llama.cpp
BLOCK: Final[dict[str, tuple[int, int]]] = {  # values and bytes
    "Q4_K": (256, 144), "Q6_K": (256, 210), "Q8_0": (32, 34), "Q5_0": (32, 22), "F16": (1, 2), "F32": (1, 4),
}  # fmt: skip
FINER: Final = ("v_proj.weight", "down_proj.weight", "down_proj")
FLOAT: Final = ("conv1d.weight", "mlp.gate.weight", "pos_embed.weight")  # the second: a mixture's router
UNREAD: Final = "its file has not been read; only llama.cpp is planned for it"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def q4_k_m(facts: ModelFacts, name: str) -> ModelFacts:
    """The model as a GGUF in Q4_K_M that goes by `name`."""
    tensors = tuple(_tensors(facts))
    vision = facts.vision
    if vision is not None and isinstance(vision.rule, SmartResize):
        most = MOST_TOKENS * (vision.patch_size * vision.merge_size) ** 2
        vision = replace(vision, rule=replace(vision.rule, max_pixels=min(vision.rule.max_pixels, most)))
    layers = tuple(replace(each, state_bytes=each.state(4), state_values=0) for each in facts.text.kv_layers)
    return replace(
        facts,
        name=name,
        tensors=tensors,
        text=replace(facts.text, kv_layers=layers),
        vision=vision,
        quantization=READY_MADE[4],
        native=False,
        predictor=None,
        download_bytes=sum(tensor.nbytes for tensor in tensors if tensor.loaded),
        gguf=GgufFacts(FILE_TYPE, vision.deepstack_levels if vision else 0, why_not=UNREAD),
    )


def _tensors(facts: ModelFacts) -> Iterator[TensorFact]:
    for tensor in facts.tensors:
        if not tensor.loaded or (tensor.role == "lm_head" and facts.tied):
            continue
        match = _LAYER.search(tensor.name)
        sees = tensor.role in ("vision", "connector")
        dtype = _type(tensor, facts, -1 if match is None else int(match[1]))
        values, nbytes = BLOCK[dtype]
        prefix = "v." if sees else "" if match is None else f"blk.{match[1]}."
        yield tensor._replace(
            name=prefix + tensor.name, dtype=dtype, nbytes=prod(tensor.shape) // values * nbytes
        )


def _type(tensor: TensorFact, facts: ModelFacts, layer: int) -> str:
    """As `llama-quantize` chooses it."""
    if len(tensor.shape) == 1 or tensor.name.endswith(FLOAT):
        return "F32"
    if tensor.role in ("vision", "connector"):
        return "F16"
    layers = facts.text.num_layers
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    finer = tensor.role == "lm_head" or (tensor.role == "embedding" and facts.tied)
    finer = finer or (layer >= 0 and more and tensor.name.endswith(FINER))
    kinds = ("Q6_K", "Q8_0", "F16") if finer else ("Q4_K", "Q5_0", "F16")
    return next(kind for kind in kinds if tensor.shape[-1] % BLOCK[kind][0] == 0)
