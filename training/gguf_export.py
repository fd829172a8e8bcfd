"""A checkpoint as GGUF, with its vision tower as the mmproj beside it.

    python -m training.gguf_export src/snugvl/pocket OUT.gguf              pocket, for tests and real runs
    python -m training.gguf_export Qwen/Qwen3-VL-2B-Instruct OUT.gguf --type Q4_K_M

A model of the catalogue has no weights here: its file has the exact tensors, types and size, and no content
(a hole, which takes no disk): llama.cpp's buffers don't depend on values (`benchmarks/random_gguf.py` fills
it, for speed). Families: Qwen3 and Qwen3-VL,
mixtures included, Qwen3.5, and what llama.cpp calls llama. Names come from the package `gguf`; the choice of
types in Q4_K_M is llama.cpp's.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open

from snugvl.checkpoint.assemble import network_of
from snugvl.checkpoint.catalogue import find
from snugvl.checkpoint.section import read_json

ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": gguf.MODEL_ARCH.QWEN3VL,
    "Qwen3VLMoeForConditionalGeneration": gguf.MODEL_ARCH.QWEN3VLMOE,
    "Qwen3_5ForConditionalGeneration": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForConditionalGeneration": gguf.MODEL_ARCH.QWEN35MOE,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
}
RECURRENT = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
PREDICTOR = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
             "norm": "shared_head_norm"}  # fmt: skip
ALTERNATING = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}  # rows of heads in "llama"
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_K_M": 15}
BLOCKS = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
MERGERS = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
LEVELS = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}
FLOAT = ("conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight")
NO_MERGES = ["Ā ā"]  # llama.cpp insists on one: of bytes 0 and 1, which follow one another in no text
DEFAULT_SECTIONS = {"qwen3_5_text": [11, 11, 10], "qwen3_5_moe_text": [11, 11, 10]}
NORMAL, CONTROL, DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens; the second and last are no text


class Tensor(NamedTuple):
    """One tensor of the file; `value` is None where there is none to be had."""

    name: str
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor] | None


# The bytes of a tensor that has no value: its name, shape and type.
Fill = Callable[[str, tuple[int, ...], gguf.GGMLQuantizationType], Iterator[np.ndarray[Any, Any]]]


def export(
    source: str, out: Path, kind: str = "F16", *, tokenizer: Path | None = None, fill: Fill | None = None
) -> Path | None:
    """Write `out`, and for a model that sees mmproj-…; returns the latter.

    Of a model of the catalogue: `tokenizer` is a folder with the vocabulary, `fill` what its tensors hold.
    """
    config, tensors, folder = _read(source)
    if config["architectures"] == ["LlamaForCausalLM"]:
        tensors = [_alternating(each, config) for each in tensors]
    (name,) = config["architectures"]
    text = config.get("text_config", config)
    arch = ARCHITECTURES[name]
    layers = text["num_hidden_layers"]
    predicts = folder is not None and any(each.name.startswith("mtp.") for each in tensors)
    if folder is not None and arch in RECURRENT:
        tensors = [_recurrent(each, text, layers) for each in tensors]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[arch])
    _text_keys(writer, text, config.get("vision_config", {}), predicts=predicts)
    writer.add_file_type(FILE_TYPES[kind])
    _tokenizer(writer, folder or tokenizer, text["vocab_size"], "qwen2" if tokenizer else "llama-bpe")
    names = gguf.get_tensor_name_map(arch, layers + predicts)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    mine = [each for each in tensors if ".visual." not in each.name and not each.name.startswith("mtp.")]
    named = [part for each in mine for part in _named(each, names)]
    _write(writer, named, out, kind, layers + predicts, tied=tied, fill=fill)
    if "vision_config" not in config:
        return None
    beside = out.with_name(f"mmproj-{out.name}")
    _write_tower(config, [each for each in tensors if ".visual." in each.name], beside, kind, fill)
    return beside


def _read(source: str) -> tuple[dict[str, Any], list[Tensor], Path | None]:
    folder = Path(source)
    if folder.is_dir():
        file: Any = safe_open(folder / "model.safetensors", "pt")

        def held(name: str) -> Tensor:
            shape = tuple(file.get_slice(name).get_shape())
            return Tensor(name, shape, lambda: file.get_tensor(name).float())

        return read_json(folder / "config.json"), [held(name) for name in file.keys()], folder  # noqa: SIM118
    found = find(source)
    if found is None:
        raise SystemExit(f"{source} is neither a folder nor in the catalogue")
    config = dict(found[0].config)
    network = network_of(config, found[0].images, source)
    return config, [Tensor(each.name, each.shape, None) for each in network.tensors], None


def _alternating(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The rows of queries and keys as llama.cpp turns them: a head's two halves alternate."""
    key, value = ALTERNATING.get(tensor.name.split(".")[-2] if "." in tensor.name else ""), tensor.value
    if key is None or value is None:
        return tensor

    def turned() -> torch.Tensor:
        rows = value().view(config[key], 2, -1, tensor.shape[1])
        return rows.transpose(1, 2).reshape(tensor.shape)

    return tensor._replace(value=turned)


