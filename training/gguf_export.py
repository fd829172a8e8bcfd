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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from snugvl.checkpoint.assemble import network_of
from snugvl.checkpoint.catalogue import find
from snugvl.checkpoint.facts import PREDICTOR
from snugvl.checkpoint.families import parse_config
from snugvl.checkpoint.section import read_json
from snugvl.quantize.gguf_file import FLOAT, GgufFile, Naming, Tensor, add_vocabulary, converted

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_K_M": 15}
BLOCKS = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}

# The bytes of a tensor that has no value: its name, shape and type.
Fill = Callable[[str, tuple[int, ...], Kind], Iterator[np.ndarray[Any, Any]]]


def export(
    source: str,
    out: Path,
    kind: str = "F16",
    *,
    tokenizer: Path | None = None,
    fill: Fill | None = None,
    words: int | None = None,
) -> Path | None:
    """Write `out`, and for a model that sees mmproj-…; returns the latter.

    Of a model of the catalogue: `tokenizer` is a folder with the vocabulary, `fill` what its tensors hold.
    Without such a folder tokens have names that stand for them, or only the first `words`: to write all takes
    longer than the rest, and a plan reads none.
    """
    values, tensors, folder = _read(source)
    config = parse_config(values, source)
    predicts = folder is not None and any(each.name.startswith(PREDICTOR) for each in tensors)
    naming = Naming(config, predicts=predicts)
    writer = naming.metadata()
    writer.add_file_type(FILE_TYPES[kind])
    cut = "qwen2" if tokenizer else "llama-bpe"
    _tokenizer(writer, folder or tokenizer, words or config.text.vocab_size, cut)
    mine = [
        each for each in tensors if not _visual(each) and (predicts or not each.name.startswith(PREDICTOR))
    ]
    named = [*naming.factors(), *(part for each in mine for part in naming.decoder(each))]
    mixed, layers, tied = config.text.mixture is not None, naming.layers, config.tie_word_embeddings
    types = [(each, Kind[_type(each, kind, layers, tied=tied, mixed=mixed)]) for each in named]
    _written(GgufFile(out, writer, types), types, fill)
    if config.vision is None:
        return None
    beside, wide = out.with_name(f"mmproj-{out.name}"), "F32" if kind == "F32" else "F16"
    writer = naming.tower_metadata()
    writer.add_file_type(FILE_TYPES[wide])
    parts = [part for each in tensors if _visual(each) for part in naming.tower(each)]
    types = [(each, Kind[_type(each, wide, 0, tied=False, mixed=False)]) for each in parts]
    _written(GgufFile(beside, writer, types), types, fill)
    return beside


def _visual(tensor: Tensor) -> bool:
    return ".visual." in tensor.name


def _written(file: GgufFile, tensors: list[tuple[Tensor, Kind]], fill: Fill | None) -> None:
    for tensor, kind in tensors:
        if tensor.value is not None:
            file.put(tensor.name, converted(tensor, kind))
        elif fill is not None:
            file.put(tensor.name, fill(tensor.name, tensor.shape, kind))
    file.close()


def _read(source: str) -> tuple[dict[str, Any], list[Tensor], Path | None]:
    folder = Path(source)
    if folder.is_dir():
        file: Any = safe_open(folder / "model.safetensors", "pt")

        def held(name: str) -> Tensor:
            shape = tuple(file.get_slice(name).get_shape())
            return Tensor(name, shape, lambda: [file.get_tensor(name)])

        return read_json(folder / "config.json"), [held(name) for name in file.keys()], folder  # noqa: SIM118
    found = find(source)
    if found is None:
        raise SystemExit(f"{source} is neither a folder nor in the catalogue")
    config = dict(found[0].config)
    network = network_of(config, found[0].images, source)
    return config, [Tensor(each.name, each.shape, None) for each in network.tensors], None


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


def _tokenizer(writer: gguf.GGUFWriter, folder: Path | None, size: int, cut: str) -> None:
    """The vocabulary; of a model without files names that stand for it."""
    if folder is None:
        document: dict[str, Any] = {
            "model": {"vocab": {f"<{number}>": number for number in range(size)}, "merges": []}
        }
        add_vocabulary(writer, document, size, cut, (0,), "")
        return
    ends = read_json(folder / "generation_config.json")["eos_token_id"]
    add_vocabulary(
        writer,
        json.loads((folder / "tokenizer.json").read_text()),
        size,
        cut,
        ends[:1] if isinstance(ends, list) else (ends,),
        (folder / "chat_template.jinja").read_text(),
    )


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
