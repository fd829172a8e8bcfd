"""A GGUF as our own engine sees it: its metadata as a `config.json`, its tensors by the network's names.

llama.cpp stores these in another way:

    rows of queries and keys   of some families each head's two halves alternate, row by row
                               (`GgufNetwork.alternating`, `TensorEntry.heads`)
    a tower's patches          one convolution for each frame of a pair (`TensorEntry.frames`)
    deepstack mergers          by the block after which they stand, not by their place in the list
    experts                    gate and up of all experts apart (`models/loader.py`)
    Qwen3.5's norms            with the 1 that is added to them; how fast heads forget as −exp of it
                               (`TensorEntry.meant`)
    Qwen3.5's value heads      those of one key head lie apart (`LinearAttention.tiled`), which our engine
                               keeps: the columns that follow from it share scales
    a multi-token predictor    as a layer behind the last

Names of towers and of vision tokens here (`_BLOCK`, `_TOWER`, `_VISION_TOKENS`, `_vision`) are Qwen3-VL's,
the one tower that our engine runs from a GGUF. With llama.cpp another tower needs none of them: its family
names its projector (`Family.projectors`), `gguf_facts.py` makes its image rule, and
`backends/llamacpp/facts.py` has the texts around its pictures.

Names, keys and orders: llama.cpp, `gguf-py/gguf/constants.py` and `tensor_mapping.py`,
`convert_hf_to_gguf.py` (MIT).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.facts import PREDICTOR, ModelFacts, Role, Stored, TensorFact
from snugvl.checkpoint.families import GGUF, parse_config
from snugvl.checkpoint.families.decoder import FULL, LINEAR, TILED
from snugvl.checkpoint.families.traits import GgufNetwork
from snugvl.checkpoint.gguf import GgufHeader
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.checkpoint.section import MAX_LAYERS, Section, plain
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURE: Final = "general.architecture"
TOKENS: Final = "tokenizer.ggml.tokens"
# Stored forms that our kernels read (`layers/ggml.py`), and those that are copied.
BLOCKS: Final = (
    "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS",
    "MXFP4",
)  # fmt: skip
PLAIN: Final = ("F32", "F16", "BF16")
INSTEAD: Final = "use --backend llamacpp"
FACTORS: Final = "rope_freqs.weight"  # divisors of the rotary frequencies: Llama 3's scaling
UNREAD: Final = ("rope.scaling.type", "expert_count", "attention.sliding_window", "rope.scaling.factor")
_VISUAL = "model.visual."
_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = {
    "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
}  # fmt: skip
_RECURRENT = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
}  # fmt: skip
_MIXTURE = {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"ffn_{part}_{ending}": f"mlp.{place}.{part}_proj"
    for part in ("gate", "up", "down")
    for ending, place in (("shexp", "shared_expert"), ("exps", "experts"))
}
_PREDICTOR = {
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}  # fmt: skip
_NOT_MATRICES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
                 "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}  # fmt: skip
_AROUND = {"token_embd": "embed_tokens", "output_norm": "norm"}
_TOWER = {
    "v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed", "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2", "v.post_ln": "merger.norm",
}  # fmt: skip
_MERGER = {"fc1": "linear_fc1", "fc2": "linear_fc2", "norm": "norm"}
_NAME = re.compile(
    r"(?:(?P<tower>v\.)?blk\.(?P<layer>\d+)\.(?P<part>(?:nextn\.)?\w+)|v\.deepstack\.(?P<level>\d+)\.(?P<merger>\w+)"
    r"|(?P<around>[\w.]+?))\.(?P<kind>weight|bias)(?P<frame>\.\d+)?"
)
_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip


def our_name(
    name: str,
    decoder: str,
    levels: Sequence[int],
    network: GgufNetwork | None = None,
    layers: int = MAX_LAYERS,
) -> str | None:
    """Our network's name of a tensor of llama.cpp's, or None where it has none.

    Args:
        decoder: prefix of the decoder's names.
        levels: indices of the blocks after which deepstack mergers stand.
        network: which tensors layers have beyond those of a plain one.
        layers: number of the decoder's layers; those behind them are a predictor's.
    """
    bare = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if bare is not None and bare[2] in _NOT_MATRICES and network is not None and network.nested:
        return f"{_place(int(bare[1]), decoder, layers)}.{_NOT_MATRICES[bare[2]]}"
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    kind, layer = found["kind"], found["layer"]
    stem: str | None
    if found["tower"]:
        stem = _BLOCK.get(found["part"])
        return stem and f"{_VISUAL}blocks.{layer}.{stem}.{kind}"
    if layer is not None:
        if network is not None and int(layer) == layers and found["part"] in _PREDICTOR:
            return f"{PREDICTOR}{_PREDICTOR[found['part']]}.{kind}"
        stem = _parts_of(network).get(found["part"])
        return stem and f"{_place(int(layer), decoder, layers)}.{stem}.{kind}"
    if found["level"] is not None:
        stem, level = _MERGER.get(found["merger"]), int(found["level"])
        known = stem and level in levels
        return f"{_VISUAL}deepstack_merger_list.{levels.index(level)}.{stem}.{kind}" if known else None
    if found["around"] == "output":
        return f"lm_head.{kind}"
    if (stem := _AROUND.get(found["around"])) is not None:
        return f"{decoder}{stem}.{kind}"
    stem = _TOWER.get(found["around"])
    return stem and f"{_VISUAL}{stem}.{kind}"


def _parts_of(network: GgufNetwork | None) -> Mapping[str, str]:
    """Our names of a layer's tensors, by llama.cpp's."""
    if network is None:
        return _LAYER
    return _LAYER | (_RECURRENT if network.recurrent else {}) | (_MIXTURE if network.mixture else {})


def _place(layer: int, decoder: str, layers: int) -> str:
    return f"{decoder}layers.{layer}" if layer < layers else f"{PREDICTOR}layers.{layer - layers}"


def layers_of(section: Section) -> int:
    """Number of the decoder's layers, without a predictor's."""
    predictors = section.values.get("nextn_predict_layers") or 0
    layers = section.count("block_count", most=MAX_LAYERS) - (
        predictors if isinstance(predictors, int) else 0
    )
    section.require(layers > 0, "block_count leaves no layer")
    return layers


def config_of(
    values: Mapping[str, Any],
    images: Mapping[str, Any] | None,
    tensors: Sequence[Stored],
    where: str,
    factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The `config.json` that transformers has for the same model, as far as our engine reads it.

    Args:
        values: the metadata; where the vocabulary was kept, ids of vision tokens are looked up in it.
        images: the metadata of the mmproj, or None: a model that sees is read as its text model then.
        factors: the content of `FACTORS`, where it was read; a plan needs none.

    Raises:
        CheckpointError: a key is missing or nonsense.
        UnsupportedModel: an architecture, a variant or a type of tensor that our engine doesn't have.
    """
    kind = Section(values, where).get(ARCHITECTURE, str)
    network = GGUF.get(kind)
    if network is None:
        raise UnsupportedModel(
            f"{where} is a {plain(kind)}; our own engine runs GGUFs of {', '.join(sorted(GGUF))}: {INSTEAD}"
        )
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    _check_types(tensors, where)
    section = Section(below(values, kind), f"{where}: {kind}")
    for key in UNREAD:
        if section.values.get(key) not in (None, "none", 0) and not (
            network.mixture and key == "expert_count"
        ):
            raise UnsupportedModel(f"{section.where} has {key}, which our engine doesn't read: {INSTEAD}")
    text = _text(section, shapes, network)
    if network.mixture:
        text |= _experts(section)
    if not network.sees and images is not None:
        raise UnsupportedModel(f"{where} is a {kind} that sees, which our engine doesn't run: {INSTEAD}")
    if factors is not None:
        text["rope_scaling"] = {"type": "longrope", "short_factor": list(factors), "attention_factor": 1.0}
    if images is None and not network.nested:
        return text | {"architectures": [network.text]}
    sections = section.get("rope.dimension_sections", list)
    rope = {"rope_type": "default", "mrope_section": sections[:3], "mrope_interleaved": True}
    if network.recurrent:
        rope["partial_rotary_factor"] = section.count("rope.dimension_count") / text["head_dim"]
    if images is None:
        whole = {"architectures": [network.text], "vision_config": None, "text_config": text}
        text |= {"rope_scaling": rope}
        return whole | {"tie_word_embeddings": text["tie_word_embeddings"]}
    return {
        "architectures": [network.sees],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | {"rope_scaling": rope},
        "vision_config": _vision(images, network.projector, text["hidden_size"], where),
        **_vision_tokens(values, where),
    }


