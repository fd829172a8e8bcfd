"""A small checkpoint folder without weights, and transformers beside it as the oracle."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import read_config
from snugvl.inputs.prompt import Processor
from tests import checkpoints

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PLAIN_ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<two words>",
)

# The splitting rule of Qwen's own tokenizer.json.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# As short as the one that ships with small checkpoints: pictures only outside the system message.
SIMPLE_TEMPLATE = """\
{%- if messages and messages[0].role == 'system' -%}
{%- set sys = messages[0] -%}{%- set rest = messages[1:] -%}
{{- '<|im_start|>system\\n' -}}
{%- if sys.content is string -%}{{- sys.content -}}{%- else -%}
{%- for part in sys.content -%}{%- if 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.content is string -%}{{- m.content -}}
{%- else -%}{%- for part in m.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}{{- part.text -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def small_tokenizer() -> Tokenizer:
    """Byte-level BPE of Qwen's form with a vocabulary of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "What is in this image? A red circle, two blue squares. <0.5 seconds> system user assistant"
    ] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    return tokenizer


def write_checkpoint(folder: Path) -> Path:
    """Everything of a checkpoint but its weights."""
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 16}
    vision["deepstack_visual_indexes"] = [0]
    text = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": True,
            "text_config": text,
            "vision_config": vision,
        },
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None},
        "preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
            **sizes,
            **half,
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 1 << 18},
            **sizes,
            **half,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(SIMPLE_TEMPLATE)
    return folder


def whole_options(folder: Path, **others: Any) -> checkpoints.Options:
    """How weights are made that belong to `write_checkpoint`'s files."""
    values = json.loads((folder / "config.json").read_text())
    image, video, start, end = (
        values[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end")
    )
    return checkpoints.Options(vocab=512, placeholders=(image, video, start, end), **others)


def write_whole(folder: Path, **others: Any) -> Path:
    """Random weights, a real tokenizer and template."""
    return checkpoints.write(folder, whole_options(write_checkpoint(folder), **others))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint of the test's own, to break."""
    return write_checkpoint(tmp_path)


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> ModelConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="session")
def processor(checkpoint: Path, config: ModelConfig) -> Processor:
    return Processor.from_folder(checkpoint, config)


def _torchvision() -> SimpleNamespace:
    """The functions of torchvision.transforms.v2.functional that transformers' video path calls.

    torchvision isn't a dependency, not even of the tests. Its v2 `resize` of a uint8 tensor on the CPU with
    bicubic interpolation is torch's own `interpolate` (its `_do_native_uint8_resize_on_cpu`), and `normalize`
    is a subtraction and a division.
    """

    def resize(image: torch.Tensor, size: Any, interpolation: Any, antialias: bool) -> torch.Tensor:
        assert image.dtype == torch.uint8
        assert interpolation == "bicubic"
        flat = image.reshape(-1, *image.shape[-3:])
        done = torch.nn.functional.interpolate(
            flat, size=list(size), mode="bicubic", align_corners=False, antialias=antialias
        )
        return done.reshape(*image.shape[:-2], *size)

    def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
        return image.sub(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    modes = SimpleNamespace(BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos")
    return SimpleNamespace(
        resize=resize, normalize=normalize, grayscale_to_rgb=lambda video: video, InterpolationMode=modes
    )


@pytest.fixture(scope="session")
def video_oracle(checkpoint: Path) -> Any:
    """transformers' own video processor; only the three torchvision functions it calls are stand-ins."""
    backends = pytest.importorskip("transformers.image_processing_backends")
    utils = pytest.importorskip("transformers.video_processing_utils")
    module = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    for place in (backends, utils, module):
        if not hasattr(place, "tvF"):
            place.tvF = _torchvision()
    if not getattr(backends, "pil_torch_interpolation_mapping", None):
        backends.pil_torch_interpolation_mapping = {3: "bicubic"}
    return module.Qwen3VLVideoProcessor(
        **json.loads((checkpoint / "video_preprocessor_config.json").read_text())
    )


@pytest.fixture(scope="session")
def image_oracle(checkpoint: Path) -> Any:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    values = json.loads((checkpoint / "preprocessor_config.json").read_text())
    values.pop("image_processor_type")
    return module.Qwen2VLImageProcessorPil(**values)


@pytest.fixture(scope="session")
def oracle(checkpoint: Path, image_oracle: Any, video_oracle: Any) -> Any:
    """transformers' own Qwen3VLProcessor over the same folder."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = (checkpoint / "chat_template.jinja").read_text()

    class Unchecked(Qwen3VLProcessor):  # type: ignore[misc]
        """Without torchvision transformers can't look up its video classes, even to check the argument."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Unchecked(image_oracle, tokenizer, video_oracle, chat_template=template)
