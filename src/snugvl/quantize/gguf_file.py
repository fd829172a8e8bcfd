"""A checkpoint as a GGUF and, where it sees, an mmproj: metadata, names, orders, and the files themselves.

What llama.cpp stores in another way than transformers is listed in `checkpoint/gguf_network.py`, which reads
it; here the same is done the other way round. Names and metadata are those of the package `gguf`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from snugvl.checkpoint.architecture import Llama3Scaling, ModelConfig
from snugvl.checkpoint.facts import PREDICTOR
from snugvl.checkpoint.families import GGUF
from snugvl.checkpoint.families.traits import GgufNetwork
from snugvl.checkpoint.gguf_network import FACTORS
from snugvl.errors import UnsupportedModel
from snugvl.models.rope import inverse_frequencies, llama3

INSTEAD: Final = "use snugvl's own format"
SIZES: Final = gguf.GGML_QUANT_SIZES
PREDICTORS: Final = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}  # fmt: skip
MERGERS: Final = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
LEVELS: Final = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}
FLOAT: Final = (
    "conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight"
)  # fmt: skip
NO_MERGES: Final = ["Ā ā"]  # llama.cpp insists on one: of bytes 0 and 1, which follow one another in no text
NORMAL, CONTROL, DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens; the second and last are not text
ROWS: Final = 1 << 22  # values that are converted together


class Tensor(NamedTuple):
    """A tensor of a checkpoint or of a GGUF. `value`: its values, some rows after the other, each time it is
    called; None where there are none."""

    name: str
    shape: tuple[int, ...]
    value: Callable[[], Iterable[torch.Tensor]] | None

    def changed(self, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> "Tensor":
        """The tensor with other values, computed from all of them."""
        value, mine = self.value, self.shape
        if value is None:
            return self._replace(shape=shape)
        return self._replace(shape=shape, value=lambda: [change(torch.cat([*value()]).view(mine))])


class Naming:
    """How llama.cpp names and orders the tensors of a model. `kind`: the architecture as GGUF files name it;
    `layers`: the decoder's layers, and a predictor's."""

    def __init__(self, config: ModelConfig, *, predicts: bool = False) -> None:
        """`predicts`: whether a multi-token predictor is stored.

        Raises:
            UnsupportedModel: an architecture, or a variant of it, that our engine reads from no GGUF.
        """
        self.config, self.text, self.predicts = config, config.text, predicts
        self.kind, self.network = _network(config)
        self.layers = self.text.num_layers + predicts
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.kind)
        self._names = gguf.get_tensor_name_map(arch, self.layers)
        vision = config.vision
        self._tower = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 0 if vision is None else vision.depth)

    def rows(self, name: str) -> torch.Tensor | None:
        """The checkpoint's rows of a tensor in the order in which llama.cpp has them; None: the same."""
        text, linear = self.text, self.text.linear
        part = ".".join(name.split(".")[-2:])
        if self.network.alternating and part.startswith(("q_proj.", "k_proj.")):
            heads = text.num_heads if part.startswith("q") else text.num_kv_heads
            return torch.arange(heads * text.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()
        if linear is None or "linear_attn." not in name:
            return None
        if part.startswith(("in_proj_qkv.", "conv1d.")):
            beside = linear.channels - linear.values
            return torch.cat((torch.arange(beside), beside + self._values()))
        if part.startswith("in_proj_z."):
            return self._values()
        heads = part.startswith(("in_proj_a.", "in_proj_b.")) or part.endswith((".A_log", ".dt_bias"))
        return self._heads() if heads else None

    def columns(self, name: str) -> torch.Tensor | None:
        """The checkpoint's columns of a matrix in the order in which llama.cpp has them; None: the same."""
        return self._values() if self.text.linear is not None and "linear_attn.out_proj." in name else None

    def _heads(self) -> torch.Tensor:
        """Value heads, those of one key head apart."""
        assert self.text.linear is not None
        return torch.arange(self.text.linear.value_heads).view(self.text.linear.key_heads, -1).T.flatten()

    def _values(self) -> torch.Tensor:
        assert self.text.linear is not None
        width = self.text.linear.value_dim
        return (self._heads()[:, None] * width + torch.arange(width)).flatten()

    def decoder(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor of the decoder, or of its predictor, as llama.cpp has it; joined experts become two."""
        name, shape = tensor.name, tensor.shape
        part = ".".join(name.split(".")[-2:])
        if (order := self.rows(name)) is not None:
            tensor = tensor.changed(shape, lambda value: value[order])
        if (across := self.columns(name)) is not None:
            tensor = tensor.changed(shape, lambda value: value[:, across])
        if part.endswith("A_log"):
            tensor = tensor.changed(shape, lambda value: -torch.exp(value.float()))
        elif self.network.recurrent and "linear_attn" not in name and len(shape) == 1 and "norm" in part:
            tensor = tensor.changed(shape, lambda value: value.float() + 1)
        elif name.endswith("conv1d.weight"):
            tensor = tensor.changed((shape[0], shape[-1]), lambda value: value[:, 0])
        if name.endswith("experts.gate_up_proj"):
            half = shape[0], shape[1] // 2, shape[2]
            for number, each in enumerate(("gate", "up")):
                split = tensor.changed(half, partial(_half, number))
                yield split._replace(name=self.name(name.replace("gate_up_proj", f"{each}_proj.weight")))
            return
        yield tensor._replace(
            name=self.name(f"{name}.weight" if name.endswith("experts.down_proj") else name)
        )

    def name(self, name: str) -> str:
        """llama.cpp's name of a tensor of the decoder, or of its predictor."""
        if name.startswith(PREDICTOR):
            own, last = name.split(".")[1], self.layers - 1
            if own in PREDICTORS:
                return f"blk.{last}.nextn.{PREDICTORS[own]}.{name.rpartition('.')[2]}"
            name = name.replace(f"{PREDICTOR}layers.0", f"model.layers.{last}")
        name = name.replace("model.language_model.", "model.")
        if name.endswith("dt_bias"):
            return f"blk.{name.split('.')[2]}.ssm_dt.bias"
        stem, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = name, "", ""
        found = self._names.get_name(stem)
        if found is None:
            raise UnsupportedModel(f"llama.cpp's {self.kind} has no tensor {name}; {INSTEAD}")
        return found + dot + suffix

    def tower(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor of the vision tower as llama.cpp has it."""
        assert self.config.vision is not None
        name = tensor.name.removeprefix("model.")
        parts = name.split(".")
        if name.endswith("patch_embed.proj.weight"):  # two frames of a video, one convolution each
            rows, channels, frames, *side = tensor.shape
            for frame in range(frames):
                late = f".{frame}" if frame else ""
                split = tensor.changed((rows, channels, *side), partial(_frame, frame))
                yield split._replace(name=f"v.patch_embd.weight{late}")
        elif parts[1] == "merger":
            yield tensor._replace(name=f"{MERGERS[parts[2]]}.{parts[3]}")
        elif parts[1] == "deepstack_merger_list":
            level = self.config.vision.deepstack_layers[int(parts[2])]
            yield tensor._replace(name=f"v.deepstack.{level}.{LEVELS[parts[3]]}.{parts[4]}")
        else:
            stem, _, suffix = name.rpartition(".")
            yield tensor._replace(name=f"{self._tower.get_name(stem)}.{suffix}")

    def factors(self) -> list[Tensor]:
        """The divisors of the rotary frequencies where they aren't all 1, as a tensor of the file."""
        rope = self.text.rope
        if not isinstance(rope.scaling, Llama3Scaling):
            return []
        plain = inverse_frequencies(rope.dims, rope.theta, torch.device("cpu"))
        factors = plain / llama3(plain, rope.scaling)
        return [Tensor(FACTORS, (rope.dims // 2,), lambda: [factors])]

    def metadata(self) -> gguf.GGUFWriter:
        """A writer that has the decoder's metadata, but for the vocabulary."""
        text, writer = self.text, gguf.GGUFWriter(None, self.kind)
        writer.add_block_count(self.layers)
        if self.predicts:
            writer.add_nextn_predict_layers(1)
        writer.add_context_length(text.max_position_embeddings)
        writer.add_embedding_length(text.hidden_size)
        mixture = text.mixture
        inner = text.intermediate_size or (0 if mixture is None else mixture.shared)
        writer.add_feed_forward_length(inner)
        writer.add_head_count(text.num_heads)
        writer.add_head_count_kv(text.num_kv_heads)
        writer.add_key_length(text.head_dim)
        writer.add_value_length(text.head_dim)
        writer.add_layer_norm_rms_eps(text.rms_norm_eps)
        writer.add_rope_freq_base(text.rope.theta)
        if text.rope.sections is not None:
            writer.add_rope_dimension_sections([*text.rope.sections, 0])
        if self.config.vision is not None:
            writer.add_num_deepstack_layers(len(self.config.vision.deepstack_layers))
        if mixture is not None:
            writer.add_expert_count(mixture.count)
            writer.add_expert_used_count(mixture.used)
            writer.add_expert_feed_forward_length(mixture.width)
            if mixture.shared:
                writer.add_expert_shared_feed_forward_length(mixture.shared)
        if text.linear is not None:
            writer.add_rope_dimension_count(text.rope.dims)
            writer.add_ssm_conv_kernel(text.linear.kernel)
            writer.add_ssm_state_size(text.linear.key_dim)
            writer.add_ssm_group_count(text.linear.key_heads)
            writer.add_ssm_time_step_rank(text.linear.value_heads)
            writer.add_ssm_inner_size(text.linear.values)
            writer.add_full_attention_interval(text.kinds.index("full") + 1)
        return writer

    def tower_metadata(self) -> gguf.GGUFWriter:
        """A writer that has the metadata of the mmproj: Qwen3-VL's tower, which Qwen3.5 has as well."""
        vision, writer = self.config.vision, gguf.GGUFWriter(None, "clip")
        assert vision is not None
        writer.add_type("mmproj")
        writer.add_clip_has_vision_encoder(True)
        writer.add_clip_projector_type(self.network.projector)
        writer.add_vision_use_gelu(True)
        writer.add_vision_projection_dim(vision.out_hidden_size)
        writer.add_vision_image_size(vision.position_grid * vision.patch_size)
        writer.add_vision_patch_size(vision.patch_size)
        writer.add_vision_embedding_length(vision.hidden_size)
        writer.add_vision_feed_forward_length(vision.intermediate_size)
        writer.add_vision_block_count(vision.depth)
        writer.add_vision_head_count(vision.num_heads)
        writer.add_vision_image_mean([0.5] * 3)
        writer.add_vision_image_std([0.5] * 3)
        writer.add_vision_attention_layernorm_eps(self.text.rms_norm_eps)
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
        levels = vision.deepstack_layers
        writer.add_vision_is_deepstack_layers([number in levels for number in range(vision.depth)])
        return writer


def _half(number: int, value: torch.Tensor) -> torch.Tensor:
    return value.chunk(2, dim=1)[number]


def _frame(number: int, value: torch.Tensor) -> torch.Tensor:
    return value[:, :, number]


def _network(config: ModelConfig) -> tuple[str, GgufNetwork]:
    """The architecture as GGUF files name it, and how our engine runs it.

    Raises:
        UnsupportedModel: there is none for this one, or it leaves something out that the model has.
    """
    text, sees = config.text, config.vision is not None
    # A decoder that has an architecture of its own is not the one that sees.
    for kind, network in sorted(GGUF.items(), key=lambda item: bool(item[1].sees) != sees):
        if config.architecture == (network.sees if sees else network.text):
            scaled = text.rope.scaling is not None and not isinstance(text.rope.scaling, Llama3Scaling)
            lacking = (
                "windows" if text.window is not None
                else "this scaling of rotary positions" if scaled
                else "biases behind attention" if text.o_bias
                else ""
            )  # fmt: skip
            if lacking:
                raise UnsupportedModel(f"a GGUF of {kind} has no {lacking}, which this model has; {INSTEAD}")
            return kind, network
    known = sorted({name for each in GGUF.values() for name in (each.text, each.sees) if name})
    raise UnsupportedModel(
        f"{config.architecture} can't be written as a GGUF; {', '.join(known)} can; {INSTEAD}"
    )


def add_vocabulary(
    writer: gguf.GGUFWriter,
    document: Mapping[str, Any],
    size: int,
    cut: str,
    ends: Sequence[int],
    template: str,
    first: int | None = None,
) -> None:
    """Add the vocabulary of a `tokenizer.json`, and the chat template, to a file's metadata.

    Args:
        size: rows of the embedding, which may have more than there are tokens.
        cut: how llama.cpp cuts words; "llama-bpe" takes a word that is a token as that.
        ends: tokens that end an answer; llama.cpp knows others by their names.
        first: the token that comes before a whole text; None: none does.
    """
    words = {number: word for word, number in document["model"]["vocab"].items()}
    listed = document.get("added_tokens") or []
    added = {each["id"]: each["content"] for each in listed}
    kinds = {each["id"]: CONTROL if each["special"] else DEFINED for each in listed}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    tokens = [added.get(number, words.get(number, f"[PAD{number}]")) for number in range(size)]
    writer.add_token_list(tokens)
    known = {**dict.fromkeys(words, NORMAL), **kinds}
    writer.add_token_types([known.get(number, UNUSED) for number in range(size)])
    merges = [each if isinstance(each, str) else " ".join(each) for each in document["model"]["merges"]]
    writer.add_token_merges(merges or NO_MERGES)
    for add, number in zip((writer.add_eos_token_id, writer.add_eot_token_id), ends, strict=False):
        add(number)
    if first is not None:
        writer.add_bos_token_id(first)
    writer.add_add_bos_token(first is not None)
    writer.add_chat_template(template)


class GgufFile:
    """A GGUF whose tensors are written one after the other, in any order; what isn't is a hole."""

    def __init__(self, path: Path, writer: gguf.GGUFWriter, tensors: Iterable[tuple[Tensor, Kind]]) -> None:
        """Write the header."""
        kinds = list(tensors)
        sizes = [nbytes_of(tensor.shape, kind) for tensor, kind in kinds]
        for (tensor, kind), nbytes in zip(kinds, sizes, strict=True):
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float16), nbytes, raw_dtype=kind)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        self._writer = writer
        self._file: IO[bytes] = writer.fout[0]
        place, pad = self._file.tell(), writer.data_alignment
        place = gguf.GGUFWriter.ggml_pad(place, pad)
        self._places: dict[str, int] = {}
        for (tensor, _), nbytes in zip(kinds, sizes, strict=True):
            self._places[tensor.name] = place
            place += gguf.GGUFWriter.ggml_pad(nbytes, pad)
        self._file.truncate(place)

    def put(self, name: str, pieces: Iterable[np.ndarray[Any, Any]]) -> None:
        """Write the bytes of a tensor, piece by piece."""
        self._file.seek(self._places[name])
        for piece in pieces:
            self._file.write(np.ascontiguousarray(piece).data)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def nbytes_of(shape: Sequence[int], kind: Kind) -> int:
    """Bytes of a tensor in a file."""
    block, nbytes = SIZES[kind]
    return math.prod(shape) // block * nbytes


def plain_kind(tensor: Tensor, wanted: Kind) -> Kind:
    """The type of a tensor: `wanted` where llama.cpp and its columns allow it, else of 32 or 16 bits."""
    if len(tensor.shape) == 1 or tensor.name.endswith(FLOAT):
        return Kind.F32
    return wanted if tensor.shape[-1] % SIZES[wanted][0] == 0 else Kind.F16


def converted(tensor: Tensor, kind: Kind) -> Iterator[np.ndarray[Any, Any]]:
    """A tensor's values as a type's bytes, piece by piece."""
    assert tensor.value is not None
    for rows in tensor.value():
        for piece in torch.split(rows.reshape(-1, tensor.shape[-1]), max(1, ROWS // tensor.shape[-1])):
            yield gguf.quants.quantize(piece.float().numpy(), kind)
