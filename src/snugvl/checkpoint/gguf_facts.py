"""A GGUF's metadata as the planner's facts: one reader for all of llama.cpp's architectures.

They share their keys, so none has to be known by name: differences in memory are in the metadata (windows,
recurrent states, experts), or are refused. A few windows' patterns are in llama.cpp's source alone: they are
traits of families.

Its vocabulary as `tokenizer.json`, its chat template and the tokens that end an answer: llama.cpp names how
text is cut before byte pairs are merged (`tokenizer.ggml.pre`); the rules themselves are those of the
published tokenizers. A vocabulary of SentencePiece's has scores instead of merges, and is refused. Source of
the rules: llama.cpp, `src/llama-vocab.cpp` (MIT), which repeats each model's own tokenizer.json.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import Any, Final

from snugvl.checkpoint.architecture import TextConfig
from snugvl.checkpoint.facts import (
    GgufFacts,
    KVLayer,
    Material,
    ModelFacts,
    Role,
    TensorFact,
    TextFacts,
    VisionFacts,
)
from snugvl.checkpoint.families import GGUF, PROJECTORS, describe, family_of_gguf, traits_of
from snugvl.checkpoint.families.decoder import GatedDelta
from snugvl.checkpoint.gguf_network import (
    ARCHITECTURE,
    INSTEAD,
    TOKENS,
    below,
    config_of,
    layers_of,
    levels_of,
    naming_of,
    our_name,
    parsed,
    projector_of,
    squares,
)
from snugvl.checkpoint.image_rules import FixedSquare, SmartResize
from snugvl.checkpoint.section import MAX_LAYERS, Section, plain, shown
from snugvl.core.formats import PREQUANTIZED
from snugvl.errors import CheckpointError, UnsupportedModel

FILE: Final = "snugvl.file"  # ours, beside the metadata: where it was read
UNLIKE: Final = "snugvl.unlike"  # of an mmproj that was left out
MMPROJ: Final = "clip"  # the architecture of a vision tower's own file
UNPLANNED: Final = (
    "attention.kv_lora_rank",
    "wkv.head_size",
    "shortconv.l_cache",
    "attention.indexer.head_count",
)
FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
KINDS: Final = "tokenizer.ggml.token_type"
MERGES: Final = "tokenizer.ggml.merges"
KEPT: Final = (TOKENS, KINDS, MERGES)  # arrays that are needed whole
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_CONTROL, _DEFINED, _UNUSED = 3, 4, 5  # types of tokens
# Control tokens that end an answer in llama.cpp by their names, whatever else a file says.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED_WORDS = _WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def gguf_facts(name: str, material: Material) -> ModelFacts:
    """The facts of a GGUF, with its mmproj's where there is one (`Material.images`).

    Raises:
        CheckpointError: a key is missing or nonsense, or a layer lacks a tensor.
        UnsupportedModel: an architecture whose memory isn't known.
    """
    values = material.config
    architecture = Section(values, material.where).get(ARCHITECTURE, str)
    if architecture == MMPROJ:
        raise UnsupportedModel(f"{material.where} is a vision tower alone (mmproj); name the model beside it")
    section = Section(below(values, architecture), f"{material.where}: {plain(architecture)}")
    tensors = tuple(
        TensorFact(stored, _role(stored, shape), dtype, shape, nbytes, not stored.startswith("mtp."))
        for stored, dtype, shape, nbytes in material.tensors
    )
    names = {tensor.name for tensor in tensors}
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{material.where} has no token_embd.weight; a part of it is missing")
    if architecture in GGUF:  # of others it isn't known that their layers are alike
        _check_layers(names, layers_of(section), material.where)
    vision = None if material.images is None else _vision(material.images, material.where)
    ours, why = _ours(material)
    if ours is not None:
        _check_network(material)
    kept = () if ours is None else tuple(_kept(ours, layer) for layer in range(ours.num_layers))
    text = _text(section, architecture, tensors)
    if ours is not None:
        text = replace(text, mixture=ours.mixture)
    predicts = ours is not None and section.values.get("nextn_predict_layers") == 1
    return ModelFacts(
        name=name,
        revision=material.revision,
        source=material.source,
        architecture=architecture,
        family=family_of_gguf(architecture),
        text=text,
        vision=vision,
        tensors=tensors,
        tied="output.weight" not in names,
        quantization=_coarseness(tensors),
        download_bytes=material.download_bytes,
        native=not why,
        gguf=GgufFacts(
            FILE_TYPES.get(values.get("general.file_type", -1)) or _commonest(tensors),
            section.values.get("n_deepstack_layers") or 0,
            values.get(FILE, ""),
            (material.images or {}).get(FILE, ""),
            tuple(levels_of(material.images)),
            why,
            values.get(UNLIKE, ""),
            kept,
        ),
        predictor=next(each for each in reversed(kept) if not each.recurrent) if predicts else None,
    )


def _check_layers(names: Iterable[str], layers: int, where: str) -> None:
    """Refuse a file in which a layer lacks a weight that others of its kind have. Biases may be left out.

    Raises:
        CheckpointError: with the tensor's name.
    """
    found = {f"blk.{layer}.": set[str]() for layer in range(layers)}
    for match in (re.fullmatch(r"(blk\.\d+\.)(.+\.weight)", name) for name in names):
        if match and match[1] in found:
            found[match[1]].add(match[2])
    kinds = defaultdict[tuple[bool, ...], set[str]](set)
    for parts in found.values():
        kinds[_kind(parts)] |= parts
    for layer, parts in found.items():
        if lacking := sorted((kinds[_kind(parts)] if parts else set[str]().union(*kinds.values())) - parts):
            raise CheckpointError(
                f"{where} lacks tensor '{layer}{lacking[0]}', which other layers have; the file is "
                "incomplete or foreign, download it again"
            )


def _check_network(material: Material) -> None:
    """Refuse a file that lacks a tensor which our network of this configuration has, in all layers, say.

    Raises:
        CheckpointError: with the first one's name.
    """
    values, images, where = material.config, material.images, material.where
    try:
        config = config_of(values, images, material.tensors, where)
        settings = None if images is None else Section(squares(images, config, (1, 1 << 40)), where)
        network = describe(Section(config, where), settings)
    except CheckpointError:  # the text model of one that sees, of which no family describes the tensors
        return
    naming = naming_of(values, images, where)
    held = {our_name(tensor.name, *naming) for tensor in material.tensors}
    expected = [each.name for each in network.tensors if each.role != "expert"]  # of which names differ
    refuse_missing([name for name in expected if name not in held], len(expected), where)


def refuse_missing(missing: Sequence[str], count: int, where: str) -> None:
    """Raise CheckpointError where some of `count` tensors are missing."""
    if missing:
        raise CheckpointError(
            f"{where} lacks the tensor {missing[0]} ({len(missing)} of {count} that the model has are "
            "missing); finish the download, or the files are not of this model"
        )


def _kind(parts: Set[str]) -> tuple[bool, ...]:
    """Whether a layer is recurrent, and whether it has experts."""
    return tuple(any(sign in part for part in parts) for sign in ("ssm_", "_exps"))


def _ours(material: Material) -> tuple[TextConfig | None, str]:
    """The decoder as our own engine has it; or why it doesn't run the GGUF, as a sentence."""
    try:
        config = parsed(material.config, material.images, material.tensors, material.where)
        cut_of(Section(material.config, material.where))
    except CheckpointError as error:
        return None, str(error)
    return config.text, ""