def parsed(
    values: Mapping[str, Any], images: Mapping[str, Any] | None, tensors: Sequence[Stored], where: str
) -> ModelConfig:
    """The configuration, checked like any `config.json`, and with a name in our network for each tensor.

    Raises:
        CheckpointError, UnsupportedModel: as `config_of`.
    """
    config = parse_config(config_of(values, images, tensors, where), where)
    naming = naming_of(values, images, where)
    types = {tensor.name: tensor.dtype for tensor in tensors}
    for tensor in tensors:
        beside = types.get(tensor.name.replace("ffn_gate_exps", "ffn_up_exps"), tensor.dtype)
        if beside != tensor.dtype:
            raise UnsupportedModel(
                f"{where}: tensor {plain(tensor.name)} is {tensor.dtype}, but its experts' up is {beside}; "
                f"our engine has both in one matrix: {INSTEAD}"
            )
        if our_name(tensor.name, *naming) is None and tensor.name != FACTORS:
            raise UnsupportedModel(
                f"{where} has a tensor {plain(tensor.name)}, which our engine doesn't know: {INSTEAD}"
            )
    return config


def naming_of(
    values: Mapping[str, Any], images: Mapping[str, Any] | None, where: str
) -> tuple[str, list[int], GgufNetwork | None, int]:
    """The arguments of `our_name` after the first, for a model's tensors."""
    kind = str(values.get(ARCHITECTURE))
    layers = layers_of(Section(below(values, kind), f"{where}: {plain(kind)}"))
    return _prefix(kind, sees=images is not None), levels_of(images), GGUF.get(kind), layers


