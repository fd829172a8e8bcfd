"""GGUF files for tests, made by llama.cpp's own writer; weights are holes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TEXT = {"token_embd.weight": (64, 32), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_norm.weight": (32,)}
TOWER = {"v.patch_embd.weight": (16, 3, 16, 16), "mm.0.weight": (64, 64)}
KINDS = gguf.GGMLQuantizationType


def model(
    path: Path,
    *,
    tensors: dict[str, tuple[int, ...]] | None = None,
    architecture: str = "llama",
    **more: Any,
) -> Path:
    """A decoder of `block_count` layers, or one. `more`: metadata of the architecture, with __ for a dot."""
    writer = gguf.GGUFWriter(None, architecture)
    values = {
        "block_count": 1, "context_length": 4096, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1,
    }  # fmt: skip
    for key, value in (values | {name.replace("__", "."): value for name, value in more.items()}).items():
        name = key if key.startswith("split.") else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_file_type(7)
    writer.add_token_list([f"<{number}>" for number in range(64)])
    layers = range(more.get("block_count", 1))
    return written(writer, path, of_layers(layers) if tensors is None else tensors)


def of_layers(layers: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder with these layers."""
    return {name.replace("blk.0", f"blk.{layer}"): shape for layer in layers for name, shape in TEXT.items()}


def tower(path: Path, width: int = 32, projector: str = "qwen3vl_merger") -> Path:
    """A vision tower for a decoder of that width."""
    writer = gguf.GGUFWriter(None, "clip")
    writer.add_clip_projector_type(projector)
    writer.add_vision_projection_dim(width)
    writer.add_vision_patch_size(16)
    writer.add_vision_spatial_merge_size(2)
    writer.add_vision_embedding_length(16)
    writer.add_vision_feed_forward_length(64)
    writer.add_vision_block_count(2)
    writer.add_vision_head_count(2)
    writer.add_vision_is_deepstack_layers([True, False])
    return written(writer, path, TOWER)


def written(writer: gguf.GGUFWriter, path: Path, tensors: dict[str, tuple[int, ...]]) -> Path:
    """The file with these tensors, as holes: matrices in 8 bits, all else in 32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, shape in tensors.items():
        kind = KINDS.Q8_0 if len(shape) == 2 else KINDS.F32
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        size = int(np.prod(shape)) // block * nbytes
        writer.add_tensor_info(name, shape, np.dtype(np.float16), size, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    sizes = (gguf.GGUFWriter.ggml_pad(each.nbytes, 32) for each in writer.tensors[0].values())
    file.truncate(gguf.GGUFWriter.ggml_pad(file.tell(), 32) + sum(sizes))
    writer.close()
    return path
