"""Gemma 4 as a mixture of experts (26B-A4B) and dense (31B), for the plans of other engines than ours.

Five layers with a window to one without, whose heads are wider and whose values are its keys; every layer has
an MLP of its own beside the experts. A picture keeps its aspect and fills a budget of tokens. Source:
transformers' models/gemma4 (configuration, modelling, image processor). E2B and E4B, which have an embedding
for every layer, share caches and hear, aren't known.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from snugvl.checkpoint.architecture import Mixture
from snugvl.checkpoint.facts import KVLayer, VisionFacts
from snugvl.checkpoint.families.decoder import Decoder, read_decoder, sliding, windows_by_type
from snugvl.checkpoint.families.traits import Expected, Family, Network, Pictures, Traits, linear, norm
from snugvl.checkpoint.families.vision import images_of
from snugvl.checkpoint.image_rules import FilledArea
from snugvl.checkpoint.section import MAX_LAYERS, Section
from snugvl.errors import UnsupportedModel

SEES = "Gemma4ForConditionalGeneration"
_DEFAULTS = {
    "hidden": 2304, "intermediate": 9216, "layers": 30, "heads": 8, "kv_heads": 4, "head_dim": 256,
    "vocab": 262144, "max_positions": 131072,
}  # fmt: skip
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_MIXTURE_NORMS = (
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)
GGUF_TOKENS = Pictures(40, 280, merge=3)  # tokens of a picture in llama.cpp, which scales none up to them
UNKNOWN = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")


@dataclass(frozen=True, slots=True)
class _Gemma4:
    """The decoder: layers with a window are `narrow`, others `wide`; `same`: the latter's values are keys."""

    narrow: Decoder
    wide: Decoder
    same: bool

    def layer(self, index: int) -> Decoder:
        return self.wide if self.narrow.windows[index] is None else self.narrow

    def tensors(self, name: str) -> Iterator[Expected]:
        """Embedding, which is the head, too, layers and the final norm."""
        hidden, experts = self.narrow.hidden, self.narrow.experts
        yield Expected(f"{name}.embed_tokens.weight", (self.narrow.vocab, hidden), "embedding")
        for index in range(self.narrow.layers):
            layer, decoder = f"{name}.layers.{index}", self.layer(index)
            wide = decoder is self.wide
            for tensor in (*decoder.attention(f"{layer}.self_attn"), *decoder.mlp(f"{layer}.mlp")):
                if not (wide and self.same and tensor.name.endswith("v_proj.weight")):
                    yield tensor
            for each in (*_NORMS, *(_MIXTURE_NORMS if experts else ())):
                yield from norm(f"{layer}.{each}", hidden)
            yield Expected(f"{layer}.layer_scalar", (1,), "other")
            if experts:
                count, width = experts.count, experts.width
                yield Expected(f"{layer}.experts.gate_up_proj", (count, 2 * width, hidden), "expert")
                yield Expected(f"{layer}.experts.down_proj", (count, hidden, width), "expert")
                yield Expected(f"{layer}.router.scale", (hidden,), "other")
                yield Expected(f"{layer}.router.per_expert_scale", (count,), "other")
                yield from linear(f"{layer}.router.proj", count, hidden, "other")
        yield from norm(f"{name}.norm", hidden)


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Gemma 4 configuration for the plan.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a variant with embeddings for each layer, shared caches or ears.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    unknown = [key for key in UNKNOWN if text.values.get(key)]
    if unknown or root.values.get("audio_config"):
        raise UnsupportedModel(f"{root.where} has {(*unknown, 'audio_config')[0]}, which isn't planned yet")
    decoder, tower = _decoder(text), _tower(vision, images_of(images, root.where))
    kv = tuple(
        KVLayer(each.kv_heads, each.head_dim, window)
        for each, window in (
            (decoder.layer(index), window) for index, window in enumerate(decoder.narrow.windows)
        )
    )
    return Network(
        family="gemma4",
        architecture=architecture,
        text=replace(decoder.narrow.facts(), kv_layers=kv),
        vision=tower,
        tied=True,
        tensors=(
            *_tower_tensors(vision, tower, decoder.narrow.hidden),
            *decoder.tensors("model.language_model"),
        ),
    )


def _decoder(text: Section) -> _Gemma4:
    decoder = read_decoder(text, _DEFAULTS)
    types = sliding([(index + 1) % 6 != 0 for index in range(decoder.layers)])
    windows = windows_by_type(text, text.count("sliding_window", 512), types)
    experts = None
    if text.values.get("enable_moe_block"):
        sparse = (True,) * decoder.layers
        count, used = text.count("num_experts"), text.count("top_k_experts")
        experts = Mixture(count, used, text.count("moe_intermediate_size"), 0, sparse)
    windows = (*windows[:-1], None)  # whatever the file says: transformers' class sets the last one right
    narrow = replace(decoder, windows=windows, qk_norm=True, experts=experts)
    same = text.get("attention_k_eq_v", bool, False)
    kv_heads = text.count("num_global_key_value_heads", decoder.kv_heads) if same else decoder.kv_heads
    head = text.count("global_head_dim", 512)
    return _Gemma4(narrow, replace(narrow, kv_heads=kv_heads, head_dim=head), same)


def _tower(vision: Section, images: Section) -> VisionFacts:
    patch, merge = vision.count("patch_size", 16), vision.count("pooling_kernel_size", 3)
    tokens = images.count("max_soft_tokens", 280)
    return VisionFacts(
        depth=vision.count("num_hidden_layers", 16, most=MAX_LAYERS),
        hidden_size=vision.count("hidden_size", 768),
        intermediate_size=vision.count("intermediate_size", 3072),
        num_heads=vision.count("num_attention_heads", 12),
        patch_size=patch,
        merge_size=merge,
        patch_dim=3 * patch**2,
        deepstack_levels=0,
        rule=FilledArea(patch, merge, tokens),
    )


def _tower_tensors(vision: Section, tower: VisionFacts, out: int) -> Iterator[Expected]:
    name, hidden = "model.vision_tower", tower.hidden_size
    head = vision.count("head_dim", hidden // tower.num_heads)
    keys = vision.count("num_key_value_heads", tower.num_heads) * head
    positions = (2, vision.count("position_embedding_size", 10240), hidden)
    yield Expected(f"{name}.patch_embedder.position_embedding_table", positions, "vision")
    yield from linear(f"{name}.patch_embedder.input_proj", hidden, tower.patch_dim, "vision")
    if vision.get("standardize", bool, False):
        yield Expected(f"{name}.std_bias", (hidden,), "vision")
        yield Expected(f"{name}.std_scale", (hidden,), "vision")
    queries, wide = tower.num_heads * head, tower.intermediate_size
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    for index in range(tower.depth):
        layer = f"{name}.encoder.layers.{index}"
        for part, (rows, columns) in shapes.items():
            yield from linear(f"{layer}.{part}.linear", rows, columns, "vision")
        for part in ("q_norm", "k_norm"):
            yield from norm(f"{layer}.self_attn.{part}", head, "vision")
        for part in _NORMS:
            yield from norm(f"{layer}.{part}", hidden, "vision")
    yield from linear("model.embed_vision.embedding_projection", out, hidden, "connector")


FAMILY = Family(
    architectures=(SEES,),
    describe=describe,
    traits={
        "gemma4": Traits(gguf=("gemma4",), stretched=1, pictures=GGUF_TOKENS)
    },  # two kinds of layers, neither stretched
    projectors={"gemma4v": GGUF_TOKENS},
)