def _prefix(architecture: str, *, sees: bool) -> str:
    network = GGUF.get(architecture)
    inside = network is not None and (network.nested or (sees and bool(network.sees)))
    return "model.language_model." if inside else "model."


def projector_of(images: Mapping[str, Any]) -> str:
    """The kind of tower that the metadata of an mmproj names; "None" where it names none."""
    return str(images.get("clip.vision.projector_type") or images.get("clip.projector_type"))


def levels_of(images: Mapping[str, Any] | None) -> list[int]:
    """Indices of the blocks after which deepstack mergers stand."""
    flags = (images or {}).get("clip.vision.is_deepstack_layers") or []
    return [number for number, flag in enumerate(flags) if flag] if isinstance(flags, list) else []


def ours(facts: ModelFacts) -> ModelFacts:
    """The facts with the tensors of our network: under its names, the tower's patches in one tensor."""
    assert facts.gguf is not None, "only a GGUF has other names"
    decoder, network = (
        _prefix(facts.architecture, sees=facts.vision is not None),
        GGUF.get(facts.architecture),
    )
    made: dict[str, TensorFact] = {}
    for tensor in facts.tensors:
        name = (
            our_name(tensor.name, decoder, facts.gguf.levels, network, facts.text.num_layers) or tensor.name
        )
        role: Role = "other" if tensor.role == "linear" and len(tensor.shape) < 2 else tensor.role
        same = made.get(name)
        if name == FACTORS or (name.startswith(PREDICTOR) and not facts.predicts):
            tensor = tensor._replace(loaded=False)
        if same is not None:  # the other frame of a pair
            rows, channels, *sides = tensor.shape
            whole = (rows, channels, 2, *sides)
            made[name] = same._replace(shape=whole, nbytes=same.nbytes + tensor.nbytes)
        else:
            made[name] = tensor._replace(name=name, role=role)
    more = (facts.predictor,) if facts.predicts and facts.predictor is not None else ()
    text = facts.text
    if facts.gguf.kept:  # other states than llama.cpp's
        text = replace(text, kv_layers=(*facts.gguf.kept, *more))
    return replace(facts, tensors=tuple(made.values()), text=text)