def _kept(text: TextConfig, layer: int) -> KVLayer:
    """Keys, values or state that our engine keeps of a layer."""
    if text.kinds[layer] == "linear" and text.linear is not None:
        return GatedDelta(text.linear, ()).kept()
    queries, keys = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    gated = {"projected": 2 * queries + 2 * keys, "values": queries} if text.gated else {}
    return KVLayer(text.num_kv_heads, text.head_dim, text.window_of(layer), **gated)


def _role(name: str, shape: tuple[int, ...]) -> Role:
    if name.startswith(("v.", "mm.", "a.")):
        return "connector" if name.startswith("mm.") else "vision"
    if name in ("token_embd.weight", "output.weight"):
        return "embedding" if name.startswith("token") else "lm_head"
    if "_exps." in name:
        return "expert"
    return "norm" if "norm" in name else "linear" if len(shape) == 2 else "other"


def _text(section: Section, architecture: str, tensors: tuple[TensorFact, ...]) -> TextFacts:
    for key in UNPLANNED:
        if section.values.get(key):
            raise UnsupportedModel(f"{section.where} has {key}: a cache of a kind that isn't planned yet")
    layers = layers_of(section)
    hidden = section.count("embedding_length")
    heads = max(_each(section, "attention.head_count", layers))
    vocabulary = next(tensor.shape[0] for tensor in tensors if tensor.role == "embedding")
    return TextFacts(
        hidden_size=hidden,
        intermediate_size=max(_each(section, "feed_forward_length", layers, 1)),
        num_layers=layers,
        num_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=section.count("context_length"),
        kv_layers=tuple(_kv_layers(section, architecture, layers, hidden // max(heads, 1))),
        experts_used=section.values.get("expert_used_count") or 0,
    )


def _each(section: Section, key: str, layers: int, default: int | None = None) -> list[int]:
    """Read a number of every layer, which files write once where it is the same."""
    value = section.values.get(key)
    if isinstance(value, list) and len(value) >= layers and all(isinstance(each, int) for each in value):
        return [max(0, each) for each in value[:layers]]
    return [section.count(key, default)] * layers


def _kv_layers(section: Section, architecture: str, layers: int, head: int) -> Iterator[KVLayer]:
    heads = _each(section, "attention.head_count", layers)
    kv_heads = _each(section, "attention.head_count_kv", layers, max(heads))
    key = section.count("attention.key_length", head)
    near = section.count("attention.key_length_swa", key)  # of layers with a window
    values = section.count("attention.value_length", key), section.count("attention.value_length_swa", near)
    if (key, near) != values:
        raise UnsupportedModel(
            f"{section.where} has keys of {key} and values of {values[0]}; that isn't planned yet"
        )
    traits = traits_of(family_of_gguf(architecture))
    window = section.values.get("attention.sliding_window")
    pattern = section.values.get("attention.sliding_window_pattern") or traits.full_every
    every = section.values.get("full_attention_interval", 4)
    recurrent = section.values.get("ssm.state_size")
    if recurrent and not traits.recurrent:
        raise UnsupportedModel(f"{section.where} has recurrent states of a kind that isn't planned yet")
    for layer in range(layers):
        if recurrent and (layer + 1) % every:
            yield _recurrent(section, recurrent)
            continue
        if isinstance(pattern, list):
            windowed = layer < len(pattern) and bool(pattern[layer])
        else:
            windowed = isinstance(pattern, int) and pattern > 0 and (layer + 1) % pattern > 0
        windowed = windowed and isinstance(window, int)
        yield KVLayer(kv_heads[layer], near if windowed else key, window=window if windowed else None)


def _recurrent(section: Section, state: int) -> KVLayer:
    """The states of a gated delta-rule layer, which llama.cpp keeps in float32."""
    inner, groups = section.count("ssm.inner_size"), section.count("ssm.group_count")
    channels = inner + 2 * groups * state
    convolution = (section.count("ssm.conv_kernel") - 1) * channels
    return KVLayer(
        0, 0, state_bytes=4 * (state * inner + convolution), projected=channels + inner, values=inner
    )


def _vision(values: Mapping[str, Any], where: str) -> VisionFacts:
    section = Section(below(values, "clip.vision"), f"{where}: mmproj")
    kind = projector_of(values)
    if kind not in PROJECTORS:
        raise UnsupportedModel(
            f"{section.where} has the projector {plain(kind)}; the tokens of its pictures aren't known "
            f"(known: {', '.join(sorted(PROJECTORS))})"
        )
    patch, pictures = section.count("patch_size", most=1024), PROJECTORS[kind]
    side = section.count("image_size", patch, most=1 << 16)
    scale = section.values.get("projector.scale_factor")
    merge = section.count("spatial_merge_size", scale or (pictures.merge if pictures else 2), most=64)
    if pictures is not None:
        least, most = (count * (patch * merge) ** 2 for count in (pictures.least, pictures.most))
        rule: SmartResize | FixedSquare = SmartResize(patch, merge, min_pixels=least, max_pixels=most)
    else:
        merge = scale or 4
        rule = FixedSquare(side, patch, (side // patch // merge) ** 2)
    return VisionFacts(
        depth=section.count("block_count", most=MAX_LAYERS),
        hidden_size=section.count("embedding_length"),
        intermediate_size=section.count("feed_forward_length"),
        num_heads=section.count("attention.head_count"),
        patch_size=patch,
        merge_size=merge,
        patch_dim=3 * patch * patch,
        deepstack_levels=len(levels_of(values)),
        rule=rule,
        windowed=bool(section.values.get("n_wa_pattern")),
    )


def _coarseness(tensors: tuple[TensorFact, ...]) -> Any:
    """The precision, in the planner's terms, that is as fine as the file's types."""
    held = [tensor for tensor in tensors if tensor.role in ("linear", "expert")]
    bits = 8 * sum(tensor.nbytes for tensor in held) / max(sum(prod(tensor.shape) for tensor in held), 1)
    return PREQUANTIZED[4] if bits < 6 else PREQUANTIZED[8] if bits < 12 else None


def _commonest(tensors: tuple[TensorFact, ...]) -> str:
    held = Counter[str]()
    for tensor in tensors:
        held[tensor.dtype] += tensor.nbytes
    return held.most_common(1)[0][0]


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_CUTS: "Final[Mapping[str, Cut]]" = {  # by llama.cpp's names
    "gpt-2": (None, [{**_BYTES, "use_regex": True}], False),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}], False),
    "qwen2": ("NFC", _split(_WORDS % ""), False),
    "qwen35": ("NFC", _split(_MARKED_WORDS % ""), False),
    "llama-bpe": (None, _split(_WORDS % "{1,3}"), True),
}


Cut = tuple[str | None, list[dict[str, Any]], bool]
"""Normaliser, how text is cut, whether a word that is a token is taken as that."""


def cut_of(section: Section) -> Cut:
    """How text is cut before byte pairs are merged.

    Raises:
        UnsupportedModel: a kind of vocabulary, or a cut, that isn't known.
    """
    model, pre = section.get(_MODEL, str), section.get(_PRE, str, "default")
    if model != "gpt2" or pre not in _CUTS:
        what = f"{_MODEL} {plain(model)}" if model != "gpt2" else f"{_PRE} {plain(pre)}"
        raise UnsupportedModel(
            f"{section.where} has {what}; our engine reads gpt2 with {', '.join(_CUTS)}: {INSTEAD}"
        )
    return _CUTS[pre]


def cut_named(document: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how a `tokenizer.json` cuts text; None where our engine knows none."""
    model, given = document.get("model") or {}, document.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given])
    normaliser = (document.get("normalizer") or {}).get("type")
    mine = normaliser, [_step(each) for each in steps], bool(model.get("ignore_merges"))
    if model.get("type") != "BPE":
        return None
    named = (
        name
        for name, (form, cut, whole) in _CUTS.items()
        if mine == (form, [_step(each) for each in cut], whole)
    )
    return next(named, None)


def _step(values: Mapping[str, Any]) -> dict[str, Any]:
    """A step of cutting text, without what changes no token."""
    made = {key: value for key, value in values.items() if key != "trim_offsets"}
    return {"use_regex": True, **made} if values.get("type") == "ByteLevel" else made


def tokenizer_files(values: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The tokenizer's small files of a checkpoint folder, made from the metadata, by file name.

    `values`: the metadata, with the arrays of `KEPT`.

    Raises:
        CheckpointError: an array is missing or nonsense.
        UnsupportedModel: a kind of vocabulary, or a cut, that isn't known.
    """
    section = Section(values, where)
    cut = cut_of(section)
    tokens, kinds = _texts(section, TOKENS), section.get(KINDS, list)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{where} has {len(tokens):,} tokens, but {KINDS} of {len(kinds):,}")
    told = {name: _token(section, f"tokenizer.ggml.{name}_token_id", tokens) for name in ("bos", "eos")}
    named = {f"{name}_token": token for name, token in told.items() if token is not None}
    ends = {token for number, token in enumerate(tokens) if kinds[number] == _CONTROL and token in _ENDS}
    ends |= {named["eos_token"]} if "eos_token" in named else set()
    eot = _token(section, "tokenizer.ggml.eot_token_id", tokens)
    ends |= {eot} if eot is not None else set()
    framed = told["bos"] if values.get("tokenizer.ggml.add_bos_token") else None
    config: dict[str, Any] = dict(named)
    if (template := values.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": _document(tokens, kinds, _merges(section), cut, framed),
        "tokenizer_config.json": config,
        "generation_config.json": {
            "eos_token_id": [number for number, token in enumerate(tokens) if token in ends]
        },
    }


def _document(
    tokens: list[str], kinds: list[int], merges: list[list[str]], cut: Cut, framed: str | None
) -> dict[str, Any]:
    """The content of `tokenizer.json`. `framed`: tokens that come before a whole text."""
    normaliser, steps, whole = cut
    vocab = {token: number for number, token in enumerate(tokens) if kinds[number] != _UNUSED}
    if len(vocab) < sum(kind != _UNUSED for kind in kinds):
        raise CheckpointError(f"{TOKENS} has a token twice")
    # Some files have merges that make no token, as llama.cpp insists on one: they never apply.
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, **flags, "special": kinds[number] == _CONTROL}
        for number, token in enumerate(tokens)
        if kinds[number] in (_CONTROL, _DEFINED)
    ]
    processor: dict[str, Any] | None = None
    if framed is not None:
        single = [{"SpecialToken": {"id": framed, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {framed: {"id": framed, "ids": [vocab[framed]], "tokens": [framed]}}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if normaliser is None else {"type": normaliser},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": processor,
        "decoder": {**_BYTES, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": whole, "vocab": vocab, "merges": merges},
    }


def _merges(section: Section) -> list[list[str]]:
    """The merges as pairs of tokens. No token holds a space: byte-level vocabularies write it otherwise."""
    pairs = [merge.split(" ") for merge in _texts(section, MERGES)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise CheckpointError(f"{section.where} has a merge {shown(' '.join(wrong))}; two tokens are merged")
    return pairs


def _texts(section: Section, key: str) -> list[str]:
    found = section.get(key, list)
    if not all(isinstance(each, str) for each in found):
        raise CheckpointError(f"{section.where}: {key} are not texts")
    return list(found)


def _token(section: Section, key: str, tokens: list[str]) -> str | None:
    """The token that a key names by its id."""
    number = section.values.get(key)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(f"{section.where} has {key} {shown(number)}, of {len(tokens):,} tokens")
    return tokens[number]
