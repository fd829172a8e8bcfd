"""Tiny models as GGUF, every matrix in blocks of some type, and what they mean as a folder in float32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from training.gguf_export import export, rewrite

from snugvl.checkpoint.families import read_config
from snugvl.layers.ggml import LAYOUTS, GgmlType
from snugvl.quantize.gguf_file import Naming, Tensor
from tests import checkpoints, text_checkpoints
from tests.ggml_blocks import random_blocks, reference

Pick = Callable[[str], GgmlType | None]
TEXT = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4,
    "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 256}
SPECIAL = {"<|image_pad|>": 300, "<|video_pad|>": 301, "<|vision_start|>": 302, "<|vision_end|>": 303,
           "<|im_start|>": 304, "<|im_end|>": 305}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class Pair(NamedTuple):
    """The same values: as GGUF, with its mmproj, and in a folder."""

    model: Path
    projector: Path | None
    wide: Path


def qwen3_vl(root: Path, pick: Pick, tower: Pick = lambda _: None, *, tied: bool = False) -> Pair:
    """A Qwen3-VL. `pick`, `tower`: the type of a matrix by its name; None leaves it in float32."""
    text, vision = dict(checkpoints.TEXT), dict(checkpoints.VISION)
    checkpoints.TEXT.update(TEXT)
    checkpoints.VISION.update(VISION)
    try:
        source = checkpoints.write(root / "source", checkpoints.Options(tied=tied))
    finally:
        checkpoints.TEXT.update(text)
        checkpoints.VISION.update(vision)
    return written(root, source, pick, tower)


def text_model(
    root: Path, architecture: str, kind: str, pick: Pick, *, tied: bool = False, **more: Any
) -> Pair:
    """A text model of `text_checkpoints`. `more`: of its `config.json`."""
    sizes = more | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    source = root / "source"
    source.mkdir(parents=True)
    text_checkpoints.write(source, text_checkpoints.Text(architecture, kind, sizes, tied=tied))
    return written(root, source, pick)


def written(root: Path, source: Path, pick: Pick = lambda _: None, tower: Pick = lambda _: None) -> Pair:
    """A checkpoint as GGUF; the folder becomes `Pair.wide`."""
    _tokenizer(source, 320)
    beside = export(str(source), root / "plain.gguf", "F32")
    names = _names(source)
    changed: dict[str, torch.Tensor] = {}
    made = []
    for path, choose in ((root / "plain.gguf", pick), (beside, tower)):
        if path is None:
            continue
        out = root / path.name.replace("plain", "model")
        rewrite(path, out, lambda tensor, choose=choose: _blocks(tensor, choose(tensor.name), changed))
        made.append(out)
        path.unlink()
    state = load_file(source / "model.safetensors")
    llama = json.loads((source / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    for name, value in changed.items():
        ours = names[name]
        assert state[ours].shape == value.shape
        state[ours] = _undone(ours, value) if llama else value
    save_file({name: value.contiguous() for name, value in state.items()}, source / "model.safetensors")
    shutil.move(source, root / "wide")
    return Pair(made[0], made[1] if len(made) > 1 else None, root / "wide")


def _blocks(tensor: Any, kind: GgmlType | None, changed: dict[str, torch.Tensor]) -> tuple[np.ndarray, Any]:
    if kind is None or len(tensor.data.shape) != 2 or tensor.data.shape[1] % LAYOUTS[kind].block:
        return tensor.data, None
    raw = random_blocks(kind, *tensor.data.shape, seed=len(changed))
    changed[tensor.name] = reference(raw, kind)
    return raw, gguf.GGMLQuantizationType[kind]


def _names(source: Path) -> dict[str, str]:
    """From llama.cpp's names to the checkpoint's, by llama.cpp's own table."""
    naming, found = Naming(read_config(source)), {}
    for name, value in load_file(source / "model.safetensors").items():
        one = Tensor(name, tuple(value.shape), None)
        parts = naming.tower(one) if ".visual." in name else naming.decoder(one)
        found |= {part.name: name for part in parts}
    return found


def _undone(name: str, value: torch.Tensor) -> torch.Tensor:
    """From llama.cpp's rows to the checkpoint's: a head is 64 rows here."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    order = torch.arange(64).view(2, 32).T.flatten()  # of a head's rows, as llama.cpp's permute takes them
    heads = value.view(-1, 64, value.shape[1])
    undone = torch.empty_like(heads)
    undone[:, order] = heads
    return undone.view(value.shape)


def _tokenizer(folder: Path, size: int) -> None:
    """Bytes, and the tokens for pictures."""
    words = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    letters = {byte: chr(byte) for byte in words}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in letters)}
    document = {
        "model": {"vocab": {letter: byte for byte, letter in letters.items()}, "merges": []},
        "added_tokens": [
            {"id": number, "content": name, "special": True} for name, number in SPECIAL.items()
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 305}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