def _recurrent(tensor: Tensor, text: Mapping[str, Any], layers: int) -> Tensor:
    """A tensor of Qwen3.5's decoder as llama.cpp has it: norms with their 1, forgetting as −exp, value heads
    of one key head apart, and the predictor as a layer behind the last."""
    name, made = tensor.name, tensor.value
    if made is None or ".visual." in name:
        return tensor
    value, part = made(), ".".join(name.split(".")[-2:])
    if part.endswith("A_log"):
        value = -torch.exp(value)
    elif (part.endswith("norm.weight") and "linear_attn" not in name) or part.startswith("pre_fc_norm"):
        value = value + 1
    if "linear_attn." in name:
        value = _tiled(name, value, text)
    if name.startswith("mtp."):
        own = name.split(".")[1]
        name = name.replace("mtp.layers.0", f"model.layers.{layers}")
        name = (
            name.replace(f"mtp.{own}", f"blk.{layers}.nextn.{PREDICTOR[own]}") if own in PREDICTOR else name
        )
    return Tensor(name, tensor.shape, lambda: value)


def _tiled(name: str, value: torch.Tensor, text: Mapping[str, Any]) -> torch.Tensor:
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    width = text["linear_value_head_dim"]
    heads = torch.arange(values).view(keys, -1).T.flatten()  # where a head was
    wide = (heads[:, None] * width + torch.arange(width)).flatten()
    beside = 2 * keys * text["linear_key_head_dim"]
    if "in_proj_qkv." in name or "conv1d" in name:
        return torch.cat((value[:beside], value[beside:][wide]))
    if "in_proj_z." in name:
        return value[wide]
    if "out_proj." in name:
        return value[:, wide]
    return value if "linear_attn.norm" in name else value[heads]