def entries_of(headers: Sequence[GgufHeader], tower: GgufHeader | None) -> dict[str, TensorEntry]:
    """All tensors of the parts and the mmproj, by our network's names.

    Raises:
        CheckpointError: a tensor is there twice, or a frame of the patches is missing.
    """
    values = headers[0].values
    images = None if tower is None else tower.values
    naming = naming_of(values, images, headers[0].where)
    kind, network = str(values.get(ARCHITECTURE)), naming[2]
    alternating = kind in GGUF and GGUF[kind].alternating
    heads = _heads(Section(below(values, kind), headers[0].where)) if alternating else {}
    found: dict[str, TensorEntry] = {}
    for entry in placed((*headers, *([] if tower is None else [tower]))):
        if entry.name == FACTORS:  # in the configuration: `gguf_folder.py`
            continue
        name = our_name(entry.name, *naming) or entry.name
        if network is not None and network.recurrent and not name.startswith(_VISUAL):
            entry = _as_stored(entry, name)
        part = name.rpartition(".")[0].rpartition(".")[2]
        entry = replace(entry, heads=heads.get(part, 0))
        if name not in found:
            found[name] = entry
            continue
        first = found[name]
        if not entry.name.endswith(".weight.1") or first.frames or entry.shape != first.shape:
            raise CheckpointError(f"{entry.file}: tensor {plain(entry.name)} is in it twice")
        rows, channels, *sides = entry.shape
        found[name] = replace(
            first, shape=(rows, channels, 2, *sides), nbytes=2 * first.nbytes, frames=(first, entry)
        )
    return found


def _as_stored(entry: TensorEntry, name: str) -> TensorEntry:
    """An entry of a recurrent network with what its values mean."""
    if name.endswith("A_log"):
        return replace(entry, meant="minus exp")
    if name.endswith("shared_expert_gate.weight"):  # a vector in some files
        return replace(entry, shape=(1, entry.shape[-1]))
    offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return replace(entry, meant="plus one") if offset else entry


def placed(headers: Iterable[GgufHeader]) -> Iterator[TensorEntry]:
    """All tensors of files, by llama.cpp's names."""
    for header in headers:
        for tensor, offset in zip(header.tensors, header.offsets, strict=True):
            yield TensorEntry(
                tensor.name, tensor.dtype, tensor.shape, Path(header.where), offset, tensor.nbytes
            )


def _heads(section: Section) -> dict[str, int]:
    """Number of heads whose rows alternate, by projection."""
    queries = section.count("attention.head_count")
    return {"q_proj": queries, "k_proj": section.count("attention.head_count_kv", queries)}


def below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The metadata whose keys begin with a prefix, by keys without it."""
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}


def _check_types(tensors: Iterable[Stored], where: str) -> None:
    for tensor in tensors:
        if tensor.dtype not in (*BLOCKS, *PLAIN):
            raise UnsupportedModel(
                f"{where}: tensor {plain(tensor.name)} is {tensor.dtype}; our engine reads "
                f"{', '.join((*BLOCKS, *PLAIN))}: {INSTEAD}"
            )
        if tensor.dtype in BLOCKS and not _multiplied(tensor):
            raise UnsupportedModel(
                f"{where}: tensor {plain(tensor.name)} is {tensor.dtype}, but is not multiplied with; our "
                f"engine reads it as {', '.join(PLAIN)}: {INSTEAD}"
            )


def _multiplied(tensor: Stored) -> bool:
    """Whether a tensor is a matrix whose rows are multiplied or looked up."""
    beside = tensor.name.startswith(("v.patch_embd", "v.position_embd"))
    experts = len(tensor.shape) == 3 and tensor.name.endswith("_exps.weight")
    return (len(tensor.shape) == 2 or experts) and not beside


def _experts(section: Section) -> dict[str, Any]:
    """Sizes of a mixture's experts.

    Raises:
        UnsupportedModel: routing of another kind than softmax, normalised, in one group.
    """
    others = {
        "expert_gating_func": (None, 1), "expert_weights_scale": (None, 0, 1),
        "expert_weights_norm": (None, True),
        "expert_group_count": (None, 0, 1), "expert_shared_count": (None, 0, 1),
    }  # fmt: skip
    for key, known in others.items():
        if section.values.get(key) not in known:
            raise UnsupportedModel(f"{section.where} has {key}, which our engine doesn't read: {INSTEAD}")
    shared = "expert_shared_feed_forward_length"
    return {
        "num_experts": section.count("expert_count"),
        "num_experts_per_tok": section.count("expert_used_count"),
        "moe_intermediate_size": section.count("expert_feed_forward_length"),
        **({"shared_expert_intermediate_size": section.count(shared)} if section.values.get(shared) else {}),
    }


def _linear_attention(section: Section, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Sizes of gated delta-rule attention, and which layers have it."""
    values = section.count("ssm.time_step_rank")
    linear = [f"blk.{layer}.ssm_a" in shapes for layer in range(layers)]
    return {
        "linear_num_key_heads": section.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": section.count("ssm.state_size"),
        "linear_value_head_dim": section.count("ssm.inner_size") // values,
        "linear_conv_kernel_dim": section.count("ssm.conv_kernel"),
        TILED: True,
        "layer_types": [LINEAR if each else FULL for each in linear],
        "mtp_num_hidden_layers": section.values.get("nextn_predict_layers") or 0,
    }


