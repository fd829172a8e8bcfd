"""Tiny random checkpoints of families that our own engine doesn't run, written by transformers itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

hf: Any = transformers
VOCAB = 512
CONTROL = ("<bos>", "<eos>", "<pad>", "<turn>", "</turn>")
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEMPLATE = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<turn>' + m.role + ': ' -}}
{%- if m.content is string -%}{{- m.content -}}
{%- else -%}{%- for part in m.content -%}
{%- if part.type == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '</turn>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<turn>assistant: ' -}}{%- endif -%}"""
# As SmolVLM's: content is a list always.
PARTS_TEMPLATE = """\
{%- for m in messages -%}
{{- '<turn>' + m['role'] + ':' -}}
{%- for line in m['content'] -%}
{%- if line['type'] == 'text' -%}{{- line['text'] -}}{%- endif -%}
{%- if line['type'] == 'image' -%}{{- 'IMAGE' -}}{%- endif -%}
{%- endfor -%}{{- '</turn>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<turn>assistant:' -}}{%- endif -%}"""


def tokenizer(*more: str, **named: str) -> PreTrainedTokenizerFast:
    """Byte-level, with control tokens of our own and those of a family by their names."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["What is in this image? user assistant the colours"] * 4, trainer)
    special = [
        AddedToken(text, special=True, normalized=False) for text in (*CONTROL, *named.values(), *more)
    ]
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=named,
    )


def finish(
    folder: Path, model: Any, words: PreTrainedTokenizerFast, template: str, image: str, *others: Any
) -> Path:
    """Random weights large enough that every part matters, and all files."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape)
            values.copy_(values + 0.1 * noise if "norm" in name else noise * _scale(name))
    model.generation_config.eos_token_id = words.convert_tokens_to_ids("<eos>")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    for other in others:
        other.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template.replace("IMAGE", image))
    return folder


def _scale(name: str) -> float:
    """Attention sharp enough, and embeddings apart enough, that answers aren't one token for ever."""
    return 1.0 if any(part in name for part in ("q_proj", "k_proj", "embed")) else 0.3


def llama(folder: Path) -> Path:
    """Text only."""
    words = tokenizer()
    config = hf.LlamaConfig(**TEXT, bos_token_id=None, eos_token_id=None)
    return finish(folder, hf.LlamaForCausalLM(config), words, TEMPLATE, "")


def qwen3_5(folder: Path) -> Path:
    """Text only: layers of linear attention beside one of full attention."""
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    config = hf.Qwen3_5TextConfig(**TEXT, **linear, bos_token_id=None, eos_token_id=None)
    return finish(folder, hf.Qwen3_5ForCausalLM(config), tokenizer(), TEMPLATE, "")


def gemma3(folder: Path) -> Path:
    """Sliding windows of 8 tokens, a fixed square, attention both ways inside pictures."""
    words = tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>")
    text = TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(
        text_config=text | {"query_pre_attn_scalar": 16, "tie_word_embeddings": False},
        tie_word_embeddings=False,
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=words.convert_tokens_to_ids("<soft>"),
        boi_token_index=words.convert_tokens_to_ids("<boi>"),
        eoi_token_index=words.convert_tokens_to_ids("<eoi>"),
    )
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    images: Any = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(images, words, image_seq_length=4)
    return finish(folder, hf.Gemma3ForConditionalGeneration(config), words, TEMPLATE, "<boi>", processor)


def smolvlm(folder: Path) -> Path:
    """Tiles of 32² pixels of a picture scaled up to 64."""
    tiles = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    words = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    config = hf.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama", "pad_token_id": 0},
        vision_config=VISION,
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    images: Any = SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    made = finish(
        folder, hf.SmolVLMForConditionalGeneration(config), words, PARTS_TEMPLATE, "<image>", images
    )
    (folder / "processor_config.json").write_text(
        '{"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}'
    )
    return made


def internvl(folder: Path) -> Path:
    """Tiles of 32² pixels, as many as the aspect asks for."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    words = tokenizer(**named)
    vision = VISION | {"image_size": [32, 32], "patch_size": [8, 8]}
    config = hf.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    images: Any = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=3
    )
    made = finish(
        folder, hf.InternVLForConditionalGeneration(config), words, TEMPLATE, "<IMG_CONTEXT>\n", images
    )
    (folder / "processor_config.json").write_text(
        '{"image_seq_length": 4, "processor_class": "InternVLProcessor"}'
    )
    return made


def llava(folder: Path) -> Path:
    """One square through CLIP. Its template knows strings only, so placeholders are written into the text."""
    words = tokenizer(image_token="<image>")
    config = hf.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=VISION | {"model_type": "clip_vision_model"},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    images: Any = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        images, words, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    strings = TEMPLATE.partition("{%- if m.content is string")[0] + (
        "{{- m.content.strip() -}}{{- '</turn>' -}}{%- endfor -%}<turn>assistant: "
    )
    return finish(folder, hf.LlavaForConditionalGeneration(config), words, strings, "", processor)


SEEING: dict[str, Callable[[Path], Path]] = {
    "gemma3": gemma3,
    "smolvlm": smolvlm,
    "internvl": internvl,
    "llava": llava,
}
TEXTS: dict[str, Callable[[Path], Path]] = {"llama": llama, "qwen3_5": qwen3_5}