def rewrite(
    source: Path,
    out: Path,
    change: Callable[[Any], tuple[np.ndarray[Any, Any], Any]],
    split: int = 0,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """The same file with other tensors, and `more`.

    `change`: from one of `gguf.GGUFReader`'s to its values, or its bytes `[rows, bytes]` and their type.
    `split`: tensors of a part, or 0.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=split)
    left = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(left):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values, kind = change(tensor)
        writer.add_tensor(tensor.name, values, raw_dtype=kind)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text_keys(
    writer: gguf.GGUFWriter, text: Mapping[str, Any], vision: Mapping[str, Any], *, predicts: bool = False
) -> None:
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head = text.get("head_dim") or hidden // heads
    writer.add_block_count(text["num_hidden_layers"] + predicts)
    if predicts:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(text.get("intermediate_size") or text["shared_expert_intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(text.get("rms_norm_eps", 1e-6))
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(text.get("rope_theta") or rope.get("rope_theta", 10000.0)))
    if sections := rope.get("mrope_section", DEFAULT_SECTIONS.get(text.get("model_type", ""))):
        writer.add_rope_dimension_sections([*sections, 0][:4])
    if vision:
        writer.add_num_deepstack_layers(len(vision.get("deepstack_visual_indexes", [])))
    if experts := text.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
        if shared := text.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(shared)
    if kernel := text.get("linear_conv_kernel_dim"):
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 0.25)))
        writer.add_ssm_conv_kernel(kernel)
        writer.add_ssm_state_size(text["linear_key_head_dim"])
        writer.add_ssm_group_count(text["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
        writer.add_ssm_inner_size(text["linear_value_head_dim"] * text["linear_num_value_heads"])
        writer.add_full_attention_interval(text.get("full_attention_interval", 4))


def _tokenizer(writer: gguf.GGUFWriter, folder: Path | None, size: int, pre: str) -> None:
    """The vocabulary; of a model without files names that stand for it.

    `pre`: how llama.cpp cuts words; "llama-bpe" takes a word that is a token as that, as pocket's does.
    """
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    if folder is None:
        writer.add_token_list([f"<{number}>" for number in range(size)])
        writer.add_token_types([1] * size)
        writer.add_token_merges(NO_MERGES)
        writer.add_eos_token_id(0)
        return
    document = json.loads((folder / "tokenizer.json").read_text())
    words = {number: word for word, number in document["model"]["vocab"].items()}
    added = {each["id"]: each["content"] for each in document["added_tokens"]}
    kinds = {each["id"]: CONTROL if each["special"] else DEFINED for each in document["added_tokens"]}
    writer.add_token_list([added.get(number, words.get(number, f"<{number}>")) for number in range(size)])
    known = {**dict.fromkeys(words, NORMAL), **kinds}
    writer.add_token_types([known.get(number, UNUSED) for number in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]] or NO_MERGES)
    ends = read_json(folder / "generation_config.json")["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _named(tensor: Tensor, names: gguf.TensorNameMap) -> Iterator[Tensor]:
    """As llama.cpp calls it; joined experts one by one."""
    name = tensor.name.replace("model.language_model.", "model.").replace("dt_bias", "dt_proj.bias")
    shape, value = tensor.shape, tensor.value
    if name.endswith("experts.gate_up_proj"):
        for number, part in enumerate(("gate", "up")):
            split = name.replace("gate_up_proj", f"{part}_proj.weight")
            half = None if value is None else partial(_half, value, number)
            yield from _named(Tensor(split, (shape[0], shape[1] // 2, shape[2]), half), names)
        return
    if name.startswith("blk."):
        yield Tensor(name, shape, value)
        return
    if name.endswith("experts.down_proj"):
        name += ".weight"
    if name.endswith("conv1d.weight"):
        shape = shape[0], shape[-1]
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, "", ""
    if stem.endswith("dt_proj"):
        yield Tensor(f"blk.{name.split('.')[2]}.ssm_dt.bias", shape, value)
        return
    found = names.get_name(stem)
    assert found is not None, f"llama.cpp has no name for {tensor.name}"
    yield Tensor(found + dot + suffix, shape, value)


def _half(value: Callable[[], torch.Tensor], number: int) -> torch.Tensor:
    return value().chunk(2, dim=1)[number]


def _more_bits(layer: int, layers: int) -> bool:
    """Layers with finer values and second products in Q4_K_M: the first and last eighths, and each third."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _type(tensor: Tensor, kind: str, layers: int, *, tied: bool, mixed: bool) -> str:
    name, columns = tensor.name, tensor.shape[-1]
    if len(tensor.shape) == 1 or name.endswith(FLOAT):
        return "F32"
    if kind == "Q4_K_M":
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        low = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
        finer = name == "output.weight" or (tied and name == "token_embd.weight")
        finer = finer or (name.endswith(low) and _more_bits(layer, layers))
        kind = "Q6_K" if finer else "Q5_K" if mixed and name.endswith("attn_qkv.weight") else "Q4_K"
        if columns % BLOCKS[kind][0]:
            kind = "Q8_0" if finer else "Q5_0"
    return kind if columns % BLOCKS[kind][0] == 0 else "F16"


def _write(
    writer: gguf.GGUFWriter,
    tensors: list[Tensor],
    out: Path,
    kind: str,
    layers: int,
    *,
    tied: bool = False,
    fill: Fill | None = None,
) -> None:
    """The file, tensor after tensor; what has no value is what `fill` says, or a hole."""
    mixed = any("_exps." in each.name for each in tensors)
    types = [gguf.GGMLQuantizationType[_type(each, kind, layers, tied=tied, mixed=mixed)] for each in tensors]
    sizes = []
    for tensor, dtype in zip(tensors, types, strict=True):
        block, nbytes = gguf.GGML_QUANT_SIZES[dtype]
        sizes.append(math.prod(tensor.shape) // block * nbytes)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float16), sizes[-1], raw_dtype=dtype)
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    place = gguf.GGUFWriter.ggml_pad(file.tell(), writer.data_alignment)
    for tensor, dtype, nbytes in zip(tensors, types, sizes, strict=True):
        if tensor.value is not None:
            file.seek(place)
            gguf.quants.quantize(tensor.value().reshape(tensor.shape).numpy(), dtype).tofile(file)
        elif fill is not None:
            file.seek(place)
            for piece in fill(tensor.name, tensor.shape, dtype):
                piece.tofile(file)
        place += gguf.GGUFWriter.ggml_pad(nbytes, writer.data_alignment)
    file.truncate(place)
    writer.close()


def _write_tower(
    config: Mapping[str, Any], tensors: list[Tensor], out: Path, kind: str, fill: Fill | None
) -> None:
    """The mmproj: Qwen3-VL's tower, which Qwen3.5 has, too; in 16 bits, if not in 32."""
    kind = "F32" if kind == "F32" else "F16"
    vision, text = config["vision_config"], config["text_config"]
    levels = vision.get("deepstack_visual_indexes", [])
    writer = gguf.GGUFWriter(None, "clip")
    writer.add_type("mmproj")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_use_gelu(True)
    writer.add_vision_projection_dim(vision["out_hidden_size"])
    writer.add_vision_image_size(math.isqrt(vision["num_position_embeddings"]) * vision["patch_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_attention_layernorm_eps(text.get("rms_norm_eps", 1e-6))
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_is_deepstack_layers([number in levels for number in range(vision["depth"])])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    named = [part for each in tensors for part in _tower_named(each, names, levels)]
    _write(writer, named, out, kind, 0, fill=fill)


def _tower_named(tensor: Tensor, names: gguf.TensorNameMap, levels: list[int]) -> Iterator[Tensor]:
    name, value = tensor.name.removeprefix("model."), tensor.value
    parts = name.split(".")
    if name.endswith("patch_embed.proj.weight"):  # two frames of a video, one convolution each
        rows, channels, frames, side, _ = tensor.shape
        for frame in range(frames):
            late = f".{frame}" if frame else ""
            half = None if value is None else partial(_frame, value, frame)
            yield Tensor(f"v.patch_embd.weight{late}", (rows, channels, side, side), half)
    elif parts[1] == "merger":
        yield Tensor(f"{MERGERS[parts[2]]}.{parts[3]}", tensor.shape, value)
    elif parts[1] == "deepstack_merger_list":
        yield Tensor(
            f"v.deepstack.{levels[int(parts[2])]}.{LEVELS[parts[3]]}.{parts[4]}", tensor.shape, value
        )
    else:
        stem, _, suffix = name.rpartition(".")
        yield Tensor(f"{names.get_name(stem)}.{suffix}", tensor.shape, value)


def _frame(value: Callable[[], torch.Tensor], number: int) -> torch.Tensor:
    return value()[:, :, number]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a checkpoint folder, or a model of the catalogue")
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=FILE_TYPES, default="F16", help="of a model of the catalogue")
    given = parser.parse_args()
    print(given.out, export(given.source, given.out, given.type) or "")


if __name__ == "__main__":
    main()
