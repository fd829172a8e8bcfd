"""Small tokenizers in the styles of Llama 2, Mistral 0.3 and Gemma: pieces, marked spaces, byte tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = ["The quick brown fox jumps over the lazy dog. the then there is an answer: yes or no?"] * 4
MARK = "▁"
STYLES = ("llama 2", "mistral 0.3", "gemma", "metaspace")
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def pieces(style: str) -> Tokenizer:
    """A tokenizer of a style, as their `tokenizer.json` has it."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    names = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [tuple(pair) for pair in learned["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    made = Tokenizer(model)
    steps: list[Any] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama 2":
        made.normalizer = trained.normalizer
        steps.append(decoders.Strip(" ", 1, 0))
    elif style == "mistral 0.3":
        made.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    elif style == "gemma":
        made.normalizer = normalizers.Replace(" ", MARK)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always", split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(MARK, prepend_scheme="always")]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def write(folder: Path, style: str = "llama 2", **config: Any) -> Path:
    """Tokenizer, template and the tokens that end an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces(style).save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(values | {"tokenizer_class": "PreTrainedTokenizerFast"} | config)
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4 + 259 + 0]}))
    return folder