def _text(section: Section, shapes: Mapping[str, tuple[int, ...]], network: GgufNetwork) -> dict[str, Any]:
    heads, hidden = section.count("attention.head_count"), section.count("embedding_length")
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{section.where} has no token_embd.weight; a part of it is missing")
    head = section.values.get("attention.key_length") or section.values.get("rope.dimension_count")
    head = head or hidden // heads
    rotated = section.count("rope.dimension_count", head)
    if rotated != head and not network.recurrent:
        raise UnsupportedModel(f"{section.where} rotates {rotated} of {head} values of a head: {INSTEAD}")
    layers = layers_of(section)
    inner = section.values.get("expert_shared_feed_forward_length") if network.mixture else None
    found = _linear_attention(section, layers, shapes) if network.recurrent else {}
    return found | {
        "hidden_size": hidden,
        "intermediate_size": section.count("feed_forward_length", inner or None),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": section.count("attention.head_count_kv", heads),
        "head_dim": head,
        "vocab_size": embedding[0],
        "max_position_embeddings": section.count("context_length"),
        "rms_norm_eps": section.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": section.get("rope.freq_base", float, 10000.0),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _vision(images: Mapping[str, Any], projector: str, hidden: int, where: str) -> dict[str, Any]:
    section = Section(below(images, "clip.vision"), f"{where}: mmproj")
    kind = projector_of(images)
    if kind != projector:
        raise UnsupportedModel(
            f"{section.where} has the projector {plain(kind)}; our engine has {projector}: {INSTEAD}"
        )
    patch = section.count("patch_size", most=1024)
    return {
        "depth": section.count("block_count"),
        "hidden_size": section.count("embedding_length"),
        "intermediate_size": section.count("feed_forward_length"),
        "num_heads": section.count("attention.head_count"),
        "in_channels": 3,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "spatial_merge_size": section.count("spatial_merge_size", 2, most=64),
        "out_hidden_size": section.count("projection_dim", hidden),
        "num_position_embeddings": (section.count("image_size", most=1 << 16) // patch) ** 2,
        "deepstack_visual_indexes": levels_of(images),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _vision_tokens(values: Mapping[str, Any], where: str) -> dict[str, int]:
    """Ids of the tokens for pictures, by name; empty where the vocabulary wasn't kept, as for a plan."""
    tokens = values.get(TOKENS)
    if not isinstance(tokens, list):
        return {}
    places = {token: number for number, token in enumerate(tokens) if token in _VISION_TOKENS.values()}
    missing = [token for token in _VISION_TOKENS.values() if token not in places]
    if missing:
        raise CheckpointError(f"{where} has no token {missing[0]}, which stands for pictures")
    return {field: places[token] for field, token in _VISION_TOKENS.items()}


def squares(images: Mapping[str, Any], config: Mapping[str, Any], pixels: tuple[int, int]) -> dict[str, Any]:
    """The `preprocessor_config.json` that transformers has for the same tower.

    `pixels`: fewest and most pixels of a picture, which a GGUF doesn't have (`Family.projectors`).
    """
    section, tower = Section(below(images, "clip.vision"), "mmproj"), config["vision_config"]

    def three(key: str) -> list[float]:
        found = section.get(key, list, [0.5] * 3)
        return [float(each) for each in found if isinstance(each, int | float) and math.isfinite(each)]

    return {
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "patch_size": tower["patch_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "image_mean": three("image_mean"),
        "image_std": three("image_std"),
    }
